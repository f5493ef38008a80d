"""One call written as a JSON object, read character by character."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Generator
from enum import Enum, auto

_WHITESPACE = " \t\n\r"
_ARGUMENT_KEYS = ("arguments", "parameters")


class State(Enum):
    """How far a call has come."""

    READING = auto()
    DONE = auto()
    """The object has ended and is a call."""
    BROKEN = auto()
    """It is no call, whatever follows."""


class _NoCall(Exception):
    """What was read is no call."""


class _Value:
    """Finds where a JSON value ends; whether it is well-formed is asked of the whole object at its end."""

    def __init__(self, first: str) -> None:
        self._is_scalar = first not in '{["'
        self._depth = 0
        self._is_string = False
        self._is_escaped = False

    def is_over_at(self, character: str) -> bool:
        """Return whether a number or word is over where ``character`` comes."""
        return self._is_scalar and character in ",}" + _WHITESPACE

    def feed(self, character: str) -> bool:
        """Take a character, the first one included; return whether the value ends with it."""
        if self._is_escaped:
            self._is_escaped = False
        elif self._is_string and character == "\\":
            self._is_escaped = True
        elif character == '"':
            self._is_string = not self._is_string
            return not self._is_string and self._depth == 0
        elif not self._is_string and character in "{[":
            self._depth += 1
        elif not self._is_string and character in "}]":
            self._depth -= 1
            return self._depth == 0
        return False


_Reader = Generator[None, str, str]
"""Is sent characters; returns one that it has not used."""


class CallScanner:
    """Reads ``{"name": ..., "arguments": {...}}``, in which ``parameters`` may stand for ``arguments``.

    Keys may come in any order and others among them. The arguments are given as they come, once the name is
    known.

    Args:
        names: of the functions there are; another name makes no call.
    """

    def __init__(self, names: Collection[str]) -> None:
        self._names = names
        self._raw: list[str] = []
        self._read_name: str | None = None
        self._early_arguments: list[str] = []
        """Those that came before the name."""
        self._new_arguments: list[str] = []
        self._keys: set[str] = set()
        self.name: str | None = None
        """Of the function; set as soon as there is something to tell of its arguments."""
        self.state = State.READING
        self._reader = self._read_object()
        next(self._reader)

    @property
    def raw(self) -> str:
        """All that was read."""
        return "".join(self._raw)

    def feed(self, character: str) -> None:
        """Take one character while `state` is ``READING``."""
        self._raw.append(character)
        try:
            self._reader.send(character)
        except StopIteration:
            self.state = State.DONE if self._is_json() else State.BROKEN
        except _NoCall:
            self.state = State.BROKEN

    def take_arguments(self) -> str:
        """Return the argument text that came since the last time."""
        text = "".join(self._new_arguments)
        self._new_arguments.clear()
        return text

    def _read_object(self) -> _Reader:
        _expect((yield from _next_visible()), "{")
        character = yield from _next_visible()
        while character != "}":
            _expect(character, '"')
            key: list[str] = []
            character = yield from _read_value(character, key.append)
            _expect(character, ":")
            character = yield from self._read_member(_string_of(key), (yield from _next_visible()))
            if character == ",":
                character = yield from _next_visible()
            else:
                _expect(character, "}")
        self._finish_object()
        return character

    def _read_member(self, key: str | None, first: str) -> _Reader:
        if key is None or key in self._keys:
            raise _NoCall
        if key in _ARGUMENT_KEYS:
            self._keys.update(_ARGUMENT_KEYS)
            return (yield from self._read_arguments(first))
        self._keys.add(key)
        text: list[str] = []
        character = yield from _read_value(first, text.append)
        if key == "name":
            self._read_name = _string_of(text)
            if self._read_name not in self._names:
                raise _NoCall
        return character

    def _read_arguments(self, first: str) -> _Reader:
        _expect(first, "{")
        self.name = self._read_name
        sink = self._early_arguments if self.name is None else self._new_arguments
        return (yield from _read_value(first, sink.append))

    def _finish_object(self) -> None:
        if self._read_name is None:
            raise _NoCall
        if self.name is None:
            self.name = self._read_name
            self._new_arguments.append("".join(self._early_arguments) or "{}")

    def _is_json(self) -> bool:
        try:
            json.loads(self.raw)
        except (ValueError, RecursionError):
            return False
        return True


def _next_visible() -> _Reader:
    while True:
        character = yield
        if character not in _WHITESPACE:
            return character


def _read_value(first: str, keep: Callable[[str], None]) -> _Reader:
    """Read a value that begins with ``first``; returns the first visible character behind it."""
    value = _Value(first)
    character = first
    while not value.is_over_at(character):
        keep(character)
        if value.feed(character):
            return (yield from _next_visible())
        character = yield
    return (yield from _next_visible()) if character in _WHITESPACE else character


def _expect(character: str, wanted: str) -> None:
    if character != wanted:
        raise _NoCall


def _string_of(text: list[str]) -> str | None:
    try:
        value = json.loads("".join(text))
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, str) else None
