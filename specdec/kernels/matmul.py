"""Products with bfloat16 weights in float32 arithmetic, for CPUs that have no instructions for bfloat16.

Weights stay bfloat16 in memory, since reading them is what a small batch costs. They lie in panels of 16
outputs and are widened in registers.

Every output is a sum over the inputs in their order, one rounded product after the other. So a row's results
do not depend, bit for bit, on which rows are multiplied beside it.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from llvmlite import ir
from numba import njit, prange, types
from numba.core import cgutils
from numba.extending import intrinsic
from torch.nn import functional

from specdec.kernels.scalars import OPTIONS, load, store

PANEL = 16
"""Outputs of a panel."""
ROWS = 6
"""Rows whose sums are kept in registers at once: with a panel's two vectors 12 of AVX2's 16 registers."""

_LANES = PANEL // 2
_FLOAT, _INTP = ir.FloatType(), ir.IntType(64)
_FLOATS = ir.VectorType(_FLOAT, _LANES)
_BITS = ir.VectorType(ir.IntType(32), _LANES)

_ROWS_PER_PART = 24
"""Threads share the rows when each gets so many, else the panels: then none reads what another reads."""
_WIDENED = 48 * 1024
"""Numbers of x held as float32 at once: they and a panel stay in a core's second cache."""


def pack(weight: torch.Tensor) -> npt.NDArray[np.int32]:
    """A bfloat16 matrix [out, in] in panels, [ceil(out / 16), in, 8] of pairs of outputs.

    Output j of a panel is the lower half of a pair and output j + 8 the upper: each takes one instruction to
    become float32.
    """
    bits = weight.detach().view(torch.int16)
    num_panels = -(-len(bits) // PANEL)
    bits = functional.pad(bits, (0, 0, 0, num_panels * PANEL - len(bits)))
    pairs = bits.view(num_panels, 2, _LANES, -1).permute(0, 3, 2, 1).contiguous()
    array: npt.NDArray[np.int32] = pairs.view(torch.int32).squeeze(-1).numpy()
    return array


def _splat(builder: Any, number: Any) -> Any:
    lane = builder.insert_element(ir.Constant(_FLOATS, ir.Undefined), number, ir.IntType(32)(0))
    return builder.shuffle_vector(lane, ir.Constant(_FLOATS, ir.Undefined), ir.Constant(_BITS, [0] * _LANES))


def _widened(builder: Any, pairs: Any) -> tuple[Any, Any]:
    """Both halves of eight pairs as float32."""
    lower = builder.shl(pairs, ir.Constant(_BITS, [16] * _LANES))
    upper = builder.and_(pairs, ir.Constant(_BITS, [0xFFFF0000] * _LANES))
    return builder.bitcast(lower, _FLOATS), builder.bitcast(upper, _FLOATS)


def _piece(num_rows: int, num_panels: int) -> Any:
    """A piece of the product whose sums stay in registers.

    The function made sets sums[i, 16 * p + j] to x[row + i] . output j of panels[panel + p], for ``num_rows``
    times ``num_panels`` of i and p. x and sums are float32; all are contiguous.
    """

    @intrinsic  # type: ignore[untyped-decorator]
    def multiply_piece(typing_context: Any, x: Any, row: Any, panels: Any, panel: Any, sums: Any) -> Any:
        signature = types.none(x, types.intp, panels, types.intp, sums)

        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            x_array, row, panels_array, panel, sums_array = args
            fma = cgutils.get_or_insert_function(
                builder.module, ir.FunctionType(_FLOATS, [_FLOATS] * 3), f"llvm.fma.v{_LANES}f32"
            )

            def address(array_type: Any, array: Any, *index: Any) -> Any:
                view = context.make_array(array_type)(context, builder, array)
                return cgutils.get_item_pointer(
                    context, builder, array_type, view, list(index), wraparound=False
                )

            zero = _INTP(0)
            rows = [address(x, x_array, builder.add(row, _INTP(i)), zero) for i in range(num_rows)]
            weights = [
                builder.bitcast(
                    address(panels, panels_array, builder.add(panel, _INTP(p)), zero, zero),
                    _BITS.as_pointer(),
                )
                for p in range(num_panels)
            ]
            view = context.make_array(panels)(context, builder, panels_array)
            depth = builder.extract_value(view.shape, 1)
            # Stack slots to the IR; LLVM makes registers of them.
            slots = [[cgutils.alloca_once(builder, _FLOATS) for _ in range(2 * num_panels)] for _ in rows]
            for slot in (slot for of_row in slots for slot in of_row):
                builder.store(ir.Constant(_FLOATS, [0.0] * _LANES), slot)
            with cgutils.for_range(builder, depth) as loop:
                vectors = [
                    vector
                    for pointer in weights
                    for vector in _widened(builder, builder.load(builder.gep(pointer, [loop.index]), align=4))
                ]
                for pointer, of_row in zip(rows, slots, strict=True):
                    factor = _splat(builder, builder.load(builder.gep(pointer, [loop.index])))
                    for slot, vector in zip(of_row, vectors, strict=True):
                        builder.store(builder.call(fma, [factor, vector, builder.load(slot)]), slot)
            for i, of_row in enumerate(slots):
                for j, slot in enumerate(of_row):
                    target = address(sums, sums_array, _INTP(i), _INTP(j * _LANES))
                    builder.store(builder.load(slot), builder.bitcast(target, _FLOATS.as_pointer()), align=4)
            return context.get_dummy_value()

        return signature, codegen

    return multiply_piece


_piece_1, _piece_2, _piece_3, _piece_4, _piece_5, _piece_6 = (_piece(rows, 1) for rows in range(1, ROWS + 1))
# Few rows have few sums, and each waits for its last addition: several panels fill the time.
_piece_1_by_4, _piece_2_by_3, _piece_3_by_2 = _piece(1, 4), _piece(2, 3), _piece(3, 2)


@njit(**OPTIONS)  # type: ignore[untyped-decorator]
def _multiply_rows(x: Any, row: int, num_rows: int, panels: Any, panel: int, limit: int, sums: Any) -> int:
    """Sums of up to 6 rows with as many panels as are worth it, at most ``limit``; returns how many."""
    if num_rows == 1 and limit >= 4:
        _piece_1_by_4(x, row, panels, panel, sums)
        return 4
    if num_rows == 2 and limit >= 3:
        _piece_2_by_3(x, row, panels, panel, sums)
        return 3
    if num_rows == 3 and limit >= 2:
        _piece_3_by_2(x, row, panels, panel, sums)
        return 2
    if num_rows == 1:
        _piece_1(x, row, panels, panel, sums)
    elif num_rows == 2:
        _piece_2(x, row, panels, panel, sums)
    elif num_rows == 3:
        _piece_3(x, row, panels, panel, sums)
    elif num_rows == 4:
        _piece_4(x, row, panels, panel, sums)
    elif num_rows == 5:
        _piece_5(x, row, panels, panel, sums)
    else:
        _piece_6(x, row, panels, panel, sums)
    return 1


@njit(**OPTIONS)  # type: ignore[untyped-decorator]
def _store_sums(sums: Any, bias: Any, out: Any) -> None:
    """out[i, j] = sums[i, j] + bias[j]; a bias of size 0 is none."""
    for i in range(out.shape[0]):
        for j in range(out.shape[1]):
            total = sums[i, j]
            if bias.shape[0] > 0:
                total += load(bias[j])
            out[i, j] = store(out, total)


@njit(**OPTIONS)  # type: ignore[untyped-decorator]
def _multiply_block(x: Any, panels: Any, first: int, last: int, bias: Any, sums: Any, out: Any) -> None:
    """Products of float32 rows with panels from ``first`` to before ``last``.

    A panel is read once and stays in the first cache for the other rows, which are taken in groups as equal
    as possible.
    """
    num_rows, num_outputs = out.shape
    num_groups = (num_rows + ROWS - 1) // ROWS
    panel = first
    while panel < last:
        limit = last - panel if num_groups == 1 else 1
        count = 1
        for group in range(num_groups):
            start, end = num_rows * group // num_groups, num_rows * (group + 1) // num_groups
            count = _multiply_rows(x, start, end - start, panels, panel, limit, sums)
            left, right = panel * PANEL, min((panel + count) * PANEL, num_outputs)
            _store_sums(sums, bias[left:right], out[start:end, left:right])
        panel += count


@njit(**OPTIONS)  # type: ignore[untyped-decorator]
def _multiply_part(x: Any, panels: Any, first: int, last: int, bias: Any, out: Any) -> None:
    """What one thread does: its rows, widened some at a time, with its panels."""
    num_rows, depth = x.shape
    height = min(num_rows, max(1, _WIDENED // (ROWS * depth)) * ROWS)
    wide = np.empty((height, depth), np.float32)
    sums = np.empty((ROWS, 4 * PANEL), np.float32)
    for start in range(0, num_rows, height):
        block = x[start : start + height]
        for i in range(block.shape[0]):
            for k in range(depth):
                wide[i, k] = load(block[i, k])
        _multiply_block(wide[: block.shape[0]], panels, first, last, bias, sums, out[start : start + height])


@njit(parallel=True, **OPTIONS)  # type: ignore[untyped-decorator]
def multiply(x: Any, panels: Any, bias: Any, num_threads: int, out: Any) -> None:
    """Set ``out`` to x times the transposed weight, plus the bias.

    Args:
        x: [rows, in].
        panels: [ceil(out / 16), in, 8] as `pack` makes them.
        bias: [out], or [0] for none.
        num_threads: that it is divided among.
        out: [rows, out], written.
    """
    num_rows, num_panels = x.shape[0], panels.shape[0]
    row_parts = max(1, min(num_threads, num_rows // _ROWS_PER_PART))
    panel_parts = (num_threads + row_parts - 1) // row_parts
    for part in prange(row_parts * panel_parts):
        i, j = part // panel_parts, part % panel_parts
        start, end = num_rows * i // row_parts, num_rows * (i + 1) // row_parts
        first, last = num_panels * j // panel_parts, num_panels * (j + 1) // panel_parts
        _multiply_part(x[start:end], panels, first, last, bias, out[start:end])
