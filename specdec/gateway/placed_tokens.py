"""Which tokens the content of an answer is: its text taken apart with the log-probabilities beside it."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import assert_never

from specdec.gateway.answers import (
    CallArguments,
    CallBroken,
    CallStart,
    Content,
    Part,
    Reasoning,
    TextParser,
    merged,
)
from specdec.gateway.events import ScoredToken


class PlacedTokens:
    """Takes text and tokens, gives parts; each part of content has the tokens that its characters are of.

    A token belongs to the first content that it shares a character with; one inside a character, to that
    character. Tokens of reasoning, calls and tags, and one that only ends the output, belong to none.

    Args:
        parser: of the text.
    """

    def __init__(self, parser: TextParser) -> None:
        self._parser = parser
        self._tokens: deque[ScoredToken] = deque()
        self._length = 0
        """Characters read."""

    def push(self, text: str, tokens: Iterable[ScoredToken]) -> Sequence[Part]:
        """Take more text and tokens; text may lag behind its tokens. Returns what is certain now."""
        self._tokens.extend(tokens)
        parts: list[Part] = []
        # One by one: then what is certain ends where what the parser holds back begins.
        for character in text:
            self._length += 1
            new = self._parser.push(character)
            parts += self._placed(new, self._length - self._parser.num_held)
        return tuple(merged(parts))

    def finish(self) -> Sequence[Part]:
        """The text is over: return what was held back."""
        return tuple(merged(self._placed(self._parser.finish(), self._length)))

    def _placed(self, parts: Sequence[Part], end: int) -> list[Part]:
        """Parts with their tokens.

        Args:
            parts: next to each other in the text.
            end: of the last of them.
        """
        start = end - sum(map(_num_characters, parts))
        placed: list[Part] = []
        for part in parts:
            end = start + _num_characters(part)
            if isinstance(part, Content | CallBroken):
                part = replace(part, tokens=tuple(self._taken(start, end)))
            placed.append(part)
            start = end
        return placed

    def _taken(self, start: int, end: int) -> Iterable[ScoredToken]:
        """Take the tokens up to ``end``; yield those that reach behind ``start``."""
        while self._tokens and self._tokens[0].text_offset < end:
            token = self._tokens.popleft()
            # The last one known has all that is known of the text behind it.
            behind = self._tokens[0].text_offset if self._tokens else end
            if max(behind, token.text_offset + 1) > start:
                yield token


def _num_characters(part: Part) -> int:
    match part:
        case Content() | Reasoning() | CallBroken():
            return len(part.text)
        case CallStart() | CallArguments():
            return 0
        case _:
            assert_never(part)
