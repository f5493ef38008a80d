"""Chat templates in the manner of real families, and a gateway that serves one of them."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Sequence

import llguidance.hf
import numpy as np
from llguidance import LLMatcher, LLTokenizer
from tokenizers import AddedToken
from transformers import PreTrainedTokenizerFast

from specdec.gateway.backend import Backend
from specdec.gateway.service import GenerationService
from specdec.types import GenerationRequest, ModelInfo
from tests.fakes import EOS_ID, toy_config, toy_tokenizer

_MESSAGES = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n[reasoning]{{ message.content }}[calls]"
    "<|im_end|>\n{% endfor %}"
)
_PROMPT = "{% if add_generation_prompt %}<|im_start|>assistant\n[opening]{% endif %}"
_TOOLS = (
    "{% if tools %}<|im_start|>system\n# Tools\n{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}"
    "<|im_end|>\n{% endif %}"
)
_CALLS = (
    "{% for call in message.tool_calls or [] %}"
    '<tool_call>\n{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}\n'
    "</tool_call>{% endfor %}"
)
_REASONING = (
    "{% if message.reasoning_content %}<think>\n{{ message.reasoning_content }}\n</think>\n\n{% endif %}"
)
_NO_THINKING = "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}"


def _template(tools: str = "", reasoning: str = "", calls: str = "", opening: str = "") -> str:
    text = tools + _MESSAGES + _PROMPT
    return text.replace("[reasoning]", reasoning).replace("[calls]", calls).replace("[opening]", opening)


PLAIN = _template()
HERMES = _template(_TOOLS, calls=_CALLS)
LLAMA3 = _template(_TOOLS.replace("# Tools", "Environment: ipython <|python_tag|>"))
THINKING = _template(_TOOLS, _REASONING, _CALLS, _NO_THINKING)
THINKING_OPEN = _template(_TOOLS, _REASONING, _CALLS, "<think>\n")
"""Opens the tag in the prompt."""


def tokenizer_with(
    template: str | None, tokens: Sequence[str] = (), *, are_special: bool = False
) -> PreTrainedTokenizerFast:
    """The toy tokenizer with another template, and with tokens of its own for some texts."""
    tokenizer = copy.deepcopy(toy_tokenizer())
    tokenizer.chat_template = template
    tokenizer.add_tokens([AddedToken(token, special=are_special, normalized=False) for token in tokens])
    return tokenizer


def service_with(
    backend: Backend,
    template: str | None,
    *,
    tokens: Sequence[str] = (),
    are_special: bool = False,
    **gateway: object,
) -> GenerationService:
    tokenizer = tokenizer_with(template, tokens, are_special=are_special)
    info = ModelInfo(max_context=4096, vocab_size=len(tokenizer), eos_token_ids=frozenset({EOS_ID}))
    return GenerationService(backend, tokenizer, toy_config(**gateway), info, created=1_700_000_000)


class RandomFollower:
    """Writes outputs at random that follow the request's grammar: what a bad model would make of it.

    Args:
        tokenizer: the served one.
        is_thinking: whether reasoning comes first.
        seed: of the randomness.
        openings: texts that it likes to write where the grammar lets it.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerFast,
        *,
        is_thinking: bool = False,
        seed: int = 0,
        openings: Sequence[str] = (),
    ) -> None:
        self.is_thinking = is_thinking
        self._openings = openings
        self._tokenizer: LLTokenizer = llguidance.hf.from_tokenizer(tokenizer, eos_token=EOS_ID)
        self._random = random.Random(seed)

    def __call__(self, request: GenerationRequest) -> list[int]:
        matcher = LLMatcher(self._tokenizer, request.sampling.grammar, log_level=0)
        assert not matcher.is_error(), matcher.get_error()
        output: list[int] = []
        while True:
            allowed = self._allowed(matcher)
            is_long = len(output) > 200
            if EOS_ID in allowed and (is_long or self._random.random() < 0.3):
                return [*output, EOS_ID]
            token_ids = [self._random.choice([token for token in allowed if token != EOS_ID] or [EOS_ID])]
            if len(allowed) > 200 and self._random.random() < 0.2:
                token_ids = self._end_of_free_text(output, allowed)
            if opening := self._opening(matcher):
                token_ids = opening
            output += token_ids
            if output[-1] == EOS_ID:
                return output
            assert matcher.consume_tokens(token_ids), matcher.get_error()

    def _end_of_free_text(self, output: list[int], allowed: list[int]) -> list[int]:
        """What ends the reasoning, or else a JSON string."""
        close = self._tokenizer.tokenize_str("</think>", parse_special=True)
        is_closed = "</think>" in self._tokenizer.decode_str(output)
        if self.is_thinking and not is_closed and close[0] in allowed:
            return close
        quote = self._tokenizer.tokenize_str('"')
        return quote if quote[0] in allowed else [allowed[0]]

    def _opening(self, matcher: LLMatcher) -> list[int]:
        """One of the texts to begin with, sometimes, where it may come; else nothing."""
        if not self._openings or self._random.random() > 0.3:
            return []
        token_ids = self._tokenizer.tokenize_str(self._random.choice(self._openings), parse_special=True)
        return token_ids if matcher.validate_tokens(token_ids) == len(token_ids) else []

    @staticmethod
    def _allowed(matcher: LLMatcher) -> list[int]:
        bits = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8), bitorder="little")
        return [int(token) for token in np.nonzero(bits)[0]]


def tool(name: str, properties: dict[str, object] | None = None, **function: object) -> dict[str, object]:
    """A chat completion's tool that needs all of its properties."""
    schema = {
        "type": "object",
        "properties": properties or {},
        "required": list(properties or {}),
        "additionalProperties": False,
    }
    return {"type": "function", "function": {"name": name, "parameters": schema, **function}}


WEATHER = tool("get_weather", {"city": {"enum": ["Oslo", "Rome"]}, "days": {"type": "integer"}})
CLOCK = tool("clock")


def call_text(name: str, arguments: object) -> str:
    """A call as Hermes models write it."""
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"
