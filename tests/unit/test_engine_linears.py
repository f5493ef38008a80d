"""What a decoder multiplies with, in each way a CPU can: right, and a row the same in any company."""

import numba
import pytest
import torch
from torch.nn import functional

from specdec.engine.decoder import weights
from specdec.engine.decoder.weights import (
    DotLinear,
    OneDnnLinear,
    PanelLinear,
    TileLinear,
    TorchLinear,
    make_linear,
)
from specdec.engine.threads import set_num_threads
from specdec.kernels import as_array, dot_matmul, matmul, panels, tile_matmul, tiles
from tests.kernel_threads import kernel_threads

set_num_threads(1)

BFLOAT16_ROUNDING = 2.0**-8
SHAPES = [(1, 1), (16, 8), (17, 3), (37, 576), (64, 40), (200, 1536)]
"""Outputs and inputs: panels that are full and not, fewer of them than a thread takes at once, and more."""


@pytest.fixture(params=[1, 2, 3], ids=lambda count: f"{count} threads")
def num_threads(request):
    with kernel_threads(request.param):
        yield request.param


def normal(*shape, seed=0, dtype=torch.bfloat16):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def onednn(weight, bias):
    if not weights.has_onednn_bfloat16():
        pytest.skip("oneDNN has no bfloat16 on this CPU")
    return OneDnnLinear(weight, bias)


def tiled(weight, bias):
    """The kernel for tiles, with inputs that weigh nothing up to whole ones."""
    if not tiles.IS_AVAILABLE:
        pytest.skip("this CPU has no tiles")
    return padded(TileLinear, tile_matmul.DEPTH, weight, bias)


def dotted(weight, bias):
    """The kernel for pairs, likewise."""
    if not dot_matmul.IS_AVAILABLE:
        pytest.skip("this CPU has no AVX512-BF16")
    return padded(DotLinear, dot_matmul.DEPTH, weight, bias)


def padded(kind, depth, weight, bias):
    missing = -weight.shape[1] % depth
    linear = kind(functional.pad(weight, (0, missing)), bias)
    return lambda x: linear(functional.pad(x, (0, missing)))


def exact(x, weight, bias):
    product = x.double() @ weight.double().T
    return product if bias is None else product + bias.double()


@pytest.mark.parametrize("make", [onednn, tiled, dotted, PanelLinear, TorchLinear])
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize(("num_outputs", "num_inputs"), SHAPES)
def test_product_is_rounded_once(make, num_outputs, num_inputs, has_bias, num_threads):
    weight = normal(num_outputs, num_inputs)
    bias = normal(num_outputs, seed=1) if has_bias else None
    linear = make(weight, bias)
    for num_rows in (2, 5, 13, 150):
        x = normal(num_rows, num_inputs, seed=2)
        out = linear(x)
        assert (out.shape, out.dtype) == ((num_rows, num_outputs), torch.bfloat16)
        torch.testing.assert_close(
            out.double(), exact(x, weight, bias), rtol=1.001 * BFLOAT16_ROUNDING, atol=1e-4
        )


@pytest.mark.parametrize("make", [tiled, dotted, PanelLinear])
@pytest.mark.parametrize(("num_outputs", "num_inputs"), SHAPES)
def test_row_has_the_same_bits_in_any_company(make, num_outputs, num_inputs, num_threads):
    linear = make(normal(num_outputs, num_inputs), normal(num_outputs, seed=1))
    x = normal(512, num_inputs, seed=2)
    together = linear(x)
    for num_rows in (*range(1, 41), 100):
        assert torch.equal(linear(x[7 : 7 + num_rows]), together[7 : 7 + num_rows])


@pytest.mark.parametrize("make", [tiled, dotted, PanelLinear])
def test_result_is_the_same_with_any_number_of_threads(make):
    linear, x = make(normal(100, 64), None), normal(300, 64, seed=2)
    set_num_threads(1)
    alone = linear(x)
    for num_threads in range(2, numba.config.NUMBA_NUM_THREADS + 1):
        numba.set_num_threads(num_threads)
        assert torch.equal(linear(x), alone)
    numba.set_num_threads(1)


def test_sum_of_panels_is_taken_in_order_and_in_float32():
    """Two inputs that cancel with a small one between them: in another order it would count."""
    weight = torch.tensor([[2.0**30, 1.0, -(2.0**30), 1.0]]).bfloat16()
    assert PanelLinear(weight, None)(torch.ones(1, 4).bfloat16()).item() == 1.0


def test_panels_take_float32_rows_too():
    weight, x = normal(20, 30), normal(9, 30, seed=2, dtype=torch.float32)
    out = PanelLinear(weight, None)(x)
    assert out.dtype is torch.float32
    torch.testing.assert_close(out.double(), exact(x, weight, None), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("make", [tiled, dotted, PanelLinear])
@pytest.mark.parametrize("special", [torch.inf, -torch.inf, torch.nan])
def test_what_is_not_a_number_stays_in_its_row_and_its_output(make, special):
    weight, x = normal(40, 8), normal(7, 8, seed=2)
    weight[17, 3] = special
    x[4, 5] = special
    out = make(weight, None)(x)
    strange = torch.zeros(7, 40, dtype=torch.bool)
    strange[4] = strange[:, 17] = True
    assert torch.equal(~out.isfinite(), strange)


def test_every_weight_is_widened_to_itself():
    """Every finite bfloat16 as a weight of one input, at every place of a panel."""
    every = torch.arange(-(2**15), 2**15, dtype=torch.int16).view(torch.bfloat16)
    finite = every[every.isfinite()].unsqueeze(1)
    one = torch.ones(1, 1).bfloat16()
    for shift in (0, 3, 8):
        rolled = finite.roll(shift, 0)
        assert torch.equal(PanelLinear(rolled, None)(one)[0], rolled[:, 0])


@pytest.mark.parametrize(
    ("has_tiles", "has_dots", "num_inputs", "kind"),
    [
        (True, True, 64, TileLinear),
        (True, True, 48, DotLinear),
        (False, True, 64, DotLinear),
        (False, True, 3, OneDnnLinear),
        (False, False, 64, OneDnnLinear),
    ],
)
def test_bfloat16_goes_to_the_widest_instruction_that_takes_its_inputs(
    has_tiles, has_dots, num_inputs, kind, monkeypatch
):
    if kind is OneDnnLinear and not weights.has_onednn_bfloat16():
        pytest.skip("oneDNN has no bfloat16 on this CPU")
    monkeypatch.setattr(tiles, "IS_AVAILABLE", has_tiles)
    monkeypatch.setattr(dot_matmul, "IS_AVAILABLE", has_dots)
    assert isinstance(make_linear(normal(4, num_inputs), None), kind)


@pytest.mark.parametrize("depth", [tile_matmul.DEPTH, dot_matmul.DEPTH])
def test_pairs_of_inputs_are_packed_whole(depth):
    weight = normal(40, 2 * depth)
    packed = panels.pack(weight, depth)
    assert packed.shape == (4, depth, panels.PANEL)
    assert (packed[0, 1] == weight[:16, 2:4].contiguous().view(torch.int32).flatten().numpy()).all()
    assert not packed[3].any()
    with pytest.raises(ValueError, match=f"no multiple of {depth}"):
        panels.pack(normal(4, depth + 1), depth)


@pytest.mark.parametrize(("is_supported", "kind"), [(False, PanelLinear), (True, OneDnnLinear)])
def test_bfloat16_goes_to_onednn_where_it_can_and_to_panels_elsewhere(is_supported, kind, monkeypatch):
    if is_supported and not weights.has_onednn_bfloat16():
        pytest.skip("oneDNN has no bfloat16 on this CPU")
    monkeypatch.setattr(tiles, "IS_AVAILABLE", False)
    monkeypatch.setattr(dot_matmul, "IS_AVAILABLE", False)
    monkeypatch.setattr(weights, "has_onednn_bfloat16", lambda: is_supported)
    assert isinstance(make_linear(normal(4, 4), None), kind)
    assert isinstance(make_linear(normal(4, 4, dtype=torch.float32), None), TorchLinear)


def test_without_onednn_there_is_no_bfloat16_of_its(monkeypatch):
    monkeypatch.setattr(torch._C, "_has_mkldnn", False)
    assert not weights.has_onednn_bfloat16()


def test_only_libraries_want_padding():
    weight = normal(4, 4)
    assert [PanelLinear(weight, None).padded_rows(count) for count in (1, 17, 300)] == [1, 17, 300]
    assert [TorchLinear(weight, None).padded_rows(count) for count in (1, 17, 300)] == [2, 20, 320]


def test_panels_are_whole_and_their_pairs_are_eight_outputs_apart():
    weight = normal(20, 3)
    panels = matmul.pack(weight)
    assert panels.shape == (2, 3, 8)
    lower, upper = (panels & 0xFFFF).astype("uint16"), ((panels >> 16) & 0xFFFF).astype("uint16")
    bits = as_array(weight).view("uint16")
    assert (bits[:8] == lower[0].T).all()
    assert (bits[8:16] == upper[0].T).all()
    assert (bits[16:] == lower[1, :, :4].T).all()
    assert not lower[1, :, 4:].any()
    assert not upper[1].any()
