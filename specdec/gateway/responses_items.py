"""The output items of a response while they are written, with the events that tell of them."""

from __future__ import annotations

import uuid
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from typing import Literal, assert_never

from specdec.gateway.answers import (
    CallArguments,
    CallBroken,
    CallStart,
    Content,
    Part,
    Reasoning,
    merged,
    new_call_id,
)
from specdec.gateway.events import ScoredToken
from specdec.gateway.openai_logprobs import token_logprobs

JsonObject = dict[str, object]
Status = Literal["in_progress", "completed", "incomplete"]


class _Item(ABC):
    """One item; its text comes bit by bit."""

    kind: str
    prefix: str
    """Of the names of its item ids."""

    def __init__(self, output_index: int) -> None:
        self._texts: list[str] = []
        self._tokens: list[ScoredToken] = []
        self._output_index = output_index
        self._id = f"{self.prefix}_{uuid.uuid4().hex}"

    @property
    def text(self) -> str:
        return "".join(self._texts)

    def opening(self) -> Iterator[JsonObject]:
        """Yield the events that begin it."""
        yield {
            "type": "response.output_item.added",
            "output_index": self._output_index,
            "item": self.shown("in_progress"),
        }

    def write(self, text: str, tokens: Sequence[ScoredToken] = ()) -> JsonObject:
        """Take more text and its tokens, if they are asked for; return its event."""
        self._texts.append(text)
        self._tokens += tokens
        return {"type": f"{self._text_event}.delta", **self._place(), "delta": text}

    def closing(self, status: Status) -> Iterator[JsonObject]:
        """Yield the events that end it."""
        yield {
            "type": "response.output_item.done",
            "output_index": self._output_index,
            "item": self.shown(status),
        }

    def shown(self, status: Status) -> JsonObject:
        """The item as clients know it: empty while it is in progress."""
        return {
            "id": self._id,
            "type": self.kind,
            "status": status,
            **self._body(is_empty=status == "in_progress"),
        }

    @property
    @abstractmethod
    def _text_event(self) -> str: ...

    @abstractmethod
    def _body(self, *, is_empty: bool) -> JsonObject: ...

    def _place(self) -> JsonObject:
        return {"item_id": self._id, "output_index": self._output_index}


class _TextItem(_Item):
    """An item with one content part."""

    def opening(self) -> Iterator[JsonObject]:
        yield from super().opening()
        yield {"type": "response.content_part.added", **self._place(), "part": self._part("")}

    def closing(self, status: Status) -> Iterator[JsonObject]:
        yield {"type": f"{self._text_event}.done", **self._place(), "text": self.text}
        yield {"type": "response.content_part.done", **self._place(), "part": self._part(self.text)}
        yield from super().closing(status)

    def _place(self) -> JsonObject:
        return {**super()._place(), "content_index": 0}

    @abstractmethod
    def _part(self, text: str) -> JsonObject: ...


class _MessageItem(_TextItem):
    kind = "message"
    prefix = "msg"
    _text_event = "response.output_text"

    def write(self, text: str, tokens: Sequence[ScoredToken] = ()) -> JsonObject:
        return {**super().write(text, tokens), "logprobs": token_logprobs(tokens)}

    def closing(self, status: Status) -> Iterator[JsonObject]:
        done, *others = super().closing(status)
        yield from ({**done, "logprobs": token_logprobs(self._tokens)}, *others)

    def _part(self, text: str) -> JsonObject:
        logprobs = token_logprobs(self._tokens) if text else []
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}

    def _body(self, *, is_empty: bool) -> JsonObject:
        return {"role": "assistant", "content": [] if is_empty else [self._part(self.text)]}


class _ReasoningItem(_TextItem):
    kind = "reasoning"
    prefix = "rs"
    _text_event = "response.reasoning_text"

    def _part(self, text: str) -> JsonObject:
        return {"type": "reasoning_text", "text": text}

    def _body(self, *, is_empty: bool) -> JsonObject:
        return {"summary": [], "content": [] if is_empty else [self._part(self.text)]}


class _CallItem(_Item):
    kind = "function_call"
    prefix = "fc"
    _text_event = "response.function_call_arguments"

    def __init__(self, output_index: int, name: str) -> None:
        super().__init__(output_index)
        self._name = name
        self._call_id = new_call_id()

    def closing(self, status: Status) -> Iterator[JsonObject]:
        yield {
            "type": f"{self._text_event}.done",
            **self._place(),
            "name": self._name,
            "arguments": self.text,
        }
        yield from super().closing(status)

    def _body(self, *, is_empty: bool) -> JsonObject:
        return {"call_id": self._call_id, "name": self._name, "arguments": "" if is_empty else self.text}


class OutputWriter:
    """Writes the items of one answer."""

    def __init__(self) -> None:
        self.output: list[JsonObject] = []
        """The items that have ended."""
        self._item: _Item | None = None

    def write(self, parts: Iterable[Part]) -> Iterator[JsonObject]:
        """Take parts; yield the events, to be exhausted."""
        for part in merged(parts):
            match part:
                case Content() | Reasoning():
                    yield from self._write_text(part)
                case CallStart():
                    yield from self._begin(_CallItem(len(self.output) + (self._item is not None), part.name))
                case CallArguments():
                    assert self._item is not None
                    yield self._item.write(part.text)
                case CallBroken():
                    yield from self.close("incomplete")
                    yield from self._write_text(Content(part.text, part.tokens))
                case _:
                    assert_never(part)

    def close(self, status: Status) -> Iterator[JsonObject]:
        """End the item that is being written, if there is one; yield the events, to be exhausted."""
        if self._item is not None:
            item, self._item = self._item, None
            self.output.append(item.shown(status))
            yield from item.closing(status)

    def _write_text(self, part: Content | Reasoning) -> Iterator[JsonObject]:
        kind = _MessageItem if isinstance(part, Content) else _ReasoningItem
        if not isinstance(self._item, kind):
            yield from self._begin(kind(len(self.output) + (self._item is not None)))
        assert self._item is not None
        yield self._item.write(part.text, part.tokens if isinstance(part, Content) else ())

    def _begin(self, item: _Item) -> Iterator[JsonObject]:
        yield from self.close("completed")
        self._item = item
        yield from item.opening()
