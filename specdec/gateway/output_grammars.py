"""The one grammar an output must match: what the client asks for, calls, reasoning in front."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from llguidance import LLMatcher

from specdec.engine.grammar import Grammars
from specdec.errors import ConfigError, InvalidRequest
from specdec.gateway.grammar_check import GrammarChecker
from specdec.gateway.reasoning import CLOSE, OPEN, Thinking
from specdec.gateway.structured import Constraint, json_object
from specdec.gateway.tools.definitions import ToolUse
from specdec.gateway.tools.formats import ToolFormat, lark_text

if TYPE_CHECKING:
    from llguidance import LLTokenizer

Result = TypeVar("Result")

MAX_SHOWN_CHARS = 300


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputShape:
    """What is asked of one output."""

    constraint: Constraint | None = None
    """Of the answer's content."""
    tools: ToolUse | None = None
    tool_format: ToolFormat | None = None
    """Set where ``tools`` are."""
    thinking: Thinking = Thinking.ABSENT

    @property
    def is_free(self) -> bool:
        """Whether any output will do."""
        return self.constraint is None and (self.tools is None or not self.tools.is_held)

    @property
    def _is_call_forced(self) -> bool:
        return self.tools is not None and self.tools.mode == "required"

    @property
    def param(self) -> str:
        """The field to name for what is wrong with all of it."""
        return self.constraint.param if self.constraint is not None else "tools"

    def grammar(self, is_token: Callable[[str], bool]) -> str:
        """Write the grammar, as llguidance reads it.

        Reasoning stands in front of whatever is asked for. Where calls are possible but not forced, there may
        be calls in place of the content, or in and behind it where it is free text.

        Args:
            is_token: whether a text is a token of its own, which a model then writes and nothing else.
        """
        if self.constraint is None and not self._is_call_forced:
            return self._free_text_with_calls(is_token)
        content = None if self._is_call_forced else self.constraint
        parts = {} if content is None else {"content": content.grammar}
        alternatives = [f"@{name}" for name in parts]
        rules: list[str] = []
        if self.tools is not None and self.tool_format is not None:
            alternatives.append("calls")
            rules = self.tool_format.calls_rules(self.tools, is_token)
            parts |= {
                f"arguments_{idx}": tool.arguments.grammar for idx, tool in enumerate(self.tools.callable)
            }
        thought, thought_rules = _thought(self.thinking, is_token)
        start = f"start: {thought} ({' | '.join(alternatives)})"
        return _written([start, *rules, *thought_rules], parts)

    def _free_text_with_calls(self, is_token: Callable[[str], bool]) -> str:
        assert self.tools is not None
        assert self.tool_format is not None
        parts = {
            f"arguments_{idx}": (tool.arguments if tool.is_strict else json_object("tools")).grammar
            for idx, tool in enumerate(self.tools.callable)
        }
        thought, thought_rules = _thought_before_text(self.thinking, is_token)
        # Text that begins as reasoning is reasoning: in there, nothing opens a call.
        barred = rf"\s*{OPEN}" if self.thinking is Thinking.POSSIBLE else ""
        rules = self.tool_format.answer_rules(self.tools, is_token, barred)
        return _written([f"start: {thought} answer", *rules, *thought_rules], parts)

    def parts(self) -> Iterator[Constraint]:
        """Yield what came from the client, each to be blamed on its own field."""
        if self.constraint is not None:
            yield self.constraint
        if self.tools is not None:
            is_any_held = self.constraint is not None or self._is_call_forced
            yield from (tool.arguments for tool in self.tools.callable if is_any_held or tool.is_strict)


class OutputGrammars:
    """Makes the grammars of one gateway's requests and refuses those that cannot be followed.

    Args:
        grammars: what workers will follow them with.
    """

    def __init__(self, grammars: Grammars) -> None:
        self._grammars = grammars
        self._checker = GrammarChecker()
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="specdec-grammar")

    async def of(self, shape: OutputShape) -> str:
        """Return what an output of this shape must match; empty if it may be anything.

        Raises:
            InvalidRequest: it cannot be followed; names the field.
            ServiceUnavailable: it could not be tried out.
        """
        if shape.is_free:
            return ""
        try:
            tokenizer = await self._in_thread(self._grammars.tokenizer)
        except ConfigError as error:
            raise InvalidRequest(
                f"{shape.param}: this model cannot be held to it: {error}", shape.param
            ) from error
        grammar = shape.grammar(lambda text: _is_token(tokenizer, text))
        if fault := await self._checker.fault_of(grammar):
            for part in shape.parts():
                _refuse(await self._checker.fault_of(f'{{"grammars": [{part.grammar}]}}'), part.param)
            _refuse(fault, shape.param)
        if shape.constraint is not None and shape.constraint.may_name_tokens:
            # Only here, where the vocabulary is, can it be seen whether they exist.
            _refuse(await self._in_thread(_fault_with, tokenizer, grammar), shape.param)
        return grammar

    async def _in_thread(self, function: Callable[..., Result], *arguments: object) -> Result:
        return await asyncio.get_running_loop().run_in_executor(self._executor, function, *arguments)


def _written(rules: list[str], parts: Mapping[str, str]) -> str:
    """A grammar of Lark rules, and of others that they name with an ``@``."""
    named = [{"name": name, **json.loads(grammar)} for name, grammar in parts.items()]
    return json.dumps({"grammars": [{"lark_grammar": "\n".join(rules)}, *named]})


def _thought(thinking: Thinking, is_token: Callable[[str], bool]) -> tuple[str, list[str]]:
    """What stands in front of the answer, and the Lark rules it needs."""
    if thinking is Thinking.ABSENT:
        return "", []
    rules = [
        f"thought: /(.|\\n)*/ {CLOSE}" if is_token(CLOSE) else f'thought[suffix="{CLOSE}"]: /(.|\\n)*/',
        "SPACE: /\\s{0,4}/",
    ]
    if thinking is Thinking.OPEN:
        return "thought SPACE", rules
    return f"({lark_text(OPEN, is_token)} thought SPACE)?", rules


def _thought_before_text(thinking: Thinking, is_token: Callable[[str], bool]) -> tuple[str, list[str]]:
    """As `_thought`, in front of text, which begins with whatever white space it likes."""
    thought, rules = _thought(thinking, is_token)
    if thinking is Thinking.POSSIBLE and not is_token(OPEN):
        return "(THINK thought)?", [*rules, f"THINK: /\\s*{OPEN}/"]
    return thought, rules


def _is_token(tokenizer: LLTokenizer, text: str) -> bool:
    token_ids = tokenizer.tokenize_str(text, parse_special=True)
    return len(token_ids) == 1 and tokenizer.is_special_token(token_ids[0])


def _fault_with(tokenizer: LLTokenizer, grammar: str) -> str:
    is_error, messages = LLMatcher.validate_grammar_with_warnings(grammar, tokenizer)
    return messages[0] if is_error else ""


def _refuse(fault: str, param: str) -> None:
    if fault:
        reason = " ".join(fault.split())[:MAX_SHOWN_CHARS]
        raise InvalidRequest(f"{param} cannot be followed: {reason}", param)
