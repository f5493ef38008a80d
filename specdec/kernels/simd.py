"""A vector of 16 float32 as a numba type, for loops whose sums must stay in registers.

LLVM's own vectoriser finds the other loops; it does not keep several sums of a nested loop in registers.
On a machine with narrower registers LLVM splits a vector over several.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic, models, register_model

LANES = 16

_FLOAT = ir.FloatType()
_VECTOR = ir.VectorType(_FLOAT, LANES)
_BITS16 = ir.VectorType(ir.IntType(16), LANES)
_BITS32 = ir.VectorType(ir.IntType(32), LANES)


class _VectorType(types.Type):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__(name="Float32x16")


float32x16 = _VectorType()


@register_model(_VectorType)
class _VectorModel(models.PrimitiveModel):  # type: ignore[misc]
    def __init__(self, manager: Any, fe_type: Any) -> None:
        super().__init__(manager, fe_type, _VECTOR)


def _pointer(context: Any, builder: Any, array_type: Any, array: Any, row: Any, column: Any) -> Any:
    """Address of array[row, column]."""
    view = context.make_array(array_type)(context, builder, array)
    return cgutils.get_item_pointer(context, builder, array_type, view, [row, column], wraparound=False)


@intrinsic  # type: ignore[untyped-decorator]
def zeros(typing_context: Any) -> Any:
    """All lanes 0."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return ir.Constant(_VECTOR, [0.0] * LANES)

    return float32x16(), codegen


@intrinsic  # type: ignore[untyped-decorator]
def load(typing_context: Any, array: Any, row: Any, column: Any) -> Any:
    """array[row, column : column + 16], converted from bfloat16 bits if it holds those."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        is_bits = isinstance(array.dtype, types.Integer)
        pointer = _pointer(context, builder, array, *args)
        source = _BITS16 if is_bits else _VECTOR
        value = builder.load(builder.bitcast(pointer, source.as_pointer()), align=2 if is_bits else 4)
        if not is_bits:
            return value
        wide = builder.shl(builder.zext(value, _BITS32), ir.Constant(_BITS32, [16] * LANES))
        return builder.bitcast(wide, _VECTOR)

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
def add_scaled(typing_context: Any, total: Any, factor: Any, vector: Any) -> Any:
    """A total plus factor times vector, rounded once."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        total, factor, vector = args
        lane = builder.insert_element(ir.Constant(_VECTOR, ir.Undefined), factor, ir.IntType(32)(0))
        mask = ir.Constant(_BITS32, [0] * LANES)
        splat = builder.shuffle_vector(lane, ir.Constant(_VECTOR, ir.Undefined), mask)
        fma = cgutils.get_or_insert_function(
            builder.module, ir.FunctionType(_VECTOR, [_VECTOR] * 3), f"llvm.fma.v{LANES}f32"
        )
        return builder.call(fma, [splat, vector, total])

    return float32x16(float32x16, types.float32, float32x16), codegen
