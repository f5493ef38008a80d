"""A vector of 16 float32 as a numba type, for loops whose sums must stay in registers.

LLVM's own vectoriser finds the other loops; it does not keep several sums of a nested loop in registers.
On a machine with narrower registers LLVM splits a vector over several. Nothing here is reordered or
contracted by LLVM: a lane's arithmetic is the one written, whatever is computed beside it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import llvmlite.binding
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic, models, register_model

LANES = 16
IS_WIDE: bool = llvmlite.binding.get_host_cpu_features().get("avx512f", False)
"""Whether a register holds a whole vector, and there are 32 of them and not 16."""

_FLOAT, _INTP = ir.FloatType(), ir.IntType(64)
_VECTOR = ir.VectorType(_FLOAT, LANES)
_BITS16 = ir.VectorType(ir.IntType(16), LANES)
_BITS32 = ir.VectorType(ir.IntType(32), LANES)
_EXACT = ("nsz",)
"""An instruction with flags of its own is not given numba's, which let LLVM reorder sums, and in another
order where there are more of them."""


class _VectorType(types.Type):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__(name="Float32x16")


float32x16 = _VectorType()


@register_model(_VectorType)
class _VectorModel(models.PrimitiveModel):  # type: ignore[misc]
    def __init__(self, manager: Any, fe_type: Any) -> None:
        super().__init__(manager, fe_type, _VECTOR)


# What the operations are made of ---------------------------------------------------------------------------


def _pointer(context: Any, builder: Any, array_type: Any, array: Any, row: Any, column: Any) -> Any:
    """Address of array[row, column]."""
    view = context.make_array(array_type)(context, builder, array)
    return cgutils.get_item_pointer(context, builder, array_type, view, [row, column], wraparound=False)


def _constant(number: float) -> Any:
    return ir.Constant(_VECTOR, [number] * LANES)


def _splat(builder: Any, number: Any) -> Any:
    lane = builder.insert_element(ir.Constant(_VECTOR, ir.Undefined), number, ir.IntType(32)(0))
    mask = ir.Constant(_BITS32, [0] * LANES)
    return builder.shuffle_vector(lane, ir.Constant(_VECTOR, ir.Undefined), mask)


def _fma(builder: Any, a: Any, b: Any, total: Any) -> Any:
    """The total plus a * b, rounded once."""
    fma = cgutils.get_or_insert_function(
        builder.module, ir.FunctionType(_VECTOR, [_VECTOR] * 3), f"llvm.fma.v{LANES}f32"
    )
    return builder.call(fma, [a, b, total])


def _add(builder: Any, a: Any, b: Any) -> Any:
    return builder.fadd(a, b, flags=_EXACT)


def _subtract(builder: Any, a: Any, b: Any) -> Any:
    return builder.fsub(a, b, flags=_EXACT)


def _times(builder: Any, a: Any, b: Any) -> Any:
    return builder.fmul(a, b, flags=_EXACT)


def _larger(builder: Any, a: Any, b: Any) -> Any:
    """The larger one in each lane; b where one is NaN."""
    return builder.select(builder.fcmp_ordered(">", a, b), a, b)


def _load(builder: Any, pointer: Any, dtype: Any) -> Any:
    """16 numbers from an address, converted from bfloat16 bits if ``dtype`` is an integer."""
    if not isinstance(dtype, types.Integer):
        return builder.load(builder.bitcast(pointer, _VECTOR.as_pointer()), align=4)
    value = builder.load(builder.bitcast(pointer, _BITS16.as_pointer()), align=2)
    wide = builder.shl(builder.zext(value, _BITS32), ir.Constant(_BITS32, [16] * LANES))
    return builder.bitcast(wide, _VECTOR)


def _fold(builder: Any, vector: Any, combine: Callable[[Any, Any], Any]) -> Any:
    """The lanes combined in halves: always in the same order."""
    width = LANES // 2
    while width:
        indices = [(lane + width) % LANES for lane in range(LANES)]
        other = builder.shuffle_vector(vector, vector, ir.Constant(_BITS32, indices))
        vector, width = combine(vector, other), width // 2
    return builder.extract_element(vector, ir.IntType(32)(0))


def prefetch(builder: Any, pointer: Any) -> None:
    """Ask for a cache line that will be read soon."""
    byte, number = ir.IntType(8).as_pointer(), ir.IntType(32)
    prefetch = cgutils.get_or_insert_function(
        builder.module, ir.FunctionType(ir.VoidType(), [byte, number, number, number]), "llvm.prefetch.p0"
    )
    is_write, locality, is_data = number(0), number(3), number(1)
    builder.call(prefetch, [builder.bitcast(pointer, byte), is_write, locality, is_data])


# Operations ------------------------------------------------------------------------------------------------


@intrinsic  # type: ignore[untyped-decorator]
def splat(typing_context: Any, number: Any) -> Any:
    """All lanes the same."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return _splat(builder, args[0])

    return float32x16(types.float32), codegen


@intrinsic  # type: ignore[untyped-decorator]
def load(typing_context: Any, array: Any, row: Any, column: Any) -> Any:
    """array[row, column : column + 16], converted from bfloat16 bits if it holds those."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return _load(builder, _pointer(context, builder, array, *args), array.dtype)

    return float32x16(array, types.intp, types.intp), codegen


@intrinsic  # type: ignore[untyped-decorator]
def store(typing_context: Any, array: Any, row: Any, column: Any, vector: Any) -> Any:
    """array[row, column : column + 16] = vector, a float32 array."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pointer = _pointer(context, builder, array, *args[:3])
        builder.store(args[3], builder.bitcast(pointer, _VECTOR.as_pointer()), align=4)
        return context.get_dummy_value()

    return types.none(array, types.intp, types.intp, float32x16), codegen


@intrinsic  # type: ignore[untyped-decorator]
def add(typing_context: Any, a: Any, b: Any) -> Any:
    """Sum lane by lane."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return _add(builder, *args)

    return float32x16(float32x16, float32x16), codegen


@intrinsic  # type: ignore[untyped-decorator]
def multiply(typing_context: Any, a: Any, b: Any) -> Any:
    """Product lane by lane."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return _times(builder, *args)

    return float32x16(float32x16, float32x16), codegen


@intrinsic  # type: ignore[untyped-decorator]
def larger(typing_context: Any, a: Any, b: Any) -> Any:
    """The larger one in each lane; b where one is NaN."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return _larger(builder, *args)

    return float32x16(float32x16, float32x16), codegen


@intrinsic  # type: ignore[untyped-decorator]
def any_larger(typing_context: Any, a: Any, b: Any) -> Any:
    """Whether a is larger than b in any lane."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        lanes = builder.bitcast(builder.fcmp_ordered(">", *args), ir.IntType(LANES))
        return builder.icmp_unsigned("!=", lanes, lanes.type(0))

    return types.boolean(float32x16, float32x16), codegen


@intrinsic  # type: ignore[untyped-decorator]
def largest_lane(typing_context: Any, vector: Any) -> Any:
    """The largest number of a vector without NaN."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return _fold(builder, args[0], lambda a, b: _larger(builder, a, b))

    return types.float32(float32x16), codegen


@intrinsic  # type: ignore[untyped-decorator]
def sum_of_lanes(typing_context: Any, vector: Any) -> Any:
    """Sum, always in the same order."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return _fold(builder, args[0], lambda a, b: _add(builder, a, b))

    return types.float32(float32x16), codegen


_LOG2_E = 1.4426950408889634
_LN2_HIGH, _LN2_LOW = 0.693359375, -2.12194440e-4
_POLYNOMIAL = (
    1.9875691500e-4,
    1.3981999507e-3,
    8.3334519073e-3,
    4.1665795894e-2,
    1.6666665459e-1,
    5.0000001201e-1,
)
_TO_INTEGER = 1.5 * 2.0**23
"""Added to a float32 it leaves no bits for a fraction: the sum's lowest bits are the nearest integer."""


@intrinsic  # type: ignore[untyped-decorator]
def exp_of_difference(typing_context: Any, a: Any, b: Any) -> Any:
    """e**(a - b) for a no larger than b; where that is below e**-87 it is 0.

    As `specdec.kernels.scalars.exp`, to 2e-7 relative of the rounded difference. NaN stays NaN.
    """

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        x = _subtract(builder, *args)
        is_above = builder.fcmp_unordered(">", x, _constant(-87.0))
        shifted = _fma(builder, x, _constant(_LOG2_E), _constant(_TO_INTEGER))
        exponent = _subtract(builder, shifted, _constant(_TO_INTEGER))
        r = _fma(builder, exponent, _constant(-_LN2_HIGH), x)
        r = _fma(builder, exponent, _constant(-_LN2_LOW), r)
        poly = _constant(_POLYNOMIAL[0])
        for coefficient in _POLYNOMIAL[1:]:
            poly = _fma(builder, poly, r, _constant(coefficient))
        value = _add(builder, _fma(builder, poly, _times(builder, r, r), r), _constant(1.0))
        biased = builder.add(builder.bitcast(shifted, _BITS32), ir.Constant(_BITS32, [127] * LANES))
        power = builder.bitcast(builder.shl(biased, ir.Constant(_BITS32, [23] * LANES)), _VECTOR)
        return builder.select(is_above, _times(builder, value, power), _constant(0.0))

    return float32x16(float32x16, float32x16), codegen


_TO_EXPONENT = _TO_INTEGER + 127.0
"""The same, and the integer is a float32's exponent as its bits have it."""
_POWER_POLYNOMIAL = (0.00958285, 0.05590642, 0.24024099, 0.69312419, 1.0)


@intrinsic  # type: ignore[untyped-decorator]
def power_of_two(typing_context: Any, x: Any, factor: Any, shift: Any) -> Any:
    """2**(x * factor - shift) to 3e-6 relative, for exponents up to 126; 0 below -126. NaN stays NaN."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        exponent = _fma(builder, args[0], args[1], builder.fneg(args[2]))
        is_above = builder.fcmp_unordered(">", exponent, _constant(-126.0))
        shifted = _add(builder, exponent, _constant(_TO_EXPONENT))
        whole = _subtract(builder, shifted, _constant(_TO_EXPONENT))
        fraction = _subtract(builder, exponent, whole)
        value = _constant(_POWER_POLYNOMIAL[0])
        for coefficient in _POWER_POLYNOMIAL[1:]:
            value = _fma(builder, value, fraction, _constant(coefficient))
        bits = builder.shl(builder.bitcast(shifted, _BITS32), ir.Constant(_BITS32, [23] * LANES))
        power = builder.bitcast(bits, _VECTOR)
        return builder.select(is_above, _times(builder, value, power), _constant(0.0))

    return float32x16(float32x16, float32x16, float32x16), codegen


# Rounding to bfloat16 ---------------------------------------------------------------------------------------


class _BFloat(ir.Type):  # type: ignore[misc]
    """LLVM's type, which llvmlite does not know."""

    def _to_string(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _BFloat)

    def __hash__(self) -> int:
        return hash(_BFloat)


_PAIRS16 = ir.VectorType(ir.IntType(16), 2 * LANES)
_PAIRS = ir.VectorType(_BFloat(), 2 * LANES)


def _do(builder: Any, name: str, result: Any, *operands: Any) -> Any:
    """An instruction of AVX512-BF16."""
    function_type = ir.FunctionType(result, [operand.type for operand in operands])
    name = f"llvm.x86.avx512bf16.{name}.512"
    return builder.call(cgutils.get_or_insert_function(builder.module, function_type, name), operands)


@intrinsic  # type: ignore[untyped-decorator]
def store_rounded(
    typing_context: Any, array: Any, row: Any, column: Any, low: Any, high: Any, total: Any
) -> Any:
    """array[row, column : column + 32] = low and high as bfloat16 bits; for CPUs with AVX512-BF16 only.

    Returns:
        The total plus the rounded numbers, those at 2 * i and 2 * i + 1 in lane i.
    """

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        *place, low, high, total = args
        rounded = _do(builder, "cvtne2ps2bf16", _PAIRS, high, low)
        pointer = _pointer(context, builder, array, *place)
        bits = builder.bitcast(rounded, _PAIRS16)
        builder.store(bits, builder.bitcast(pointer, _PAIRS16.as_pointer()), align=2)
        ones = builder.bitcast(ir.Constant(_PAIRS16, [0x3F80] * (2 * LANES)), _PAIRS)
        return _do(builder, "dpbf16ps", _VECTOR, total, rounded, ones)

    signature = float32x16(array, types.intp, types.intp, float32x16, float32x16, float32x16)
    return signature, codegen


# Products --------------------------------------------------------------------------------------------------


def product(num_rows: int) -> Any:
    """A piece of a matrix product, ``num_rows`` times 16, whose sums stay in registers.

    The function made sets out[row + i, out_column + j] to the sum over k < depth of
    left[row + i, left_column + k] * right[k, right_column + j], or adds that to it: one product after the
    other, whatever the piece's size. Rows of ``left`` and ``out``, float32 both, are contiguous; ``right``
    may be bfloat16 bits.
    """

    @intrinsic  # type: ignore[untyped-decorator]
    def multiply_piece(
        typing_context: Any,
        left: Any,
        left_column: Any,
        right: Any,
        right_column: Any,
        depth: Any,
        row: Any,
        out: Any,
        out_column: Any,
        is_added: Any,
    ) -> Any:
        index = types.intp
        signature = types.none(left, index, right, index, index, index, out, index, types.boolean)

        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            (
                left_array,
                left_column,
                right_array,
                right_column,
                depth,
                row,
                out_array,
                out_column,
                is_added,
            ) = args
            rows = [builder.add(row, _INTP(i)) for i in range(num_rows)]
            factors = [_pointer(context, builder, left, left_array, i, left_column) for i in rows]
            targets = [_pointer(context, builder, out, out_array, i, out_column) for i in rows]
            # Stack slots to the IR; LLVM makes registers of them.
            sums = [cgutils.alloca_once(builder, _VECTOR) for _ in rows]
            for total, target in zip(sums, targets, strict=True):
                before = _load(builder, target, types.float32)
                builder.store(builder.select(is_added, before, _constant(0.0)), total)
            with cgutils.for_range(builder, depth) as loop:
                source = _pointer(context, builder, right, right_array, loop.index, right_column)
                vector = _load(builder, source, right.dtype)
                for total, factor in zip(sums, factors, strict=True):
                    spread = _splat(builder, builder.load(builder.gep(factor, [loop.index])))
                    builder.store(_fma(builder, spread, vector, builder.load(total)), total)
            for total, target in zip(sums, targets, strict=True):
                builder.store(builder.load(total), builder.bitcast(target, _VECTOR.as_pointer()), align=4)
            return context.get_dummy_value()

        return signature, codegen

    return multiply_piece


_PAIRS_AHEAD = 64
"""How far ahead in a panel its weights are asked for."""


def dot_product(num_rows: int) -> Any:
    """A piece of a product whose sums stay in registers, ``num_rows`` rows times two panels of 16 outputs.

    The function made sets sums[i, 16 * p + j] to x[row + i], contiguous bfloat16 bits, times output j of
    panels[panel + p], [panels, in / 2, 16] pairs of bfloat16. Of ``count`` rows fewer than ``num_rows`` the
    last one is repeated. For CPUs with AVX512-BF16 only.
    """

    @intrinsic  # type: ignore[untyped-decorator]
    def multiply_piece(
        typing_context: Any, x: Any, row: Any, count: Any, panels: Any, panel: Any, sums: Any
    ) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            left, row, count, right, panel, out = args
            zero, number = _INTP(0), ir.IntType(32).as_pointer()
            last = builder.sub(count, _INTP(1))
            offsets = [
                builder.select(builder.icmp_signed("<", _INTP(i), last), _INTP(i), last)
                for i in range(num_rows)
            ]
            rows = [
                builder.bitcast(_pointer(context, builder, x, left, builder.add(row, offset), zero), number)
                for offset in offsets
            ]
            view = context.make_array(panels)(context, builder, right)
            weights = [
                builder.bitcast(
                    cgutils.get_item_pointer(
                        context,
                        builder,
                        panels,
                        view,
                        [builder.add(panel, _INTP(p)), zero, zero],
                        wraparound=False,
                    ),
                    _PAIRS.as_pointer(),
                )
                for p in range(2)
            ]
            # Stack slots to the IR; LLVM makes registers of them.
            totals = [[cgutils.alloca_once(builder, _VECTOR) for _ in weights] for _ in rows]
            for total in (total for of_row in totals for total in of_row):
                builder.store(_constant(0.0), total)
            with cgutils.for_range(builder, builder.extract_value(view.shape, 1)) as loop:
                ahead = builder.add(loop.index, _INTP(_PAIRS_AHEAD))
                for pointer in weights:
                    prefetch(builder, builder.gep(pointer, [ahead]))
                vectors = [builder.load(builder.gep(pointer, [loop.index]), align=4) for pointer in weights]
                for pointer, of_row in zip(rows, totals, strict=True):
                    pair = builder.load(builder.gep(pointer, [loop.index]), align=2)
                    lane = builder.insert_element(ir.Constant(_BITS32, ir.Undefined), pair, ir.IntType(32)(0))
                    spread = builder.bitcast(
                        builder.shuffle_vector(lane, lane, ir.Constant(_BITS32, [0] * LANES)), _PAIRS
                    )
                    for total, vector in zip(of_row, vectors, strict=True):
                        dots = _do(builder, "dpbf16ps", _VECTOR, builder.load(total), spread, vector)
                        builder.store(dots, total)
            for i, of_row in enumerate(totals):
                for p, total in enumerate(of_row):
                    target = _pointer(context, builder, sums, out, _INTP(i), _INTP(LANES * p))
                    builder.store(builder.load(total), builder.bitcast(target, _VECTOR.as_pointer()), align=4)
            return context.get_dummy_value()

        return types.none(x, types.intp, types.intp, panels, types.intp, sums), codegen

    return multiply_piece
