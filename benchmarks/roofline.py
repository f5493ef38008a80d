"""The most tokens per second that one stream of plain decoding can have here: bandwidth ÷ bytes of weights.

A decode step of one sequence reads every weight once and does two operations with it, far below what the
cores can do; so memory sets the limit. The bandwidth is measured: all cores read what no cache can hold.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import struct
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks.common import save
from specdec.models import resolve_model

BUFFER_BYTES = 2 * 1024**3
"""Far more than any last-level cache (32 MiB on the machine of the results kept)."""
BYTES_PER_WEIGHT = {"bfloat16": 2, "float16": 2, "float32": 4}


def read_bandwidth(repeats: int = 10) -> float:
    """Bytes per second, the best of several readings in two ways: a sum, and a matrix times a vector."""
    torch.set_num_threads(os.cpu_count() or 1)
    columns = 4096
    buffer = torch.ones(BUFFER_BYTES // 4 // columns, columns)
    vector = torch.ones(columns)
    ways: tuple[Callable[[], object], ...] = (buffer.sum, lambda: buffer @ vector)
    best_s = min(_seconds(read) for _ in range(repeats) for read in ways)
    return BUFFER_BYTES / best_s


def _seconds(function: Callable[[], object]) -> float:
    started_s = time.perf_counter()
    function()
    return time.perf_counter() - started_s


def weight_bytes_per_step(folder: Path, dtype: str) -> int:
    """Bytes of weights that one decode step reads, from the shapes in the model's safetensors files.

    Of the input embedding a step reads one row, so that matrix does not count, unless it is tied: then the
    files hold no output matrix, and it is read in full in that role.
    """
    shapes = {name: shape for file in folder.glob("*.safetensors") for name, shape in _shapes(file).items()}
    if "lm_head.weight" in shapes:
        shapes = {name: shape for name, shape in shapes.items() if "embed_tokens" not in name}
    return sum(math.prod(shape) for shape in shapes.values()) * BYTES_PER_WEIGHT[dtype]


def _shapes(file: Path) -> dict[str, list[int]]:
    with file.open("rb") as stream:
        (size,) = struct.unpack("<Q", stream.read(8))
        header: dict[str, Any] = json.loads(stream.read(size))
    return {name: entry["shape"] for name, entry in header.items() if name != "__metadata__"}


def roofline(models: dict[str, str], dtype: str) -> dict[str, Any]:
    bandwidth = read_bandwidth()
    sizes = {name: weight_bytes_per_step(Path(resolve_model(model)), dtype) for name, model in models.items()}
    return {
        "read_bandwidth_gb_per_s": round(bandwidth / 1e9, 1),
        "dtype": dtype,
        **{f"{name}_mb_per_step": round(size / 1e6, 1) for name, size in sizes.items()},
        **{f"{name}_tokens_per_s_limit": round(bandwidth / size, 1) for name, size in sizes.items()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", default="smollm2")
    parser.add_argument("--draft", default="smollm2-draft")
    parser.add_argument("--dtype", default="bfloat16", choices=BYTES_PER_WEIGHT)
    args = parser.parse_args()
    figures = roofline({"target": args.target, "draft": args.draft}, args.dtype)
    print(figures)
    save("roofline", figures)


if __name__ == "__main__":
    main()
