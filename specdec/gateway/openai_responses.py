"""The OpenAI-compatible answers: chat and text completions, whole and in chunks, and the model list."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

from specdec.gateway.events import Completion, Finished, Usage
from specdec.types import FinishReason, SpeculationStats

JsonObject = dict[str, object]


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponseFormat(ABC):
    """How one request's answer looks; the same id, time and model in all its chunks."""

    request_id: str
    model: str
    created: int
    wants_metrics: bool
    wants_usage_chunk: bool

    @abstractmethod
    def whole(self, completion: Completion) -> JsonObject:
        """The answer of a request that does not stream."""

    @abstractmethod
    def first_chunk(self) -> JsonObject | None:
        """What precedes the first text."""

    @abstractmethod
    def text_chunk(self, text: str) -> JsonObject: ...

    @abstractmethod
    def last_chunk(self, finished: Finished) -> JsonObject:
        """The last chunk with a choice."""

    def usage_chunk(self, usage: Usage) -> JsonObject | None:
        """The one chunk without a choice, if it was asked for."""
        if not self.wants_usage_chunk:
            return None
        return {**self._head(self._chunk_object()), "choices": [], "usage": _usage(usage)}

    @abstractmethod
    def _chunk_object(self) -> str: ...

    def _head(self, object_name: str) -> JsonObject:
        return {
            "id": self.request_id,
            "object": object_name,
            "created": self.created,
            "model": self.model,
        }

    def _chunk(self, choice: JsonObject, finish_reason: FinishReason | None = None) -> JsonObject:
        chunk = {
            **self._head(self._chunk_object()),
            "choices": [{"index": 0, **choice, "logprobs": None, "finish_reason": finish_reason}],
        }
        # Without include_usage no chunk mentions usage at all.
        return {**chunk, "usage": None} if self.wants_usage_chunk else chunk

    def _whole(self, object_name: str, choice: JsonObject, finished: Finished) -> JsonObject:
        return {
            **self._head(object_name),
            "choices": [{"index": 0, **choice, "logprobs": None, "finish_reason": finished.finish_reason}],
            "usage": _usage(finished.usage),
            **self._metrics(finished),
        }

    def _metrics(self, finished: Finished) -> JsonObject:
        if not self.wants_metrics:
            return {}
        return {"metrics": {"speculative_decoding": _speculation(finished.stats)}}


class ChatFormat(ResponseFormat):
    """``/v1/chat/completions``."""

    def whole(self, completion: Completion) -> JsonObject:
        message = {"role": "assistant", "content": completion.text, "refusal": None}
        return self._whole("chat.completion", {"message": message}, completion.finished)

    def first_chunk(self) -> JsonObject | None:
        return self._chunk({"delta": {"role": "assistant", "content": ""}})

    def text_chunk(self, text: str) -> JsonObject:
        return self._chunk({"delta": {"content": text}})

    def last_chunk(self, finished: Finished) -> JsonObject:
        return {**self._chunk({"delta": {}}, finished.finish_reason), **self._metrics(finished)}

    def _chunk_object(self) -> str:
        return "chat.completion.chunk"


class CompletionFormat(ResponseFormat):
    """``/v1/completions``."""

    def whole(self, completion: Completion) -> JsonObject:
        return self._whole("text_completion", {"text": completion.text}, completion.finished)

    def first_chunk(self) -> JsonObject | None:
        return None

    def text_chunk(self, text: str) -> JsonObject:
        return self._chunk({"text": text})

    def last_chunk(self, finished: Finished) -> JsonObject:
        return {**self._chunk({"text": ""}, finished.finish_reason), **self._metrics(finished)}

    def _chunk_object(self) -> str:
        return "text_completion"


def model_card(name: str, created: int) -> JsonObject:
    """One entry of ``/v1/models``."""
    return {"id": name, "object": "model", "created": created, "owned_by": "specdec"}


def _usage(usage: Usage) -> JsonObject:
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.total_tokens,
    }


def _speculation(stats: SpeculationStats) -> JsonObject:
    return {
        "num_spec_steps": stats.num_spec_steps,
        "num_draft_tokens": stats.num_draft_tokens,
        "num_accepted_draft_tokens": stats.num_accepted_draft_tokens,
        "mean_acceptance_length": stats.mean_acceptance_length,
        "draft_acceptance_rate": stats.draft_acceptance_rate,
        "acceptance_histogram": list(stats.acceptance_histogram),
    }
