"""One call inside an answer: its parts as they become certain."""

from __future__ import annotations

from collections.abc import Collection

from specdec.gateway.answers import CallArguments, CallBroken, CallStart, Content, Part
from specdec.gateway.tools.calls import CallScanner, State


class CallReader:
    """Reads one call.

    Args:
        names: of the functions there are.
        index: of the call in its answer.
        opening: text before the call's object that is content if there turns out to be no call.
    """

    def __init__(self, names: Collection[str], index: int, opening: str) -> None:
        self._scanner = CallScanner(names)
        self._index = index
        self._opening = opening
        self._is_told = False

    @property
    def state(self) -> State:
        return self._scanner.state

    @property
    def has_begun(self) -> bool:
        """Whether it has come so far that a client may have heard of it."""
        return self._scanner.name is not None

    def push(self, text: str) -> tuple[list[Part], str]:
        """Take text up to the call's end; return what is certain now, and the text behind the end."""
        num_taken = 0
        while num_taken < len(text) and self.state is State.READING:
            self._scanner.feed(text[num_taken])
            num_taken += 1
        return (self._given_back() if self.state is State.BROKEN else self._told()), text[num_taken:]

    def finish(self) -> list[Part]:
        """The text ends inside the call: one that has begun stays, cut off; another is content."""
        return [] if self.has_begun else self._given_back()

    def _told(self) -> list[Part]:
        name = self._scanner.name
        if name is None:
            return []
        parts: list[Part] = [] if self._is_told else [CallStart(self._index, name)]
        self._is_told = True
        arguments = self._scanner.take_arguments()
        return [*parts, CallArguments(self._index, arguments)] if arguments else parts

    def _given_back(self) -> list[Part]:
        text = self._opening + self._scanner.raw
        return [CallBroken(self._index, text) if self._is_told else Content(text)]
