"""The one configuration tree, checked at start: unknown keys and bad values are errors that name the key.

The tree is the ``args`` of the Serve application in a deployment file. Replica counts and device resources
are Serve's own deployment settings, beside it in the same file.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from specdec.errors import ConfigError
from specdec.types import Overlap

ToolParser = Literal["auto", "hermes", "llama3"]
ReasoningParser = Literal["auto", "think", "none"]

MAX_SPECULATIVE_TOKENS = 32
"""Upper bound of ``num_speculative_tokens`` everywhere."""

Dtype = Literal["bfloat16", "float16", "float32"]


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class ModelConfig(_Section):
    """One model and how its worker holds it."""

    model: str = Field(min_length=1)
    """An embedded model's name (``smollm2``), a local folder, or a Hugging Face id."""
    dtype: Dtype = "bfloat16"
    device: str = "auto"
    """``auto`` takes the GPU that Ray assigned to the worker (``num_gpus``), else the CPU."""
    max_context: int | None = Field(default=None, gt=0)
    """Tokens; None takes the model's own limit."""
    kv_capacity_tokens: int = Field(default=65_536, gt=0)
    """Tokens of KV cache over all sequences. Its memory is claimed at start: layers * kv_heads * head_dim * 4
    bytes a token in 16 bits, so 23 KB for SmolLM2-135M."""
    prefix_caching: bool = True
    """Keep the KV cache of prompts, so that one that begins like an earlier one is not computed again."""
    cuda_graphs: bool = True
    """On a GPU, launch the small batches of drafting and verification as CUDA graphs, where the model allows
    it. They take a few seconds at start."""
    num_threads: int | None = Field(default=None, gt=0)
    """CPU threads for the model; None takes every core this process may use."""
    spin_count: int | None = Field(default=3_000, ge=0)
    """How often the model's helper threads look for work before they sleep; None is libgomp's own 300,000."""
    pin_threads: bool = True
    """Give each of a CPU model's threads a core of its own, if there are as many of both."""


class DraftConfig(ModelConfig):
    """A draft model."""

    draft_vocab_map: str | None = "auto"
    """The token ids it may draft, a ``.npy`` file of integers: a smaller head is faster, and costs only what
    it leaves unsaid. ``auto`` takes the model's own ``draft_vocab.npy``, if any; None drafts all ids."""


class SpeculationConfig(_Section):
    num_speculative_tokens: int | Literal["auto"] = "auto"
    """Gamma: ``auto`` chooses it per sequence and round, from measured times and acceptance, 0 (plain
    decoding) where speculation does not pay; a number is drafted always. A request may lower it, not raise
    it."""
    max_speculative_tokens: int = Field(default=8, ge=1, le=MAX_SPECULATIVE_TOKENS)
    """Most that ``auto`` drafts."""
    pipeline: Overlap | Literal["auto"] = "auto"
    """``serial``: draft, then verify. ``lookahead``: while the target verifies, the draft prepares the next
    block for the likely outcomes. ``groups``: half of the sequences are drafted for while the other half is
    verified. ``auto``: whichever is fastest; serial where draft and target compute on one device."""
    lookahead_branches: int = Field(default=8, ge=1, le=64)
    """Outcomes per sequence that are prepared for, at most."""
    draft_support: int = Field(default=64, ge=1, le=256)
    """K: tokens kept in the draft's truncated law in rejection mode."""

    @field_validator("num_speculative_tokens", mode="before")
    @classmethod
    def _number_or_auto(cls, value: object) -> object:
        if value == "auto":
            return value
        if not str(value).isdecimal() or int(str(value)) > MAX_SPECULATIVE_TOKENS:
            raise ValueError(f"must be 'auto' or an integer in [0, {MAX_SPECULATIVE_TOKENS}]")
        return int(str(value))


class StepTimes(_Section):
    """What a simulated model's forward takes."""

    step_s: float = Field(ge=0)
    """Seconds, whatever is fed."""
    token_s: float = Field(default=0.0, ge=0)
    """Seconds more for each token."""

    def of(self, num_sequences: int, num_tokens: int) -> float:
        """Seconds of a forward."""
        return self.step_s + self.token_s * num_tokens


class SimulationConfig(_Section):
    """Simulated models in place of real ones: laws that are known, on devices as fast as they are told to
    be.
    """

    law: Literal["greedy", "sampled"] = "greedy"
    """``greedy``: the target's greedy choice is the draft's with a probability of ``acceptance_rate``;
    ``sampled``: smooth laws that overlap by it."""
    acceptance_rate: float = Field(default=0.8, ge=0, le=1)
    vocab_size: int = Field(default=1000, ge=10, le=50_000)
    max_context: int = Field(default=8192, gt=1)
    seed: int = Field(default=0, ge=0)
    target: StepTimes = StepTimes(step_s=0.016)
    draft: StepTimes = StepTimes(step_s=0.002)


class CoordinatorConfig(_Section):
    max_num_seqs: int = Field(default=32, gt=0)
    """Sequences decoded together in one lane; the others wait."""
    max_waiting: int = Field(default=256, ge=0)
    """Requests that may wait; beyond it they get 429. One API key's may be no more than there are places left
    free."""
    prefill_chunk_tokens: int = Field(default=512, gt=0)
    """Prompt tokens a round may feed to one worker, so that running streams are not stalled; without any,
    four times as many."""
    draft_timeout_s: float = Field(default=5.0, gt=0)
    """A draft worker that takes longer is dropped: target-only rounds until it answers again. Once calls of a
    size have been timed, 30 times the slowest of them is the limit, but 2 s at least."""
    target_timeout_s: float = Field(default=60.0, gt=0)
    """A target worker that takes longer is dropped: its sequences move to another one. Once calls of a size
    have been timed, 30 times the slowest of them is the limit, but 10 s at least."""
    max_moves: int = Field(default=5, ge=0)
    """Times a sequence may be moved to another target worker without a token in between, and times it may be
    moved to another coordinator, before it fails."""
    poll_interval_s: float = Field(default=0.5, gt=0)
    """How often workers are looked up and told which sequences live."""
    orphan_timeout_s: float = Field(default=10.0, gt=0)
    """A gateway's sequences are cancelled when it has given no sign of life for this long."""
    idle_wait_s: float = Field(default=30.0, gt=0)
    """A request waits this long for a coordinator and a target worker, then fails with 503."""

    def max_waiting_of(self, client: str) -> int:
        """Requests that one client may have in a queue where nobody else waits; "" is all without a key."""
        return (self.max_waiting + 1) // 2 if client else self.max_waiting


class GatewayConfig(_Section):
    grpc_host: str = "127.0.0.1"
    grpc_port: int = Field(default=9000, ge=0, le=65535)
    """0 picks a free port."""
    grpc_reflection: bool = False
    grpc_tls_cert: str | None = None
    """PEM certificate chain; with ``grpc_tls_key`` gRPC is served over TLS. HTTP's is in ``http_options``."""
    grpc_tls_key: str | None = None
    """PEM private key."""
    api_keys_file: str | None = None
    """One API key a line, asked for by every route and call but those that docs/security.md lists; None: only
    those of the environment variable ``SPECDEC_API_KEYS``, if any."""
    cors_origins: tuple[str, ...] = ()
    """Web pages that may call HTTP from a browser, like ``https://example.com``; ``*`` is all of them."""
    max_requests_per_key: int | None = Field(default=None, gt=0)
    """Requests with one API key that a gateway serves at a time, waiting ones included; beyond it they get
    429. None: any number."""
    max_body_bytes: int = Field(default=8 * 1024 * 1024, gt=0)
    """Larger HTTP bodies get 413, larger gRPC messages RESOURCE_EXHAUSTED."""
    max_stop_strings: int = Field(default=16, gt=0)
    max_choices: int = Field(default=16, gt=0)
    """Most that ``n`` and ``best_of`` may ask for."""
    max_prompts: int = Field(default=128, gt=0)
    """Prompts in one request."""
    max_logprobs: int = Field(default=20, ge=0)
    """Likeliest tokens that may be asked for at each position."""
    tool_parser: ToolParser = "auto"
    """The format in which the model writes tool calls; ``auto`` reads it off its chat template."""
    reasoning_parser: ReasoningParser = "auto"
    """``think``: answers begin with reasoning in ``<think>`` tags; ``auto``: if the template knows them."""
    max_stream_messages_per_s: float = Field(default=500.0, gt=0)
    """Shared by the streams of one gateway: beyond it a message carries what several rounds committed."""
    request_timeout_s: float = Field(default=600.0, gt=0)
    """Overall deadline of a request."""
    other_pairs: tuple[Annotated[str, Field(min_length=1)], ...] = ()
    """Names of the applications whose pairs are served too, each built by ``build_pair``."""

    @model_validator(mode="after")
    def _both_or_none(self) -> GatewayConfig:
        if (self.grpc_tls_cert is None) != (self.grpc_tls_key is None):
            raise ValueError("grpc_tls_cert and grpc_tls_key go together")
        return self


class AppConfig(_Section):
    """All of it."""

    target: ModelConfig
    draft: DraftConfig | None = None
    """None serves the target alone."""
    served_model_name: Annotated[str, Field(min_length=1)] | None = None
    """The name clients use; None takes ``target.model``."""
    simulation: SimulationConfig | None = None
    """Simulated models; the names of ``target`` and ``draft`` are only labels then."""
    speculation: SpeculationConfig = SpeculationConfig()
    coordinator: CoordinatorConfig = CoordinatorConfig()
    gateway: GatewayConfig = GatewayConfig()

    @property
    def model_name(self) -> str:
        return self.served_model_name or self.target.model

    @property
    def adapts_gamma(self) -> bool:
        return self.draft is not None and self.speculation.num_speculative_tokens == "auto"

    @property
    def max_speculative_tokens(self) -> int:
        """Gamma in force, the largest of them where it adapts; 0 without a draft model."""
        if self.draft is None:
            return 0
        gamma = self.speculation.num_speculative_tokens
        return self.speculation.max_speculative_tokens if gamma == "auto" else gamma


PAIR_GATEWAY_KEYS = frozenset({"tool_parser", "reasoning_parser"})
"""What of ``gateway`` belongs to a pair: the rest is the gateway's own, in the application that has it."""


def parse_pair_config(values: object) -> AppConfig:
    """As `parse_config`, of an application without a gateway.

    Raises:
        ConfigError: also where a key belongs to the application with the gateway.
    """
    config = parse_config(values)
    if misplaced := sorted(config.gateway.model_fields_set - PAIR_GATEWAY_KEYS):
        raise ConfigError(
            "invalid configuration: "
            + "; ".join(
                f"gateway.{key}: belongs to the application that has the gateway" for key in misplaced
            )
        )
    return config


def parse_config(values: object) -> AppConfig:
    """Check a plain tree (from YAML) and return it typed.

    Raises:
        ConfigError: naming each key at fault, the value seen and what is allowed.
    """
    try:
        return AppConfig.model_validate(values)
    except ValidationError as error:
        lines = [
            f"{'.'.join(str(part) for part in item['loc']) or 'config'}: {item['msg']}"
            + ("" if item["type"] in ("missing", "extra_forbidden") else f" (got {item['input']!r})")
            for item in error.errors()
        ]
        raise ConfigError("invalid configuration: " + "; ".join(lines)) from error
