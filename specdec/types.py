"""Values shared by every layer: identities, sampling parameters, requests and statistics.

Knows nothing of torch, Ray, HTTP or protobuf.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Literal, NewType

import msgspec

SequenceId = NewType("SequenceId", str)
"""One choice of one request; unique in the whole cluster."""

WorkerId = NewType("WorkerId", str)
"""One life of one worker process; a restarted worker has a new id."""

FinishReason = Literal["stop", "length"]
"""Why a sequence ended well: an EOS or stop token or string, or a cap on its length."""

Pipeline = Literal["serial", "lookahead", "auto"]
"""``lookahead``: while the target verifies, the draft prepares the next block for the likely outcomes."""

Overlap = Literal["serial", "lookahead", "groups"]
"""``groups``: half of the sequences are drafted for while the other half is verified."""

GREEDY_TEMPERATURE = 1e-5
"""At or below this temperature decoding is greedy: the law is a point mass to float32 accuracy."""


class Part(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Base of what a message of a round holds for each sequence: a value like a frozen dataclass.

    It is made in a tenth of the time, crosses between processes without the names of its fields, and is never
    looked at by the garbage collector: hundreds are made and dropped each round, and none is part of a cycle.
    """


class VerificationMode(StrEnum):
    """How drafted tokens are verified; see docs/architecture.md."""

    GREEDY = "greedy"
    """Temperature 0: accept while the draft token equals the target's argmax."""
    REJECTION = "rejection"
    """Rejection sampling (Leviathan et al. 2023, arXiv:2211.17192): exact in law."""
    COUPLED = "coupled"
    """Shared Gumbel noise (Daliri et al. 2024, arXiv:2408.07978): exact token for token given the seed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelInfo:
    """What must be known of a model before it is served."""

    vocab_size: int
    """Ids that may be emitted: ``range(vocab_size)``. Embedding rows beyond are padding."""
    max_context: int
    """Prompt and output tokens together."""
    eos_token_ids: frozenset[int]
    """Any of them ends a sequence; empty if the model states none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """The law a client asks for: what is done to the target's logits before a token is drawn."""

    temperature: float = 1.0
    """>= 0; at or below ``GREEDY_TEMPERATURE`` decoding is greedy."""
    top_k: int = 0
    """Keep the k most likely tokens; 0 keeps all."""
    top_p: float = 1.0
    """Nucleus: keep the smallest set of most likely tokens whose probability reaches this, in (0, 1]."""
    min_p: float = 0.0
    """Drop tokens less likely than this fraction of the most likely one, in [0, 1]."""
    presence_penalty: float = 0.0
    """Subtracted once from the logit of every token already generated."""
    frequency_penalty: float = 0.0
    """Subtracted from a token's logit once per time it was generated."""
    repetition_penalty: float = 1.0
    """> 0; divides (multiplies) positive (negative) logits of tokens in prompt or output."""
    logit_bias: tuple[tuple[int, float], ...] = ()
    """(token id, bias) pairs added to the logits, ids distinct."""
    bad_words: tuple[tuple[int, ...], ...] = ()
    """Token sequences the output must not contain: the last token of one is excluded behind the others."""
    min_tokens: int = 0
    """Tokens that end a sequence are excluded before so many output tokens."""
    grammar: str = ""
    """What the output must match, as llguidance reads it; empty: anything."""
    seed: int = 0
    """Key of all randomness of the sequence, in [0, 2**64)."""
    mode: VerificationMode = VerificationMode.REJECTION

    @property
    def is_greedy(self) -> bool:
        return self.mode is VerificationMode.GREEDY


@dataclass(frozen=True, slots=True, kw_only=True)
class StopCriteria:
    """When the coordinator ends a sequence. Stop strings are the gateway's: they need text."""

    max_tokens: int
    """> 0; cap on output tokens."""
    stop_token_ids: frozenset[int] = frozenset()
    """EOS ids and the client's stop tokens: the sequence ends with the first of them drawn."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest:
    """One sequence to generate, as the gateway submits it to a coordinator."""

    sequence_id: SequenceId
    prompt_ids: tuple[int, ...]
    """At least one token."""
    sampling: SamplingParams
    stop: StopCriteria
    max_draft_tokens: int | None = None
    """The client's cap on draft tokens per round; 0 is plain decoding, None leaves it to the deployment."""
    pipeline: Pipeline | None = None
    """What the client asks for; None leaves it to the deployment."""
    output_ids: tuple[int, ...] = ()
    """Tokens committed elsewhere before: generation goes on behind them."""
    client: str = ""
    """Who asks, for turns in the queue: the digest of an API key; empty where there are none."""
    is_moved: bool = False
    """Another coordinator had taken it and was lost: it is not refused for want of room."""
    num_logprobs: int | None = None
    """Log-probabilities wanted of each output token, beside so many of the likeliest ones; None: none."""
    wants_prompt_logprobs: bool = False
    """The same of the prompt's tokens, the first excepted; with ``num_logprobs``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculationStats:
    """Acceptance counters of one sequence. Rates are derived, never stored."""

    num_rounds: int = 0
    """Verification rounds that committed tokens, with or without draft tokens."""
    num_spec_steps: int = 0
    """Rounds that verified at least one draft token."""
    num_draft_tokens: int = 0
    num_accepted_draft_tokens: int = 0
    acceptance_histogram: tuple[int, ...] = field(default=())
    """``acceptance_histogram[a]`` = number of spec steps that accepted exactly ``a`` draft tokens."""

    @property
    def mean_acceptance_length(self) -> float:
        """Tokens emitted per spec step: 1 + accepted / steps (the recovered or bonus token included)."""
        if self.num_spec_steps == 0:
            return 1.0
        return 1.0 + self.num_accepted_draft_tokens / self.num_spec_steps

    @property
    def draft_acceptance_rate(self) -> float:
        """Accepted / drafted tokens (the field's "draft acceptance rate"); 0 when nothing was drafted."""
        if self.num_draft_tokens == 0:
            return 0.0
        return self.num_accepted_draft_tokens / self.num_draft_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLogprob:
    """The target's own opinion of a token: natural logarithms of the softmax of its raw logits."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()
    """(token id, logprob) of the likeliest tokens, likeliest first; it need not be among them."""


class TokenChunk(Part, frozen=True, kw_only=True):
    """What one round committed for one sequence, on its way from coordinator to gateway.

    Wire cost: about 100 bytes plus 8 per token.
    """

    sequence_id: SequenceId
    token_ids: tuple[int, ...]
    """Committed this round, in order. The token that ended the sequence (EOS, stop token) is included."""
    num_drafted: int = 0
    """Draft tokens this round verified."""
    num_accepted: int = 0
    """How many of them were accepted: the first of ``token_ids``, unless the sequence ended before."""
    is_prepared: bool = False
    """The draft was made while the target verified the block before."""
    logprobs: tuple[TokenLogprob, ...] = ()
    """One per token, if asked for."""
    prompt_logprobs: tuple[TokenLogprob, ...] = ()
    """Of the prompt's tokens from the second on, on a sequence's first chunk, if asked for."""
    finish_reason: FinishReason | None = None
    """Set on a sequence's last chunk if it ended well."""
    error: str | None = None
    """Set on a sequence's last chunk if it failed: a sentence for the client."""

    @property
    def is_last(self) -> bool:
        return self.finish_reason is not None or self.error is not None
