"""Reasoning of thinking models: text between ``<think>`` and ``</think>`` in front of the answer."""

from __future__ import annotations

from enum import Enum, auto

from specdec.gateway.answers import Part, Reasoning, TextParser, partial_len

OPEN = "<think>"
CLOSE = "</think>"


class Thinking(Enum):
    """What the prompt's end says of the reasoning."""

    ABSENT = auto()
    """None is expected: all text is content."""
    POSSIBLE = auto()
    """The model opens the tag itself, or does not."""
    OPEN = auto()
    """The template has opened the tag: the text begins inside."""


def has_reasoning(template: str) -> bool:
    """Return whether a chat template is a thinking model's."""
    return CLOSE in template


def thinking_after(prompt: str) -> Thinking:
    """Read off a rendered prompt of a thinking model's template where its answer begins."""
    opened, closed = prompt.rfind(OPEN), prompt.rfind(CLOSE)
    if opened > closed and not prompt[opened + len(OPEN) :].strip():
        return Thinking.OPEN
    if closed >= 0 and not prompt[closed + len(CLOSE) :].strip():
        return Thinking.ABSENT
    return Thinking.POSSIBLE


class ReasoningSplitter:
    """Gives the text between the tags as reasoning and hands the rest to the parser of the answer.

    Whitespace next to a tag belongs to neither.

    Args:
        thinking: where the text begins; not ``ABSENT``.
        answer: for the text behind the closing tag, or all of it where no tag opens.
    """

    def __init__(self, thinking: Thinking, answer: TextParser) -> None:
        assert thinking is not Thinking.ABSENT
        self._answer = answer
        self._is_open = thinking is Thinking.OPEN
        self._is_over = False
        self._is_blank = True
        """Nothing but whitespace was seen of the part that is being read."""
        self._held = ""

    @property
    def num_held(self) -> int:
        """See `TextParser`."""
        return self._answer.num_held if self._is_over else len(self._held)

    def push(self, text: str) -> list[Part]:
        """Take more text; return what is certain now."""
        if self._is_over:
            return self._push_answer(text)
        self._held += text
        if not self._is_open:
            start = self._held.lstrip()
            if OPEN.startswith(start):
                return []
            if not start.startswith(OPEN):
                return self._end(self._held, has_reasoned=False)
            self._is_open, self._held = True, start[len(OPEN) :]
        return self._push_reasoning()

    def finish(self) -> list[Part]:
        """Return what was held back: reasoning that was cut off stays reasoning."""
        if self._is_over:
            return self._answer.finish()
        if not self._is_open:
            return [*self._answer.push(self._held), *self._answer.finish()]
        return [*self._reasoning(self._held.rstrip()), *self._answer.finish()]

    def _push_reasoning(self) -> list[Part]:
        reasoning, tag, rest = self._held.partition(CLOSE)
        if tag:
            return [*self._reasoning(reasoning.rstrip()), *self._end(rest, has_reasoned=True)]
        # What may become the tag, and whitespace that may stand before it.
        certain = reasoning[: len(reasoning) - partial_len(reasoning, CLOSE)].rstrip()
        self._held = reasoning[len(certain) :]
        return self._reasoning(certain)

    def _reasoning(self, text: str) -> list[Part]:
        if self._is_blank:
            text = text.lstrip()
        if not text:
            return []
        self._is_blank = False
        return [Reasoning(text)]

    def _end(self, rest: str, *, has_reasoned: bool) -> list[Part]:
        self._is_over, self._held, self._is_blank = True, "", has_reasoned
        return self._push_answer(rest)

    def _push_answer(self, text: str) -> list[Part]:
        if self._is_blank:
            text = text.lstrip()
            if not text:
                return []
            self._is_blank = False
        return self._answer.push(text)
