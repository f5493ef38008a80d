"""FlashAttention over the paged cache against the same in plain torch."""

import pytest
import torch

from specdec.engine.attention import AttentionTraits, cuda, reference
from specdec.engine.batch import Segment, StepBatch
from specdec.engine.kv_layout import FlatLayer

CUDA = torch.device("cuda:0")
BLOCK_SIZE = 256
NUM_BLOCKS = 40
SHAPES = {
    "single tokens": [(1, 5), (1, 256), (1, 257), (1, 900)],
    "verification": [(5, 5), (3, 259), (9, 700), (1, 30)],
    "prefill": [(300, 300), (100, 612), (1, 40)],
}
"""(new tokens, cached positions with them) of each sequence."""


def batch_of(shapes):
    blocks = iter(torch.randperm(NUM_BLOCKS, generator=torch.Generator().manual_seed(0)).tolist())
    segments, start = [], 0
    for num_tokens, kv_length in shapes:
        own = [next(blocks) for _ in range(-(-kv_length // BLOCK_SIZE))]
        segments.append(Segment(start=start, num_tokens=num_tokens, kv_length=kv_length, blocks=own))
        start += num_tokens
    return StepBatch.of([0] * start, [], segments, BLOCK_SIZE, CUDA)


@pytest.mark.parametrize("has_block_tables", [False, True], ids=["copies", "block tables"])
@pytest.mark.parametrize("window", [None, 100])
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(8, 2, 64), (4, 4, 128), (6, 1, 96)])
@pytest.mark.parametrize("shapes", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_flash_attention_is_the_reference(
    dtype, shapes, heads, kv_heads, head_dim, window, has_block_tables, monkeypatch
):
    if has_block_tables and not cuda.HAS_BLOCK_TABLES:
        pytest.skip("this torch has no block tables")
    monkeypatch.setattr(cuda, "HAS_BLOCK_TABLES", has_block_tables)
    torch.manual_seed(1)
    batch = batch_of(shapes)
    slots = NUM_BLOCKS * BLOCK_SIZE
    sample = torch.randn(1, kv_heads, head_dim, device=CUDA, dtype=dtype)
    layer = FlatLayer(sample, sample, NUM_BLOCKS, BLOCK_SIZE)
    layer.keys.copy_(torch.randn(slots, kv_heads, head_dim, device=CUDA))
    layer.values.copy_(torch.randn(slots, kv_heads, head_dim, device=CUDA))
    query = torch.randn(len(batch.token_ids), heads, head_dim, device=CUDA, dtype=dtype)
    traits = AttentionTraits(scale=head_dim**-0.5, window=window)
    expected = reference.attend(query, layer, batch, traits, head_dim)
    torch.testing.assert_close(
        cuda.attend(query, layer, batch.tensors, traits), expected, rtol=0.02, atol=0.01
    )
