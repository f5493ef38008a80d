"""The service between protocols and backend."""

from __future__ import annotations

import asyncio
import time
from contextlib import aclosing

import pytest

from specdec.errors import (
    ContextLengthExceeded,
    DeadlineExceeded,
    GenerationFailed,
    InvalidRequest,
    ServiceUnavailable,
    TooManyRequests,
)
from specdec.gateway.events import Finished, TextDelta, Totals, collect
from specdec.gateway.requests import ClientRequest, SamplingOptions, TextPrompt
from specdec.types import TokenChunk
from tests.fakes import (
    EOS_ID,
    ScriptedBackend,
    byte_ids_of,
    eventually,
    scripted_stats,
    token_ids_of,
    toy_service,
)

COLOURS = [*byte_ids_of("red green blue"), EOS_ID]


def ask(text="one", model=None, timeout_s=None, **options) -> ClientRequest:
    return ClientRequest(
        request_id="cmpl-1",
        prompts=(TextPrompt(text=text),),
        model=model,
        timeout_s=timeout_s,
        sampling=SamplingOptions(**options),
    )


async def events_of(service, request):
    async with aclosing(service.generate(request)) as events:
        return [event async for event in events]


async def only_choice(service, request):
    """The one choice of a generation, and the totals."""
    completion = await collect(service.generate(request))
    (choice,) = completion.choices
    return choice, completion.totals


def text_and_ids_of(events):
    deltas = [event for event in events if isinstance(event, TextDelta)]
    return "".join(delta.text for delta in deltas), [i for delta in deltas for i in delta.token_ids]


@pytest.mark.parametrize("sizes", [(1,), (3,), (1, 4, 2), (100,)])
async def test_text_and_usage_of_a_natural_end(sizes):
    backend = ScriptedBackend(COLOURS, chunk_sizes=sizes)
    choice, totals = await only_choice(toy_service(backend), ask())
    assert choice.text == "red green blue"
    assert choice.token_ids == tuple(COLOURS)  # the EOS token is returned and counted, without text
    assert choice.finish_reason == "stop"
    assert totals.usage.completion_tokens == len(COLOURS)
    assert totals.usage.prompt_tokens == len(token_ids_of("one"))
    assert totals.stats.num_draft_tokens > 0
    assert (backend.num_running, backend.num_closed) == (0, 0)  # ended, not cancelled


@pytest.mark.parametrize("sizes", [(1,), (3,), (100,)])
async def test_stop_string_ends_text_ids_and_usage_at_one_token(sizes):
    backend = ScriptedBackend(COLOURS, chunk_sizes=sizes)
    choice, totals = await only_choice(toy_service(backend), ask(stop=("een bl",)))
    assert choice.text == "red gr"
    assert choice.token_ids == tuple(byte_ids_of("red green bl"))
    assert choice.finish_reason == "stop"
    assert totals.usage.completion_tokens == len("red green bl")
    assert backend.num_running == 0


async def test_stop_string_closes_the_backend_before_the_client_reads_on():
    backend = ScriptedBackend(COLOURS, block_after=9)
    async with aclosing(toy_service(backend).generate(ask(stop=("green",)))) as events:
        while (await anext(events)).token_ids[-1:] != (byte_ids_of("n")[0],):
            pass
        assert (backend.num_running, backend.num_closed) == (0, 1)
        assert isinstance(await anext(events), Finished)


async def test_max_tokens_ends_with_length():
    choice, totals = await only_choice(toy_service(ScriptedBackend(COLOURS)), ask(max_tokens=5))
    assert (choice.text, choice.finish_reason) == ("red g", "length")
    assert totals.usage.completion_tokens == 5


async def test_stop_token_at_the_cap_is_a_stop():
    choice, _ = await only_choice(toy_service(ScriptedBackend(COLOURS)), ask(max_tokens=len(COLOURS)))
    assert choice.finish_reason == "stop"


async def test_ignore_eos_runs_to_the_cap():
    service = toy_service(ScriptedBackend(COLOURS))
    choice, totals = await only_choice(service, ask(ignore_eos=True, max_tokens=50))
    assert choice.finish_reason == "length"
    assert totals.usage.completion_tokens == 50
    assert choice.text.startswith("red green bluered")


async def test_zero_token_answer_counts_its_eos():
    events = await events_of(toy_service(ScriptedBackend([EOS_ID])), ask())
    assert events == [
        TextDelta(text="", token_ids=(EOS_ID,)),
        Finished(finish_reason="stop", totals=Totals(usage=events[1].totals.usage, stats=scripted_stats(1))),
    ]
    assert events[1].totals.usage.completion_tokens == 1


async def test_truncated_character_gives_the_same_text_streamed_or_not():
    service = toy_service(ScriptedBackend(byte_ids_of("ab😀")))
    events = await events_of(service, ask(max_tokens=4))
    assert "".join(event.text for event in events[:-1]) == "ab\ufffd"
    choice, _ = await only_choice(service, ask(max_tokens=4))
    assert choice.text == "ab\ufffd"


async def test_stats_survive_a_stop_string():
    backend = ScriptedBackend(COLOURS, chunk_sizes=(1,))
    choice, totals = await only_choice(toy_service(backend), ask(stop=("gr",)))
    assert totals.stats == scripted_stats(len(choice.token_ids))


async def test_closing_closes_the_backend():
    backend = ScriptedBackend(COLOURS, block_after=3)
    events = toy_service(backend).generate(ask())
    await anext(events)
    assert backend.num_running == 1
    await events.aclose()
    assert (backend.num_running, backend.num_closed) == (0, 1)


async def test_cancelling_closes_the_backend():
    backend = ScriptedBackend(COLOURS, block_after=0)
    task = asyncio.create_task(collect(toy_service(backend).generate(ask())))
    await eventually(lambda: backend.num_running == 1)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert (backend.num_running, backend.num_closed) == (0, 1)


@pytest.mark.parametrize(("own", "gateways"), [(0.05, 60.0), (None, 0.05), (60.0, 0.05)])
async def test_the_shorter_deadline_ends_the_request(own, gateways):
    backend = ScriptedBackend(COLOURS, block_after=2)
    service = toy_service(backend, request_timeout_s=gateways)
    started = time.monotonic()
    with pytest.raises(DeadlineExceeded):
        await collect(service.generate(ask(timeout_s=own)))
    assert time.monotonic() - started < 1.0
    assert (backend.num_running, backend.num_closed) == (0, 1)


@pytest.mark.parametrize(
    "error", [TooManyRequests("full"), ServiceUnavailable("none"), GenerationFailed("lost")]
)
@pytest.mark.parametrize("after", [0, 2])
async def test_errors_of_the_backend_pass_through(error, after):
    backend = ScriptedBackend(COLOURS, error=error, error_after=after)
    with pytest.raises(type(error), match=error.message):
        await collect(toy_service(backend).generate(ask()))


@pytest.mark.parametrize("last", [None, "the target was lost"])
async def test_a_generation_without_a_good_end_is_a_failure(last):
    class BrokenBackend(ScriptedBackend):
        async def generate(self, request, not_before):
            yield (TokenChunk(sequence_id=request.sequence_id, token_ids=(5,)),)
            if last is not None:
                yield (TokenChunk(sequence_id=request.sequence_id, token_ids=(), error=last),)

    with pytest.raises(GenerationFailed, match=last or "unexpectedly"):
        await collect(toy_service(BrokenBackend()).generate(ask()))


async def test_nothing_reaches_the_backend_when_the_request_is_wrong():
    backend = ScriptedBackend(COLOURS)
    service = toy_service(backend)
    for request, error in [
        (ask(temperature=float("nan")), InvalidRequest),
        (ask(text=""), InvalidRequest),
    ]:
        with pytest.raises(error):
            await anext(service.generate(request))
    assert backend.requests == []


async def test_context_is_bounded_by_what_workers_report():
    backend = ScriptedBackend(COLOURS)
    service = toy_service(backend, max_context=256)
    assert service.model_info.max_context == 256  # nothing attached: the configuration's word
    backend.max_context = 64
    await collect(service.generate(ask()))
    assert backend.requests[0].stop.max_tokens == 64 - len(token_ids_of("one"))
    backend.max_context = 10_000
    assert service.model_info.max_context == 256


async def test_long_prompts_do_not_stop_running_streams():
    service = toy_service(ScriptedBackend(COLOURS))
    task = asyncio.create_task(collect(service.generate(ask(text="red green " * 60_000))))
    num_turns = 0
    while not task.done():
        await asyncio.sleep(0.001)
        num_turns += 1
    assert num_turns > 10  # tokenizing on the event loop would leave one
    with pytest.raises(ContextLengthExceeded):
        await task


async def test_under_load_messages_are_fewer_and_say_the_same():
    script = ScriptedBackend(COLOURS, chunk_sizes=(1, 2), delay_s=0.002, waits=True)
    every_round = await events_of(toy_service(script), ask(ignore_eos=True, max_tokens=90))
    slow = toy_service(script, max_stream_messages_per_s=2.0)
    started = time.monotonic()
    first = None
    merged = []
    async with aclosing(slow.generate(ask(ignore_eos=True, max_tokens=90))) as events:
        async for event in events:
            first = first or time.monotonic() - started
            merged.append(event)
    assert first < 0.4  # before the half second between two messages
    assert merged[0] == every_round[0]
    assert len(merged) < len(every_round) / 3
    assert merged[-1] == every_round[-1]  # reason, usage and the statistics of every round
    assert text_and_ids_of(merged) == text_and_ids_of(every_round)


async def test_a_stop_string_in_the_middle_of_a_merged_message_ends_it_there():
    script = ScriptedBackend(COLOURS, delay_s=0.002, waits=True)
    service = toy_service(script, max_stream_messages_per_s=1.0)
    choice, totals = await only_choice(service, ask(stop=("een bl",)))
    assert choice.text == "red gr"
    assert choice.token_ids == tuple(byte_ids_of("red green bl"))
    assert totals.stats == scripted_stats(len(choice.token_ids))


async def test_streams_share_the_messages_per_second():
    script = ScriptedBackend(COLOURS, delay_s=0.002, waits=True)
    service = toy_service(script, max_stream_messages_per_s=200.0)

    async def count() -> int:
        return len(await events_of(service, ask(ignore_eos=True, max_tokens=90)))

    alone = await count()
    together = await asyncio.gather(*(count() for _ in range(20)))
    assert max(together) < alone / 2
    assert await count() > alone / 2  # streams that ended hold nothing back
