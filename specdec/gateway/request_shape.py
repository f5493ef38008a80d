"""Checks of how much a request asks for: prompts, choices, log-probabilities. Pure, and before tokenizing."""

from __future__ import annotations

from specdec.config import AppConfig
from specdec.errors import InvalidRequest
from specdec.gateway.requests import ChatPrompt, ClientRequest

MAX_BAD_WORDS = 64
MAX_BAD_WORD_CHARS = 256
"""Every word is looked for behind every token, draft tokens included."""


def check_shape(request: ClientRequest, config: AppConfig) -> None:
    """Refuse what asks for too much, or for what contradicts itself.

    Raises:
        InvalidRequest: ``param`` names the field at fault.
    """
    _check_choices(request, config.gateway.max_choices)
    _check_number_of_sequences(request, config)
    _check_logprobs(request, config.gateway.max_logprobs)
    _check_length(request)
    _check_grammar(request)
    _check_bad_words(request.sampling.bad_words)


def _check_choices(request: ClientRequest, most: int) -> None:
    for name, value in (("n", request.n), ("best_of", request.best_of)):
        if value is not None and not 1 <= value <= most:
            raise InvalidRequest(f"{name} must be in [1, {most}], got {shown(value)}", name)
    if request.best_of is not None and request.best_of < (request.n or 1):
        raise InvalidRequest(f"best_of must be at least n, which is {request.n or 1}", "best_of")


def _check_number_of_sequences(request: ClientRequest, config: AppConfig) -> None:
    num_prompts, most = len(request.prompts), config.gateway.max_prompts
    if not 1 <= num_prompts <= most:
        raise InvalidRequest(f"prompt must hold 1 to {most} prompts, got {num_prompts}", "prompt")
    candidates = request.best_of or request.n or 1
    room = config.coordinator.max_num_seqs + config.coordinator.max_waiting_of(request.client)
    if num_prompts * candidates > room:
        field = "best_of" if request.best_of else "n" if candidates > 1 else "prompt"
        raise InvalidRequest(
            f"{field}: {num_prompts} prompts with {candidates} choices are {num_prompts * candidates}"
            f" sequences, more than the {room} this deployment can take at once",
            field,
        )


def _check_logprobs(request: ClientRequest, most: int) -> None:
    value, name = request.num_logprobs, request.logprobs_field
    if value is not None and not 0 <= value <= most:
        raise InvalidRequest(f"{name} must be in [0, {most}], got {shown(value)}", name)


def _check_length(request: ClientRequest) -> None:
    asked, least = request.sampling.max_tokens, request.sampling.min_tokens
    lowest = 0 if request.echo else 1
    if asked is not None and asked < lowest:
        raise InvalidRequest(
            f"max_tokens must be at least 1 (0 only with echo), got {shown(asked)}", "max_tokens"
        )
    if least is not None and least < 0:
        raise InvalidRequest(f"min_tokens must be at least 0, got {shown(least)}", "min_tokens")
    if least is not None and asked is not None and least > asked:
        raise InvalidRequest(
            f"min_tokens is {shown(least)}, more than max_tokens, which is {asked}", "min_tokens"
        )


def _check_grammar(request: ClientRequest) -> None:
    options = request.sampling
    holds_calls = any(isinstance(prompt, ChatPrompt) and prompt.holds_calls for prompt in request.prompts)
    if options.constraint is None and not holds_calls:
        return
    for name, value in (("min_tokens", options.min_tokens), ("ignore_eos", options.ignore_eos)):
        if value:
            raise InvalidRequest(
                f"{name} cannot be kept together with a grammar, which says where the output ends", name
            )


def _check_bad_words(words: tuple[str, ...]) -> None:
    if len(words) > MAX_BAD_WORDS:
        raise InvalidRequest(
            f"bad_words has {len(words)} words, at most {MAX_BAD_WORDS} are allowed", "bad_words"
        )
    if not all(1 <= len(word) <= MAX_BAD_WORD_CHARS for word in words):
        raise InvalidRequest(f"bad_words must have 1 to {MAX_BAD_WORD_CHARS} characters", "bad_words")


def shown(value: float) -> str:
    """Write a client's number for an error message; huge integers are shortened."""
    return (
        f"{value:.6g}" if isinstance(value, float) else str(value) if abs(value) < 10**20 else "a huge number"
    )
