"""One step's ragged batch: prefill chunks, drafts to verify and single tokens, packed without gaps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import numpy.typing as npt
import torch

from specdec.engine.upload import AnyArray, upload

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
    """Most tokens of a segment, or more."""
    max_kv_length: int
    """Most cached positions of a segment, or more."""
    block_size: int

    @classmethod
    def of(
        cls, tensors: Sequence[torch.Tensor], *, max_queries: int, max_kv_length: int, block_size: int
    ) -> BatchTensors:
        """From the tensors in the order of `StepBatch.arrays`."""
        token_ids, positions, slots, rows, query_starts, kv_lengths, tables = tensors
        return cls(
            token_ids=token_ids,
            positions=positions,
            slots=slots,
            rows=rows,
            query_starts=query_starts,
            kv_lengths=kv_lengths,
            tables=tables,
            max_queries=max_queries,
            max_kv_length=max_kv_length,
            block_size=block_size,
        )


@dataclass(frozen=True, eq=False, kw_only=True)
class StepBatch:
    """The same on the host, as the CPU's kernels take it; see `BatchTensors` for what is not said here."""

    token_ids: Int64Array
    """[tokens]; zeros where only ``device_token_ids`` knows them."""
    positions: Int64Array
    slots: Int64Array
    rows: Int64Array
    segments: Int64Array
    """[n, 4]: index of the sequence, its first token, number of tokens, cached positions with them."""
    tiles: Int64Array
    """[m, 4]: the same of the segments cut into at most `TILE` tokens each."""
    tables: Int32Array
    block_size: int
    device: torch.device
    device_token_ids: torch.Tensor | None = None
    """[tokens] int64, if the tokens were drawn on the device and the host has not seen them."""
    static_tensors: BatchTensors | None = None
    """Stand for `tensors` where they are kept from batch to batch."""

    @classmethod
    def of(
        cls,
        token_ids: Sequence[int],
        rows: Sequence[int],
        segments: Sequence[Segment],
        block_size: int,
        device: torch.device,
        device_token_ids: torch.Tensor | None = None,
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
        table = np.stack([np.arange(len(segments)), starts, lengths, kv_lengths], axis=1)
        return cls(
            token_ids=np.array(token_ids, np.int64),
            positions=positions,
            slots=tables[owner, positions // block_size].astype(np.int64) * block_size
            + positions % block_size,
            rows=np.array(rows, np.int64),
            segments=table,
            tiles=_tiles(table),
            tables=tables,
            block_size=block_size,
            device=device,
            device_token_ids=device_token_ids,
        )

    @property
    def max_queries(self) -> int:
        return int(self.segments[:, 2].max(initial=0))

    @property
    def arrays(self) -> list[AnyArray]:
        """The tensors of `BatchTensors` in order, on the host."""
        ends = self.segments[:, 1] + self.segments[:, 2]
        return [
            self.token_ids,
            self.positions,
            self.slots,
            self.rows,
            np.concatenate([self.segments[:1, 1], ends]).astype(np.int32),
            self.segments[:, 3].astype(np.int32),
            self.tables,
        ]

    @cached_property
    def tensors(self) -> BatchTensors:
        """The batch on its device, copied there when first asked for; the host does not wait for the copy."""
        if self.static_tensors is not None:
            return self.static_tensors
        tensors = BatchTensors.of(
            upload(self.arrays, self.device),
            max_queries=self.max_queries,
            max_kv_length=int(self.segments[:, 3].max(initial=0)),
            block_size=self.block_size,
        )
        return tensors if self.device_token_ids is None else replace(tensors, token_ids=self.device_token_ids)

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
    # A tile's work grows with its position, and each thread gets a run of neighbours: the longest and the
    # shortest left change places, so that any run has its share of both.
    tiles.sort(key=lambda tile: tile[3])
    folded = [tiles[-(i // 2) - 1 if i % 2 else i // 2] for i in range(len(tiles))]
    return np.array(folded, np.int64)
