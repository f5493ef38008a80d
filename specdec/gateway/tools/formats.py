"""How models write tool calls, and which way a chat template asks for."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from specdec.gateway.answers import CallBroken, Content, Part, Reasoning, TextParser
from specdec.gateway.tools.definitions import ToolUse
from specdec.gateway.tools.hermes import CLOSE, OPEN, HermesParser
from specdec.gateway.tools.llama3 import TAG, Llama3Parser

GAP = r"[ \n\t]{0,4}"
"""Around a call that the model opens by itself."""
ANY = r"(.|\n)*"


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
    opens_anywhere: bool
    """Calls stand in text, each behind the first of ``prefix``; else an answer is calls or text."""

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
        more = _up_to(use.max_calls - 1, f"{_quoted(self.separator)} call")
        return [
            f"calls: call {more}",
            f"call: {prefix} ({' | '.join(names)}) {suffix}",
            *(f"call_{idx}: {self._object(tool.name, idx)}" for idx, tool in enumerate(use.callable)),
        ]

    def answer_rules(self, use: ToolUse, is_token: Callable[[str], bool], barred: str) -> list[str]:
        """Lark rules: ``answer`` is text in which whatever opens a call goes on as one; arguments as above.

        Nothing that the parser takes for a call can be written in another way.

        Args:
            use: tools and how many calls there may be.
            is_token: see `calls_rules`.
            barred: regular expression of what the text must not begin with; empty for nothing.
        """
        return (self._calls_in_text if self.opens_anywhere else self._calls_or_text)(use, is_token, barred)

    def _calls_in_text(self, use: ToolUse, is_token: Callable[[str], bool], barred: str) -> list[str]:
        opening = self.prefix[0]
        text = f"/{ANY}/ & ~/{ANY}{re.escape(opening)}{ANY}/"
        names = " | ".join(f"call_{idx}" for idx in range(len(use.callable)))
        if is_token(opening):
            openings = [f"first: FIRST_TEXT {opening}", f"opening: TEXT {opening}"]
        else:
            until = f"/{ANY}{re.escape(opening)}/"
            openings = [
                "first[lazy]: FIRST_OPENING",
                "opening[lazy]: OPENING",
                f"FIRST_OPENING: {until}{_but(barred)}",
                f"OPENING: {until}",
            ]
        return [
            f"answer: FIRST_TEXT | first call {_up_to(use.max_calls - 1, 'opening call')} TEXT",
            f"call: GAP ({names}) GAP {lark_text(self.suffix[-1], is_token)}",
            *(f"call_{idx}: {self._object(tool.name, idx)}" for idx, tool in enumerate(use.callable)),
            *openings,
            f"FIRST_TEXT: {text}{_but(barred)}",
            f"TEXT: {text}",
            f"GAP: /{GAP}/",
        ]

    def _calls_or_text(self, use: ToolUse, is_token: Callable[[str], bool], barred: str) -> list[str]:
        tag = f"{TAG}? " if is_token(TAG) else ""
        gap = GAP if is_token(TAG) else f"{GAP}({re.escape(TAG)}{GAP})?"
        opening = rf"\s*({re.escape(TAG)}\s*)?\{{"
        tools = list(enumerate(use.callable))
        firsts, others = (" | ".join(f"{name}_{idx}" for idx, _ in tools) for name in ("first", "call"))
        more = _up_to(use.max_calls - 1, f"{_quoted(self.separator)} ({others})")
        return [
            f"answer: TEXT | {tag}({firsts}) {more}",
            *(f"first_{idx}: FIRST_{idx} @arguments_{idx} {_quoted('}')}" for idx, _ in tools),
            *(f"FIRST_{idx}: /{gap}{re.escape(self._head(tool.name))}/" for idx, tool in tools),
            *(f"call_{idx}: {self._object(tool.name, idx)}" for idx, tool in tools),
            f"TEXT: /{ANY}/{_but(opening)}{_but(barred)}",
        ]

    def _object(self, tool_name: str, idx: int) -> str:
        return f"{_quoted(self._head(tool_name))} @arguments_{idx} {_quoted('}')}"

    def _head(self, tool_name: str) -> str:
        return f'{{"name": "{tool_name}", "{self.arguments_key}": '


class OneCallParser:
    """Drops the calls behind the first; what has turned out to be none does not count.

    Args:
        parser: of all of them.
    """

    def __init__(self, parser: TextParser) -> None:
        self._parser = parser
        self._index: int | None = None

    @property
    def num_held(self) -> int:
        """See `TextParser`."""
        return self._parser.num_held

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
    opens_anywhere=True,
)
LLAMA3 = ToolFormat(
    name="llama3", parser_of=Llama3Parser, arguments_key="parameters", separator="; ", opens_anywhere=False
)
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


def _up_to(most: int, rule: str) -> str:
    return f"({rule}){{0,{most}}}" if most else ""


def _but(beginning: str) -> str:
    """Bars texts that begin with a regular expression; empty bars nothing."""
    return f" & ~/{beginning}{ANY}/" if beginning else ""
