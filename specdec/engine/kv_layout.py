"""How one layer's keys and values lie in memory; the device's attention decides."""

from __future__ import annotations

from typing import Protocol

import torch

from specdec.engine.batch import StepBatch
from specdec.kernels import DTYPES, as_array
from specdec.kernels import layers as kernels


class LayerCache(Protocol):
    """One layer of the KV cache. New tokens' keys and values are [tokens, kv_heads, head_dim]."""

    def write(self, key: torch.Tensor, value: torch.Tensor, batch: StepBatch) -> None:
        """Store those of a batch's tokens."""
        ...

    def gather(self, batch: StepBatch, idx: int, first: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of one segment's positions from ``first`` on, [kv_heads, positions, head_dim]."""
        ...

    def copy_block(self, source: int, copy: int) -> None: ...


class FlatLayer:
    """Keys and values are [slots, kv_heads, head_dim], slot = block * block_size + position in it.

    The pages of FlashAttention are a view of it.
    """

    def __init__(self, key: torch.Tensor, value: torch.Tensor, num_blocks: int, block_size: int) -> None:
        self.keys = key.new_zeros(num_blocks * block_size, *key.shape[1:])
        self.values = value.new_zeros(num_blocks * block_size, *value.shape[1:])
        self._block_size = block_size

    def write(self, key: torch.Tensor, value: torch.Tensor, batch: StepBatch) -> None:
        self.keys.index_copy_(0, batch.tensors.slots, key)
        self.values.index_copy_(0, batch.tensors.slots, value)

    def gather(self, batch: StepBatch, idx: int, first: int) -> tuple[torch.Tensor, torch.Tensor]:
        slots = torch.from_numpy(batch.slots_of(idx)[first:]).to(self.keys.device)
        return self.keys[slots].transpose(0, 1), self.values[slots].transpose(0, 1)

    def copy_block(self, source: int, copy: int) -> None:
        size = self._block_size
        for tensor in (self.keys, self.values):
            tensor[copy * size : (copy + 1) * size] = tensor[source * size : (source + 1) * size]


class BlockLayer:
    """Keys are [blocks, kv_heads, head_dim, block_size], values [blocks, kv_heads, block_size, head_dim].

    Made for the CPU's attention kernel: see `specdec.kernels.attention`.
    """

    def __init__(self, key: torch.Tensor, value: torch.Tensor, num_blocks: int, block_size: int) -> None:
        (_, num_heads, key_dim), value_dim = key.shape, value.shape[-1]
        self.keys = key.new_zeros(num_blocks, num_heads, key_dim, block_size)
        self.values = value.new_zeros(num_blocks, num_heads, block_size, value_dim)
        self.key_array, self.value_array = as_array(self.keys), as_array(self.values)

    def write(self, key: torch.Tensor, value: torch.Tensor, batch: StepBatch) -> None:
        kernels.store_keys_and_values(
            as_array(key.contiguous()),
            as_array(value.contiguous()),
            batch.slots,
            self.key_array,
            self.value_array,
        )

    def gather(self, batch: StepBatch, idx: int, first: int) -> tuple[torch.Tensor, torch.Tensor]:
        length = int(batch.segments[idx, 3])
        blocks = torch.from_numpy(batch.tables[idx, : -(-length // batch.block_size)]).long()
        keys = self.keys[blocks].permute(1, 0, 3, 2).flatten(1, 2)
        values = self.values[blocks].transpose(0, 1).flatten(1, 2)
        return keys[:, first:length], values[:, first:length]

    def copy_block(self, source: int, copy: int) -> None:
        self.keys[copy] = self.keys[source]
        self.values[copy] = self.values[source]


def make_layer(key: torch.Tensor, value: torch.Tensor, num_blocks: int, block_size: int) -> LayerCache:
    """A zeroed layer for keys and values of these shapes, dtype and device."""
    has_kernels = key.device.type == "cpu" and key.dtype in DTYPES
    return (BlockLayer if has_kernels else FlatLayer)(key, value, num_blocks, block_size)
