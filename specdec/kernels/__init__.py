"""CPU operations of a decoder, compiled by numba: all but the matmuls, and those too in bfloat16 on most.

Arrays hold float32, or bfloat16 as the bits of an int16 (numpy knows no bfloat16); arithmetic is float32.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

DTYPES = (torch.bfloat16, torch.float32)
"""Dtypes that there are kernels for."""


def as_array(tensor: torch.Tensor) -> npt.NDArray[np.generic]:
    """A CPU tensor's memory as the kernels take it."""
    if tensor.dtype == torch.bfloat16:
        tensor = tensor.view(torch.int16)
    array: npt.NDArray[np.generic] = tensor.numpy()
    return array
