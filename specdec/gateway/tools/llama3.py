"""The format of Llama 3 models: the answer is ``{"name": ..., "parameters": ...}``, or several of these."""

from __future__ import annotations

from specdec.gateway.answers import Content, Part
from specdec.gateway.tools.calls import State
from specdec.gateway.tools.reader import CallReader

TAG = "<|python_tag|>"
"""May stand in front of the first call."""
SEPARATOR = ";"
"""May stand between two."""


class Llama3Parser:
    """Takes calls off an answer's beginning; whatever follows them is text.

    Args:
        names: of the functions there are.
    """

    def __init__(self, names: frozenset[str]) -> None:
        self._names = names
        self._num_calls = 0
        self._call: CallReader | None = None
        self._is_text = False
        self._held = ""

    @property
    def num_held(self) -> int:
        """See `TextParser`; nothing of a call while it is read."""
        return len(self._held)

    def push(self, text: str) -> list[Part]:
        """Take more text; return what is certain now."""
        parts: list[Part] = []
        while text and not self._is_text:
            new, text = self._step(text)
            parts += new
        return [*parts, Content(text)] if text else parts

    def finish(self) -> list[Part]:
        """Return what was held back."""
        if self._call is not None:
            return self._call.finish()
        held = self._held.lstrip() if self._num_calls else self._held
        return [Content(held)] if held else []

    def _step(self, text: str) -> tuple[list[Part], str]:
        """Take text up to the next change of state; return what is certain, and the rest."""
        if self._call is not None:
            return self._in_call(self._call, text)
        self._held += text
        mark = SEPARATOR if self._num_calls else TAG
        visible = self._held.lstrip()
        rest = visible.removeprefix(mark).lstrip()
        if not rest or (visible != mark and mark.startswith(visible)):
            return [], ""
        if rest.startswith("{"):
            opening = self._held[: len(self._held) - len(rest)]
            self._call, self._held = CallReader(self._names, self._num_calls, opening), ""
            return [], rest
        text, self._held, self._is_text = visible if self._num_calls else self._held, "", True
        return [], text

    def _in_call(self, call: CallReader, text: str) -> tuple[list[Part], str]:
        parts, rest = call.push(text)
        if call.state is not State.READING:
            self._num_calls += call.has_begun
            self._is_text = call.state is State.BROKEN
            self._call = None
        return parts, rest
