"""What a client asks for, whichever protocol it speaks: decoded and typed, not yet checked."""

from __future__ import annotations

from dataclasses import dataclass, field

from specdec.types import Pipeline, VerificationMode


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCall:
    """A function call an assistant made earlier in the conversation."""

    id: str
    name: str
    arguments: str
    """JSON text, as the model wrote it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatMessage:
    role: str
    content: str = ""
    name: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatPrompt:
    """A conversation, rendered with the model's chat template."""

    messages: tuple[ChatMessage, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class TextPrompt:
    """Text to continue, with the special tokens the tokenizer adds by itself."""

    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenPrompt:
    """Token ids, used unchanged."""

    token_ids: tuple[int, ...]


Prompt = ChatPrompt | TextPrompt | TokenPrompt


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingOptions:
    """None means that the client did not say; `specdec.gateway.validation` holds the defaults and ranges."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: tuple[tuple[int, float], ...] = ()
    seed: int | None = None
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculativeOptions:
    num_speculative_tokens: int | None = None
    """Cap on draft tokens per round; 0 is plain decoding, None is the deployment's choice."""
    mode: VerificationMode | None = None
    """REJECTION or COUPLED; None chooses by whether a seed is given."""
    pipeline: Pipeline | None = None
    """None is the deployment's choice."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientRequest:
    """One generation a client asks for."""

    request_id: str
    """Made by the gateway, unique in the whole cluster."""
    prompt: Prompt
    model: str | None = None
    """None or empty takes the served model."""
    sampling: SamplingOptions = field(default=SamplingOptions())
    speculative: SpeculativeOptions = field(default=SpeculativeOptions())
    timeout_s: float | None = None
    """The client's own deadline; the gateway's applies in any case."""
