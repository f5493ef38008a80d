"""One step's ragged batch: prefill chunks, drafts to verify and single tokens, packed without gaps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

TILE = 32
"""Tokens that share one walk over their sequence's cache in the CPU's attention."""

Int64Array = npt.NDArray[np.int64]
Int32Array = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Segment:
    """One sequence's share of the packed tokens."""

    start: int
    """Index of its first token in the batch."""
    num_tokens: int
    kv_length: int
    """Cached positions once these tokens are written."""
    blocks: Sequence[int]


@dataclass(frozen=True, slots=True, eq=False)
class BatchTensors:
    """A batch on the model's device."""

    token_ids: torch.Tensor
    """[tokens] int64"""
    positions: torch.Tensor
    """[tokens] int64, in their sequences."""
    slots: torch.Tensor
    """[tokens] int64, where in the KV cache each token's key and value go."""
    rows: torch.Tensor
    """[rows] int64, indices of the tokens whose logits are wanted."""
    query_starts: torch.Tensor
    """[segments + 1] int32, where each segment's tokens begin, and where the last one's end."""
    kv_lengths: torch.Tensor
    """[segments] int32, cached positions with the new tokens."""
    tables: torch.Tensor
    """[segments, most blocks of one] int32, padded with 0."""
    max_queries: int
    """Most tokens of a segment."""
    max_kv_length: int
    block_size: int


@dataclass(frozen=True, slots=True, eq=False)
class StepBatch:
    """The same as plain arrays, for the CPU's kernels; see `BatchTensors` for what they hold."""

    token_ids: Int64Array
    positions: Int64Array
    slots: Int64Array
    segments: Int64Array
    """[n, 4]: index of the sequence, its first token, number of tokens, cached positions with them."""
    tiles: Int64Array
    """[m, 4]: the same of the segments cut into at most `TILE` tokens each."""
    tables: Int32Array
    block_size: int
    tensors: BatchTensors

    @classmethod
    def of(
        cls,
        token_ids: Sequence[int],
        rows: Sequence[int],
        segments: Sequence[Segment],
        block_size: int,
        device: torch.device,
    ) -> StepBatch:
        """Lay out segments that follow each other without gaps."""
        tables = np.zeros((len(segments), max((len(s.blocks) for s in segments), default=0)), np.int32)
        for idx, segment in enumerate(segments):
            tables[idx, : len(segment.blocks)] = segment.blocks
        lengths = np.array([s.num_tokens for s in segments], np.int64)
        kv_lengths = np.array([s.kv_length for s in segments], np.int64)
        starts = np.cumsum(lengths) - lengths
        owner = np.repeat(np.arange(len(segments)), lengths)
        positions = np.arange(len(token_ids)) - (starts - kv_lengths + lengths)[owner]
        slots = tables[owner, positions // block_size].astype(np.int64) * block_size + positions % block_size
        ids = np.array(token_ids, np.int64)

        def on_device(array: np.ndarray) -> torch.Tensor:
            return torch.from_numpy(array).to(device, non_blocking=True)

        table = np.stack([np.arange(len(segments)), starts, lengths, kv_lengths], axis=1)
        return cls(
            token_ids=ids,
            positions=positions,
            slots=slots,
            segments=table,
            tiles=_tiles(table),
            tables=tables,
            block_size=block_size,
            tensors=BatchTensors(
                token_ids=on_device(ids),
                positions=on_device(positions),
                slots=on_device(slots),
                rows=on_device(np.array(rows, np.int64)),
                query_starts=on_device(np.append(starts, len(token_ids)).astype(np.int32)),
                kv_lengths=on_device(kv_lengths.astype(np.int32)),
                tables=on_device(tables),
                max_queries=int(lengths.max(initial=0)),
                max_kv_length=int(kv_lengths.max(initial=0)),
                block_size=block_size,
            ),
        )

    def slots_of(self, idx: int) -> Int64Array:
        """[cached positions] slots of all positions of one segment, its new tokens included."""
        positions = np.arange(self.segments[idx, 3])
        blocks: Int64Array = self.tables[idx, positions // self.block_size].astype(np.int64)
        slots: Int64Array = blocks * self.block_size + positions % self.block_size
        return slots


def _tiles(segments: Int64Array) -> Int64Array:
    if segments[:, 2].max(initial=0) <= TILE:
        return segments
    tiles = [
        (idx, start + done, min(TILE, length - done), kv_length - length + min(length, done + TILE))
        for idx, start, length, kv_length in segments.tolist()
        for done in range(0, length, TILE)
    ]
    return np.array(tiles, np.int64)
