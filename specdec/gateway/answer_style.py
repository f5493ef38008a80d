"""How the served model writes its answers, read off its chat template."""

from __future__ import annotations

import json
from collections.abc import Callable

from tokenizers import Tokenizer

from specdec.config import ReasoningParser, ToolParser
from specdec.errors import InvalidRequest
from specdec.gateway import reasoning
from specdec.gateway.answers import PlainParser, TextParser
from specdec.gateway.output_grammars import OutputShape
from specdec.gateway.reasoning import ReasoningSplitter, Thinking, has_reasoning, thinking_after
from specdec.gateway.requests import ChatPrompt, Prompt
from specdec.gateway.structured import Constraint
from specdec.gateway.tools import hermes
from specdec.gateway.tools.formats import FORMATS, format_of

TAGS = (reasoning.OPEN, reasoning.CLOSE, hermes.OPEN, hermes.CLOSE)


class AnswerStyle:
    """What to expect of answers.

    Args:
        template: the chat template's text; empty without one.
        tool_parser: the format of tool calls; ``auto`` reads it off the template.
        reasoning_parser: ``think`` where there is reasoning in tags, ``none`` where there is not.
    """

    def __init__(self, template: str, *, tool_parser: ToolParser, reasoning_parser: ReasoningParser) -> None:
        self._tool_format = format_of(template) if tool_parser == "auto" else FORMATS[tool_parser]
        self._has_reasoning = (
            has_reasoning(template) if reasoning_parser == "auto" else reasoning_parser == "think"
        )

    def shape(
        self, prompt: Prompt, rendered: Callable[[], str], constraint: Constraint | None
    ) -> OutputShape:
        """Say what is asked of the outputs to one prompt.

        Args:
            prompt: as the client gave it.
            rendered: gives the end of its text, special tokens included.
            constraint: of the answer's content.

        Raises:
            InvalidRequest: there are tools and it is not known how the model would call them.
        """
        if not isinstance(prompt, ChatPrompt):
            return OutputShape(constraint=constraint)
        if prompt.tools is not None and self._tool_format is None:
            raise InvalidRequest(
                "tools: how this model writes calls cannot be told from its chat template; "
                "the operator may set gateway.tool_parser",
                "tools",
            )
        return OutputShape(
            constraint=constraint,
            tools=prompt.tools,
            tool_format=self._tool_format if prompt.tools is not None else None,
            thinking=thinking_after(rendered()) if self._has_reasoning else Thinking.ABSENT,
        )


def showing_tags(tokenizer: Tokenizer) -> Tokenizer:
    """Return a tokenizer that decodes the tags of answers as text, also where they are special tokens."""
    known = tokenizer.get_added_tokens_decoder().values()
    if not any(token.special and token.content in TAGS for token in known):
        return tokenizer
    value = json.loads(tokenizer.to_str())
    for token in value["added_tokens"]:
        token["special"] = token["special"] and token["content"] not in TAGS
    return Tokenizer.from_str(json.dumps(value))


def parser_of(shape: OutputShape) -> TextParser | None:
    """Make the parser of one output of this shape; None where all of it is content."""
    tools, tool_format = shape.tools, shape.tool_format
    calls = tool_format.parser(tools) if tools is not None and tool_format is not None else None
    if shape.thinking is Thinking.ABSENT:
        return calls
    return ReasoningSplitter(shape.thinking, calls or PlainParser())
