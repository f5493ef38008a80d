"""The compiled CPU loops against torch and plain float64: tight in float32, one rounding in bfloat16."""

from dataclasses import replace
from typing import NamedTuple

import numpy as np
import pytest
import torch
from numba import njit
from torch.nn import functional

from specdec.engine.attention import AttentionTraits, cpu, reference
from specdec.engine.batch import TILE, Segment, StepBatch
from specdec.engine.kv_layout import BlockLayer, FlatLayer, PairedBlockLayer, make_layer
from specdec.engine.threads import set_num_threads
from specdec.kernels import as_array, layers, memory, scalars, simd, tiles
from specdec.kernels.attention import BLOCK, CHUNK
from tests.kernel_threads import kernel_threads

set_num_threads(1)

CPU = torch.device("cpu")
NO_WEIGHT = np.empty(0, np.float32)
BFLOAT16_ROUNDING = 2.0**-8
"""Half the distance of two neighbours, relative to the smaller one."""


@pytest.fixture(params=[1, 2], ids=lambda count: f"{count} threads")
def num_threads(request):
    with kernel_threads(request.param):
        yield request.param


@pytest.fixture(params=[torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def dtype(request):
    return request.param


class CacheKind(NamedTuple):
    dtype: torch.dtype
    layer: type[BlockLayer]


FLOAT32 = CacheKind(torch.float32, BlockLayer)
KINDS = {
    "float32": FLOAT32,
    "bfloat16": CacheKind(torch.bfloat16, BlockLayer),
    "bfloat16 in pairs": CacheKind(torch.bfloat16, PairedBlockLayer),
}
needs_tiles = pytest.mark.skipif(not tiles.IS_AVAILABLE, reason="this CPU has no AMX")


@pytest.fixture(params=[pytest.param(name, marks=[needs_tiles] * ("pairs" in name)) for name in KINDS])
def kind(request):
    return KINDS[request.param]


def normal(*shape, dtype=torch.float32, seed=0, scale=1.0):
    generator = torch.Generator().manual_seed(seed)
    return (scale * torch.randn(*shape, generator=generator)).to(dtype)


def assert_rounded_once(actual, exact, *, atol=1e-6):
    """float32 arithmetic of a few operations, then one rounding to the result's dtype."""
    rtol = 2e-6 if actual.dtype == torch.float32 else BFLOAT16_ROUNDING * 1.001
    torch.testing.assert_close(actual.double(), exact, rtol=rtol, atol=atol)


# Single numbers -------------------------------------------------------------------------------------------


@njit(**{**scalars.OPTIONS, "cache": False})
def converted(source, out):
    for i in range(source.shape[0]):
        out[i] = scalars.store(out, scalars.load(source[i]))


@njit(**{**scalars.OPTIONS, "cache": False})
def exponentials(x, out):
    for i in range(x.shape[0]):
        out[i] = scalars.exp(x[i])


def as_bfloat16(values: torch.Tensor) -> torch.Tensor:
    out = torch.empty_like(values, dtype=torch.bfloat16)
    converted(as_array(values), as_array(out))
    return out


def test_every_bfloat16_loads_as_torch_loads_it():
    every = torch.arange(-(2**15), 2**15, dtype=torch.int16).view(torch.bfloat16)
    out = torch.empty(len(every), dtype=torch.float32)
    converted(as_array(every), out.numpy())
    torch.testing.assert_close(out, every.float(), rtol=0.0, atol=0.0, equal_nan=True)


def test_every_bfloat16_comes_back_as_the_same_bits():
    every = torch.arange(-(2**15), 2**15, dtype=torch.int16).view(torch.bfloat16)
    numbers = every[~every.isnan()]
    assert torch.equal(as_bfloat16(numbers).view(torch.int16), numbers.view(torch.int16))
    assert as_bfloat16(every[every.isnan()]).isnan().all()


def test_storing_bfloat16_rounds_to_nearest_and_ties_to_even():
    upper = torch.arange(0, 2**16, 7, dtype=torch.int64)
    for lower in (0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF):
        bits = ((upper << 16) | lower).to(torch.uint32).view(torch.float32)
        numbers = bits[~bits.isnan()]
        assert torch.equal(as_bfloat16(numbers).view(torch.int16), numbers.bfloat16().view(torch.int16))


def test_infinities_nan_and_numbers_beyond_the_largest_are_stored_as_what_they_are():
    largest = torch.finfo(torch.bfloat16).max
    values = torch.tensor([torch.inf, -torch.inf, largest, 1.01 * largest, -1.01 * largest, 1e-45, -0.0])
    expected = torch.tensor([torch.inf, -torch.inf, largest, torch.inf, -torch.inf, 0.0, -0.0])
    assert torch.equal(as_bfloat16(values), expected.bfloat16())
    # A NaN whose upper bits alone would be an infinity, and one that rounding up would carry into the sign.
    odd = torch.tensor([0x7F800001, 0x7FFFFFFF, 0xFF800001, 0xFFFFFFFF], dtype=torch.uint32)
    assert as_bfloat16(odd.view(torch.float32)).isnan().all()


def exp_of(x: torch.Tensor) -> torch.Tensor:
    out = torch.empty_like(x)
    exponentials(x.numpy(), out.numpy())
    return out


def test_exponential_is_precise_to_three_in_ten_million():
    x = torch.cat([torch.linspace(-86.99, 88.0, 1_000_003), normal(100_000), 1e-3 * normal(100_000)])
    exact = x.double().exp()
    assert float(((exp_of(x).double() - exact) / exact).abs().max()) < 3e-7


def test_exponential_far_below_is_zero_and_far_above_is_huge():
    x = torch.tensor([-torch.inf, -1000.0, -87.0, 0.0, 89.0, torch.inf])
    below, above = exp_of(x)[:4], exp_of(x)[4:]
    assert below.tolist() == [0.0, 0.0, 0.0, 1.0]
    assert (above > 1e38).all()


def test_exponential_of_nan_is_nan():
    assert exp_of(torch.tensor([torch.nan, 1.0])).isnan().tolist() == [True, False]


@njit(**{**scalars.OPTIONS, "cache": False})
def misalignments(count):
    """Of so many arrays that live at once, in bytes."""
    arrays = [memory.zeros((3, 7 + i), np.int16) for i in range(count)]
    return [array.ctypes.data % 64 for array in arrays], sum([np.abs(array).sum() for array in arrays])


def test_memory_of_kernels_begins_with_a_cache_line():
    bytes_over, total = misalignments(9)
    assert list(bytes_over) == [0] * 9
    assert total == 0


# Vectors --------------------------------------------------------------------------------------------------


@njit(**{**scalars.OPTIONS, "cache": False})
def exponentials_of_differences(a, b, out):
    for i in range(0, a.shape[1], simd.LANES):
        simd.store(out, 0, i, simd.exp_of_difference(simd.load(a, 0, i), simd.load(b, 0, i)))


def exp_of_difference(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    padding = -len(a) % simd.LANES
    a, b = (functional.pad(x, (0, padding)).unsqueeze(0) for x in (a, b))
    out = torch.empty_like(a)
    exponentials_of_differences(a.numpy(), b.numpy(), out.numpy())
    return out[0, : out.shape[1] - padding]


@pytest.mark.parametrize("best", [0.0, 3.7, -250.0])
def test_vector_of_exponentials_is_precise_to_three_in_ten_million(best):
    below = torch.cat([torch.linspace(0.0, 86.9, 1_000_003), normal(100_000).abs(), 1e-3 * normal(999).abs()])
    a, b = best - below, torch.full_like(below, best)
    exact = (a - b).double().exp()
    assert float(((exp_of_difference(a, b).double() - exact) / exact).abs().max()) < 3e-7


def test_vector_of_exponentials_at_the_ends():
    a = torch.tensor([0.0, -5.0, -87.0, -1000.0, -torch.inf, torch.nan, -torch.inf])
    b = torch.tensor([0.0, -5.0, 0.0, 0.0, 0.0, 0.0, -3.4e38])
    out = exp_of_difference(a, b).tolist()
    assert out[:2] == [1.0, 1.0]
    assert out[2:5] == [0.0, 0.0, 0.0]
    assert np.isnan(out[5])
    assert out[6] == 0.0


@njit(**{**scalars.OPTIONS, "cache": False})
def powers_of_two(x, factor, shift, out):
    for i in range(0, x.shape[1], simd.LANES):
        vector = simd.load(x, 0, i)
        vector = simd.power_of_two(vector, simd.splat(np.float32(factor)), simd.splat(np.float32(shift)))
        simd.store(out, 0, i, vector)


def power_of_two(x, factor, shift):
    out = torch.empty(1, len(x))
    powers_of_two(x.unsqueeze(0).numpy(), factor, shift, out.numpy())
    return out[0]


@pytest.mark.parametrize(("factor", "shift"), [(1.0, 0.0), (0.125, 3.0), (1.4426950408889634, 21.7)])
def test_vector_of_powers_of_two_is_precise_to_three_in_a_million(factor, shift):
    x = (torch.linspace(-125.9, 1.0, 16 * 50_000) + shift) / factor
    exact = torch.exp2(x.double() * float(np.float32(factor)) - float(np.float32(shift)))
    # The exponent, of up to 126, is rounded to float32 first.
    tolerance = 3e-6 + 126 * 2.0**-24
    assert float(((power_of_two(x, factor, shift).double() - exact) / exact).abs().max()) < tolerance


def test_vector_of_powers_of_two_at_the_ends():
    x = torch.tensor([0.0, 1.0, -1.0, -126.0, -1000.0, -torch.inf, torch.nan, -torch.nan] * 2)
    x[-1] = torch.tensor([0x7F800001], dtype=torch.int32).view(torch.float32)
    out = power_of_two(x, 1.0, 0.0).tolist()
    assert out[0] == 1.0
    assert out[1:3] == pytest.approx([2.0, 0.5], rel=3e-6)
    assert out[3:6] == [0.0, 0.0, 0.0]
    assert np.isnan(out[6:8] + out[14:]).all()


@njit(**{**scalars.OPTIONS, "cache": False})
def folded(x, out):
    out[0] = simd.largest_lane(simd.load(x, 0, 0))
    out[1] = simd.sum_of_lanes(simd.load(x, 0, 0))


def test_vector_is_folded():
    for lane in range(simd.LANES):
        x = -torch.arange(1.0, simd.LANES + 1).unsqueeze(0)
        x[0, lane] = 0.5
        out = torch.empty(2)
        folded(x.numpy(), out.numpy())
        assert out.tolist() == [0.5, float(x.sum())]


def product_in_pieces(num_rows, left, right, out, *, is_added):
    """Columns from 3 on of ``left`` times ``right``, to columns from 5 on of ``out``."""
    piece = simd.product(num_rows)

    @njit(**{**scalars.OPTIONS, "cache": False})
    def multiply(left, right, out, is_added):
        for row in range(0, left.shape[0], num_rows):
            for column in range(0, right.shape[1], simd.LANES):
                piece(left, 3, right, column, right.shape[0], row, out, 5 + column, is_added)

    multiply(left.numpy(), as_array(right), out.numpy(), is_added)


@pytest.mark.parametrize("is_added", [False, True])
def test_product_is_the_same_bits_in_pieces_of_any_size(is_added, dtype):
    left, right = normal(24, 70), normal(67, 64, dtype=dtype, seed=1)
    before, results = normal(24, 74, seed=2), []
    for num_rows in (1, 4, 6, 8):
        out = before.clone()
        product_in_pieces(num_rows, left, right, out, is_added=is_added)
        results.append(out)
    assert all(torch.equal(out, results[0]) for out in results)
    exact = left[:, 3:].double() @ right.double() + is_added * before[:, 5:69].double()
    torch.testing.assert_close(results[0][:, 5:69].double(), exact, rtol=1e-5, atol=1e-5)
    others = torch.ones(74, dtype=torch.bool)
    others[5:69] = False
    assert torch.equal(results[0][:, others], before[:, others])


# Norms, rotations, activations ----------------------------------------------------------------------------

SIZES = [1, 2, 3, 16, 17, 576]


def exact_norm(x, weight, eps):
    x = x.double()
    return x * (x.square().mean(dim=-1, keepdim=True) + eps).rsqrt() * weight.double()


@pytest.mark.parametrize("hidden", SIZES)
def test_norm(hidden, dtype, num_threads):
    x, weight = normal(5, hidden, dtype=dtype), normal(hidden, seed=1)
    out = torch.empty_like(x)
    layers.norm(as_array(x), weight.numpy(), 1e-5, as_array(out))
    assert_rounded_once(out, exact_norm(x, weight, 1e-5))


def test_norm_of_zeros_is_zero_and_of_tiny_numbers_depends_on_epsilon(dtype):
    x = torch.stack([torch.zeros(8, dtype=dtype), torch.full((8,), 1e-3, dtype=dtype)])
    out = torch.empty_like(x)
    layers.norm(as_array(x), torch.ones(8).numpy(), 1e-2, as_array(out))
    assert out[0].tolist() == [0.0] * 8
    assert_rounded_once(out[1], exact_norm(x[1], torch.ones(8), 1e-2))


@pytest.mark.parametrize("hidden", SIZES)
def test_add_and_norm(hidden, dtype, num_threads):
    residual, delta, weight = (
        normal(5, hidden),
        normal(5, hidden, dtype=dtype, seed=1),
        normal(hidden, seed=2),
    )
    expected = residual + delta.float()
    out = torch.empty_like(delta)
    layers.add_and_norm(residual.numpy(), as_array(delta), weight.numpy(), 1e-6, as_array(out))
    assert torch.equal(residual, expected)
    assert_rounded_once(out, exact_norm(expected, weight, 1e-6))


def test_norm_of_something_that_is_not_a_number_is_not_a_number(dtype):
    x = torch.ones(2, 8, dtype=dtype)
    x[1, 3] = torch.nan
    out = torch.empty_like(x)
    layers.norm(as_array(x), torch.ones(8).numpy(), 1e-5, as_array(out))
    assert out.isnan().tolist() == [[False] * 8, [True] * 8]


GATES = torch.cat([torch.linspace(-100, 100, 999), torch.tensor([0.0, -0.0, -1e30, 1e30, -88.0, 88.0])])


def gated(kernel, gate, up):
    out = torch.empty_like(gate)
    kernel(as_array(torch.cat([gate, up], dim=-1)), as_array(out))
    return out


@pytest.mark.parametrize("count", SIZES)
def test_gated_silu(count, dtype, num_threads):
    gate, up = normal(4, count, dtype=dtype, scale=4.0), normal(4, count, dtype=dtype, seed=1)
    exact = functional.silu(gate.double()) * up.double()
    assert_rounded_once(gated(layers.gated_silu, gate, up), exact)


@pytest.mark.parametrize("count", SIZES)
def test_gated_gelu_by_tanh(count, dtype, num_threads):
    gate, up = normal(4, count, dtype=dtype, scale=4.0), normal(4, count, dtype=dtype, seed=1)
    exact = functional.gelu(gate.double(), approximate="tanh") * up.double()
    assert_rounded_once(gated(layers.gated_gelu_tanh, gate, up), exact)


@pytest.mark.parametrize(
    ("kernel", "exact"),
    [
        (layers.gated_silu, functional.silu),
        (layers.gated_gelu_tanh, lambda gate: functional.gelu(gate, approximate="tanh")),
    ],
)
def test_activations_hold_at_the_ends(kernel, exact, dtype):
    gate = GATES.clone().to(dtype).unsqueeze(0)
    out = gated(kernel, gate, torch.ones_like(gate))
    assert_rounded_once(out, exact(gate.double()))
    gate[0, 0] = torch.nan
    assert gated(kernel, gate, torch.ones_like(gate)).isnan().sum() == 1


# Rotation and the cache -----------------------------------------------------------------------------------

NUM_BLOCKS = 4


def exact_rotated(heads, weight, cos, sin):
    x = heads.double()
    if weight is not None:
        x = exact_norm(x, weight, 1e-6)
    half = cos.shape[-1]
    cos, sin = cos.double().unsqueeze(1), sin.double().unsqueeze(1)
    low, high, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return torch.cat([low * cos - high * sin, high * cos + low * sin, rest], dim=-1)


@pytest.mark.parametrize("is_normed", [False, True])
@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "head_dim", "rotary_dim"),
    [(4, 2, 8, 8), (3, 3, 64, 64), (9, 3, 64, 32), (8, 1, 80, 20), (2, 1, 256, 256), (1, 1, 2, 2)],
)
def test_rotated_heads_and_what_is_cached(
    num_heads, num_kv_heads, head_dim, rotary_dim, is_normed, kind, num_threads
):
    dtype = kind.dtype
    positions = torch.tensor([7, 0, 30, 8, 3])
    slots = torch.tensor([BLOCK, 3 * BLOCK + 5, 0, BLOCK - 1, 2 * BLOCK + 9])
    qkv = normal(5, num_heads + 2 * num_kv_heads, head_dim, dtype=dtype)
    cos, sin = normal(31, rotary_dim // 2, seed=1).cos(), normal(31, rotary_dim // 2, seed=2).sin()
    q_weight, k_weight = (normal(head_dim, seed=seed) if is_normed else None for seed in (3, 4))
    query = torch.empty(5, num_heads, head_dim, dtype=dtype)
    new = qkv[:, :num_kv_heads]
    layer = kind.layer(new, new, num_blocks=NUM_BLOCKS, block_size=BLOCK)
    layer.keys.fill_(7.0)
    layer.values.fill_(7.0)
    layers.rotate_and_store(
        as_array(qkv),
        positions.numpy(),
        slots.numpy(),
        cos.numpy(),
        sin.numpy(),
        NO_WEIGHT if q_weight is None else q_weight.numpy(),
        NO_WEIGHT if k_weight is None else k_weight.numpy(),
        1e-6,
        as_array(query),
        layer.key_array,
        layer.value_array,
    )
    q, k, v = qkv.split([num_heads, num_kv_heads, num_kv_heads], dim=1)
    assert_rounded_once(query, exact_rotated(q, q_weight, cos[positions], sin[positions]), atol=3e-6)
    keys, values = by_slot(layer)
    assert_rounded_once(keys[slots], exact_rotated(k, k_weight, cos[positions], sin[positions]), atol=3e-6)
    assert torch.equal(values[slots], v)
    others = torch.ones(len(keys), dtype=torch.bool).index_fill(0, slots, False)
    assert (keys[others] == 7.0).all()
    assert (values[others] == 7.0).all()


def by_slot(layer):
    """[slots, kv_heads, head_dim] each."""
    num_slots = len(layer.keys) * BLOCK
    everywhere = Segment(
        start=0, num_tokens=num_slots, kv_length=num_slots, blocks=list(range(len(layer.keys)))
    )
    batch = StepBatch.of(range(num_slots), [], [everywhere], BLOCK, CPU)
    return (x.transpose(0, 1) for x in layer.gather(batch, 0, 0))


def batch_of(lengths, cached, *, seed=0, spare_blocks=2):
    """Segments of new tokens behind cached ones, over blocks in no order."""
    kv_lengths = [length + before for length, before in zip(lengths, cached, strict=True)]
    counts = [-(-length // BLOCK) for length in kv_lengths]
    num_blocks = sum(counts) + spare_blocks
    order = torch.randperm(num_blocks, generator=torch.Generator().manual_seed(seed)).tolist()
    segments = []
    for length, kv_length, count in zip(lengths, kv_lengths, counts, strict=True):
        blocks, order = order[:count], order[count:]
        start = sum(segment.num_tokens for segment in segments)
        segments.append(Segment(start=start, num_tokens=length, kv_length=kv_length, blocks=blocks))
    num_tokens = sum(lengths)
    return StepBatch.of(range(num_tokens), range(num_tokens), segments, BLOCK, CPU), num_blocks


@pytest.mark.parametrize(("head_dim", "value_dim"), [(8, 8), (80, 12), (5, 21)])
def test_written_keys_and_values_are_gathered_again(head_dim, value_dim, kind, num_threads):
    batch, num_blocks = batch_of([1, 5, 40], [0, 0, 0])
    key, value = normal(46, 3, head_dim, dtype=kind.dtype), normal(46, 3, value_dim, dtype=kind.dtype, seed=1)
    layer = kind.layer(key, value, num_blocks, BLOCK)
    layer.write(key, value, batch)
    for idx, start, end in ((0, 0, 1), (1, 1, 6), (2, 6, 46)):
        for first in (0, (end - start) // 2):
            keys, values = layer.gather(batch, idx, first)
            assert torch.equal(keys, key[start + first : end].transpose(0, 1))
            assert torch.equal(values, value[start + first : end].transpose(0, 1))


@pytest.mark.parametrize("layer_type", [BlockLayer, PairedBlockLayer, FlatLayer])
def test_block_is_copied_whole_and_alone(layer_type, dtype):
    batch, num_blocks = batch_of([3 * BLOCK], [0])
    key, value = normal(3 * BLOCK, 2, 8, dtype=dtype), normal(3 * BLOCK, 2, 12, dtype=dtype, seed=1)
    layer = layer_type(key, value, num_blocks, BLOCK)
    layer.write(key, value, batch)
    first, _, third = batch.tables[0]
    layer.copy_block(int(first), int(third))
    keys, values = layer.gather(batch, 0, 0)
    order = [*range(2 * BLOCK), *range(BLOCK)]
    assert torch.equal(keys, key[order].transpose(0, 1))
    assert torch.equal(values, value[order].transpose(0, 1))


def test_bfloat16_lies_in_pairs_where_the_cpu_has_tiles():
    x = normal(1, 1, 8)
    assert type(make_layer(x, x, 1, BLOCK)) is BlockLayer
    expected = PairedBlockLayer if tiles.IS_AVAILABLE else BlockLayer
    assert type(make_layer(x.bfloat16(), x.bfloat16(), 1, BLOCK)) is expected
    assert type(make_layer(x.half(), x.half(), 1, BLOCK)) is FlatLayer


# Attention ------------------------------------------------------------------------------------------------


def exact_attention(query, layer, batch, traits, *, of_values=torch.clone):
    """One query at a time in float64, over some function of the values."""
    group = query.shape[1] // layer.keys.shape[1]
    out = []
    for idx, (start, num_queries, kv_length) in enumerate(batch.segments[:, 1:].tolist()):
        keys, values = (x.double().repeat_interleave(group, dim=0) for x in layer.gather(batch, idx, 0))
        for i in range(num_queries):
            end = kv_length - num_queries + i + 1
            first = 0 if traits.window is None else max(0, end - traits.window)
            q = query[start + i].double().unsqueeze(-1)
            scores = (keys[:, first:end] @ q).squeeze(-1) * traits.scale
            if traits.softcap is not None:
                scores = traits.softcap * torch.tanh(scores / traits.softcap)
            if traits.sinks is not None:
                scores = torch.cat([scores, traits.sinks.double().unsqueeze(-1)], dim=-1)
            weights = scores.softmax(dim=-1)[:, : end - first]
            out.append((weights.unsqueeze(1) @ of_values(values[:, first:end])).squeeze(1))
    return torch.stack(out)


LENGTHS = [1, 2, 3, 4, 5, 6, 1, 1, TILE - 1, TILE, TILE + 1, 2 * TILE + 9]
CACHED = [0, 14, 30, 0, 16, 33, 99, 15, 1, 0, 20, 5]
"""Alone, across a block's edge, in a block's first place, and long prompts in one and several portions."""


LONG_LENGTHS = [1, 6, TILE + 3, 2 * CHUNK * BLOCK + 5]
LONG_CACHED = [3 * CHUNK * BLOCK + 1, 2 * CHUNK * BLOCK - 3, CHUNK * BLOCK - 1, 0]
"""Over several chunks of positions, and across their edges."""


def check_attention(
    kind,
    traits,
    *,
    num_kv_heads=2,
    group=2,
    head_dim=8,
    value_dim=8,
    query_scale=1.0,
    atol=2e-6,
    lengths=LENGTHS,
    cached=CACHED,
):
    dtype = kind.dtype
    batch, num_blocks = batch_of(lengths, cached)
    num_slots = num_blocks * BLOCK
    query = normal(sum(lengths), num_kv_heads * group, head_dim, dtype=kind.dtype, scale=query_scale)
    key = normal(num_slots, num_kv_heads, head_dim, dtype=kind.dtype, seed=1)
    value = normal(num_slots, num_kv_heads, value_dim, dtype=kind.dtype, seed=2)
    layer = kind.layer(key, value, num_blocks, BLOCK)
    everywhere, _ = batch_of([num_slots], [0], spare_blocks=0)
    layer.write(key, value, everywhere)
    exact = exact_attention(query, layer, batch, traits)
    out = torch.full((*query.shape[:2], value_dim), torch.nan, dtype=kind.dtype)
    cpu.attend_into(query, layer, batch, traits, out)
    if kind.layer is PairedBlockLayer:
        size = exact_attention(query, layer, batch, traits, of_values=torch.abs)
        assert_rounded_weights(out, exact, size)
    else:
        assert_rounded_once(out, exact, atol=atol)
    by_torch = reference.attend(query, layer, batch, traits, value_dim)
    tolerance = 1e-5 if dtype is torch.float32 else 0.02
    torch.testing.assert_close(by_torch.double(), exact, rtol=tolerance, atol=max(tolerance, atol))


def assert_rounded_weights(actual, exact, size):
    """Each weight rounded once, then the result; ``size`` is the weighted sum of the values without signs."""
    bound = BFLOAT16_ROUNDING * (2.02 * size + exact.abs()) + 2e-6
    excess = (actual.double() - exact).abs() - bound
    assert float(excess.max()) <= 0.0


def sinks(num_heads):
    return normal(num_heads, seed=5, scale=2.0)


@pytest.mark.parametrize("group", [1, 3, 8])
@pytest.mark.parametrize("head_dim", [8, 64, 80])
def test_attention_over_groups_and_head_sizes(group, head_dim, kind, num_threads):
    traits = AttentionTraits(scale=head_dim**-0.5)
    check_attention(kind, traits, group=group, head_dim=head_dim, value_dim=head_dim)


@pytest.mark.parametrize("window", [None, 1, 100, CHUNK * BLOCK, CHUNK * BLOCK + 17])
@pytest.mark.parametrize("has_sinks", [False, True])
def test_attention_over_several_chunks(window, has_sinks, kind, num_threads):
    traits = AttentionTraits(scale=0.35, window=window, sinks=sinks(6) if has_sinks else None)
    check_attention(
        kind, traits, group=3, head_dim=16, value_dim=16, lengths=LONG_LENGTHS, cached=LONG_CACHED
    )


def test_attention_over_several_chunks_that_is_sure_of_one_position():
    check_attention(
        FLOAT32,
        AttentionTraits(scale=1.0),
        head_dim=64,
        query_scale=20.0,
        atol=1e-3,
        lengths=LONG_LENGTHS,
        cached=LONG_CACHED,
    )


@pytest.mark.parametrize(("head_dim", "value_dim"), [(8, 12), (16, 3), (80, 64), (24, 128)])
def test_attention_with_values_of_another_size(head_dim, value_dim, kind):
    check_attention(kind, AttentionTraits(scale=0.3), head_dim=head_dim, value_dim=value_dim)


@pytest.mark.parametrize("window", [1, 2, 15, 16, 17, TILE, TILE + 8, 1000])
def test_attention_in_a_window(window, kind):
    check_attention(kind, AttentionTraits(scale=0.35, window=window), group=3)


@pytest.mark.parametrize("window", [None, 9])
@pytest.mark.parametrize("softcap", [None, 0.5, 30.0])
@pytest.mark.parametrize("has_sinks", [False, True])
def test_attention_with_a_softcap_and_sinks(window, softcap, has_sinks, kind):
    traits = AttentionTraits(
        scale=0.35, window=window, softcap=softcap, sinks=sinks(4) if has_sinks else None
    )
    check_attention(kind, traits)


def test_attention_with_one_head():
    check_attention(FLOAT32, AttentionTraits(scale=0.35), num_kv_heads=1, group=1)


def test_attention_that_is_sure_of_one_position():
    """Scores of hundreds: their exponentials would overflow, and their own rounding shows."""
    traits = AttentionTraits(scale=1.0)
    check_attention(FLOAT32, traits, head_dim=64, value_dim=8, query_scale=20.0, atol=1e-3)


def test_sink_far_above_the_scores_takes_everything(kind):
    batch, num_blocks = batch_of([3], [4])
    x = normal(num_blocks * BLOCK, 1, 8, dtype=kind.dtype)
    layer = kind.layer(x, x, num_blocks, BLOCK)
    layer.write(x, x, batch_of([len(x)], [0], spare_blocks=0)[0])
    out = torch.empty(3, 1, 8, dtype=kind.dtype)
    cpu.attend_into(x[:3], layer, batch, AttentionTraits(scale=1.0, sinks=torch.tensor([200.0])), out)
    assert torch.equal(out, torch.zeros_like(out))


def test_attention_sees_nothing_of_others_and_nothing_behind(kind):
    """Every other slot holds infinities and NaN: the least weight on one of them would show."""
    batch, num_blocks = batch_of([1, 3], [20, 29])
    num_tokens, num_slots = 4, num_blocks * BLOCK
    x = normal(num_slots, 2, 8, dtype=kind.dtype)
    layer = kind.layer(x, x, num_blocks, BLOCK)
    layer.write(x, x, batch_of([num_slots], [0], spare_blocks=0)[0])
    traits = AttentionTraits(scale=0.35)
    query = normal(num_tokens, 4, 8, dtype=kind.dtype, seed=1)
    before, after = torch.empty_like(query), torch.empty_like(query)
    cpu.attend_into(query, layer, batch, traits, before)
    own = np.concatenate([batch.slots_of(0), batch.slots_of(1)])
    strange = torch.ones(num_slots, dtype=torch.bool)
    strange[torch.from_numpy(own)] = False
    assert strange.sum() >= 2 * BLOCK
    slots = strange.nonzero().flatten().numpy()
    infinities = torch.full((len(slots), 2, 8), torch.inf, dtype=kind.dtype)
    layer.write(infinities, infinities * 0.0, replace(batch, slots=slots))
    cpu.attend_into(query, layer, batch, traits, after)
    assert torch.equal(after, before)


def test_result_does_not_depend_on_the_company(kind):
    """Bit for bit: a sequence says the same whoever is in the batch with it."""
    together, num_blocks = batch_of(LENGTHS, CACHED)
    x = normal(num_blocks * BLOCK, 2, 16, dtype=kind.dtype)
    layer = kind.layer(x, x, num_blocks, BLOCK)
    layer.write(x, x, batch_of([len(x)], [0], spare_blocks=0)[0])
    query = normal(sum(LENGTHS), 6, 16, dtype=kind.dtype, seed=1)
    traits, out = AttentionTraits(scale=0.25), torch.empty_like(query)
    cpu.attend_into(query, layer, together, traits, out)
    for idx, (start, length, kv_length) in enumerate(together.segments[:, 1:].tolist()):
        blocks = together.tables[idx].tolist()
        segment = Segment(start=0, num_tokens=length, kv_length=kv_length, blocks=blocks)
        alone = StepBatch.of(range(length), [], [segment], BLOCK, CPU)
        mine = torch.empty(length, 6, 16, dtype=kind.dtype)
        cpu.attend_into(query[start : start + length], layer, alone, traits, mine)
        assert torch.equal(mine, out[start : start + length])


def attended_in_portions(portions, query, layer, blocks, traits):
    """One sequence's queries, so many at a time."""
    out, done = query.new_empty(*query.shape[:2], layer.values.shape[-1]), 0
    for length in portions:
        end = done + length
        segment = Segment(start=0, num_tokens=length, kv_length=end, blocks=blocks[: -(-end // BLOCK)])
        batch = StepBatch.of(range(length), [], [segment], BLOCK, CPU)
        cpu.attend_into(query[done:end], layer, batch, traits, out[done:end])
        done = end
    assert done == len(query)
    return out


@pytest.mark.parametrize("value_dim", [16, 12])
@pytest.mark.parametrize("softcap", [None, 30.0])
@pytest.mark.parametrize("window", [None, 5, 100])
def test_result_does_not_depend_on_the_portions(window, softcap, value_dim, kind):
    """Bit for bit: a prompt, a draft to verify and single tokens give a position the same result."""
    length = 2 * CHUNK * BLOCK + 9
    num_blocks = -(-length // BLOCK)
    blocks = torch.randperm(num_blocks, generator=torch.Generator().manual_seed(3)).tolist()
    key = normal(num_blocks * BLOCK, 2, 16, dtype=kind.dtype)
    value = normal(num_blocks * BLOCK, 2, value_dim, dtype=kind.dtype, seed=1)
    layer = kind.layer(key, value, num_blocks, BLOCK)
    layer.write(key, value, batch_of([len(key)], [0], spare_blocks=0)[0])
    query = normal(length, 6, 16, dtype=kind.dtype, seed=2)
    traits = AttentionTraits(scale=0.3, window=window, softcap=softcap, sinks=sinks(6))
    triples = [3] * (length // 3) + [length % 3] * (length % 3 > 0)
    results = [
        attended_in_portions(portions, query, layer, blocks, traits)
        for portions in ([length], [1] * length, triples, [TILE + 1, length - TILE - 1])
    ]
    assert all(torch.equal(out, results[0]) for out in results)


def test_query_that_is_not_a_number_spoils_its_own_result_only(kind):
    batch, num_blocks = batch_of([5, 2], [140, 7])
    x = normal(num_blocks * BLOCK, 2, 16, dtype=kind.dtype)
    layer = kind.layer(x, x, num_blocks, BLOCK)
    layer.write(x, x, batch_of([len(x)], [0], spare_blocks=0)[0])
    query = normal(7, 4, 16, dtype=kind.dtype, seed=1)
    query[2, 1, 3] = torch.nan
    out = torch.empty_like(query)
    cpu.attend_into(query, layer, batch, AttentionTraits(scale=0.25), out)
    spoilt = torch.zeros_like(out, dtype=torch.bool)
    spoilt[2, 1] = True
    assert torch.equal(out.isnan(), spoilt)


@needs_tiles
@pytest.mark.parametrize("window", [None, 40])
def test_weights_in_tiles_add_up_to_one(window):
    """Rounded as they are: equal values come back as they were."""
    batch, num_blocks = batch_of(LENGTHS, CACHED)
    key = normal(num_blocks * BLOCK, 2, 16, dtype=torch.bfloat16, scale=3.0)
    value = torch.full_like(key, 1.40625)
    layer = PairedBlockLayer(key, value, num_blocks, BLOCK)
    layer.write(key, value, batch_of([len(key)], [0], spare_blocks=0)[0])
    query = normal(sum(LENGTHS), 6, 16, dtype=torch.bfloat16, seed=1)
    out = torch.empty_like(query)
    cpu.attend_into(query, layer, batch, AttentionTraits(scale=0.25, window=window), out)
    assert (out == 1.40625).all()
