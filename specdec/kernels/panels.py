"""Bfloat16 weights in panels of 16 outputs, each of pairs of inputs, as CPUs with instructions for such pairs
take them, one panel behind the other: a step of few tokens reads all of them once, as two streams.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from numba import njit
from torch.nn import functional

from specdec.kernels import simd
from specdec.kernels.scalars import INNER, store

PANEL = simd.LANES
"""Outputs of a panel."""


def pack(weight: torch.Tensor, depth: int) -> npt.NDArray[np.int32]:
    """A bfloat16 matrix [out, in] in panels, [n, in / 2, 16] of pairs of inputs; n is even.

    Args:
        weight: the matrix.
        depth: inputs that an instruction takes.

    Raises:
        ValueError: ``in`` is no multiple of ``depth``.
    """
    if weight.shape[1] % depth:
        raise ValueError(f"{weight.shape[1]} inputs are no multiple of {depth}")
    bits = weight.detach().view(torch.int16)
    num_panels = -(-len(bits) // (2 * PANEL)) * 2
    bits = functional.pad(bits, (0, 0, 0, num_panels * PANEL - len(bits)))
    pairs = bits.view(num_panels, PANEL, -1, 2).permute(0, 2, 1, 3).contiguous()
    array: npt.NDArray[np.int32] = pairs.view(torch.int32).squeeze(-1).numpy()
    return array


def pack_bias(bias: torch.Tensor | None, panels: npt.NDArray[np.int32]) -> npt.NDArray[np.float32]:
    """A bias [out] as [1, outputs of all panels] float32, filled with zeros; None is all zeros."""
    packed = np.zeros((1, len(panels) * PANEL), np.float32)
    if bias is not None:
        packed[0, : len(bias)] = bias.detach().float().numpy()
    return packed


@njit(**INNER)  # type: ignore[untyped-decorator]
def put(sums: Any, num_rows: int, bias: Any, out: Any, row: int, column: int) -> None:
    """Write a piece's sums, plus the bias, to their place."""
    if column + 2 * PANEL <= out.shape[1]:
        low_bias, high_bias = simd.load(bias, 0, column), simd.load(bias, 0, column + PANEL)
        for i in range(num_rows):
            low = simd.add(simd.load(sums, i, 0), low_bias)
            high = simd.add(simd.load(sums, i, PANEL), high_bias)
            simd.store_rounded(out, row + i, column, low, high, low)
    else:
        for i in range(num_rows):
            for j in range(out.shape[1] - column):
                out[row + i, column + j] = store(out, sums[i, j] + bias[0, column + j])
