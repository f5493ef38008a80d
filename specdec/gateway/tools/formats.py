"""How models write tool calls, and which way a chat template asks for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from specdec.gateway.answers import CallBroken, Content, Part, Reasoning, TextParser
from specdec.gateway.tools.definitions import ToolUse
from specdec.gateway.tools.hermes import CLOSE, OPEN, HermesParser
from specdec.gateway.tools.llama3 import Llama3Parser


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolFormat:
    """One way of writing calls. ``prefix`` and ``suffix`` enclose each, ``separator`` stands between two."""

    name: Literal["hermes", "llama3"]
    parser_of: Callable[[frozenset[str]], TextParser]
    """Makes a parser for answers that may call these functions."""
    arguments_key: str
    prefix: tuple[str, ...] = ()
    suffix: tuple[str, ...] = ()
    separator: str

    def parser(self, use: ToolUse) -> TextParser:
        """Make a parser for one answer."""
        parser = self.parser_of(use.names)
        return parser if use.is_parallel else OneCallParser(parser)

    def calls_rules(self, use: ToolUse, is_token: Callable[[str], bool]) -> list[str]:
        """Lark rules: ``calls`` is what a forced answer must be, ``@arguments_0`` the first tool's arguments.

        Args:
            use: tools and how many calls there may be.
            is_token: whether a text is one token of its own, which a model then writes and nothing else.
        """
        names = [f"call_{idx}" for idx in range(len(use.callable))]
        prefix = " ".join(lark_text(piece, is_token) for piece in self.prefix)
        suffix = " ".join(lark_text(piece, is_token) for piece in self.suffix)
        more = f" ({_quoted(self.separator)} call){{0,{use.max_calls - 1}}}" if use.max_calls > 1 else ""
        return [
            f"calls: call{more}",
            f"call: {prefix} ({' | '.join(names)}) {suffix}",
            *(f"call_{idx}: {self._object(tool.name, idx)}" for idx, tool in enumerate(use.callable)),
        ]

    def _object(self, tool_name: str, idx: int) -> str:
        head = f'{{"name": "{tool_name}", "{self.arguments_key}": '
        return f"{_quoted(head)} @arguments_{idx} {_quoted('}')}"


class OneCallParser:
    """Drops the calls behind the first; what has turned out to be none does not count.

    Args:
        parser: of all of them.
    """

    def __init__(self, parser: TextParser) -> None:
        self._parser = parser
        self._index: int | None = None

    def push(self, text: str) -> list[Part]:
        """Take more text; return what is certain now."""
        return [part for part in self._parser.push(text) if self._is_kept(part)]

    def finish(self) -> list[Part]:
        """Return what was held back."""
        return [part for part in self._parser.finish() if self._is_kept(part)]

    def _is_kept(self, part: Part) -> bool:
        if isinstance(part, Content | Reasoning):
            return True
        if self._index is None:
            self._index = part.index
        is_first = part.index == self._index
        if is_first and isinstance(part, CallBroken):
            self._index = None
        return is_first


HERMES = ToolFormat(
    name="hermes",
    parser_of=HermesParser,
    arguments_key="arguments",
    prefix=(OPEN, "\n"),
    suffix=("\n", CLOSE),
    separator="\n",
)
LLAMA3 = ToolFormat(name="llama3", parser_of=Llama3Parser, arguments_key="parameters", separator="; ")
FORMATS = {tool_format.name: tool_format for tool_format in (HERMES, LLAMA3)}


def format_of(template: str) -> ToolFormat | None:
    """Choose by what a chat template shows of earlier calls; None for one that is not known.

    Other families also write ``<tool_call>`` but no JSON inside.
    """
    if OPEN in template and "<function=" not in template and "<arg_key>" not in template:
        return HERMES
    if "<|python_tag|>" in template or '"parameters": dictionary' in template:
        return LLAMA3
    return None


def lark_text(text: str, is_token: Callable[[str], bool]) -> str:
    """Write a text as Lark: as its token's name, which has angle brackets, or in quotes."""
    return text if is_token(text) else _quoted(text)


def _quoted(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'"{escaped}"'
