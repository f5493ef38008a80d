"""Checks a client's request and builds the request a backend takes. Pure, apart from drawing a seed."""

from __future__ import annotations

import secrets
from dataclasses import dataclass

from specdec.config import MAX_SPECULATIVE_TOKENS, AppConfig
from specdec.errors import ContextLengthExceeded, InvalidRequest
from specdec.gateway.prompts import check_unicode, param_of
from specdec.gateway.request_shape import shown
from specdec.gateway.requests import ClientRequest, Prompt, SamplingOptions, SpeculativeOptions
from specdec.types import (
    GREEDY_TEMPERATURE,
    GenerationRequest,
    ModelInfo,
    SamplingParams,
    SequenceId,
    StopCriteria,
    VerificationMode,
)

SEED_BITS = 63
MAX_STOP_STRING_CHARS = 1024
"""Every stop string is matched against every character, so their length has a bound as their number has."""


@dataclass(frozen=True, slots=True)
class Range:
    """A closed interval, or one open at its low end."""

    low: float
    high: float
    is_low_open: bool = False

    def __contains__(self, value: float) -> bool:
        # Written so that NaN, which compares false with everything, is outside.
        return (self.low < value if self.is_low_open else self.low <= value) and value <= self.high

    def __str__(self) -> str:
        return f"{'(' if self.is_low_open else '['}{self.low:g}, {self.high:g}]"


TEMPERATURE = Range(0, 2)
TOP_P = Range(0, 1, is_low_open=True)
MIN_P = Range(0, 1)
PENALTY = Range(-2, 2)
REPETITION_PENALTY = Range(0, 2, is_low_open=True)
LOGIT_BIAS = Range(-100, 100)


def build_generation_request(
    request: ClientRequest,
    prompt: Prompt,
    prompt_ids: tuple[int, ...],
    *,
    bad_words: tuple[tuple[int, ...], ...] = (),
    config: AppConfig,
    model_info: ModelInfo,
) -> GenerationRequest:
    """Check what the prompt's form and `check_shape` leave; translate the first choice of one prompt.

    Args:
        request: what the client asks for.
        prompt: one of its prompts.
        prompt_ids: that prompt's tokens.
        bad_words: the tokens of ``request.sampling.bad_words``.
        config: the deployment's configuration.
        model_info: facts about the target.

    Raises:
        InvalidRequest: a field is out of range; ``param`` names it.
        ContextLengthExceeded: the prompt, or prompt and ``max_tokens`` together, do not fit.
    """
    options = request.sampling
    check_stop_strings(options.stop, config.gateway.max_stop_strings)
    return GenerationRequest(
        sequence_id=SequenceId(f"{request.request_id}-0"),
        prompt_ids=prompt_ids,
        sampling=_sampling_params(options, request.speculative, bad_words, model_info.vocab_size),
        stop=StopCriteria(
            max_tokens=_max_tokens(prompt, len(prompt_ids), options, model_info.max_context),
            stop_token_ids=_stop_token_ids(options, model_info),
        ),
        max_draft_tokens=_max_draft_tokens(request.speculative, config),
        pipeline=request.speculative.pipeline,
        client=request.client,
        num_logprobs=_num_logprobs(request),
        wants_prompt_logprobs=request.echo and request.num_logprobs is not None,
    )


def check_stop_strings(stop: tuple[str, ...], max_stop_strings: int) -> None:
    """Refuse more stop strings than are allowed (never drop one silently), empty ones and absurdly long ones.

    Raises:
        InvalidRequest: naming ``stop``.
    """
    if len(stop) > max_stop_strings:
        raise InvalidRequest(f"stop has {len(stop)} strings, at most {max_stop_strings} are allowed", "stop")
    for text in stop:
        if not 1 <= len(text) <= MAX_STOP_STRING_CHARS:
            raise InvalidRequest(f"stop strings must have 1 to {MAX_STOP_STRING_CHARS} characters", "stop")
        check_unicode(text, "stop")


def _num_logprobs(request: ClientRequest) -> int | None:
    """The candidates of ``best_of`` are compared by their log-probabilities, asked for or not."""
    is_compared = request.best_of is not None and request.best_of > (request.n or 1)
    return 0 if request.num_logprobs is None and is_compared else request.num_logprobs


def _sampling_params(
    options: SamplingOptions,
    speculative: SpeculativeOptions,
    bad_words: tuple[tuple[int, ...], ...],
    vocab_size: int,
) -> SamplingParams:
    temperature = _number("temperature", options.temperature, 1.0, TEMPERATURE)
    mode, seed = _verification(temperature, options.seed, speculative.mode)
    return SamplingParams(
        temperature=temperature,
        top_k=_top_k(options.top_k, vocab_size),
        top_p=_number("top_p", options.top_p, 1.0, TOP_P),
        min_p=_number("min_p", options.min_p, 0.0, MIN_P),
        presence_penalty=_number("presence_penalty", options.presence_penalty, 0.0, PENALTY),
        frequency_penalty=_number("frequency_penalty", options.frequency_penalty, 0.0, PENALTY),
        repetition_penalty=_number("repetition_penalty", options.repetition_penalty, 1.0, REPETITION_PENALTY),
        logit_bias=_logit_bias(options.logit_bias, vocab_size),
        bad_words=bad_words,
        min_tokens=options.min_tokens or 0,
        seed=seed,
        mode=mode,
    )


def _number(name: str, value: float | None, default: float, allowed: Range) -> float:
    if value is None:
        return default
    if value not in allowed:
        raise InvalidRequest(f"{name} must be in {allowed}, got {shown(value)}", name)
    return float(value)


def _verification(
    temperature: float, seed: int | None, mode: VerificationMode | None
) -> tuple[VerificationMode, int]:
    """Choose how drafted tokens are verified, and the key of the sequence's randomness.

    A client that gives a seed wants the same text again: only coupled mode promises that whatever the draft,
    the load and the failures. Without one, rejection mode accepts more.
    """
    if seed is not None and not 0 <= seed < 2**SEED_BITS:
        raise InvalidRequest(f"seed must be in [0, 2^{SEED_BITS})", "seed")
    key = secrets.randbits(SEED_BITS) if seed is None else seed
    if temperature <= GREEDY_TEMPERATURE:
        return VerificationMode.GREEDY, key
    if mode is None:
        mode = VerificationMode.REJECTION if seed is None else VerificationMode.COUPLED
    return mode, key


def _top_k(value: int | None, vocab_size: int) -> int:
    if value is None or value == -1:
        return 0
    if value < 0:
        raise InvalidRequest(f"top_k must be at least 0, or -1 for all tokens, got {shown(value)}", "top_k")
    # Any k that keeps the whole vocabulary is the same request; an absurd one must not reach the workers.
    return value if value < vocab_size else 0


def _logit_bias(entries: tuple[tuple[int, float], ...], vocab_size: int) -> tuple[tuple[int, float], ...]:
    seen: set[int] = set()
    for token_id, bias in entries:
        _check_token_id("logit_bias", token_id, vocab_size)
        if bias not in LOGIT_BIAS:
            raise InvalidRequest(
                f"logit_bias values must be in {LOGIT_BIAS}, got {shown(bias)}", "logit_bias"
            )
        if token_id in seen:
            raise InvalidRequest(f"logit_bias names token id {token_id} twice", "logit_bias")
        seen.add(token_id)
    return tuple((token_id, float(bias)) for token_id, bias in entries)


def _stop_token_ids(options: SamplingOptions, model_info: ModelInfo) -> frozenset[int]:
    for token_id in options.stop_token_ids:
        _check_token_id("stop_token_ids", token_id, model_info.vocab_size)
    own = frozenset[int]() if options.ignore_eos else model_info.eos_token_ids
    return own.union(options.stop_token_ids)


def _check_token_id(name: str, token_id: int, vocab_size: int) -> None:
    if not 0 <= token_id < vocab_size:
        raise InvalidRequest(
            f"{name}: token id {shown(token_id)} is outside the vocabulary [0, {vocab_size})", name
        )


def _max_tokens(prompt: Prompt, prompt_len: int, options: SamplingOptions, max_context: int) -> int:
    """At least 1: where nothing but the prompt is asked for, one token is generated and dropped."""
    asked, least = options.max_tokens, options.min_tokens or 0
    room = max_context - prompt_len
    # OpenAI's words, and "prompt is too long" below: LangChain and LiteLLM tell this error by them.
    limit = f"this model's maximum context length is {max_context} tokens"
    if room <= 0:
        raise ContextLengthExceeded(
            f"the prompt is too long: it has {prompt_len} tokens, and {limit}, with at least one for the"
            " output: shorten the prompt",
            param_of(prompt),
        )
    for name, value in (("min_tokens", least), ("max_tokens", asked)):
        if value is not None and value > room:
            raise ContextLengthExceeded(
                f"the prompt has {prompt_len} tokens and {name} asks for {shown(value)} more, but {limit}:"
                f" shorten the prompt or ask for at most {room}",
                name,
            )
    return room if asked is None else max(asked, 1)


def _max_draft_tokens(speculative: SpeculativeOptions, config: AppConfig) -> int | None:
    asked = speculative.num_speculative_tokens
    most = MAX_SPECULATIVE_TOKENS
    if asked is not None and not 0 <= asked <= most:
        raise InvalidRequest(
            f"speculative.num_speculative_tokens must be in [0, {most}], got {shown(asked)}",
            "speculative.num_speculative_tokens",
        )
    return asked
