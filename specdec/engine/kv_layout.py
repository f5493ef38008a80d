"""How one layer's keys and values lie in memory; the device's attention decides."""

from __future__ import annotations

from typing import Protocol

import torch

from specdec.engine.batch import StepBatch
from specdec.kernels import DTYPES, as_array, tiles
from specdec.kernels import layers as kernels
from specdec.kernels.attention import KEY_PADDING, VALUE_PADDING


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
        key_shape, value_shape = self._shapes(key.shape[-1], value.shape[-1], block_size)
        self.keys = key.new_zeros(num_blocks, key.shape[1], *key_shape)
        self.values = value.new_zeros(num_blocks, key.shape[1], *value_shape)
        self.key_array, self.value_array = as_array(self.keys), as_array(self.values)
        self._dims = key.shape[-1], value.shape[-1]

    @staticmethod
    def _shapes(key_dim: int, value_dim: int, block_size: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Of one head's keys in a block, and of its values."""
        return (key_dim, block_size), (block_size, value_dim)

    @staticmethod
    def _by_position(keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Some blocks' keys and values as [kv_heads, positions, head_dim]."""
        return keys.permute(1, 0, 3, 2).flatten(1, 2), values.transpose(0, 1).flatten(1, 2)

    def write(self, key: torch.Tensor, value: torch.Tensor, batch: StepBatch) -> None:
        kernels.store_keys_and_values(
            as_array(key.contiguous()),
            as_array(value.contiguous()),
            batch.slots,
            self.key_array,
            self.value_array,
        )

    def gather(self, batch: StepBatch, idx: int, first: int) -> tuple[torch.Tensor, torch.Tensor]:
        length, (key_dim, value_dim) = int(batch.segments[idx, 3]), self._dims
        blocks = torch.from_numpy(batch.tables[idx, : -(-length // batch.block_size)]).long()
        keys, values = self._by_position(self.keys[blocks], self.values[blocks])
        return keys[:, first:length, :key_dim], values[:, first:length, :value_dim]

    def copy_block(self, source: int, copy: int) -> None:
        self.keys[copy] = self.keys[source]
        self.values[copy] = self.values[source]


class PairedBlockLayer(BlockLayer):
    """Keys are [blocks, kv_heads, padded head_dim / 2, block_size, 2]: pairs of a key's numbers.

    Values are [blocks, kv_heads, block_size / 2, padded head_dim, 2]: pairs of positions. For CPUs with AMX.
    """

    @staticmethod
    def _shapes(key_dim: int, value_dim: int, block_size: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        num_pairs = -(-key_dim // KEY_PADDING) * KEY_PADDING // 2
        padded_value_dim = -(-value_dim // VALUE_PADDING) * VALUE_PADDING
        return (num_pairs, block_size, 2), (block_size // 2, padded_value_dim, 2)

    @staticmethod
    def _by_position(keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        keys = keys.permute(1, 0, 3, 2, 4).flatten(3, 4).flatten(1, 2)
        return keys, values.permute(1, 0, 2, 4, 3).flatten(1, 3)


def make_layer(key: torch.Tensor, value: torch.Tensor, num_blocks: int, block_size: int) -> LayerCache:
    """A zeroed layer for keys and values of these shapes, dtype and device."""
    if key.device.type != "cpu" or key.dtype not in DTYPES:
        return FlatLayer(key, value, num_blocks, block_size)
    is_paired = key.dtype == torch.bfloat16 and tiles.IS_AVAILABLE
    return (PairedBlockLayer if is_paired else BlockLayer)(key, value, num_blocks, block_size)
