"""Counter-based randomness: a value is a pure function of (seed, position, purpose, token id).

Nothing here has state, so no draw depends on batch, order, worker or how often a round was repeated; a
sequence moved to another machine goes on with the same noise. Generator: Philox4x64-10 (Salmon et al. 2011,
"Parallel random numbers: as easy as 1, 2, 3"), as numpy ships it, keyed by seed and (position, purpose). It
always runs on the CPU, so draft and target see the same bits whatever their devices.

Positions may be visited again (a rejected tail is drafted anew), and then see the same noise in another
context. That keeps every law exact: whether position i is committed depends on noise at positions <= i only,
so noise seen by a discarded tail is independent of everything committed before it.
"""

from __future__ import annotations

import threading
from enum import IntEnum
from typing import Any

import numpy as np
import numpy.typing as npt

Float32Array = npt.NDArray[np.float32]


class Purpose(IntEnum):
    """What a draw is for; draws of different purposes are independent."""

    DRAFT = 1
    """Rejection mode: the draft's own sample."""
    ACCEPT = 2
    """Rejection mode: the uniform compared with the acceptance ratio."""
    TARGET = 3
    """Recovered and bonus tokens; in coupled mode the noise that draft and target share."""


def philox_key(seed: int, position: int, purpose: Purpose) -> tuple[int, int]:
    """Two words of 64 bits; the low byte of the second holds the purpose, positions stay far below 2**56."""
    return seed, (position << 8) | purpose


def _philox(seed: int, position: int, purpose: Purpose) -> np.random.Philox:
    return np.random.Philox(key=np.array(philox_key(seed, position, purpose), dtype=np.uint64))


class _Reused(threading.local):
    """One generator per thread, whose key is set anew: making one takes eight times as long."""

    def __init__(self) -> None:
        self._generator = _philox(0, 0, Purpose.ACCEPT)
        self._fresh: Any = self._generator.state
        self._key = self._fresh["state"]["key"]

    def first_word(self, seed: int, position: int, purpose: Purpose) -> int:
        """Of the bits that `_philox` of the same arguments gives."""
        self._key[:] = philox_key(seed, position, purpose)
        self._generator.state = self._fresh
        return int(self._generator.random_raw())


_reused = _Reused()


def uniform(seed: int, position: int, purpose: Purpose) -> float:
    """One draw in [0, 1) with 53 random bits."""
    return (_reused.first_word(seed, position, purpose) >> 11) * 2.0**-53


def exponentials(seed: int, position: int, purpose: Purpose, vocab_size: int) -> Float32Array:
    """Standard exponential noise over the vocabulary, [vocab_size] float32, all finite and > 0.

    ``-log`` of it is Gumbel noise; see `specdec.sampling.verification.race`. This is the definition; workers
    use the compiled `specdec.sampling.drawing`, which agrees to the last bits of a float32.
    """
    raw = _philox(seed, position, purpose).random_raw((vocab_size + 1) // 2)
    noise = raw.view(np.uint32)[:vocab_size].astype(np.float32)
    # u = (bits + 1/2) / 2**32 is precise near 0, where races are won; the upper clamp keeps the noise finite.
    noise += np.float32(0.5)
    noise *= np.float32(2.0**-32)
    np.minimum(noise, np.float32(1.0 - 2.0**-24), out=noise)
    np.negative(noise, out=noise)
    np.log1p(noise, out=noise)
    return np.negative(noise, out=noise)
