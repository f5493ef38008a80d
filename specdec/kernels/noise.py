"""Counter-based exponential noise over a vocabulary, and races with it, without writing the noise down.

Philox4x64-10 (Salmon et al. 2011) bit for bit as numpy's `Philox` with the same key: `specdec.sampling.noise`
is the definition. A row is cut into chunks, so that bits and noise stay in the first-level cache.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, prange, types
from numba.extending import intrinsic

from specdec.kernels import scalars
from specdec.kernels.scalars import bits_of_float32, float32_of_bits

OPTIONS = {**scalars.OPTIONS, "fastmath": {"contract"}}
"""Sums keep their order here: the rounding of ``1 - u`` is made up for by name."""

_CHUNK = 1024
"""Tokens, a multiple of the 8 that one counter gives."""

_MULTIPLIER_0, _MULTIPLIER_1 = np.uint64(0xD2E7470EE14C6C93), np.uint64(0xCA5A826395121157)
_WEYL_0, _WEYL_1 = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xBB67AE8584CAA73B)


@intrinsic  # type: ignore[untyped-decorator]
def _multiply_high(typing_context: Any, a: Any, b: Any) -> Any:
    """Upper 64 bits of a product."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        wide = ir.IntType(128)
        product = builder.mul(builder.zext(args[0], wide), builder.zext(args[1], wide))
        return builder.trunc(builder.lshr(product, wide(64)), ir.IntType(64))

    return types.uint64(types.uint64, types.uint64), codegen


@njit(inline="always", **OPTIONS)  # type: ignore[untyped-decorator]
def _philox(counter: Any, key_0: Any, key_1: Any) -> Any:
    """Four words of 64 bits."""
    x0, x1, x2, x3 = counter, np.uint64(0), np.uint64(0), np.uint64(0)
    for _ in range(10):
        high_0, low_0 = _multiply_high(_MULTIPLIER_0, x0), _MULTIPLIER_0 * x0
        high_1, low_1 = _multiply_high(_MULTIPLIER_1, x2), _MULTIPLIER_1 * x2
        x0, x1, x2, x3 = high_1 ^ x1 ^ key_0, low_1, high_0 ^ x3 ^ key_1, low_0
        key_0 += _WEYL_0
        key_1 += _WEYL_1
    return x0, x1, x2, x3


@njit(**OPTIONS)  # type: ignore[untyped-decorator]
def _fill_bits(key_0: Any, key_1: Any, first: int, bits: Any) -> None:
    """The 32 bits of tokens ``first``, ``first + 1``, ...; ``first`` is a multiple of 8."""
    words = bits.view(np.uint64)
    counter = np.uint64(first // 8 + 1)  # numpy counts up before it draws
    for i in range(0, words.shape[0], 4):
        words[i], words[i + 1], words[i + 2], words[i + 3] = _philox(counter, key_0, key_1)
        counter += np.uint64(1)


@njit(inline="always", **OPTIONS)  # type: ignore[untyped-decorator]
def _exponential(bits: Any) -> Any:
    """-log1p(-u) of 32 random bits, precise near 0, finite and > 0.

    The logarithm of 1 - u is that of the Cephes library's logf; dividing by the rounding of 1 - u itself
    makes up for it (Kahan).
    """
    u = min((np.float32(bits) + np.float32(0.5)) * np.float32(2.0**-32), np.float32(1.0 - 2.0**-24))
    rest = np.float32(1.0) - u
    raw = bits_of_float32(rest)
    exponent = np.float32((raw >> np.int32(23)) - np.int32(126))
    mantissa = float32_of_bits((raw & np.int32(0x007FFFFF)) | np.int32(0x3F000000))
    is_low = mantissa < np.float32(0.70710678)
    exponent = exponent - np.float32(1.0) if is_low else exponent
    x = (mantissa + mantissa if is_low else mantissa) - np.float32(1.0)
    poly = np.float32(7.0376836292e-2)
    poly = poly * x - np.float32(1.1514610310e-1)
    poly = poly * x + np.float32(1.1676998740e-1)
    poly = poly * x - np.float32(1.2420140846e-1)
    poly = poly * x + np.float32(1.4249322787e-1)
    poly = poly * x - np.float32(1.6668057665e-1)
    poly = poly * x + np.float32(2.0000714765e-1)
    poly = poly * x - np.float32(2.4999993993e-1)
    poly = poly * x + np.float32(3.3333331174e-1)
    log = x * x * x * poly + exponent * np.float32(-2.12194440e-4) - np.float32(0.5) * x * x
    log = x + log + exponent * np.float32(0.693359375)
    lost = np.float32(1.0) - rest
    return u if rest == np.float32(1.0) else -log * (u / lost)


@njit(parallel=True, **OPTIONS)  # type: ignore[untyped-decorator]
def fill(keys: Any, noise: Any) -> None:
    """Whole rows.

    Args:
        keys: [rows, 2] uint64.
        noise: [rows, vocab] float32, written.
    """
    for row in prange(keys.shape[0]):
        bits = np.empty(_CHUNK, np.uint32)
        for first in range(0, noise.shape[1], _CHUNK):
            count = min(_CHUNK, noise.shape[1] - first)
            _fill_bits(keys[row, 0], keys[row, 1], first, bits)
            for j in range(count):
                noise[row, first + j] = _exponential(bits[j])


@njit(parallel=True, **OPTIONS)  # type: ignore[untyped-decorator]
def gather(keys: Any, ids: Any, noise: Any) -> None:
    """Single tokens of each row.

    Args:
        keys: [rows, 2] uint64.
        ids: [rows, n] int64 token ids.
        noise: [rows, n] float32, written.
    """
    for row in prange(keys.shape[0]):
        bits = np.empty(8, np.uint32)
        for j in range(ids.shape[1]):
            token = ids[row, j]
            _fill_bits(keys[row, 0], keys[row, 1], token // 8 * 8, bits)
            noise[row, j] = _exponential(bits[token % 8])


@njit(**OPTIONS)  # type: ignore[untyped-decorator]
def _smallest(times: Any) -> Any:
    """Of a chunk; lanes of 32 are compared side by side."""
    lanes = times[:32].copy()
    for j in range(32, _CHUNK, 32):
        for lane in range(32):
            if times[j + lane] < lanes[lane]:
                lanes[lane] = times[j + lane]
    return lanes.min()


@njit(parallel=True, **OPTIONS)  # type: ignore[untyped-decorator]
def race(keys: Any, weights: Any, winners: Any) -> None:
    """Argmin of noise / weight in each row; the first of equals.

    Args:
        keys: [rows, 2] uint64.
        weights: [rows, vocab] float32, >= 0, not all 0.
        winners: [rows] int64, written.
    """
    vocab_size = weights.shape[1]
    for row in prange(keys.shape[0]):
        bits = np.empty(_CHUNK, np.uint32)
        times = np.empty(_CHUNK, np.float32)
        best, winner = np.float32(math.inf), -1
        for first in range(0, vocab_size, _CHUNK):
            count = min(_CHUNK, vocab_size - first)
            _fill_bits(keys[row, 0], keys[row, 1], first, bits)
            for j in range(count):
                times[j] = _exponential(bits[j]) / weights[row, first + j]
            times[count:] = np.float32(math.inf)
            if _smallest(times) < best:
                for j in range(count):
                    if times[j] < best:
                        best, winner = times[j], first + j
        winners[row] = winner
