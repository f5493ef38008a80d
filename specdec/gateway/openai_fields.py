"""What the bodies of all generating requests have in common, and how single fields are read.

Every optional field accepts null. A field that would change the output and is not supported is accepted only
with the value that changes nothing; any unknown field is an error. Ranges are not checked here but where HTTP
and gRPC meet, in `specdec.gateway.validation` and `specdec.gateway.request_shape`.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict
from pydantic_core import PydanticCustomError

from specdec.errors import InvalidRequest
from specdec.gateway.requests import SamplingOptions, SpeculativeOptions
from specdec.gateway.structured import Constraint
from specdec.types import Pipeline, VerificationMode


def only(*accepted: object) -> AfterValidator:
    """Accept these values of a field that is not supported otherwise."""

    def check(value: object) -> object:
        if value not in accepted:
            raise PydanticCustomError(
                "unsupported",
                "this value is not supported yet: leave the field out or send {accepted}",
                {"accepted": " or ".join("null" if item is None else repr(item) for item in accepted)},
            )
        return value

    return AfterValidator(check)


def _strings(value: object) -> object:
    return [value] if isinstance(value, str) else value


_ONE_OR_SEVERAL = BeforeValidator(_strings, json_schema_input_type=str | list[str] | None)


class Fields(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class StreamOptions(Fields):
    include_usage: bool | None = None
    include_obfuscation: Annotated[bool | None, only(None, False)] = None


class SpeculativeFields(Fields):
    """specdec's own: how this request is decoded. Nothing here changes the law of the output."""

    num_speculative_tokens: int | None = None
    mode: Literal["rejection", "coupled"] | None = None
    pipeline: Pipeline | None = None
    metrics: bool | None = None
    """Return this request's acceptance counters."""


class GenerationFields(Fields):
    """What chat and text completions have in common."""

    model: str | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    seed: int | None = None
    stop: Annotated[list[str] | None, _ONE_OR_SEVERAL] = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    bad_words: Annotated[list[str] | None, _ONE_OR_SEVERAL] = None
    n: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    speculative: SpeculativeFields | None = None
    user: str | None = None

    # Change nothing in the output.
    store: bool | None = None
    metadata: dict[str, object] | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None

    @property
    def wants_metrics(self) -> bool:
        return self.speculative is not None and bool(self.speculative.metrics)

    @property
    def wants_usage_chunk(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    def check_stream_options(self) -> None:
        """Refuse options of a stream where there is none.

        Raises:
            InvalidRequest: naming ``stream_options``.
        """
        if self.stream_options is not None and not self.stream:
            raise InvalidRequest("stream_options is only allowed with stream: true", "stream_options")

    def speculative_options(self) -> SpeculativeOptions:
        """Translate ``speculative``."""
        fields = self.speculative or SpeculativeFields()
        return SpeculativeOptions(
            num_speculative_tokens=fields.num_speculative_tokens,
            mode=None if fields.mode is None else VerificationMode(fields.mode),
            pipeline=fields.pipeline,
        )

    def sampling_options(
        self, max_tokens: int | None, constraint: Constraint | None = None
    ) -> SamplingOptions:
        """Translate.

        Args:
            max_tokens: the cap, whatever its field is called.
            constraint: what the answer's content must match.

        Raises:
            InvalidRequest: ``logit_bias`` names something else than token ids.
        """
        return SamplingOptions(
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            min_p=self.min_p,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            repetition_penalty=self.repetition_penalty,
            logit_bias=_logit_bias(self.logit_bias or {}),
            seed=self.seed,
            max_tokens=max_tokens,
            min_tokens=self.min_tokens,
            stop=tuple(self.stop or ()),
            stop_token_ids=tuple(self.stop_token_ids or ()),
            ignore_eos=bool(self.ignore_eos),
            bad_words=tuple(self.bad_words or ()),
            constraint=constraint,
        )


def _logit_bias(entries: dict[str, float]) -> tuple[tuple[int, float], ...]:
    """JSON object keys are strings; these hold token ids."""
    for key in entries:
        if not (key.isascii() and key.isdecimal() and len(key) <= 10):
            raise InvalidRequest(f"logit_bias keys must be token ids, got {key[:40]!r}", "logit_bias")
    return tuple((int(key), bias) for key, bias in entries.items())
