"""Loading, storing and exponentials of single numbers, so written that LLVM makes vectors of loops."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic, overload

# Reordering sums is what makes them vectors. Infinities and NaN keep their meaning, unlike in plain fastmath.
FASTMATH = {"reassoc", "contract", "arcp", "nsz", "afn"}
OPTIONS: dict[str, Any] = {"cache": True, "nogil": True, "fastmath": FASTMATH, "error_model": "numpy"}
INNER: dict[str, Any] = {**OPTIONS, "_nrt": False}
"""For functions called often that make no arrays: numba counts references to those they are given else, with
an atomic addition at each call, which took half the time of attention."""

_INT32, _FLOAT32 = ir.IntType(32), ir.FloatType()


@intrinsic  # type: ignore[untyped-decorator]
def _bfloat16_to_float32(typing_context: Any, bits: Any) -> Any:
    """int16 bits to the float32 of the same value."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.bitcast(builder.shl(builder.zext(args[0], _INT32), _INT32(16)), _FLOAT32)

    return types.float32(types.int16), codegen


@intrinsic  # type: ignore[untyped-decorator]
def _float32_to_bfloat16(typing_context: Any, value: Any) -> Any:
    """float32 to int16 bits, rounded to nearest even; NaN stays NaN."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        bits = builder.bitcast(args[0], _INT32)
        last_kept = builder.and_(builder.lshr(bits, _INT32(16)), _INT32(1))
        rounded = builder.add(bits, builder.add(last_kept, _INT32(0x7FFF)))
        is_nan = builder.fcmp_unordered("uno", args[0], args[0])
        chosen = builder.select(is_nan, _INT32(0x7FC00000), rounded)
        return builder.trunc(builder.lshr(chosen, _INT32(16)), ir.IntType(16))

    return types.int16(types.float32), codegen


@intrinsic  # type: ignore[untyped-decorator]
def float32_of_bits(typing_context: Any, bits: Any) -> Any:
    """The float32 whose representation are these 32 bits (int32)."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.bitcast(args[0], _FLOAT32)

    return types.float32(types.int32), codegen


@intrinsic  # type: ignore[untyped-decorator]
def bits_of_float32(typing_context: Any, value: Any) -> Any:
    """The inverse of `float32_of_bits`."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.bitcast(args[0], _INT32)

    return types.int32(types.float32), codegen


@intrinsic  # type: ignore[untyped-decorator]
def _floor(typing_context: Any, value: Any) -> Any:
    """The largest whole number below, a float32: Python's is an int64, of which AVX2 makes no vectors."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        floor_type = ir.FunctionType(_FLOAT32, [_FLOAT32])
        floor = cgutils.get_or_insert_function(builder.module, floor_type, "llvm.floor.f32")
        return builder.call(floor, args)

    return types.float32(types.float32), codegen


def load(value: Any) -> np.float32:
    """An element of either kind of array as float32."""
    raise NotImplementedError


@overload(load, strict=False)  # type: ignore[untyped-decorator]
def _load(value: Any) -> Callable[..., Any]:
    if isinstance(value, types.Integer):
        return lambda value: _bfloat16_to_float32(value)
    return lambda value: value


def store(array: Any, value: Any) -> Any:
    """A float32 as an element of ``array``."""
    raise NotImplementedError


@overload(store, strict=False)  # type: ignore[untyped-decorator]
def _store(array: Any, value: Any) -> Callable[..., Any]:
    if isinstance(array.dtype, types.Integer):
        return lambda array, value: _float32_to_bfloat16(np.float32(value))
    return lambda array, value: np.float32(value)


_LOG2_E = np.float32(1.4426950408889634)
_LN2_HIGH = np.float32(0.693359375)
_LN2_LOW = np.float32(-2.12194440e-4)


@njit(inline="always", **{**OPTIONS, "cache": False})  # type: ignore[untyped-decorator]
def exp(x: Any) -> Any:
    """e**x to 2e-7 relative, without a call; below -87 it is 0.

    Range reduction by powers of two and a polynomial, as in the Cephes library's expf.
    """
    clamped = min(max(x, np.float32(-87.0)), np.float32(88.0))
    exponent = _floor(clamped * _LOG2_E + np.float32(0.5))
    r = clamped - exponent * _LN2_HIGH - exponent * _LN2_LOW
    poly = np.float32(1.9875691500e-4)
    poly = poly * r + np.float32(1.3981999507e-3)
    poly = poly * r + np.float32(8.3334519073e-3)
    poly = poly * r + np.float32(4.1665795894e-2)
    poly = poly * r + np.float32(1.6666665459e-1)
    poly = poly * r + np.float32(5.0000001201e-1)
    power = float32_of_bits((np.int32(exponent) + np.int32(127)) << np.int32(23))
    value = (poly * r * r + r + np.float32(1.0)) * power
    below = np.float32(0.0) if x <= np.float32(-87.0) else x  # NaN stays NaN
    return value if x > np.float32(-87.0) else below
