"""Keys and values of all sequences, per layer, in blocks that `specdec.engine.blocks` hands out."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from specdec.engine.batch import Segment, StepBatch
from specdec.engine.blocks import BlockManager
from specdec.engine.kv_layout import LayerCache, make_layer
from specdec.engine.runner import ForwardItem
from specdec.errors import KVCacheFull
from specdec.kernels.attention import BLOCK
from specdec.types import SequenceId

CUDA_BLOCK_SIZE = 256
"""Fewest that FlashAttention's kernel with block tables takes."""


class PagedKVCache:
    """Layers and the block tables over them.

    A layer's memory is made when it is first written, so that any model's shapes fit, and claimed then by
    zeroing it: it does not grow with the traffic.

    Args:
        capacity_tokens: positions over all sequences, rounded up to whole blocks.
        device: where the tensors are.
        shares_prefixes: whether sequences that begin alike share blocks.
    """

    def __init__(self, capacity_tokens: int, device: torch.device, *, shares_prefixes: bool = True) -> None:
        block_size = CUDA_BLOCK_SIZE if device.type == "cuda" else BLOCK
        self.blocks = BlockManager(-(-capacity_tokens // block_size), block_size)
        self._device = device
        self._shares_prefixes = shares_prefixes
        self._layers: dict[int, LayerCache] = {}
        self._num_adopted: dict[SequenceId, int] = {}
        """Leading tokens of the next item that are cached already, of sequences whose item is reserved."""

    @property
    def block_size(self) -> int:
        return self.blocks.block_size

    @property
    def scratch_block(self) -> int:
        """A block that no sequence gets: padding is written there."""
        return self.blocks.num_blocks

    @property
    def capacity_tokens(self) -> int:
        return self.blocks.num_blocks * self.block_size

    @property
    def tokens_in_use(self) -> int:
        """Positions in blocks that sequences hold; a shared block counts once."""
        return self.blocks.num_used * self.block_size

    def open(self, sequence_id: SequenceId) -> None:
        self._num_adopted.pop(sequence_id, None)
        self.blocks.open(sequence_id)

    def close(self, sequence_id: SequenceId) -> None:
        self._num_adopted.pop(sequence_id, None)
        self.blocks.close(sequence_id)

    def fork(self, sequence_id: SequenceId, copy_id: SequenceId, length: int) -> None:
        """See `BlockManager.fork`."""
        self._num_adopted.pop(copy_id, None)
        self.blocks.fork(sequence_id, copy_id, length)

    def rename(self, sequence_id: SequenceId, new_id: SequenceId) -> None:
        """See `BlockManager.rename`; neither has a reserved item."""
        self._num_adopted.pop(new_id, None)
        self._num_adopted.pop(sequence_id, None)
        self.blocks.rename(sequence_id, new_id)

    def truncate(self, sequence_id: SequenceId, length: int) -> None:
        self._num_adopted.pop(sequence_id, None)
        self.blocks.truncate(sequence_id, length)

    def layer(self, layer_idx: int, key: torch.Tensor, value: torch.Tensor) -> LayerCache:
        """A layer; ``key`` and ``value`` ([tokens, kv_heads, head_dim]) say what it holds."""
        layer = self._layers.get(layer_idx)
        if layer is None:
            layer = make_layer(key, value, self.blocks.num_blocks + 1, self.block_size)
            self._layers[layer_idx] = layer
        return layer

    def reserve(self, item: ForwardItem, num_extra: int = 0) -> None:
        """Make room for an item and ``num_extra`` tokens behind it; what is cached already is taken over.

        Raises:
            KVCacheFull: there is none; nothing was changed.
        """
        sequence_id = item.sequence_id
        is_new = sequence_id not in self._num_adopted
        if is_new:
            # A wanted row has to be computed, whatever is cached.
            known = item.token_ids[: len(item.token_ids) - item.num_rows]
            adopted = self.blocks.adopt(sequence_id, known) if self._shares_prefixes else 0
            self._num_adopted[sequence_id] = adopted
        try:
            copied = self.blocks.reserve(sequence_id, self.num_missing(item) + num_extra)
        except KVCacheFull:
            if is_new:
                self._give_back_adopted(sequence_id)
            raise
        if copied is not None:
            for layer in self._layers.values():
                layer.copy_block(*copied)

    def _give_back_adopted(self, sequence_id: SequenceId) -> None:
        adopted = self._num_adopted.pop(sequence_id)
        if adopted:
            self.blocks.truncate(sequence_id, self.blocks.length(sequence_id) - adopted)

    def num_missing(self, item: ForwardItem) -> int:
        """Tokens of an item that are not cached, as far as is known before it is reserved."""
        return len(item.token_ids) - self._num_adopted.get(item.sequence_id, 0)

    def batch(self, items: Sequence[ForwardItem], device_token_ids: torch.Tensor | None = None) -> StepBatch:
        """What a forward needs to know of reserved items; their tokens may be on the device only."""
        token_ids: list[int] = []
        segments: list[Segment] = []
        rows: list[int] = []
        for item in items:
            start = len(token_ids)
            token_ids.extend(item.token_ids[self._num_adopted[item.sequence_id] :])
            rows.extend(range(len(token_ids) - item.num_rows, len(token_ids)))
            cached = self.blocks.length(item.sequence_id)
            if len(token_ids) > start:
                segments.append(
                    Segment(
                        start=start,
                        num_tokens=len(token_ids) - start,
                        kv_length=cached + len(token_ids) - start,
                        blocks=self.blocks.table(item.sequence_id),
                    )
                )
        return StepBatch.of(token_ids, rows, segments, self.block_size, self._device, device_token_ids)

    def advance(self, items: Sequence[ForwardItem], *, unseen: bool = False) -> None:
        """Count the items' tokens as cached: all layers have been written, or will be."""
        for item in items:
            adopted = self._num_adopted.pop(item.sequence_id)
            if unseen:
                self.blocks.append_unseen(item.sequence_id, len(item.token_ids))
            else:
                self.blocks.append(item.sequence_id, item.token_ids[adopted:])
