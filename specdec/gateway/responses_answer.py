"""The answers of ``POST /v1/responses``, whole and as a stream of events."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import count
from typing import Literal, cast

from specdec.errors import SpecDecError
from specdec.gateway.answers import Content, Part
from specdec.gateway.events import Completion, Finished, GenerationEvent, TextDelta, Totals
from specdec.gateway.http_errors import error_envelope
from specdec.gateway.http_stream import frame
from specdec.gateway.openai_fields import Fields
from specdec.gateway.openai_responses import JsonObject, metrics_of
from specdec.gateway.openai_tools import ToolChoice
from specdec.gateway.responses_api import ResponsesRequest
from specdec.gateway.responses_items import OutputWriter
from specdec.types import FinishReason


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponsesFormat:
    """How one request's answer looks."""

    request_id: str
    model: str
    created: int
    body: ResponsesRequest

    def whole(self, completion: Completion) -> JsonObject:
        """The answer of a request that does not stream."""
        (choice,) = completion.choices
        writer = OutputWriter()
        list(writer.write(_parts(choice.text, choice.parts)))
        list(writer.close(_status(choice.finish_reason)))
        return self.ended(writer, choice.finish_reason, completion.totals)

    def begun(self) -> JsonObject:
        """The response when nothing of it is written."""
        return {**self._head("in_progress"), "output": [], "usage": None}

    def ended(self, writer: OutputWriter, finish_reason: FinishReason, totals: Totals) -> JsonObject:
        """The response when all of it is written."""
        usage = totals.usage
        return {
            **self._head(_status(finish_reason)),
            "output": writer.output,
            "usage": {
                "input_tokens": usage.prompt_tokens,
                "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
                "output_tokens": usage.completion_tokens,
                # Reasoning is among the output tokens and not counted apart.
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": usage.total_tokens,
            },
            **(metrics_of(totals) if self.body.wants_metrics else {}),
        }

    def _head(self, status: str) -> JsonObject:
        body = self.body
        text_format = body.text.format if body.text is not None else None
        choice = body.tool_choice or ToolChoice()
        return {
            "id": self.request_id,
            "object": "response",
            "created_at": self.created,
            "status": status,
            "background": False,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "metadata": body.metadata or {},
            "model": self.model,
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": None,
            "store": False,
            "temperature": 1.0 if body.temperature is None else body.temperature,
            "text": {"format": {"type": "text"} if text_format is None else _dumped(text_format)},
            "tool_choice": choice.word
            if choice.forced is None
            else {"type": "function", "name": choice.forced},
            "tools": [{"parameters": None, "strict": None, **_dumped(tool)} for tool in body.tools or ()],
            "top_logprobs": body.top_logprobs or 0,
            "top_p": 1.0 if body.top_p is None else body.top_p,
            "truncation": "disabled",
        }


class ResponsesFrames:
    """Events to frames, numbered."""

    def __init__(self, response: ResponsesFormat) -> None:
        self._response = response
        self._writer = OutputWriter()
        self._numbers = count()

    def opening(self) -> bytes:
        """What precedes the first event."""
        begun = self._response.begun()
        names = ("response.created", "response.in_progress")
        return self._frames({"type": name, "response": begun} for name in names)

    def of(self, event: GenerationEvent) -> bytes:
        """The event's frames in one piece; often none."""
        match event:
            case TextDelta():
                return self._frames(self._writer.write(_parts(event.text, event.parts)))
            case Finished():
                return self._end(event)
            case _:
                return b""

    def error(self, error: SpecDecError) -> bytes:
        """The frame of a failure: some clients know it by its type, others by ``error``."""
        envelope = error_envelope(error)
        told = cast("JsonObject", envelope["error"])
        return self._frames([{**told, "type": "error", "error": told}])

    def _end(self, finished: Finished) -> bytes:
        assert finished.totals is not None, "one choice"
        status = _status(finished.finish_reason)
        closing = self._frames(self._writer.close(status))
        response = self._response.ended(self._writer, finished.finish_reason, finished.totals)
        return closing + self._frames([{"type": f"response.{status}", "response": response}])

    def _frames(self, events: Iterable[JsonObject]) -> bytes:
        numbered = ({**event, "sequence_number": next(self._numbers)} for event in events)
        return b"".join(b"event: " + str(event["type"]).encode() + b"\n" + frame(event) for event in numbered)


def _parts(text: str, parts: tuple[Part, ...] | None) -> Iterable[Part]:
    if parts is not None:
        return parts
    return (Content(text),) if text else ()


def _dumped(fields: Fields) -> JsonObject:
    return fields.model_dump(mode="json", by_alias=True, exclude_none=True)


def _status(finish_reason: FinishReason) -> Literal["completed", "incomplete"]:
    return "incomplete" if finish_reason == "length" else "completed"
