"""KV cache of all sequences: one growing buffer per sequence and layer, rollback by setting a length.

Attention reads a sequence's keys and values as plain views of its buffers: nothing is gathered or copied. A
full buffer grows by a quarter, so appending costs O(1) amortised; rolling back moves nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from specdec.errors import InvariantViolation, KVCacheFull, StaleCache
from specdec.types import SequenceId

_MIN_CAPACITY = 64


@dataclass(slots=True)
class _Buffers:
    """One sequence: per layer, keys and values of shape [kv_heads, capacity, head_dim]."""

    length: int = 0
    keys: dict[int, torch.Tensor] = field(default_factory=dict)
    values: dict[int, torch.Tensor] = field(default_factory=dict)


class KVStore:
    """Owns every cached position of a worker; ``length`` is the only thing a rollback touches."""

    def __init__(self, capacity_tokens: int) -> None:
        self._capacity_tokens = capacity_tokens
        self._sequences: dict[SequenceId, _Buffers] = {}

    @property
    def capacity_tokens(self) -> int:
        return self._capacity_tokens

    @property
    def tokens_in_use(self) -> int:
        return sum(buffers.length for buffers in self._sequences.values())

    def open(self, sequence_id: SequenceId) -> None:
        self._sequences[sequence_id] = _Buffers()

    def close(self, sequence_id: SequenceId) -> None:
        self._sequences.pop(sequence_id, None)

    def length(self, sequence_id: SequenceId) -> int:
        return self._sequences[sequence_id].length

    def truncate(self, sequence_id: SequenceId, length: int) -> None:
        """Keep the first ``length`` positions.

        Raises:
            StaleCache: the sequence holds fewer.
        """
        buffers = self._sequences[sequence_id]
        if length > buffers.length:
            raise StaleCache(
                f"sequence {sequence_id}: keep {length}, but {buffers.length} positions are cached"
            )
        buffers.length = length

    def reserve(self, num_tokens: int) -> None:
        """Check that ``num_tokens`` more fit.

        Raises:
            KVCacheFull: they do not.
        """
        free = self._capacity_tokens - self.tokens_in_use
        if num_tokens > free:
            raise KVCacheFull(
                f"{num_tokens} tokens of KV cache wanted, {free} of {self._capacity_tokens} free"
            )

    def append(
        self, sequence_id: SequenceId, layer_idx: int, key: torch.Tensor, value: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write new positions of one layer behind the sequence's length and return all it holds then.

        The length itself moves once per forward, by `advance`, when every layer has been written.

        Args:
            sequence_id: an open sequence.
            layer_idx: which layer.
            key: [kv_heads, new, head_dim].
            value: [kv_heads, new, value_head_dim].

        Returns:
            Views of keys and values, [kv_heads, length + new, head_dim].
        """
        buffers = self._sequences[sequence_id]
        start, end = buffers.length, buffers.length + key.shape[1]
        keys = _write(buffers.keys, layer_idx, key, start, end)
        values = _write(buffers.values, layer_idx, value, start, end)
        return keys[:, :end], values[:, :end]

    def advance(self, sequence_id: SequenceId, num_tokens: int) -> None:
        """Count ``num_tokens`` positions as cached: all layers have been written."""
        self._sequences[sequence_id].length += num_tokens

    def check_invariants(self) -> None:
        """Every buffer holds what its length claims, and the total is within capacity."""
        for sequence_id, buffers in self._sequences.items():
            layers = (*buffers.keys.values(), *buffers.values.values())
            if any(layer.shape[1] < buffers.length for layer in layers):
                raise InvariantViolation(
                    f"sequence {sequence_id}: length {buffers.length} beyond its buffers"
                )
        if self.tokens_in_use > self._capacity_tokens:
            raise InvariantViolation(f"{self.tokens_in_use} tokens cached, capacity {self._capacity_tokens}")


def _write(
    layers: dict[int, torch.Tensor], layer_idx: int, new: torch.Tensor, start: int, end: int
) -> torch.Tensor:
    buffer = layers.get(layer_idx)
    if buffer is None or buffer.shape[1] < end:
        buffer = layers[layer_idx] = _grown(buffer, new, start, end)
    buffer[:, start:end] = new
    return buffer


def _grown(buffer: torch.Tensor | None, new: torch.Tensor, start: int, end: int) -> torch.Tensor:
    capacity = max(end + end // 4, _MIN_CAPACITY)
    grown = new.new_empty(new.shape[0], capacity, new.shape[2])
    if buffer is not None:
        grown[:, :start] = buffer[:, :start]
    return grown
