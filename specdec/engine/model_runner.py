"""Any Hugging Face causal LM as a `Runner`: packed ragged forward over our own KV cache."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from transformers import PreTrainedModel

from specdec.engine.attention import PackedBatch, Segment
from specdec.engine.kv_store import KVStore
from specdec.engine.runner import ForwardItem
from specdec.errors import StaleCache
from specdec.types import SequenceId


class ModelRunner:
    """Feeds a model; knows nothing of drafting or verification.

    Args:
        model: loaded with `specdec.engine.loading.load_model`, so that its attention is ours.
        vocab_size: ids the tokenizer knows.
        max_context: positions per sequence.
        kv_capacity_tokens: positions over all sequences.
    """

    def __init__(
        self, model: PreTrainedModel, *, vocab_size: int, max_context: int, kv_capacity_tokens: int
    ) -> None:
        self._model = model
        self._device = next(model.parameters()).device
        self._vocab_size = vocab_size
        self._max_context = max_context
        self._store = KVStore(kv_capacity_tokens)

    @property
    def vocab_size(self) -> int:
        return self._vocab_size

    @property
    def max_context(self) -> int:
        return self._max_context

    @property
    def kv_capacity_tokens(self) -> int:
        return self._store.capacity_tokens

    @property
    def kv_tokens_in_use(self) -> int:
        return self._store.tokens_in_use

    def open(self, sequence_id: SequenceId) -> None:
        self._store.open(sequence_id)

    def close(self, sequence_id: SequenceId) -> None:
        self._store.close(sequence_id)

    def length(self, sequence_id: SequenceId) -> int:
        return self._store.length(sequence_id)

    def truncate(self, sequence_id: SequenceId, length: int) -> None:
        self._store.truncate(sequence_id, length)

    @torch.inference_mode()
    def forward(self, items: Sequence[ForwardItem]) -> torch.Tensor:
        """See `Runner.forward`."""
        self._check_room(items)
        token_ids: list[int] = []
        positions: list[int] = []
        rows: list[int] = []
        segments: list[Segment] = []
        for item in items:
            start, cached = len(token_ids), self._store.length(item.sequence_id)
            token_ids.extend(item.token_ids)
            positions.extend(range(cached, cached + len(item.token_ids)))
            rows.extend(range(len(token_ids) - item.num_rows, len(token_ids)))
            segments.append(Segment(item.sequence_id, start, len(token_ids)))
        logits = self._run_model(token_ids, positions, rows, tuple(segments))
        for segment in segments:
            self._store.advance(segment.sequence_id, segment.end - segment.start)
        return logits

    def _check_room(self, items: Sequence[ForwardItem]) -> None:
        self._store.reserve(sum(len(item.token_ids) for item in items))
        for item in items:
            total = self._store.length(item.sequence_id) + len(item.token_ids)
            if total > self._max_context:
                raise StaleCache(
                    f"sequence {item.sequence_id}: {total} positions exceed the context "
                    f"of {self._max_context}"
                )

    def _run_model(
        self, token_ids: list[int], positions: list[int], rows: list[int], segments: tuple[Segment, ...]
    ) -> torch.Tensor:
        # Without wanted rows (a prefill chunk) one row still goes through the head and is dropped.
        wanted = rows or [0]
        output = self._model(
            input_ids=self._tensor(token_ids).unsqueeze(0),
            position_ids=self._tensor(positions).unsqueeze(0),
            use_cache=False,
            logits_to_keep=self._tensor(wanted),
            specdec_batch=PackedBatch(self._store, segments),
        )
        logits: torch.Tensor = output.logits[0]
        return logits[: len(rows)]

    def _tensor(self, values: Sequence[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.long, device=self._device)
