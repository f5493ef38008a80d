"""The OpenAI-compatible answers: chat and text completions, whole and in chunks, and the model list."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import assert_never

from specdec.gateway.answers import Content, merged
from specdec.gateway.events import (
    Choice,
    Completion,
    Finished,
    GenerationEvent,
    PromptEcho,
    ScoredToken,
    TextDelta,
    Totals,
    Usage,
)
from specdec.gateway.openai_logprobs import chat_logprobs, completion_logprobs
from specdec.gateway.openai_parts import delta_of, message_of
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
    num_choices: int = 1

    def whole(self, completion: Completion) -> JsonObject:
        """The answer of a request that does not stream."""
        totals = completion.totals
        return {
            **self._head(self._whole_object()),
            "choices": [
                {
                    "index": choice.index,
                    **self._body(choice),
                    "logprobs": self._logprobs(_all_tokens(choice)),
                    "finish_reason": self._finish_reason(choice.finish_reason, has_calls=choice.has_calls),
                }
                for choice in completion.choices
            ],
            "usage": _usage(totals.usage),
            **self._metrics(totals),
        }

    def opening(self) -> list[JsonObject]:
        """The chunks that precede the first text."""
        return []

    def chunks(self, event: GenerationEvent) -> list[JsonObject]:
        """What shows of an event in a stream."""
        match event:
            case PromptEcho():
                return [self.text_chunk(event.index, event.text, event.tokens)]
            case TextDelta():
                # Tokens without text (an incomplete character, a possible stop string) show nothing yet.
                is_shown = event.text or event.tokens
                return [self.text_chunk(event.index, event.text, event.tokens)] if is_shown else []
            case Finished():
                return self._last_chunks(event)
            case _:
                assert_never(event)

    @abstractmethod
    def text_chunk(self, index: int, text: str, tokens: Sequence[ScoredToken] = ()) -> JsonObject: ...

    def _last_chunks(self, finished: Finished) -> list[JsonObject]:
        """The last chunk of a choice; behind that of the last choice, the usage if it was asked for."""
        reason = self._finish_reason(finished.finish_reason, has_calls=finished.has_calls)
        last = self._chunk(finished.index, self._empty_delta(), finish_reason=reason)
        if finished.totals is None:
            return [last]
        chunks = [{**last, **self._metrics(finished.totals)}]
        if self.wants_usage_chunk:
            usage = _usage(finished.totals.usage)
            chunks.append({**self._head(self._chunk_object()), "choices": [], "usage": usage})
        return chunks

    @abstractmethod
    def _body(self, choice: Choice) -> JsonObject: ...

    @abstractmethod
    def _empty_delta(self) -> JsonObject: ...

    @abstractmethod
    def _logprobs(self, tokens: Sequence[ScoredToken]) -> JsonObject | None: ...

    @abstractmethod
    def _whole_object(self) -> str: ...

    @abstractmethod
    def _chunk_object(self) -> str: ...

    def _head(self, object_name: str) -> JsonObject:
        return {
            "id": self.request_id,
            "object": object_name,
            "created": self.created,
            "model": self.model,
        }

    def _chunk(
        self,
        index: int,
        delta: JsonObject,
        tokens: Sequence[ScoredToken] = (),
        finish_reason: str | None = None,
    ) -> JsonObject:
        choice = {
            "index": index,
            **delta,
            "logprobs": self._logprobs(tokens),
            "finish_reason": finish_reason,
        }
        chunk = {**self._head(self._chunk_object()), "choices": [choice]}
        # Without include_usage no chunk mentions usage at all.
        return {**chunk, "usage": None} if self.wants_usage_chunk else chunk

    def _finish_reason(self, reason: FinishReason, *, has_calls: bool) -> str:
        return reason

    def _metrics(self, totals: Totals) -> JsonObject:
        return metrics_of(totals) if self.wants_metrics else {}


class ChatFormat(ResponseFormat):
    """``/v1/chat/completions``."""

    def chunks(self, event: GenerationEvent) -> list[JsonObject]:
        """What shows of an event in a stream; of a text taken apart, a chunk for each part."""
        match event:
            case TextDelta(parts=tuple() as parts):
                deltas = [delta_of(part) for part in merged(parts)] or ([{}] if event.tokens else [])
                tokens = [event.tokens, *([()] * len(deltas))]
                return [
                    self._chunk(event.index, {"delta": delta}, scored)
                    for delta, scored in zip(deltas, tokens, strict=False)
                ]
            case _:
                return super().chunks(event)

    def opening(self) -> list[JsonObject]:
        """Each choice's role."""
        delta: JsonObject = {"delta": {"role": "assistant", "content": ""}}
        return [self._chunk(index, delta) for index in range(self.num_choices)]

    def text_chunk(self, index: int, text: str, tokens: Sequence[ScoredToken] = ()) -> JsonObject:
        return self._chunk(index, {"delta": {"content": text}}, tokens)

    def _body(self, choice: Choice) -> JsonObject:
        parts = [Content(choice.text)] if choice.parts is None else choice.parts
        return {"message": {"role": "assistant", **message_of(parts), "refusal": None}}

    def _finish_reason(self, reason: FinishReason, *, has_calls: bool) -> str:
        return "tool_calls" if has_calls and reason == "stop" else reason

    def _empty_delta(self) -> JsonObject:
        return {"delta": {}}

    def _logprobs(self, tokens: Sequence[ScoredToken]) -> JsonObject | None:
        return chat_logprobs(tokens)

    def _whole_object(self) -> str:
        return "chat.completion"

    def _chunk_object(self) -> str:
        return "chat.completion.chunk"


class CompletionFormat(ResponseFormat):
    """``/v1/completions``."""

    def text_chunk(self, index: int, text: str, tokens: Sequence[ScoredToken] = ()) -> JsonObject:
        return self._chunk(index, {"text": text}, tokens)

    def _body(self, choice: Choice) -> JsonObject:
        prompt = choice.echo.text if choice.echo is not None else ""
        return {"text": prompt + choice.text}

    def _empty_delta(self) -> JsonObject:
        return {"text": ""}

    def _logprobs(self, tokens: Sequence[ScoredToken]) -> JsonObject | None:
        return completion_logprobs(tokens)

    def _whole_object(self) -> str:
        return "text_completion"

    def _chunk_object(self) -> str:
        return "text_completion"


def model_card(name: str, created: int) -> JsonObject:
    """One entry of ``/v1/models``."""
    return {"id": name, "object": "model", "created": created, "owned_by": "specdec"}


def _all_tokens(choice: Choice) -> tuple[ScoredToken, ...]:
    return (*choice.echo.tokens, *choice.tokens) if choice.echo is not None else choice.tokens


def metrics_of(totals: Totals) -> JsonObject:
    """The ``metrics`` of an answer."""
    return {"metrics": {"speculative_decoding": _speculation(totals.stats)}}


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
