"""Drawing tokens: races between weights and the noise of (seed, position, purpose), many rows at once.

`specdec.sampling.noise` defines the noise; here it is made by compiled loops, on the CPU whatever the device,
so that draft and target see the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from specdec.kernels import noise as kernels
from specdec.sampling.noise import Purpose, philox_key
from specdec.sampling.transfer import to_device
from specdec.sampling.verification import race

Key = tuple[int, int]
"""(seed, position) of a row."""


def draw(weights: torch.Tensor, keys: Sequence[Key], purpose: Purpose) -> torch.Tensor:
    """One token per row, in proportion to its weight.

    Args:
        weights: [rows, vocab], >= 0, not all zero in a row; need not sum to 1.
        keys: one per row.
        purpose: what the draws are for.

    Returns:
        [rows] int64; a token of weight 0 is never drawn.
    """
    if weights.device.type == "cpu" and weights.dtype == torch.float32:
        winners = torch.empty(len(keys), dtype=torch.int64)
        kernels.race(_key_array(keys, purpose), weights.contiguous().numpy(), winners.numpy())
        return winners
    return race(weights, to_device(exponential_rows(keys, purpose, weights.shape[1]), weights.device))


def best(logits: torch.Tensor) -> torch.Tensor:
    """[rows] int64: each row's token with the largest logit, the first of those that tie.

    Args:
        logits: [rows, vocab] float32 or float64.
    """
    if logits.device.type == "cpu":  # where numpy's is vectorised and torch's is not: ten times as fast
        return torch.from_numpy(logits.numpy().argmax(axis=-1))
    return logits.argmax(dim=-1)


def draw_among(
    ids: torch.Tensor, weights: torch.Tensor, keys: Sequence[Key], purpose: Purpose, vocab_size: int
) -> torch.Tensor:
    """As `draw`, where only some tokens have weight.

    Args:
        ids: [rows, n] int64 distinct token ids.
        weights: [rows, n] theirs.
        keys: one per row.
        purpose: what the draws are for.
        vocab_size: ids are below it.

    Returns:
        [rows] int64 token ids.
    """
    if ids.device.type == "cpu":
        noise = torch.empty(ids.shape, dtype=torch.float32)
        kernels.gather(_key_array(keys, purpose), ids.numpy(), noise.numpy())
    else:  # which ids these are the host does not know without waiting for the device
        noise = to_device(exponential_rows(keys, purpose, vocab_size), ids.device).gather(1, ids)
    return ids.gather(1, race(weights, noise).unsqueeze(1)).squeeze(1)


def exponential_rows(keys: Sequence[Key], purpose: Purpose, vocab_size: int) -> torch.Tensor:
    """`specdec.sampling.noise.exponentials` of several keys, [len(keys), vocab_size] float32 on the CPU."""
    noise = torch.empty(len(keys), vocab_size, dtype=torch.float32)
    kernels.fill(_key_array(keys, purpose), noise.numpy())
    return noise


def _key_array(keys: Sequence[Key], purpose: Purpose) -> np.ndarray:
    words = [philox_key(seed, position, purpose) for seed, position in keys]
    return np.array(words, dtype=np.uint64).reshape(-1, 2)
