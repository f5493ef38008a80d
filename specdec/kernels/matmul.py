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

from specdec.kernels.scalars import OPTIONS, load
from specdec.kernels.simd import prefetch

PANEL = 16
"""Outputs of a panel."""
ROWS = 6
"""Rows whose sums are kept in registers at once: with a panel's two vectors 12 of AVX2's 16 registers."""

_LANES = PANEL // 2
_FLOAT, _INTP = ir.FloatType(), ir.IntType(64)
_FLOATS = ir.VectorType(_FLOAT, _LANES)
_BITS = ir.VectorType(ir.IntType(32), _LANES)

_AHEAD = 64
"""Inputs ahead of which a panel's weights are asked for."""
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


def pack_bias(bias: torch.Tensor | None, num_outputs: int) -> npt.NDArray[np.float32]:
    """A bias [out] as float32, filled with zeros to whole panels; None is all zeros."""
    packed = np.zeros(-(-num_outputs // PANEL) * PANEL, np.float32)
    if bias is not None:
        packed[:num_outputs] = bias.detach().float().numpy()
    return packed


def _splat(builder: Any, number: Any) -> Any:
    lane = builder.insert_element(ir.Constant(_FLOATS, ir.Undefined), number, ir.IntType(32)(0))
    return builder.shuffle_vector(lane, ir.Constant(_FLOATS, ir.Undefined), ir.Constant(_BITS, [0] * _LANES))


def _bits(number: int) -> Any:
    return ir.Constant(_BITS, [number] * _LANES)


def _widened(builder: Any, pairs: Any) -> tuple[Any, Any]:
    """Both halves of eight pairs as float32."""
    lower, upper = builder.shl(pairs, _bits(16)), builder.and_(pairs, _bits(0xFFFF0000))
    return builder.bitcast(lower, _FLOATS), builder.bitcast(upper, _FLOATS)


def _narrowed(builder: Any, vector: Any) -> Any:
    """Eight float32 as bfloat16 bits, rounded to nearest even; NaN stays NaN."""
    bits = builder.bitcast(vector, _BITS)
    last_kept = builder.and_(builder.lshr(bits, _bits(16)), _bits(1))
    rounded = builder.add(bits, builder.add(last_kept, _bits(0x7FFF)))
    is_nan = builder.fcmp_unordered("uno", vector, vector)
    chosen = builder.select(is_nan, _bits(0x7FC00000), rounded)
    return builder.trunc(builder.lshr(chosen, _bits(16)), ir.VectorType(ir.IntType(16), _LANES))


def _piece(num_rows: int, num_panels: int) -> Any:
    """A piece of the product whose sums stay in registers: ``num_rows`` rows times ``num_panels`` panels.

    The function made sets out[out_row + i, out_column + 16 * p + j] to x[x_row + i] . output j of
    panels[panel + p], plus its bias. x is float32, out float32 or bfloat16 bits; rows are contiguous.
    """

    @intrinsic  # type: ignore[untyped-decorator]
    def multiply_piece(
        typing_context: Any,
        x: Any,
        x_row: Any,
        panels: Any,
        panel: Any,
        bias: Any,
        out: Any,
        out_row: Any,
        out_column: Any,
    ) -> Any:
        index = types.intp
        signature = types.none(x, index, panels, index, bias, out, index, index)

        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            x_array, x_row, panels_array, panel, bias_array, out_array, out_row, out_column = args
            fma = cgutils.get_or_insert_function(
                builder.module, ir.FunctionType(_FLOATS, [_FLOATS] * 3), f"llvm.fma.v{_LANES}f32"
            )

            def address(array_type: Any, array: Any, *index: Any) -> Any:
                view = context.make_array(array_type)(context, builder, array)
                return cgutils.get_item_pointer(
                    context, builder, array_type, view, list(index), wraparound=False
                )

            zero = _INTP(0)
            rows = [address(x, x_array, builder.add(x_row, _INTP(i)), zero) for i in range(num_rows)]
            weights = [
                builder.bitcast(
                    address(panels, panels_array, builder.add(panel, _INTP(p)), zero, zero),
                    _BITS.as_pointer(),
                )
                for p in range(num_panels)
            ]
            depth = builder.extract_value(context.make_array(panels)(context, builder, panels_array).shape, 1)
            first = builder.mul(panel, _INTP(PANEL))
            biases = [
                builder.load(
                    builder.bitcast(
                        address(bias, bias_array, builder.add(first, _INTP(v * _LANES))), _FLOATS.as_pointer()
                    ),
                    align=4,
                )
                for v in range(2 * num_panels)
            ]
            # Stack slots to the IR; LLVM makes registers of them.
            slots = [[cgutils.alloca_once(builder, _FLOATS) for _ in biases] for _ in rows]
            for of_row in slots:
                for slot, start in zip(of_row, biases, strict=True):
                    builder.store(start, slot)
            with cgutils.for_range(builder, depth) as loop:
                vectors: list[Any] = []
                for pointer in weights:
                    prefetch(builder, builder.gep(pointer, [builder.add(loop.index, _INTP(_AHEAD))]))
                    vectors += _widened(builder, builder.load(builder.gep(pointer, [loop.index]), align=4))
                for pointer, of_row in zip(rows, slots, strict=True):
                    factor = _splat(builder, builder.load(builder.gep(pointer, [loop.index])))
                    for slot, vector in zip(of_row, vectors, strict=True):
                        builder.store(builder.call(fma, [factor, vector, builder.load(slot)]), slot)
            for i, of_row in enumerate(slots):
                for v, slot in enumerate(of_row):
                    row, column = builder.add(out_row, _INTP(i)), builder.add(out_column, _INTP(v * _LANES))
                    value = builder.load(slot)
                    if isinstance(out.dtype, types.Integer):
                        value = _narrowed(builder, value)
                    target = builder.bitcast(address(out, out_array, row, column), value.type.as_pointer())
                    builder.store(value, target, align=2)
            return context.get_dummy_value()

        return signature, codegen

    return multiply_piece


_piece_1, _piece_2, _piece_3, _piece_4, _piece_5, _piece_6 = (_piece(rows, 1) for rows in range(1, ROWS + 1))
# One or two rows have few sums, and each waits for its last addition: several panels fill the time.
_piece_1_by_4, _piece_2_by_2 = _piece(1, 4), _piece(2, 2)


@njit(**OPTIONS)  # type: ignore[untyped-decorator]
def _multiply_rows(
    x: Any,
    x_row: int,
    num_rows: int,
    panels: Any,
    panel: int,
    bias: Any,
    out: Any,
    out_row: int,
    out_column: int,
) -> None:
    """Up to 6 rows with one panel; see `_piece`."""
    if num_rows == 1:
        _piece_1(x, x_row, panels, panel, bias, out, out_row, out_column)
    elif num_rows == 2:
        _piece_2(x, x_row, panels, panel, bias, out, out_row, out_column)
    elif num_rows == 3:
        _piece_3(x, x_row, panels, panel, bias, out, out_row, out_column)
    elif num_rows == 4:
        _piece_4(x, x_row, panels, panel, bias, out, out_row, out_column)
    elif num_rows == 5:
        _piece_5(x, x_row, panels, panel, bias, out, out_row, out_column)
    else:
        _piece_6(x, x_row, panels, panel, bias, out, out_row, out_column)


@njit(**OPTIONS)  # type: ignore[untyped-decorator]
def _multiply_block(
    x: Any, panels: Any, panel: int, last: int, bias: Any, edge: Any, out: Any, start: int
) -> None:
    """Products of float32 rows with panels ``panel`` to ``last`` - 1, to rows of ``out`` from ``start``.

    A panel is read once and stays in the first cache for the other rows, which are taken in groups as equal
    as possible. A panel that is not full goes by way of ``edge``, [6, 16].
    """
    num_rows, num_outputs = x.shape[0], out.shape[1]
    last_full = min(last, num_outputs // PANEL)
    if num_rows == 1:
        while panel + 4 <= last_full:
            _piece_1_by_4(x, 0, panels, panel, bias, out, start, panel * PANEL)
            panel += 4
    if num_rows == 2:
        while panel + 2 <= last_full:
            _piece_2_by_2(x, 0, panels, panel, bias, out, start, panel * PANEL)
            panel += 2
    num_groups = (num_rows + ROWS - 1) // ROWS
    while panel < last:
        is_full, column = panel < last_full, panel * PANEL
        for group in range(num_groups):
            row, end = num_rows * group // num_groups, num_rows * (group + 1) // num_groups
            if is_full:
                _multiply_rows(x, row, end - row, panels, panel, bias, out, start + row, column)
            else:
                _multiply_rows(x, row, end - row, panels, panel, bias, edge, 0, 0)
                for i in range(end - row):
                    for j in range(num_outputs - column):
                        out[start + row + i, column + j] = edge[i, j]
        panel += 1


@njit(**OPTIONS)  # type: ignore[untyped-decorator]
def _multiply_part(
    x: Any, start: int, end: int, panels: Any, first: int, last: int, bias: Any, out: Any
) -> None:
    """What one thread does: its rows, widened some at a time, with its panels."""
    depth = x.shape[1]
    height = min(end - start, max(1, _WIDENED // (ROWS * depth)) * ROWS)
    wide = np.empty((height, depth), np.float32)
    edge = np.empty((ROWS, PANEL), out.dtype)
    for row in range(start, end, height):
        block = wide[: min(height, end - row)]
        for i in range(block.shape[0]):
            for k in range(depth):
                block[i, k] = load(x[row + i, k])
        _multiply_block(block, panels, first, last, bias, edge, out, row)


@njit(parallel=True, **OPTIONS)  # type: ignore[untyped-decorator]
def multiply(x: Any, panels: Any, bias: Any, num_threads: int, out: Any) -> None:
    """Set ``out`` to x times the transposed weight, plus the bias.

    Args:
        x: [rows, in].
        panels: as `pack` makes them.
        bias: as `pack_bias` makes it.
        num_threads: that the work is divided among.
        out: [rows, out], written.
    """
    num_rows, num_panels = x.shape[0], panels.shape[0]
    row_parts = max(1, min(num_threads, num_rows // _ROWS_PER_PART))
    panel_parts = (num_threads + row_parts - 1) // row_parts
    for part in prange(row_parts * panel_parts):
        i, j = part // panel_parts, part % panel_parts
        start, end = num_rows * i // row_parts, num_rows * (i + 1) // row_parts
        first, last = num_panels * j // panel_parts, num_panels * (j + 1) // panel_parts
        _multiply_part(x, start, end, panels, first, last, bias, out)
