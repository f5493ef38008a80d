"""Protobuf messages to and from the gateway's own values."""

from __future__ import annotations

from typing import assert_never

from specdec.errors import InvalidRequest
from specdec.gateway import structured
from specdec.gateway.events import (
    Choice,
    Completion,
    Finished,
    GenerationEvent,
    PromptEcho,
    ScoredToken,
    TextDelta,
    Usage,
)
from specdec.gateway.grpc_tools import to_tool_use, write_answer, write_delta
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
    ToolCall,
)
from specdec.gateway.structured import Constraint
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


def to_client_request(
    request: pb.GenerateRequest, request_id: str, timeout_s: float | None, client: str = ""
) -> ClientRequest:
    """Translate a request.

    Raises:
        InvalidRequest: it has no prompt, an enum value this server does not know, malformed tools, or fields
            that contradict each other.
    """
    if request.prompt_logprobs and not request.HasField("logprobs"):
        raise InvalidRequest("prompt_logprobs is only allowed with logprobs", "prompt_logprobs")
    return ClientRequest(
        request_id=request_id,
        prompts=(_prompt(request),),
        n=request.n if request.HasField("n") else None,
        echo=request.prompt_logprobs,
        num_logprobs=request.logprobs if request.HasField("logprobs") else None,
        model=request.model or None,
        sampling=_sampling_options(request.sampling),
        speculative=_speculative_options(request.speculative),
        timeout_s=timeout_s,
        client=client,
    )


def to_response(
    completion: Completion, request_id: str, model: str, wants_metrics: bool
) -> pb.GenerateResponse:
    """Translate a whole generation."""
    totals = completion.totals
    return pb.GenerateResponse(
        id=request_id,
        model=model,
        choices=map(_choice, completion.choices),
        usage=_usage(totals.usage),
        speculative_metrics=_metrics(totals.stats) if wants_metrics else None,
    )


def to_stream_response(
    event: GenerationEvent, request_id: str, model: str, wants_metrics: bool
) -> pb.GenerateStreamResponse:
    """Translate one event of a generation."""
    message = pb.GenerateStreamResponse(id=request_id, model=model, choice=event.index)
    match event:
        case PromptEcho():
            message.prompt_logprobs.extend(map(_token_logprob, event.tokens))
        case TextDelta():
            if event.parts is None:
                message.text = event.text
            else:
                write_delta(event.parts, message)
            message.token_ids.extend(event.token_ids)
            message.logprobs.extend(map(_token_logprob, event.tokens))
        case Finished():
            message.finish_reason = _finish_reason(event.finish_reason, has_calls=event.has_calls)
            if event.totals is not None:
                message.usage.CopyFrom(_usage(event.totals.usage))
                if wants_metrics:
                    message.speculative_metrics.CopyFrom(_metrics(event.totals.stats))
        case _:
            assert_never(event)
    return message


def _choice(choice: Choice) -> pb.Choice:
    message = pb.Choice(
        index=choice.index,
        text=choice.text,
        token_ids=choice.token_ids,
        finish_reason=_finish_reason(choice.finish_reason, has_calls=choice.has_calls),
        logprobs=map(_token_logprob, choice.tokens),
        prompt_logprobs=map(_token_logprob, choice.echo.tokens if choice.echo is not None else ()),
    )
    if choice.parts is not None:
        write_answer(choice.parts, message)
    return message


def _finish_reason(reason: FinishReason, *, has_calls: bool) -> pb.FinishReason:
    if has_calls and reason == "stop":
        return pb.FINISH_REASON_TOOL_CALLS
    return _FINISH_REASONS[reason]


def _token_logprob(token: ScoredToken) -> pb.TokenLogprob:
    return pb.TokenLogprob(
        token_id=token.token_id,
        token=token.utf8,
        logprob=token.logprob,
        top=[
            pb.TopLogprob(token_id=likely.token_id, token=likely.utf8, logprob=likely.logprob)
            for likely in token.top
        ],
    )


def _prompt(request: pb.GenerateRequest) -> Prompt:
    tools = to_tool_use(request)
    match request.WhichOneof("prompt"):
        case "text":
            return TextPrompt(text=request.text)
        case "messages":
            return ChatPrompt(messages=tuple(map(_message, request.messages.messages)), tools=tools)
        case "token_ids":
            return TokenPrompt(token_ids=tuple(request.token_ids.ids))
        case _:
            raise InvalidRequest("a prompt is required: set text, messages or token_ids", "prompt")


def to_prompt(request: pb.TokenizeRequest) -> Prompt:
    """Translate the prompt of a request to tokenize.

    Raises:
        InvalidRequest: it has none, or fields that contradict each other.
    """
    adds = request.add_special_tokens if request.HasField("add_special_tokens") else None
    match request.WhichOneof("prompt"):
        case "text":
            return TextPrompt(text=request.text, add_special_tokens=adds is not False)
        case "messages" if adds:
            raise InvalidRequest("a conversation has its template's special tokens", "add_special_tokens")
        case "messages":
            return ChatPrompt(messages=tuple(map(_message, request.messages.messages)))
        case _:
            raise InvalidRequest("a prompt is required: set text or messages", "prompt")


def _message(message: pb.ChatMessage) -> ChatMessage:
    return ChatMessage(
        role=message.role,
        content=message.content,
        name=message.name if message.HasField("name") else None,
        tool_call_id=message.tool_call_id if message.HasField("tool_call_id") else None,
        tool_calls=tuple(
            ToolCall(id=call.id, name=call.name, arguments=call.arguments) for call in message.tool_calls
        ),
        reasoning=message.reasoning_content,
    )


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
        min_tokens=options.min_tokens if has("min_tokens") else None,
        bad_words=tuple(options.bad_words),
        constraint=_constraint(options),
    )


def _constraint(options: pb.SamplingOptions) -> Constraint | None:
    match options.WhichOneof("constraint"):
        case "json_schema" as field:
            return structured.json_schema(options.json_schema, field)
        case "regex" as field:
            return structured.regex(options.regex, field)
        case "grammar" as field:
            return structured.lark(options.grammar, field)
        case "choice" as field:
            return structured.choice(list(options.choice.texts), field)
        case _:
            return None


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
