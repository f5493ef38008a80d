"""The one service behind HTTP and gRPC: checks a request, submits it, and turns committed tokens into text.

Knows nothing of either protocol, nor of what is behind the `Backend`.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from contextlib import aclosing, contextmanager
from dataclasses import replace
from typing import TypeVar

from specdec.config import AppConfig
from specdec.errors import DeadlineExceeded, GenerationFailed, UnknownModel
from specdec.gateway.backend import Backend
from specdec.gateway.events import Finished, GenerationEvent, TextDelta, Usage
from specdec.gateway.keys import ApiKeys
from specdec.gateway.prompts import PromptEncoder, PromptTokenizer, copy_of_backend
from specdec.gateway.requests import ClientRequest
from specdec.gateway.text import SequenceText, TextPiece
from specdec.gateway.validation import build_generation_request
from specdec.messages import CoordinatorStatus
from specdec.speculation.stats import AcceptanceCounter
from specdec.types import FinishReason, GenerationRequest, ModelInfo, TokenChunk

Result = TypeVar("Result")


class _Pace:
    """When the streams of one gateway may send again: each has an equal share of the messages per second."""

    def __init__(self, max_messages_per_s: float) -> None:
        self._max_messages_per_s = max_messages_per_s
        self._num_streams = 0

    @contextmanager
    def stream(self) -> Iterator[Callable[[], float]]:
        """Count one stream; gives its `not_before` (see `Backend.generate`).

        It lets the first text go at once. As long as rounds take longer than the share's interval, each is
        sent as it comes.
        """
        has_sent = False

        def not_before_s() -> float:
            nonlocal has_sent
            interval_s = self._num_streams / self._max_messages_per_s if has_sent else 0.0
            has_sent = True
            return asyncio.get_running_loop().time() + interval_s

        self._num_streams += 1
        try:
            yield not_before_s
        finally:
            self._num_streams -= 1


class GenerationService:
    """One gateway's service.

    Args:
        backend: where tokens come from.
        tokenizer: the target's; a ``transformers.PreTrainedTokenizerBase`` with a fast backend.
        config: the deployment's configuration.
        model_info: facts about the target model.
        created: Unix time in whole seconds, shown by ``/v1/models``.

    Raises:
        ConfigError: the tokenizer has no fast backend, or the file of API keys cannot be used.
    """

    def __init__(
        self,
        backend: Backend,
        tokenizer: PromptTokenizer,
        config: AppConfig,
        model_info: ModelInfo,
        created: int = 0,
    ) -> None:
        self.config = config
        self.created = created
        self.keys = ApiKeys.load(config.gateway.api_keys_file)
        self._backend = backend
        self._prompt_encoder = PromptEncoder(tokenizer, model_info.vocab_size)
        self._decoding_tokenizer = copy_of_backend(tokenizer)
        self._model_info = model_info
        self._pace = _Pace(config.gateway.max_stream_messages_per_s)

    @property
    def model_name(self) -> str:
        return self.config.model_name

    @property
    def model_info(self) -> ModelInfo:
        """The model's facts, with the context bounded by what target workers report."""
        reported = [status.max_context for status in self._backend.statuses() if status.max_context > 0]
        return replace(self._model_info, max_context=min([self._model_info.max_context, *reported]))

    def is_ready(self) -> bool:
        """Whether a request sent now would be served."""
        return self._backend.is_ready()

    def coordinators(self) -> tuple[CoordinatorStatus, ...]:
        """The coordinators known, as of the last poll."""
        return self._backend.statuses()

    def check_model(self, name: str | None) -> None:
        """Accept the served model's name, or none.

        Raises:
            UnknownModel: it is another name.
        """
        if name and name != self.model_name:
            raise UnknownModel(
                f"the model {name[:200]!r} is not served here; {self.model_name!r} is", "model"
            )

    def timeout_s(self, request: ClientRequest) -> float:
        """Seconds the request may take: the client's deadline or the gateway's, whichever is shorter."""
        limit = self.config.gateway.request_timeout_s
        return limit if request.timeout_s is None else min(limit, request.timeout_s)

    async def generate(self, request: ClientRequest) -> AsyncGenerator[GenerationEvent, None]:
        """Yield text as it is committed, then one `Finished`.

        The first text comes at once. Under load what several rounds committed comes in one piece: see
        ``gateway.max_stream_messages_per_s``.

        All that is wrong with a request raises before the first event. Close the generator to cancel: the
        backend's generator is closed before ``aclose()`` returns, and as soon as a stop string is complete.

        Raises:
            RequestError: the request cannot be served as it stands.
            ServiceUnavailable: nothing can serve it now, or it could not be completed.
            DeadlineExceeded: it took longer than its deadline.
        """
        deadline = asyncio.get_running_loop().time() + self.timeout_s(request)
        generation = await _until(deadline, self._prepare(request))
        text = SequenceText(
            self._decoding_tokenizer,
            stop_strings=request.sampling.stop,
            stop_token_ids=generation.stop.stop_token_ids,
        )
        counter = AcceptanceCounter()
        num_tokens = 0
        with self._pace.stream() as not_before:
            async with aclosing(self._backend.generate(generation, not_before)) as batches:
                while True:
                    batch = await _next_batch(batches, deadline)
                    piece = _text_of(batch, text, counter)
                    num_tokens += len(piece.token_ids)
                    if text.is_stopped or batch[-1].is_last:
                        break
                    if piece.token_ids:
                        yield TextDelta(text=piece.text, token_ids=piece.token_ids)
        last = TextDelta(text=piece.text + text.finish(), token_ids=piece.token_ids)
        if last.text or last.token_ids:
            yield last
        yield Finished(
            finish_reason=_finish_reason(text, batch[-1]),
            usage=Usage(prompt_tokens=len(generation.prompt_ids), completion_tokens=num_tokens),
            stats=counter.snapshot(),
        )

    async def _prepare(self, request: ClientRequest) -> GenerationRequest:
        self.check_model(request.model)
        prompt_ids = await self._prompt_encoder.encode(request.prompt)
        return build_generation_request(request, prompt_ids, config=self.config, model_info=self.model_info)


async def _until(deadline: float, work: Awaitable[Result]) -> Result:
    """Await ``work``; give it up at the deadline (in the running loop's time)."""
    try:
        async with asyncio.timeout_at(deadline) as scope:
            return await work
    except TimeoutError as error:
        if not scope.expired():
            raise
        raise DeadlineExceeded("the request was not finished by its deadline") from error


async def _next_batch(
    batches: AsyncGenerator[tuple[TokenChunk, ...], None], deadline: float
) -> tuple[TokenChunk, ...]:
    batch = await _until(deadline, anext(batches, None))
    if batch is None:
        raise GenerationFailed("the generation ended unexpectedly")
    if batch[-1].error is not None:
        raise GenerationFailed(batch[-1].error)
    if batch[-1].is_last:
        # Let the backend come to its end: closed before it, a finished sequence looks cancelled.
        await _until(deadline, anext(batches, None))
    return batch


def _text_of(batch: tuple[TokenChunk, ...], text: SequenceText, counter: AcceptanceCounter) -> TextPiece:
    """Take the rounds of one batch, up to the one with which the sequence ends."""
    texts: list[str] = []
    token_ids: list[int] = []
    for chunk in batch:
        piece = text.push(chunk.token_ids)
        counter.record(chunk.num_drafted, chunk.num_accepted)
        texts.append(piece.text)
        token_ids += piece.token_ids
        if text.is_stopped:
            break
    return TextPiece(text="".join(texts), token_ids=tuple(token_ids))


def _finish_reason(text: SequenceText, last_chunk: TokenChunk) -> FinishReason:
    if text.is_stopped or last_chunk.finish_reason is None:
        return "stop"
    return last_chunk.finish_reason
