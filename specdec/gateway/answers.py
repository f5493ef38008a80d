"""An answer's text taken apart while it is written: reasoning, content and tool calls.

A parser sees the text in whatever pieces it comes and gives the same parts for all of them, so a streamed and
a whole answer say the same.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, assert_never

if TYPE_CHECKING:
    from specdec.gateway.events import ScoredToken


@dataclass(frozen=True, slots=True)
class Reasoning:
    """Text between the tags of a thinking model."""

    text: str


@dataclass(frozen=True, slots=True)
class Content:
    """Text for the reader."""

    text: str
    tokens: tuple[ScoredToken, ...] = ()
    """Those the text is of, where somebody asked for them."""


@dataclass(frozen=True, slots=True)
class CallStart:
    """A tool call begins; its arguments follow."""

    index: int
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """More of a call's arguments: JSON text as the model wrote it."""

    index: int
    text: str


@dataclass(frozen=True, slots=True)
class CallBroken:
    """A call that had begun is malformed after all: what was written of it is content."""

    index: int
    text: str
    """All of the call, its beginning included."""
    tokens: tuple[ScoredToken, ...] = ()
    """As `Content` has them."""


Part = Reasoning | Content | CallStart | CallArguments | CallBroken


class TextParser(Protocol):
    """One answer's parser; pieces of text in, parts out."""

    @property
    def num_held(self) -> int:
        """Characters at the end of the text so far that may yet become content."""
        ...

    def push(self, text: str) -> list[Part]:
        """Take more text; return what is certain now."""
        ...

    def finish(self) -> list[Part]:
        """The text is over: return what was held back."""
        ...


class PlainParser:
    """All text is content."""

    num_held = 0

    def push(self, text: str) -> list[Part]:
        """Return the text as it is."""
        return [Content(text)] if text else []

    def finish(self) -> list[Part]:
        """Return nothing: nothing is held back."""
        return []


@dataclass(slots=True)
class Call:
    """A tool call of an answer."""

    index: int
    name: str
    arguments: str = ""


class Answer:
    """The parts of one answer put together, as a client sees it that does not stream."""

    def __init__(self) -> None:
        self._reasoning: list[str] = []
        self._content: list[str] = []
        self._calls: dict[int, Call] = {}

    def add(self, parts: Iterable[Part]) -> None:
        """Take parts in their order."""
        for part in parts:
            match part:
                case Reasoning():
                    self._reasoning.append(part.text)
                case Content():
                    self._content.append(part.text)
                case CallStart():
                    self._calls[part.index] = Call(part.index, part.name)
                case CallArguments():
                    self._calls[part.index].arguments += part.text
                case CallBroken():
                    del self._calls[part.index]
                    self._content.append(part.text)
                case _:
                    assert_never(part)

    @property
    def reasoning(self) -> str:
        return "".join(self._reasoning)

    @property
    def content(self) -> str:
        return "".join(self._content)

    @property
    def calls(self) -> tuple[Call, ...]:
        """In the order they were begun."""
        return tuple(self._calls.values())


def new_call_id() -> str:
    """What a client names a call by when it sends the result."""
    return f"call_{uuid.uuid4().hex}"


def merged(parts: Iterable[Part]) -> Iterator[Part]:
    """Join neighbours of a kind, so that a client gets one message for them."""
    last: Part | None = None
    for part in parts:
        joined = _joined(last, part)
        if joined is None and last is not None:
            yield last
        last = part if joined is None else joined
    if last is not None:
        yield last


def _joined(first: Part | None, second: Part) -> Part | None:
    match first, second:
        case Content(), Content():
            return Content(first.text + second.text, first.tokens + second.tokens)
        case Reasoning(), Reasoning():
            return Reasoning(first.text + second.text)
        case CallArguments(), CallArguments() if first.index == second.index:
            return CallArguments(first.index, first.text + second.text)
        case _:
            return None


def partial_len(text: str, tag: str) -> int:
    """Length of the end of ``text`` that may become ``tag``: 0 where none of it can."""
    return next((size for size in range(min(len(text), len(tag)), 0, -1) if text.endswith(tag[:size])), 0)
