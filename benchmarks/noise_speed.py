"""A row of noise over a vocabulary: numpy's Philox (what specdec uses) against Philox in torch operations."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch

from benchmarks.common import save
from specdec.sampling.noise import Purpose, exponentials

VOCAB_SIZE = 49_152
MASK = 0xFFFFFFFF


def torch_philox(num_counters: int) -> torch.Tensor:
    """Philox4x32-10 bits for ``4 * num_counters`` tokens in device-independent int64 operations."""
    c0 = torch.arange(num_counters, dtype=torch.int64)
    c1, c2, c3 = torch.full_like(c0, 3), torch.zeros_like(c0), torch.zeros_like(c0)
    k0, k1 = 5, 7
    for _ in range(10):
        product0, product1 = c0 * 0xD2511F53, c2 * 0xCD9E8D57
        c0, c1 = ((product1 >> 32) & MASK) ^ c1 ^ k0, product1 & MASK
        c2, c3 = ((product0 >> 32) & MASK) ^ c3 ^ k1, product0 & MASK
        k0, k1 = (k0 + 0x9E3779B9) & MASK, (k1 + 0xBB67AE85) & MASK
    return torch.stack([c0, c1, c2, c3], dim=1).view(-1)


def median_us(function: Callable[[], object], repeats: int = 200) -> float:
    times = []
    for _ in range(repeats):
        started_s = time.perf_counter()
        function()
        times.append((time.perf_counter() - started_s) * 1e6)
    return statistics.median(times)


def main() -> None:
    torch.set_num_threads(1)
    figures = {
        "vocab_size": VOCAB_SIZE,
        "numpy_philox_exponentials_us": round(
            median_us(lambda: exponentials(5, 7, Purpose.TARGET, VOCAB_SIZE)), 1
        ),
        "torch_philox_bits_only_us": round(median_us(lambda: torch_philox(VOCAB_SIZE // 4)), 1),
        "softmax_of_the_row_us": round(median_us(lambda: torch.softmax(torch.zeros(VOCAB_SIZE), 0)), 1),
    }
    print(figures)
    save("noise_speed", figures)


if __name__ == "__main__":
    main()
