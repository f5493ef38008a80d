"""What a client asks for, whichever protocol it speaks: decoded and typed, not yet checked."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from specdec.gateway.structured import Constraint
from specdec.gateway.tools.definitions import ToolUse
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
    reasoning: str = ""
    """What an assistant thought before its answer; templates may leave it out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatPrompt:
    """A conversation, rendered with the model's chat template."""

    messages: tuple[ChatMessage, ...]
    param: str = "messages"
    """What the client calls them."""
    tools: ToolUse | None = None
    template_options: Mapping[str, object] = field(default_factory=dict)
    """Variables for the template, such as ``enable_thinking``."""

    @property
    def holds_calls(self) -> bool:
        """Whether a grammar says how tools are called."""
        return self.tools is not None and self.tools.is_held


@dataclass(frozen=True, slots=True, kw_only=True)
class TextPrompt:
    """Text to continue."""

    text: str
    add_special_tokens: bool = True
    """Those the tokenizer adds by itself."""


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
    """0 only together with ``ClientRequest.echo``: nothing is to be generated."""
    min_tokens: int | None = None
    """Output tokens before which neither a token nor a stop string ends it."""
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    bad_words: tuple[str, ...] = ()
    """Texts the output must not contain, as the tokenizer writes them by themselves and behind a space."""
    constraint: Constraint | None = None
    """What the answer's content must match."""


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
    """What a client asks for: one or several choices for each of its prompts.

    The choices of prompt k have the indices from ``k * n`` on.
    """

    request_id: str
    """Made by the gateway, unique in the whole cluster."""
    prompts: tuple[Prompt, ...]
    n: int | None = None
    """Choices for each prompt, each a sequence of its own."""
    best_of: int | None = None
    """Candidates for each prompt, of which the ``n`` with the highest mean log-probability are returned."""
    echo: bool = False
    """Give the prompt back, before every choice."""
    num_logprobs: int | None = None
    """Log-probabilities of every token and of so many of the likeliest; of the prompt's too with ``echo``."""
    logprobs_field: str = "logprobs"
    """What the client calls the number."""
    places_tokens: bool = False
    """Give the output's tokens with log-probabilities also with the parts of its content."""
    model: str | None = None
    """None or empty takes the served model."""
    sampling: SamplingOptions = field(default=SamplingOptions())
    speculative: SpeculativeOptions = field(default=SpeculativeOptions())
    timeout_s: float | None = None
    """The client's own deadline; the gateway's applies in any case."""
    client: str = ""
    """See `specdec.types.GenerationRequest.client`."""
