"""Prompts to token ids: chat template, tokenizer, and the checks that need them."""

from __future__ import annotations

import asyncio
import inspect
import json
import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol, TypeVar, assert_never

from tokenizers import Tokenizer

from specdec.errors import ConfigError, InvalidRequest
from specdec.gateway.requests import ChatMessage, ChatPrompt, Prompt, TextPrompt, TokenPrompt

Argument = TypeVar("Argument")
Result = TypeVar("Result")

ROLES = ("system", "developer", "user", "assistant", "tool")


class PromptTokenizer(Protocol):
    """The part of a ``transformers.PreTrainedTokenizerBase`` that the gateway uses."""

    chat_template: str | dict[str, str] | None

    def apply_chat_template(
        self,
        conversation: list[object],
        tools: list[object] | None = ...,
        *,
        tokenize: bool,
        add_generation_prompt: bool,
        **kwargs: object,
    ) -> str: ...

    def encode(
        self, text: str, *, add_special_tokens: bool, split_special_tokens: bool = ...
    ) -> list[int]: ...


def copy_of_backend(tokenizer: PromptTokenizer) -> Tokenizer:
    """Return a copy of the Rust tokenizer behind ``tokenizer``, for use beside it.

    A copy, because encoding sets options on the original, which must not be in use elsewhere at that moment.

    Raises:
        ConfigError: it is a slow, pure-Python tokenizer, which cannot decode incrementally.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if not isinstance(backend, Tokenizer):
        raise ConfigError(
            f"{type(tokenizer).__name__} has no fast backend: serve a model that comes with a tokenizer.json"
        )
    return Tokenizer.from_str(backend.to_str())


def param_of(prompt: Prompt) -> str:
    """Name of the request field that holds the prompt, for error messages."""
    return prompt.param if isinstance(prompt, ChatPrompt) else "prompt"


class PromptEncoder:
    """Turns prompts into token ids, off the event loop.

    One thread of its own: the tokenizer is not safe to share, and a prompt of megabytes takes seconds, in
    which running streams must go on.
    """

    def __init__(self, tokenizer: PromptTokenizer, vocab_size: int) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._backend = copy_of_backend(tokenizer)
        self.template = _template_text(tokenizer.chat_template)
        """Of chats; empty without one."""
        self._own_options = {"messages", *inspect.signature(tokenizer.apply_chat_template).parameters}
        self._special_text = _pattern_of_special_tokens(self._backend)
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="specdec-tokenize")

    async def encode(self, prompt: Prompt) -> tuple[int, ...]:
        """Return at least one token id.

        Raises:
            InvalidRequest: the prompt is empty, malformed or names an unknown token.
        """
        token_ids = await self.tokenize(prompt)
        if not token_ids:
            raise InvalidRequest("the prompt is empty: it gives no tokens", param_of(prompt))
        return token_ids

    async def tokenize(self, prompt: Prompt) -> tuple[int, ...]:
        """Return the token ids of a prompt, which may be none.

        Raises:
            InvalidRequest: the prompt is malformed or names an unknown token.
        """
        match prompt:
            case TokenPrompt():
                return self._checked(prompt.token_ids, "prompt")
            case TextPrompt():
                check_unicode(prompt.text, "prompt")
                return await self._in_thread(self._encode_text, prompt)
            case ChatPrompt():
                check_messages(prompt.messages, prompt.param)
                try:
                    return await self._in_thread(self._encode_chat, prompt)
                except RecursionError as error:
                    raise InvalidRequest(f"{prompt.param}: nested too deeply", prompt.param) from error
            case _:
                assert_never(prompt)

    async def encode_words(self, words: Sequence[str], param: str) -> tuple[tuple[int, ...], ...]:
        """Return the tokens of each word, by itself and behind a space; distinct.

        Raises:
            InvalidRequest: a word is malformed.
        """
        for word in words:
            check_unicode(word, param)
        return await self._in_thread(self._encode_words, words) if words else ()

    async def detokenize(self, token_ids: Sequence[int]) -> str:
        """Return the text of token ids, special tokens included.

        Raises:
            InvalidRequest: an id is unknown.
        """
        return await self._in_thread(self._decode, self._checked(tuple(token_ids), "tokens"))

    def describe(self) -> dict[str, object]:
        """What a client needs to prepare prompts itself: special tokens (or None) and the chat template."""
        names = ("bos_token", "eos_token", "pad_token", "unk_token")
        template = self._tokenizer.chat_template
        return {
            **{name: getattr(self._tokenizer, name, None) for name in names},
            "chat_template": template.get("default") if isinstance(template, dict) else template,
            "tokenizer_class": type(self._tokenizer).__name__,
            "vocab_size": self._vocab_size,
        }

    async def _in_thread(self, function: Callable[[Argument], Result], argument: Argument) -> Result:
        return await asyncio.get_running_loop().run_in_executor(self._executor, function, argument)

    def _checked(self, token_ids: tuple[int, ...], param: str) -> tuple[int, ...]:
        for token_id in token_ids:
            if not 0 <= token_id < self._vocab_size:
                raise InvalidRequest(
                    f"{param} token id {token_id} is outside the vocabulary [0, {self._vocab_size})", param
                )
        return token_ids

    def _encode_words(self, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
        forms = [form for word in words for form in (word, f" {word}")]
        encoded = [tuple(self._tokenizer.encode(form, add_special_tokens=False)) for form in forms]
        return tuple(dict.fromkeys(token_ids for token_ids in encoded if token_ids))

    def _encode_text(self, prompt: TextPrompt) -> tuple[int, ...]:
        return tuple(self._tokenizer.encode(prompt.text, add_special_tokens=prompt.add_special_tokens))

    def _decode(self, token_ids: tuple[int, ...]) -> str:
        text: str = self._backend.decode(list(token_ids), skip_special_tokens=False)
        return text

    def _encode_chat(self, prompt: ChatPrompt) -> tuple[int, ...]:
        """Render and encode a conversation; text that looks like a special token stays text.

        The special tokens of a rendered chat are the template's alone: a message containing ``<|im_end|>``
        must not end its turn. Such text travels through the template as a placeholder that nobody can guess.
        """
        marker = secrets.token_hex(8)
        literals: list[str] = []

        def hide(text: str) -> str:
            return self._special_text.sub(hide_match, text)

        def hide_match(match: re.Match[str]) -> str:
            literals.append(match.group())
            return f"{marker}:{len(literals) - 1}:"

        self._check_options(prompt.template_options)
        conversation = [_map_strings(_template_value(message), hide) for message in prompt.messages]
        tools = [_map_strings(tool, hide) for tool in prompt.tools.definitions()] if prompt.tools else None
        options = {name: _map_strings(value, hide) for name, value in prompt.template_options.items()}
        rendered = self._render(prompt, conversation, tools, options)
        if tools is not None and rendered == self._render(prompt, conversation, None, options):
            raise InvalidRequest("tools: the model's chat template takes none", "tools")
        check_unicode(rendered, prompt.param)
        token_ids: list[int] = []
        for idx, piece in enumerate(re.split(f"{marker}:([0-9]+):", rendered)):
            # re.split alternates between rendered text and the captured numbers.
            is_literal = idx % 2 == 1
            text = literals[int(piece)] if is_literal else piece
            token_ids += self._tokenizer.encode(
                text, add_special_tokens=False, split_special_tokens=is_literal
            )
        return tuple(token_ids)

    def _check_options(self, options: Mapping[str, object]) -> None:
        """Refuse what is not the client's to set, and what the template would not notice."""
        param = "chat_template_kwargs"
        for name, value in options.items():
            if name in self._own_options or name.endswith("_token"):
                raise InvalidRequest(f"{param} must not set {name!r}", param)
            # A function's name is followed by a parenthesis.
            if not name.isidentifier() or not re.search(rf"\b{name}\b(?!\s*\()", self.template):
                raise InvalidRequest(f"{param}: the model's chat template knows no {name[:80]!r}", param)
            if not isinstance(value, str | bool | int | float | None):
                raise InvalidRequest(f"{param}.{name} must be a string, a number, a boolean or null", param)

    def _render(
        self,
        prompt: ChatPrompt,
        conversation: list[object],
        tools: list[object] | None,
        options: Mapping[str, object],
    ) -> str:
        if self._tokenizer.chat_template is None:
            raise InvalidRequest("the model has no chat template: use text completions", prompt.param)
        try:
            return self._tokenizer.apply_chat_template(
                conversation,
                tools=tools,
                tokenize=False,
                add_generation_prompt=True,
                **options,
            )
        except RecursionError:
            raise
        except Exception as error:  # a template raises anything where a value is of a kind it does not expect
            raise InvalidRequest(
                f"the model's chat template refuses these messages: {str(error)[:200]}", prompt.param
            ) from error


def check_unicode(text: str, param: str) -> None:
    """Refuse unpaired surrogates: they are no characters and no tokenizer takes them.

    Raises:
        InvalidRequest: naming ``param``.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequest(
            f"{param} is not valid Unicode: it holds an unpaired surrogate", param
        ) from error


def check_messages(messages: Sequence[ChatMessage], param: str) -> None:
    """Refuse conversations no template could render.

    Raises:
        InvalidRequest: naming the message at fault.
    """
    if not messages:
        raise InvalidRequest(f"{param} must not be empty", param)
    for idx, message in enumerate(messages):
        if message.role not in ROLES:
            raise InvalidRequest(
                f"unknown role {message.role!r}: use {', '.join(ROLES)}", f"{param}[{idx}].role"
            )


def _template_value(message: ChatMessage) -> dict[str, object]:
    """The dictionary chat templates are written against; ``developer`` is read as ``system``."""
    value: dict[str, object] = {
        "role": "system" if message.role == "developer" else message.role,
        "content": message.content,
    }
    if message.name is not None:
        value["name"] = message.name
    if message.tool_call_id is not None:
        value["tool_call_id"] = message.tool_call_id
    if message.reasoning:
        value["reasoning_content"] = message.reasoning
    if message.tool_calls:
        value["tool_calls"] = [
            {
                "type": "function",
                "id": call.id,
                "function": {"name": call.name, "arguments": _parsed(call.arguments)},
            }
            for call in message.tool_calls
        ]
    return value


def _template_text(template: str | dict[str, str] | None) -> str:
    """All of a model's templates in one text."""
    return "\n".join(template.values()) if isinstance(template, dict) else template or ""


def _map_strings(value: object, change: Callable[[str], str]) -> object:
    """Return a JSON-like value with every string in it changed."""
    match value:
        case str():
            return change(value)
        case dict():
            return {change(key): _map_strings(item, change) for key, item in value.items()}
        case list():
            return [_map_strings(item, change) for item in value]
        case _:
            return value


def _parsed(arguments: str) -> object:
    """Templates expect a call's arguments as a mapping; what is no JSON stays text."""
    try:
        return json.loads(arguments)
    except ValueError:
        return arguments


def _pattern_of_special_tokens(backend: Tokenizer) -> re.Pattern[str]:
    texts = [token.content for token in backend.get_added_tokens_decoder().values() if token.special]
    # Longest first, so that a token is not taken for another that it begins with; no token: match nothing.
    return re.compile("|".join(re.escape(text) for text in sorted(texts, key=len, reverse=True)) or r"(?!)")
