"""What crosses between coordinator and workers: frozen values, never a row of logits.

Every message of a round carries ``(sequence_id, epoch)``: the epoch rises whenever the coordinator starts a
sequence's cache anew on a worker, so an answer from before is recognised and dropped. Positions are absolute:
position 0 is the first prompt token.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from specdec.types import Part, SamplingParams, SequenceId, TokenChunk, WorkerId

Int32Array = npt.NDArray[np.int32]
Float32Array = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True, kw_only=True)
class Opening:
    """What a worker must know about a sequence before it can build its law; sent with ``keep == 0`` feeds."""

    prompt_len: int
    """Penalties tell prompt from output tokens by it."""
    sampling: SamplingParams
    stop_token_ids: frozenset[int] = frozenset()
    """A draft that draws one of these drafts no further."""
    num_logprobs: int | None = None
    """See `specdec.types.GenerationRequest.num_logprobs`; the target's alone."""


class Feed(Part, frozen=True, kw_only=True):
    """Roll one sequence's cache back to ``keep`` positions, then feed ``token_ids`` behind them.

    Idempotent: the same feed twice leaves the same cache. ``keep`` beyond what the worker holds, and a feed
    older than the last one, are errors (``StaleCache``), answered with `Lost`. Wire cost: about 80 bytes plus
    8 per token.
    """

    sequence_id: SequenceId
    epoch: int
    serial: int
    """Rises with every feed of the sequence to this worker: what arrives late does no harm."""
    keep: int
    """Cache positions that stay valid, >= 0: the rollback instruction."""
    token_ids: tuple[int, ...]
    """Fed at positions ``keep, keep + 1, ...``."""
    opening: Opening | None = None
    """Present exactly when ``keep == 0``."""


class ProposeItem(Part, frozen=True, kw_only=True):
    """Ask the draft for up to ``num_draft_tokens`` tokens behind ``feed``; 0 only fills the cache."""

    feed: Feed
    num_draft_tokens: int
    fan_out: tuple[int, ...] = ()
    """Look ahead afterwards: how many tokens to guess behind 0, 1, ..., num_draft_tokens accepted ones;
    empty: do not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProposeRequest:
    """One call per round and draft worker, for all its sequences of a lane."""

    owner: str
    """The coordinator that owns the sequences."""
    items: tuple[ProposeItem, ...]


class Draft(Part, frozen=True, kw_only=True, eq=False):
    """A draft model's proposal for one sequence.

    In rejection mode the draft's truncated law travels with it: K (id, probability) pairs a position, so
    8 * K * gamma bytes (K = 64, gamma = 5: 2.6 KB) whatever the vocabulary.
    """

    sequence_id: SequenceId
    epoch: int
    token_ids: tuple[int, ...]
    """The gamma >= 0 drafted tokens; shorter than asked when one of them is a stop token."""
    support_ids: Int32Array | None = None
    """[gamma, K] token ids the draft could have drawn, rejection mode only."""
    support_probs: Float32Array | None = None
    """[gamma, K] their draft probabilities; rows sum to 1; padding has probability 0."""
    is_prepared: bool = False
    """It was drafted while the target verified the block before."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lost:
    """A worker cannot go on with this sequence's cache; the coordinator starts it anew from the log."""

    sequence_id: SequenceId
    epoch: int
    reason: str
    out_of_memory: bool = False
    """The cache is full: starting anew at once would fail again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProposeReply:
    drafts: tuple[Draft, ...]
    lost: tuple[Lost, ...] = ()
    is_ahead: bool = True
    """All that was to be prepared since the last call had been."""


class VerifyItem(Part, frozen=True, kw_only=True):
    """Feed committed tokens and then draft tokens to the target, and judge the draft.

    ``feed.token_ids`` ends with ``draft.token_ids``. ``num_rows`` is 0 for a prefill chunk that does not
    reach the end of the log (no verdict is returned), else ``len(draft.token_ids) + 1``.
    """

    feed: Feed
    num_rows: int
    draft: Draft | None = None
    scored_ids: tuple[int, ...] = ()
    """Prompt tokens that the rows of a prefill chunk predict, whose log-probabilities are wanted: one per fed
    token, and ``num_rows`` of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyRequest:
    """One call per round for all sequences of a lane."""

    owner: str
    items: tuple[VerifyItem, ...]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RowLogprobs:
    """Log-probabilities under the target's raw law; 8 * (k + 1) bytes a row."""

    own: Float32Array
    """[rows] of the token the target gives for the row (verdicts), or of the scored token."""
    draft: Float32Array
    """[gamma] of the draft tokens; empty for scores."""
    top_ids: Int32Array
    """[rows, k] the likeliest tokens, likeliest first."""
    top_logprobs: Float32Array
    """[rows, k]"""


class Verdict(Part, frozen=True, kw_only=True):
    """The target's judgement of one draft of gamma tokens; 12 * gamma bytes and a little more.

    ``token_ids[a]`` is the token to commit behind ``a`` accepted draft tokens. In greedy and coupled mode it
    is the target's own choice at that position. In rejection mode entries below gamma are recovered tokens
    (drawn from the residual distribution) and the last one is the bonus token.
    """

    sequence_id: SequenceId
    epoch: int
    token_ids: tuple[int, ...]
    """gamma + 1 entries."""
    ratios: tuple[float, ...] = ()
    """Rejection mode: gamma values target_prob / draft_prob of the draft tokens."""
    logprobs: RowLogprobs | None = None
    """If asked for: gamma + 1 rows."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Scores:
    """Log-probabilities of the prompt tokens of one prefill chunk."""

    sequence_id: SequenceId
    epoch: int
    logprobs: RowLogprobs
    """One row per scored token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyReply:
    verdicts: tuple[Verdict, ...]
    scores: tuple[Scores, ...] = ()
    lost: tuple[Lost, ...] = ()
    kv_free_tokens: int = 0
    """Room left in the KV cache after this call: whether a sequence that gave way may come back."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """Where a process takes calls of `specdec.transport`."""

    host: str
    port: int
    token: str = field(repr=False)
    """Whoever knows it may call; told over Ray alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Heartbeat:
    """A coordinator's list of what it still needs; workers drop its other sequences.

    This is the safety net under explicit release: nothing leaks when a release is lost or a coordinator dies.
    """

    owner: str
    live: frozenset[SequenceId]


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerStatus:
    """A worker's answer to a heartbeat."""

    worker_id: WorkerId
    role: str
    """``draft`` or ``target``."""
    pid: int
    node_id: str
    model: str
    device: str
    """What it computes on; on one node the same name is the same device."""
    vocab_size: int
    """Ids the tokenizer knows; padded rows beyond are never emitted."""
    max_context: int
    kv_capacity_tokens: int
    kv_tokens_in_use: int
    num_sequences: int
    num_calls: int
    """Propose or verify calls served since the start."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundUpdate:
    """All that happened to one gateway's sequences since the last update: one message, not one per token."""

    chunks: tuple[TokenChunk, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class CoordinatorStatus:
    """What a gateway and an operator want to know of a coordinator."""

    coordinator_id: str
    pid: int
    is_ready: bool
    """At least one target worker is attached."""
    num_running: int
    num_waiting: int
    model: str
    """The served name."""
    target_model: str
    """The target's, as configured."""
    max_context: int
    """The target's, in tokens; 0 until one is attached."""
    num_speculative_tokens: int
    targets: tuple[WorkerStatus, ...]
    drafts: tuple[WorkerStatus, ...]
    num_spec_steps: int
    num_draft_tokens: int
    num_accepted_draft_tokens: int
    num_output_tokens: int
    num_sequence_rounds: int
    """Rounds that committed tokens, counted once per sequence."""
    round_s: float
    """Seconds of a round lately, of the slowest lane; 0 before the first."""
    num_prepared_drafts: int
    """Of the spec steps, those whose draft had been prepared while the target verified the block before."""
