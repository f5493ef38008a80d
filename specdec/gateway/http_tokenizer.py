"""The target's tokenizer over HTTP, at the root as lm-eval's remote tokenizer asks for it."""

from __future__ import annotations

from specdec.errors import InvalidRequest
from specdec.gateway.http_service import Models
from specdec.gateway.openai_fields import Fields
from specdec.gateway.openai_messages import ChatMessageFields
from specdec.gateway.openai_responses import JsonObject
from specdec.gateway.requests import ChatPrompt, Prompt, TextPrompt


class TokenizeRequest(Fields):
    """Body of ``POST /tokenize``: exactly one of ``prompt`` and ``messages``."""

    prompt: str | None = None
    messages: list[ChatMessageFields] | None = None
    model: str | None = None
    add_special_tokens: bool | None = None
    """Of a ``prompt``: those that the tokenizer adds by itself. None adds them, as completions do."""

    def to_prompt(self) -> Prompt:
        """Translate.

        Raises:
            InvalidRequest: fields contradict each other.
        """
        if (self.prompt is None) == (self.messages is None):
            raise InvalidRequest("send one of prompt and messages", "prompt")
        if self.prompt is not None:
            return TextPrompt(text=self.prompt, add_special_tokens=self.add_special_tokens is not False)
        if self.add_special_tokens:
            raise InvalidRequest(
                "the special tokens of a conversation are its template's: leave the field out",
                "add_special_tokens",
            )
        messages = tuple(message.to_message(idx) for idx, message in enumerate(self.messages or ()))
        return ChatPrompt(messages=messages)


class DetokenizeRequest(Fields):
    """Body of ``POST /detokenize``."""

    tokens: list[int]
    model: str | None = None


async def tokenize(body: TokenizeRequest, models: Models) -> JsonObject:
    """Encode a text or a conversation, as a request with it would be."""
    service = models.service(body.model)
    token_ids = await service.tokenize(body.to_prompt())
    return {
        "tokens": list(token_ids),
        "count": len(token_ids),
        "max_model_len": service.model_info.max_context,
    }


async def detokenize(body: DetokenizeRequest, models: Models) -> JsonObject:
    """Decode token ids, special tokens included."""
    return {"prompt": await models.service(body.model).detokenize(body.tokens)}


async def tokenizer_info(models: Models, model: str | None = None) -> JsonObject:
    """Special tokens, chat template and sizes, for clients that prepare prompts by themselves."""
    service = models.service(model)
    return {
        **service.describe_tokenizer(),
        "model": service.model_name,
        "max_model_len": service.model_info.max_context,
    }
