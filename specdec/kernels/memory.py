"""Memory that a compiled loop works in."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

from specdec.kernels.scalars import OPTIONS

_LINE = 64


@njit(**OPTIONS)  # type: ignore[untyped-decorator]
def empty(shape: Any, dtype: Any) -> Any:
    """An array at the start of a cache line, as numpy's own is not.

    Vectors and rows of tiles of 64 bytes that lie across two lines take several times as long to load.
    """
    size = 1
    for length in shape:
        size *= length
    raw = np.empty(size + _LINE // 2, dtype)
    first = (_LINE - raw.ctypes.data % _LINE) % _LINE // raw.itemsize
    return raw[first : first + size].reshape(shape)


@njit(**OPTIONS)  # type: ignore[untyped-decorator]
def zeros(shape: Any, dtype: Any) -> Any:
    """The same, of zeros."""
    array = empty(shape, dtype)
    array[:] = 0
    return array
