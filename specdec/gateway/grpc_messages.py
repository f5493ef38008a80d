"""Protobuf messages to and from the gateway's own values."""

from __future__ import annotations

from specdec.errors import InvalidRequest
from specdec.gateway.events import Completion, Finished, TextDelta, Usage
from specdec.gateway.proto import generation_pb2 as pb
from specdec.gateway.requests import (
    ChatMessage,
    ChatPrompt,
    ClientRequest,
    Prompt,
    SamplingOptions,
    SpeculativeOptions,
    TextPrompt,
    TokenPrompt,
)
from specdec.types import FinishReason, Pipeline, SpeculationStats, VerificationMode

_FINISH_REASONS: dict[FinishReason, pb.FinishReason] = {
    "stop": pb.FINISH_REASON_STOP,
    "length": pb.FINISH_REASON_LENGTH,
}

_MODES: dict[int, VerificationMode | None] = {
    pb.VERIFICATION_MODE_UNSPECIFIED: None,
    pb.VERIFICATION_MODE_REJECTION: VerificationMode.REJECTION,
    pb.VERIFICATION_MODE_COUPLED: VerificationMode.COUPLED,
}
_PIPELINES: dict[int, Pipeline | None] = {
    pb.PIPELINE_UNSPECIFIED: None,
    pb.PIPELINE_SERIAL: "serial",
    pb.PIPELINE_LOOKAHEAD: "lookahead",
    pb.PIPELINE_AUTO: "auto",
}


def to_client_request(request: pb.GenerateRequest, request_id: str, timeout_s: float | None) -> ClientRequest:
    """Translate a request.

    Raises:
        InvalidRequest: it has no prompt, or an enum value this server does not know.
    """
    return ClientRequest(
        request_id=request_id,
        prompt=_prompt(request),
        model=request.model or None,
        sampling=_sampling_options(request.sampling),
        speculative=_speculative_options(request.speculative),
        timeout_s=timeout_s,
    )


def to_response(
    completion: Completion, request_id: str, model: str, wants_metrics: bool
) -> pb.GenerateResponse:
    """Translate a whole generation."""
    finished = completion.finished
    return pb.GenerateResponse(
        id=request_id,
        model=model,
        text=completion.text,
        token_ids=completion.token_ids,
        finish_reason=_FINISH_REASONS[finished.finish_reason],
        usage=_usage(finished.usage),
        speculative_metrics=_metrics(finished.stats) if wants_metrics else None,
    )


def to_stream_response(
    event: TextDelta | Finished, request_id: str, model: str, wants_metrics: bool
) -> pb.GenerateStreamResponse:
    """Translate one event of a generation."""
    if isinstance(event, TextDelta):
        return pb.GenerateStreamResponse(
            id=request_id, model=model, text=event.text, token_ids=event.token_ids
        )
    return pb.GenerateStreamResponse(
        id=request_id,
        model=model,
        finish_reason=_FINISH_REASONS[event.finish_reason],
        usage=_usage(event.usage),
        speculative_metrics=_metrics(event.stats) if wants_metrics else None,
    )


def _prompt(request: pb.GenerateRequest) -> Prompt:
    match request.WhichOneof("prompt"):
        case "text":
            return TextPrompt(text=request.text)
        case "messages":
            messages = request.messages.messages
            return ChatPrompt(
                messages=tuple(ChatMessage(role=item.role, content=item.content) for item in messages)
            )
        case "token_ids":
            return TokenPrompt(token_ids=tuple(request.token_ids.ids))
        case _:
            raise InvalidRequest("a prompt is required: set text, messages or token_ids", "prompt")


def _sampling_options(options: pb.SamplingOptions) -> SamplingOptions:
    has = options.HasField
    return SamplingOptions(
        temperature=options.temperature if has("temperature") else None,
        top_p=options.top_p if has("top_p") else None,
        top_k=options.top_k if has("top_k") else None,
        min_p=options.min_p if has("min_p") else None,
        presence_penalty=options.presence_penalty if has("presence_penalty") else None,
        frequency_penalty=options.frequency_penalty if has("frequency_penalty") else None,
        repetition_penalty=options.repetition_penalty if has("repetition_penalty") else None,
        logit_bias=tuple(options.logit_bias.items()),
        seed=options.seed if has("seed") else None,
        max_tokens=options.max_tokens if has("max_tokens") else None,
        stop=tuple(options.stop),
        stop_token_ids=tuple(options.stop_token_ids),
        ignore_eos=options.ignore_eos,
    )


def _speculative_options(options: pb.SpeculativeOptions) -> SpeculativeOptions:
    if options.mode not in _MODES:
        raise InvalidRequest(f"unknown verification mode {options.mode}", "speculative.mode")
    if options.pipeline not in _PIPELINES:
        raise InvalidRequest(f"unknown pipeline {options.pipeline}", "speculative.pipeline")
    return SpeculativeOptions(
        num_speculative_tokens=(
            options.num_speculative_tokens if options.HasField("num_speculative_tokens") else None
        ),
        mode=_MODES[options.mode],
        pipeline=_PIPELINES[options.pipeline],
    )


def _usage(usage: Usage) -> pb.Usage:
    return pb.Usage(
        prompt_tokens=usage.prompt_tokens,
        completion_tokens=usage.completion_tokens,
        total_tokens=usage.total_tokens,
    )


def _metrics(stats: SpeculationStats) -> pb.SpeculativeMetrics:
    return pb.SpeculativeMetrics(
        num_spec_steps=stats.num_spec_steps,
        num_draft_tokens=stats.num_draft_tokens,
        num_accepted_draft_tokens=stats.num_accepted_draft_tokens,
        mean_acceptance_length=stats.mean_acceptance_length,
        draft_acceptance_rate=stats.draft_acceptance_rate,
        acceptance_histogram=stats.acceptance_histogram,
    )
