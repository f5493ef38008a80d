"""The choices of one request: which sequences they are, and the events each sequence gives."""

from __future__ import annotations

import asyncio
import hashlib
import secrets
from collections.abc import AsyncGenerator, Awaitable, Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import TypeVar

from tokenizers import Tokenizer

from specdec.errors import DeadlineExceeded, GenerationFailed, InvariantViolation
from specdec.gateway.answer_events import with_parts
from specdec.gateway.answer_style import parser_of
from specdec.gateway.answers import PlainParser, TextParser
from specdec.gateway.backend import Backend
from specdec.gateway.echo import EchoedPrompt
from specdec.gateway.events import (
    Choice,
    Completion,
    Finished,
    GenerationEvent,
    ScoredToken,
    TextDelta,
    Totals,
    Usage,
)
from specdec.gateway.output_grammars import OutputShape
from specdec.gateway.pace import Pace
from specdec.gateway.requests import ClientRequest
from specdec.gateway.text import SequenceText
from specdec.gateway.vocabulary import Vocabulary, mean_logprob
from specdec.speculation.stats import AcceptanceCounter
from specdec.types import FinishReason, GenerationRequest, SequenceId, TokenChunk

SEED_BYTES = 8

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True, kw_only=True)
class SequencePlan:
    """One sequence to run, and the choices it answers."""

    generation: GenerationRequest
    indices: tuple[int, ...]
    """Several where the choices of a prompt cannot but be identical."""
    stop_strings: tuple[str, ...]
    echo: EchoedPrompt | None
    parser: TextParser | None
    """Of its text; None where all of it is content."""
    places_tokens: bool
    """Parts of content have their tokens."""
    keeps_output: bool
    """False: the one token it generates was not asked for, only the prompt."""


@dataclass(slots=True)
class Tally:
    """What the sequences of one request add up to."""

    prompt_tokens: int
    completion_tokens: int = 0
    counter: AcceptanceCounter = field(default_factory=AcceptanceCounter)

    def totals(self) -> Totals:
        usage = Usage(prompt_tokens=self.prompt_tokens, completion_tokens=self.completion_tokens)
        return Totals(usage=usage, stats=self.counter.snapshot())


def num_candidates(request: ClientRequest) -> int:
    """Choices generated for each prompt, whether returned or not."""
    return request.best_of or request.n or 1


def plan_sequences(
    request: ClientRequest,
    generation: GenerationRequest,
    prompt_no: int,
    echo: EchoedPrompt | None,
    shape: OutputShape,
) -> Iterator[SequencePlan]:
    """Yield the sequences of one prompt.

    Greedy choices are identical: one sequence answers all of them. Of others, the first has the request's own
    seed, so that it does not change with the number of choices.
    """
    num_choices = num_candidates(request)
    first = prompt_no * num_choices
    indices = tuple(range(first, first + num_choices))
    groups = [indices] if generation.sampling.is_greedy else [(index,) for index in indices]
    for number, group in enumerate(groups):
        yield SequencePlan(
            generation=replace(
                generation,
                sequence_id=SequenceId(f"{request.request_id}-{group[0]}"),
                sampling=replace(generation.sampling, seed=_seed(request, generation, number)),
            ),
            indices=group,
            stop_strings=request.sampling.stop,
            echo=echo,
            parser=parser_of(shape) or (PlainParser() if request.places_tokens else None),
            places_tokens=request.places_tokens,
            keeps_output=request.sampling.max_tokens != 0,
        )


def _seed(request: ClientRequest, generation: GenerationRequest, number: int) -> int:
    own = generation.sampling.seed
    if number == 0:
        return own
    if request.sampling.seed is None:
        return secrets.randbits(8 * SEED_BYTES)
    digest = hashlib.blake2b(f"{own}:{number}".encode(), digest_size=SEED_BYTES).digest()
    return int.from_bytes(digest, "little")


def best_choices(request: ClientRequest, completion: Completion) -> Completion:
    """Keep of each prompt's candidates those with the highest mean log-probability, best first.

    What is not returned stays in the totals.
    """
    candidates, returned = num_candidates(request), request.n or 1
    if candidates == returned:
        return completion
    kept: list[Choice] = []
    for start in range(0, len(completion.choices), candidates):
        group = completion.choices[start : start + candidates]
        kept += sorted(group, key=lambda choice: mean_logprob(choice.tokens), reverse=True)[:returned]
    choices = [replace(choice, index=index) for index, choice in enumerate(kept)]
    if request.num_logprobs is None:
        choices = [replace(choice, tokens=()) for choice in choices]
    return replace(completion, choices=tuple(choices))


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceRunner:
    """Runs sequences of one gateway."""

    backend: Backend
    tokenizer: Tokenizer
    vocabulary: Vocabulary
    pace: Pace

    def events(
        self, plan: SequencePlan, tally: Tally, deadline: float
    ) -> AsyncGenerator[GenerationEvent, None]:
        """Yield the events of all choices the sequence answers.

        The sequence has ended on every worker when a `Finished` is yielded, and when this is closed.

        Args:
            plan: the sequence.
            tally: of the request; counted up.
            deadline: in the running loop's time.
        """
        events = self._events(plan, tally, deadline)
        if plan.parser is not None:
            events = with_parts(events, plan.parser, places_tokens=plan.places_tokens)
        return events if len(plan.indices) == 1 else _repeated(events, plan.indices[1:])

    async def _events(
        self, plan: SequencePlan, tally: Tally, deadline: float
    ) -> AsyncGenerator[GenerationEvent, None]:
        index = plan.indices[0]
        text = SequenceText(
            self.tokenizer,
            stop_strings=plan.stop_strings,
            stop_token_ids=plan.generation.stop.stop_token_ids,
            min_tokens=plan.generation.sampling.min_tokens,
        )
        start = len(plan.echo.text) if plan.echo is not None else 0
        with self.pace.stream() as not_before:
            async with aclosing(self.backend.generate(plan.generation, not_before)) as batches:
                batch = await _next_batch(batches, deadline)
                if plan.echo is not None:
                    scores = batch[0].prompt_logprobs if plan.generation.wants_prompt_logprobs else None
                    yield plan.echo.event(index, scores, self.vocabulary)
                while True:
                    delta = self._delta(batch, text, plan, tally, start)
                    if text.is_stopped or batch[-1].is_last:
                        break
                    if delta.token_ids:
                        yield delta
                    batch = await _next_batch(batches, deadline)
        last = replace(delta, text=delta.text + text.finish())
        if last.text or last.token_ids:
            yield last
        yield Finished(index=index, finish_reason=_finish_reason(plan, text, batch[-1]))

    def _delta(
        self, batch: tuple[TokenChunk, ...], text: SequenceText, plan: SequencePlan, tally: Tally, start: int
    ) -> TextDelta:
        """Take the rounds of one batch, up to the one with which the sequence ends."""
        texts: list[str] = []
        token_ids: list[int] = []
        tokens: list[ScoredToken] = []
        for chunk in batch:
            tally.counter.record(chunk.num_drafted, chunk.num_accepted)
            if not plan.keeps_output:
                continue
            piece = text.push(chunk.token_ids)
            texts.append(piece.text)
            token_ids += piece.token_ids
            if plan.generation.num_logprobs is not None:
                tokens += self._scored(chunk, piece.offsets, start)
            if text.is_stopped:
                break
        tally.completion_tokens += len(token_ids) * len(plan.indices)
        return TextDelta(
            index=plan.indices[0], text="".join(texts), token_ids=tuple(token_ids), tokens=tuple(tokens)
        )

    def _scored(self, chunk: TokenChunk, offsets: Sequence[int], start: int) -> Iterator[ScoredToken]:
        """Yield the tokens of a round that were taken: one for each offset."""
        if len(chunk.logprobs) != len(chunk.token_ids):
            raise InvariantViolation(f"{len(chunk.logprobs)} logprobs of {len(chunk.token_ids)} tokens")
        for token, offset in zip(chunk.logprobs, offsets, strict=False):
            yield self.vocabulary.scored(token, start + offset)


async def until(deadline: float, work: Awaitable[Result]) -> Result:
    """Await ``work``; give it up at the deadline (in the running loop's time).

    Raises:
        DeadlineExceeded: it was not done by then.
    """
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
    batch = await until(deadline, anext(batches, None))
    if batch is None:
        raise GenerationFailed("the generation ended unexpectedly")
    if batch[-1].error is not None:
        raise GenerationFailed(batch[-1].error)
    if batch[-1].is_last:
        # Let the backend come to its end: closed before it, a finished sequence looks cancelled.
        await until(deadline, anext(batches, None))
    return batch


async def _repeated(
    events: AsyncGenerator[GenerationEvent, None], indices: Sequence[int]
) -> AsyncGenerator[GenerationEvent, None]:
    """Yield each event, and the same for other choices."""
    async with aclosing(events):
        async for event in events:
            yield event
            for index in indices:
                yield replace(event, index=index)


def _finish_reason(plan: SequencePlan, text: SequenceText, last_chunk: TokenChunk) -> FinishReason:
    if not plan.keeps_output:
        return "length"
    if text.is_stopped or last_chunk.finish_reason is None:
        return "stop"
    return last_chunk.finish_reason
