"""Batches padded to few shapes, with work that is simply repeated in the place of CUDA graphs."""

import numpy as np
import pytest
import torch

from specdec.engine.attention import cuda
from specdec.engine.batch import StepBatch
from specdec.engine.decoder import graphs, torch_step
from specdec.engine.decoder.forward import Decoder
from specdec.engine.decoder.graphs import Bucket, Buckets, GraphedDecoder, padded
from specdec.engine.drafting import DraftEngine
from specdec.engine.kv_cache import PagedKVCache
from specdec.engine.model_runner import ModelRunner
from specdec.engine.upload import pack, unpack
from tests.tiny_models import (
    COUPLED,
    GREEDY,
    VOCAB_SIZE,
    feed,
    item,
    loaded_forward,
    propose,
    sequence_id,
    tiny_config,
    tokens,
)

MAX_CONTEXT = 96
CPU = torch.device("cpu")


# FlashAttention, as far as it is used ----------------------------------------------------------------------


def flash_attention(
    query,
    keys,
    values,
    query_starts,
    key_starts,
    max_queries,
    max_keys,
    dropout,
    is_causal,
    debug,
    *,
    scale,
    window_size_left,
    window_size_right,
    seqused_k,
):
    """What the kernel promises and no more: output of no sequence's is left as it was (here NaN)."""
    out = torch.full_like(query, torch.nan)
    assert is_causal == ((window_size_left, window_size_right) == (-1, 0))
    groups = query.shape[1] // keys.shape[1]
    if max_queries == 1 and groups > 1 and (window_size_left, window_size_right) == (-1, -1):
        assert len(query) == len(query_starts) - 1
    for idx, num_keys in enumerate(seqused_k.tolist()):
        span = slice(*query_starts[idx : idx + 2].tolist())
        num_queries = span.stop - span.start
        assert 0 <= num_queries <= max_queries
        assert num_keys <= max_keys
        assert num_keys <= key_starts[idx + 1] - key_starts[idx]
        used = slice(int(key_starts[idx]), int(key_starts[idx]) + num_keys)
        k, v = (x[used].repeat_interleave(groups, dim=1) for x in (keys, values))
        scores = torch.einsum("qhd,khd->hqk", query[span], k) * scale
        distance = torch.arange(num_keys) - torch.arange(num_keys - num_queries, num_keys).unsqueeze(1)
        if window_size_right >= 0:
            scores = scores.masked_fill(distance > window_size_right, -torch.inf)
        if window_size_left >= 0:
            scores = scores.masked_fill(-distance > window_size_left, -torch.inf)
        out[span] = torch.einsum("hqk,khd->qhd", scores.softmax(dim=-1), v)
    return (out,)


def varlen_attn(query, keys, values, query_starts, _, max_queries, max_keys, **arguments):
    """The same with block tables."""
    tables, window = arguments["block_table"], arguments["window_size"]
    groups = query.shape[1] // keys.shape[2]
    assert arguments["enable_gqa"] == (groups > 1)
    is_repacked = max_queries == 1 and groups > 1 and window == (-1, -1)
    assert arguments["num_splits"] == (None if is_repacked else 1)
    room = tables.shape[1] * keys.shape[1]
    return flash_attention(
        query,
        keys[tables.flatten()].flatten(0, 1),
        values[tables.flatten()].flatten(0, 1),
        query_starts,
        torch.arange(len(tables) + 1) * room,
        max_queries,
        max_keys,
        0.0,
        window == (-1, 0),
        False,
        scale=arguments["scale"],
        window_size_left=window[0],
        window_size_right=window[1],
        seqused_k=arguments["seqused_k"],
    )[0]


@pytest.fixture(params=[True, False], ids=["block tables", "copies"])
def flash(request, monkeypatch):
    """Attention on the CPU goes the way it goes on CUDA."""
    monkeypatch.setattr(cuda, "HAS_BLOCK_TABLES", request.param)
    monkeypatch.setattr(cuda, "varlen_attn", varlen_attn)
    monkeypatch.setattr(cuda, "_flash_attention", flash_attention)
    monkeypatch.setattr(torch_step, "attend", attend_as_on_cuda)


def attend_as_on_cuda(query, layer, batch, traits, value_dim):
    return cuda.attend(query, layer, batch.tensors, traits)


def repeat(work):
    """In place of a graph."""
    work()
    return work


@pytest.fixture(params=["llama", "mistral"], ids=["whole window", "window of 8"], scope="module")
def decoder(request, tmp_path_factory):
    """float64, for which the CPU has no kernels of its own: the layers run as on CUDA."""
    forward = loaded_forward(
        tiny_config(request.param), tmp_path_factory.mktemp("model"), max_context=MAX_CONTEXT, dtype="float64"
    )
    assert isinstance(forward, Decoder)
    return forward


def runner_of(decoder):
    return ModelRunner(decoder, vocab_size=VOCAB_SIZE, max_context=MAX_CONTEXT, kv_capacity_tokens=4096)


def graphed_runner_of(decoder):
    runner = runner_of(decoder)
    runner.model = GraphedDecoder(decoder, runner.cache, MAX_CONTEXT, capture=repeat)
    return runner


# Shapes ---------------------------------------------------------------------------------------------------


def batch_of(*shapes, cached=20):
    """Segments of these many tokens behind ``cached`` positions each."""
    cache = PagedKVCache(4096, CPU)
    items = []
    for i, num_tokens in enumerate(shapes):
        name = f"s{i}"
        cache.open(sequence_id(name))
        for part in ([*tokens(cached, seed=i)], [3 + i] * num_tokens):
            fed = item(name, part)
            cache.reserve(fed)
            if len(part) == cached:
                cache.advance([fed])
        items.append(fed)
    return cache.batch(items), cache


@pytest.mark.parametrize(
    ("shapes", "bucket"),
    [
        ((1,), (1, 1)),
        ((1, 1, 1), (4, 1)),
        ((4, 1), (2, 5)),
        ((9,) * 17, (32, 9)),
        ((6,), (1, 9)),
    ],
)
def test_smallest_bucket_that_holds_the_batch(shapes, bucket):
    batch, _ = batch_of(*shapes)
    found = Buckets(6, has_block_tables=True).of(batch)
    assert (found.num_segments, found.tokens_per_segment, found.table_width) == (*bucket, 6)


@pytest.mark.parametrize("shapes", [(10,), (1,) * 33, (64, 1)])
def test_larger_batches_have_no_bucket(shapes):
    assert Buckets(16, has_block_tables=True).of(batch_of(*shapes)[0]) is None


def test_table_widths_matter_only_without_block_tables():
    assert Buckets(20, has_block_tables=True).table_widths == (20,)
    assert Buckets(20, has_block_tables=False).table_widths == (1, 2, 4, 8, 16, 20)
    assert Buckets(1, has_block_tables=False).table_widths == (1,)
    assert Buckets(16, has_block_tables=False).table_widths == (1, 2, 4, 8, 16)


def test_largest_bucket_comes_first():
    buckets = Buckets(4, has_block_tables=False).narrowest()
    assert [buckets[0], buckets[-1]] == [Bucket(32, 9, 1), Bucket(1, 1, 1)]
    assert len(set(buckets)) == len(graphs.NUM_SEGMENTS) * len(graphs.TOKENS_PER_SEGMENT)


@pytest.mark.parametrize("shapes", [(1,), (3, 1, 2), (5,) * 3, (1, 1), (9, 9, 9, 1)])
def test_padding_writes_to_the_scratch_block_only(shapes):
    batch, cache = batch_of(*shapes)
    bucket = Buckets(6, has_block_tables=True).of(batch)
    whole = padded(batch, bucket, cache.scratch_block)
    num_tokens = len(batch.token_ids)
    assert len(whole.token_ids) == len(whole.rows) == bucket.num_tokens
    assert whole.tables.shape == (bucket.num_segments, 6)
    np.testing.assert_array_equal(whole.slots[:num_tokens], batch.slots)
    np.testing.assert_array_equal(whole.segments[: len(shapes)], batch.segments)
    assert set(whole.slots[num_tokens:] // batch.block_size) <= {cache.scratch_block}
    assert set(whole.tables[len(shapes) :, 0]) <= {cache.scratch_block}
    assert whole.segments[:, 2].max() <= bucket.tokens_per_segment
    starts = whole.arrays[4]
    assert (np.diff(starts) == whole.segments[:, 2]).all()
    assert starts[-1] <= bucket.num_tokens


def test_every_padding_token_of_single_tokens_has_a_segment():
    """FlashAttention takes one query per sequence for granted there."""
    batch, cache = batch_of(1, 1, 1)
    whole = padded(batch, Bucket(8, 1, 6), cache.scratch_block)
    np.testing.assert_array_equal(whole.arrays[4], np.arange(9))


def test_no_sequence_ever_gets_the_scratch_block():
    cache = PagedKVCache(64, CPU)
    cache.open(sequence_id("a"))
    cache.reserve(item("a", tokens(64)))
    assert cache.blocks.num_free == 0
    assert cache.scratch_block not in cache.blocks.table(sequence_id("a"))


@pytest.mark.parametrize("shapes", [(1,), (3, 1, 2)])
def test_packed_arrays_come_back(shapes):
    arrays = batch_of(*shapes)[0].arrays
    for array, tensor in zip(arrays, unpack(pack(arrays, CPU), arrays), strict=True):
        np.testing.assert_array_equal(tensor.numpy(), array)


def test_batch_without_tokens_is_padded_too():
    whole = padded(StepBatch.of([], [], [], 16, CPU), Bucket(2, 3, 4), scratch_block=7)
    np.testing.assert_array_equal(whole.segments[:, 1:], [[0, 3, 3], [3, 3, 3]])
    np.testing.assert_array_equal(whole.slots, [112, 113, 114] * 2)


# What comes out -------------------------------------------------------------------------------------------


def steps():
    """Prefill, drafting, verification of unequal drafts, rollbacks; (items, lengths to roll back to)."""
    long, short = tokens(40, seed=1), tokens(5, seed=2)
    yield [item("a", long, 1), item("b", short, 0)], {}
    yield [item("a", [3]), item("b", [4])], {}
    yield [item("b", [5])], {}
    yield [item("a", tokens(5, 3)), item("b", tokens(2, 4)), item("c", tokens(9, 5))], {"a": 43, "b": 7}
    yield [item("c", tokens(4, 6), 2), item("a", [9]), item("b", tokens(12, 7), 1)], {"c": 10}
    yield [item(name, tokens(3, seed), 3) for seed, name in enumerate("abc")], {}
    yield [item("c", tokens(8, 9), 0)], {}
    yield [item(name, [11]) for name in "cab"], {}


@pytest.mark.usefixtures("flash")
def test_padded_batches_give_the_same_logits(decoder):
    plain, graphed = runner_of(decoder), graphed_runner_of(decoder)
    for runner in (plain, graphed):
        for name in "abc":
            runner.open(sequence_id(name))
    for items, kept in steps():
        torch.testing.assert_close(graphed.forward(items), plain.forward(items), rtol=1e-5, atol=1e-5)
        for name, length in kept.items():
            plain.truncate(sequence_id(name), length)
            graphed.truncate(sequence_id(name), length)
    assert graphed.model.num_graphs > 3


@pytest.mark.usefixtures("flash")
def test_attention_as_on_cuda_is_the_reference(decoder, monkeypatch):
    runner = runner_of(decoder)
    flashed, expected = [], []
    for rows in (flashed, expected):
        for name in "abc":
            runner.open(sequence_id(name))
        for items, kept in steps():
            rows.append(runner.forward(items))
            for name, length in kept.items():
                runner.truncate(sequence_id(name), length)
        monkeypatch.undo()
    torch.testing.assert_close(torch.cat(flashed), torch.cat(expected), rtol=1e-5, atol=1e-5)


@pytest.mark.usefixtures("flash")
def test_unseen_tokens_reach_the_graph(decoder):
    requests = [
        (feed("a", tokens(9), sampling=GREEDY), 6),
        (feed("b", tokens(20, 1), sampling=COUPLED), 4),
        (feed("c", tokens(30, 2), sampling=GREEDY), 1),
    ]
    plain = DraftEngine(runner_of(decoder), 8, draws_unseen=False).propose(propose(*requests))
    graphed = DraftEngine(graphed_runner_of(decoder), 8, draws_unseen=True).propose(propose(*requests))
    assert [d.token_ids for d in graphed.drafts] == [d.token_ids for d in plain.drafts]


@pytest.mark.usefixtures("flash")
def test_prepared_shapes_are_not_captured_again(decoder):
    captured = []

    def counting(work):
        captured.append(work)
        return repeat(work)

    runner = runner_of(decoder)
    runner.model = graphed = GraphedDecoder(decoder, runner.cache, MAX_CONTEXT, capture=counting)
    graphed.prepare()
    assert len(captured) == graphed.num_graphs == len(graphs.NUM_SEGMENTS) * len(graphs.TOKENS_PER_SEGMENT)
    runner.open(sequence_id("a"))
    runner.forward([item("a", tokens(7))])
    runner.forward([item("a", [3])])
    assert len(captured) == graphed.num_graphs


@pytest.mark.usefixtures("flash")
def test_beyond_the_most_graphs_shapes_run_without(decoder, monkeypatch):
    monkeypatch.setattr(graphs, "MAX_GRAPHS", 1)
    plain, graphed = runner_of(decoder), graphed_runner_of(decoder)
    for runner in (plain, graphed):
        runner.open(sequence_id("a"))
    for num_tokens in (1, 5, 1):
        items = [item("a", tokens(num_tokens))]
        torch.testing.assert_close(graphed.forward(items), plain.forward(items), rtol=1e-5, atol=1e-5)
    assert graphed.model.num_graphs == 1


def test_graphs_are_for_cuda(decoder):
    assert not GraphedDecoder.supports(decoder)
