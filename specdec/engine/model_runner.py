"""A model over our own paged KV cache as a `Runner`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from transformers import PreTrainedModel

from specdec.engine.attention.interface import PackedBatch
from specdec.engine.batch import StepBatch
from specdec.engine.kv_cache import PagedKVCache
from specdec.engine.runner import ForwardItem
from specdec.errors import StaleCache
from specdec.types import SequenceId


class Forward(Protocol):
    """A model's forward: `specdec.engine.decoder.forward.Decoder`, or `TransformersForward` for any other."""

    @property
    def device(self) -> torch.device: ...

    def forward(self, batch: StepBatch, cache: PagedKVCache) -> torch.Tensor:
        """[rows of the batch, >= vocab_size] logits; the batch has at least one token."""
        ...


class TransformersForward:
    """Any Hugging Face causal LM.

    Args:
        model: loaded with `specdec.engine.loading.load_model`, so that its attention is ours.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model

    @property
    def device(self) -> torch.device:
        device: torch.device = self._model.device
        return device

    def forward(self, batch: StepBatch, cache: PagedKVCache) -> torch.Tensor:
        """See `Forward`."""
        tensors = batch.tensors
        num_rows = len(tensors.rows)
        # Without wanted rows (a prefill chunk) one row still goes through the head and is dropped.
        rows = tensors.rows if num_rows else torch.zeros(1, dtype=torch.long, device=self.device)
        output = self._model(
            input_ids=tensors.token_ids.unsqueeze(0),
            position_ids=tensors.positions.unsqueeze(0),
            use_cache=False,
            logits_to_keep=rows,
            specdec_batch=PackedBatch(cache, batch),
        )
        logits: torch.Tensor = output.logits[0]
        return logits[:num_rows]


class ModelRunner:
    """Feeds a model; knows nothing of drafting or verification.

    Args:
        model: its forward.
        vocab_size: ids the tokenizer knows.
        max_context: positions per sequence.
        kv_capacity_tokens: positions over all sequences, rounded up to whole blocks.
        shares_prefixes: whether sequences that begin alike share their KV cache there.
    """

    def __init__(
        self,
        model: Forward,
        *,
        vocab_size: int,
        max_context: int,
        kv_capacity_tokens: int,
        shares_prefixes: bool = True,
    ) -> None:
        self.model = model
        """May be replaced by one that says the same, `GraphedDecoder` for its `Decoder`."""
        self._vocab_size = vocab_size
        self._max_context = max_context
        self.cache = PagedKVCache(kv_capacity_tokens, model.device, shares_prefixes=shares_prefixes)

    @property
    def vocab_size(self) -> int:
        return self._vocab_size

    @property
    def max_context(self) -> int:
        return self._max_context

    @property
    def kv_capacity_tokens(self) -> int:
        return self.cache.capacity_tokens

    @property
    def kv_tokens_in_use(self) -> int:
        return self.cache.tokens_in_use

    def open(self, sequence_id: SequenceId) -> None:
        self.cache.open(sequence_id)

    def close(self, sequence_id: SequenceId) -> None:
        self.cache.close(sequence_id)

    def fork(self, sequence_id: SequenceId, copy_id: SequenceId, length: int) -> None:
        self.cache.fork(sequence_id, copy_id, length)

    def rename(self, sequence_id: SequenceId, new_id: SequenceId) -> None:
        self.cache.rename(sequence_id, new_id)

    @property
    def runs_ahead(self) -> bool:
        return self.model.device.type == "cuda"

    def wait(self) -> None:
        """Looking at a value waits for it."""

    def length(self, sequence_id: SequenceId) -> int:
        return self.cache.blocks.length(sequence_id)

    def truncate(self, sequence_id: SequenceId, length: int) -> None:
        self.cache.truncate(sequence_id, length)

    @torch.inference_mode()
    def reserve(self, item: ForwardItem, num_extra: int = 0) -> None:
        """See `Runner.reserve`."""
        total = self.length(item.sequence_id) + self.cache.num_missing(item) + num_extra
        if total > self._max_context:
            raise StaleCache(
                f"sequence {item.sequence_id}: {total} positions exceed the context of {self._max_context}"
            )
        self.cache.reserve(item, num_extra)

    @torch.inference_mode()
    def forward(
        self, items: Sequence[ForwardItem], device_token_ids: torch.Tensor | None = None
    ) -> torch.Tensor:
        """See `Runner.forward`."""
        for item in items:
            self.reserve(item)
        batch = self.cache.batch(items, device_token_ids)
        if len(batch.token_ids):
            logits = self.model.forward(batch, self.cache)
        else:  # every token was cached already, and no row is wanted
            logits = torch.empty(0, self._vocab_size, device=self.model.device)
        self.cache.advance(items, unseen=device_token_ids is not None)
        return logits

    def settle(self, sequence_id: SequenceId, token_ids: Sequence[int]) -> None:
        self.cache.blocks.settle(sequence_id, token_ids)
