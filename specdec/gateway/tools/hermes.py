"""The format of Hermes and Qwen models: ``<tool_call>`` JSON ``</tool_call>``, in or behind text."""

from __future__ import annotations

from specdec.gateway.answers import Content, Part, partial_len
from specdec.gateway.tools.calls import State
from specdec.gateway.tools.reader import CallReader

OPEN = "<tool_call>"
CLOSE = "</tool_call>"


class HermesParser:
    """Takes calls out of a text, and the whitespace before each; a closing tag may be lacking.

    Args:
        names: of the functions there are.
    """

    def __init__(self, names: frozenset[str]) -> None:
        self._names = names
        self._num_calls = 0
        self._call: CallReader | None = None
        self._is_behind_call = False
        """Whitespace and the closing tag are still to come."""
        self._is_blank = False
        """Nothing but whitespace has come since the last call."""
        self._held = ""

    @property
    def num_held(self) -> int:
        """See `TextParser`; nothing of a call while it is read."""
        return len(self._held)

    def push(self, text: str) -> list[Part]:
        """Take more text; return what is certain now."""
        parts: list[Part] = []
        while text:
            new, text = self._step(text)
            parts += new
        return parts

    def finish(self) -> list[Part]:
        """Return what was held back."""
        if self._call is not None:
            return self._call.finish()
        if self._is_blank or (self._is_behind_call and not self._held.strip()):
            return []
        return [Content(self._held)] if self._held else []

    def _step(self, text: str) -> tuple[list[Part], str]:
        """Take text up to the next change of state; return what is certain, and the rest."""
        if self._call is not None:
            return self._in_call(self._call, text)
        self._held += text
        if self._is_behind_call:
            rest = self._held.lstrip()
            if rest != CLOSE and CLOSE.startswith(rest):
                return [], ""
            self._is_behind_call, self._is_blank, self._held = False, True, ""
            return [], rest.removeprefix(CLOSE)
        return self._in_text()

    def _in_call(self, call: CallReader, text: str) -> tuple[list[Part], str]:
        parts, rest = call.push(text)
        if call.state is not State.READING:
            self._num_calls += call.has_begun
            self._is_behind_call = call.state is State.DONE
            self._call = None
        return parts, rest

    def _in_text(self) -> tuple[list[Part], str]:
        self._is_blank = self._is_blank and not self._held.strip()
        before, tag, rest = self._held.partition(OPEN)
        certain = (before if tag else before[: len(before) - partial_len(before, OPEN)]).rstrip()
        uncertain = before[len(certain) :]
        if tag:
            self._call = CallReader(self._names, self._num_calls, uncertain + tag)
        self._held = "" if tag else uncertain
        return [Content(certain)] if certain else [], rest
