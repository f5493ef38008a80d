"""Tiny models behind the real coordinator, in one process: a stream's text depends on nothing around it."""

import asyncio
from contextlib import asynccontextmanager

import pytest

from specdec.config import AppConfig, parse_config
from specdec.coordinator import lane
from specdec.coordinator.local import run_local
from specdec.engine.drafting import DraftEngine
from specdec.engine.model_runner import ModelRunner
from specdec.engine.verifying import TargetEngine
from specdec.types import GenerationRequest, SamplingParams, StopCriteria, VerificationMode
from tests.fakes import eventually
from tests.tiny_models import COUPLED, GREEDY, RUNNERS, fed, model_runner, sequence_id, tokens

GAMMA = 4
NOISE = 0.001
"""Of a draft that is right about every other time."""
DRAFTS = {"the target itself": {}, "an ordinary one": {"noise": NOISE}, "a bad one": {"seed": 1}}


def config(gamma: int = GAMMA, **coordinator: object) -> AppConfig:
    return parse_config(
        {
            "target": {"model": "tiny"},
            "draft": {"model": "tiny-draft"},
            "speculation": {"num_speculative_tokens": gamma},
            "coordinator": coordinator,
        }
    )


class Recorder:
    """A runner that notes how many tokens each sequence was fed in each forward."""

    def __init__(self, runner):
        self._runner = runner
        self.forwards: list[dict[str, int]] = []

    def __getattr__(self, name):
        return getattr(self._runner, name)

    def forward(self, items):
        self.forwards.append({item.sequence_id: len(item.token_ids) for item in items})
        return self._runner.forward(items)

    def shapes_of(self, name):
        return [forward[name] for forward in self.forwards if name in forward]


@asynccontextmanager
async def system(target, draft, **coordinator):
    async with run_local(config(**coordinator), target, draft) as local:
        yield local
        await eventually(lambda: local.target.status().num_sequences == 0)
        await eventually(lambda: local.draft.status().num_sequences == 0)
    assert target.kv_tokens_in_use == draft.kv_tokens_in_use == 0


async def generated(
    local,
    name,
    prompt,
    *,
    max_tokens=40,
    sampling: SamplingParams = GREEDY,
    started: asyncio.Event | None = None,
):
    """All chunks of one sequence; ``started`` is set with the first."""
    request = GenerationRequest(
        sequence_id=sequence_id(name),
        prompt_ids=tuple(prompt),
        sampling=sampling,
        stop=StopCriteria(max_tokens=max_tokens),
    )
    chunks = []
    async for chunk in local.client.generate(request):
        chunks.append(chunk)
        if started is not None:
            started.set()
    return chunks


def text(chunks):
    return [token for chunk in chunks for token in chunk.token_ids]


def num_drafted(chunks):
    return sum(chunk.num_drafted for chunk in chunks)


def greedy_reference(prompt, count=40, make_runner=model_runner):
    """Token by token, by the target alone."""
    runner, output = make_runner(), []
    runner.open(sequence_id("reference"))
    logits = fed(runner, "reference", prompt, num_rows=1)
    while len(output) < count:
        output.append(int(logits[-1].argmax()))
        logits = fed(runner, "reference", output[-1:])
    return output


PROMPTS = {f"{length} tokens": tokens(length, seed=length) for length in (5, 50, 300)}


@pytest.mark.parametrize("draft", DRAFTS)
async def test_prompts_of_very_different_length_together_equal_plain_decoding(draft):
    """Rows that accept fewer tokens do not disturb the others."""
    async with system(model_runner(), model_runner(**DRAFTS[draft])) as local:
        together = await asyncio.gather(*(generated(local, name, p) for name, p in PROMPTS.items()))
    for chunks, prompt in zip(together, PROMPTS.values(), strict=True):
        assert text(chunks) == greedy_reference(prompt)
        assert num_drafted(chunks) > 0
        assert chunks[-1].finish_reason == "length"


@pytest.mark.parametrize("draft", DRAFTS)
async def test_seeded_coupled_text_is_the_same_alone_and_in_company(draft):
    async with system(model_runner(), model_runner(**DRAFTS[draft])) as local:
        together = await asyncio.gather(
            *(generated(local, name, p, sampling=COUPLED) for name, p in PROMPTS.items())
        )
        alone = [await generated(local, f"{n} alone", p, sampling=COUPLED) for n, p in PROMPTS.items()]
    assert [text(chunks) for chunks in together] == [text(chunks) for chunks in alone]


async def test_draft_equal_to_the_target_is_accepted_whole_in_company_too():
    async with system(model_runner(), model_runner()) as local:
        together = await asyncio.gather(*(generated(local, name, p) for name, p in PROMPTS.items()))
    for chunks in together:
        assert all(chunk.num_accepted == chunk.num_drafted for chunk in chunks)


@pytest.mark.parametrize("draft", DRAFTS)
async def test_repeated_prompts_in_one_batch_say_the_same(draft):
    x, y, z = (tokens(12, seed=seed) for seed in (1, 2, 3))
    async with system(model_runner(), model_runner(**DRAFTS[draft])) as local:
        batch = [generated(local, f"s{i}", prompt) for i, prompt in enumerate((x, y, x, z, x))]
        answers = await asyncio.gather(*batch)
    texts = [text(chunks) for chunks in answers]
    for chunks in answers:
        assert num_drafted(chunks) > 0
        if draft == "SELF":  # a repeated prompt is drafted as well as a new one
            assert all(chunk.num_accepted == chunk.num_drafted for chunk in chunks)
    assert texts[0] == texts[2] == texts[4] == greedy_reference(x)
    assert (texts[1], texts[3]) == (greedy_reference(y), greedy_reference(z))


async def test_sixteen_prompts_at_once_equal_plain_decoding():
    prompts = [tokens(3 + 5 * i, seed=i) for i in range(16)]
    async with system(model_runner(), model_runner(noise=NOISE), max_num_seqs=5) as local:
        batch = [generated(local, f"s{i}", prompt, max_tokens=12) for i, prompt in enumerate(prompts)]
        texts = [text(chunks) for chunks in await asyncio.gather(*batch)]
    assert texts == [greedy_reference(prompt, 12) for prompt in prompts]


# Workers that lose a sequence -----------------------------------------------------------------------------


@pytest.mark.parametrize("loser", ["target", "draft"])
@pytest.mark.parametrize("sampling", [GREEDY, COUPLED], ids=lambda sampling: sampling.mode.value)
async def test_sequence_lost_by_a_worker_goes_on_from_the_log(loser, sampling):
    """The text is the same, drafting goes on, and nobody is asked for a row that was not fed."""
    prompt = tokens(9)
    draft, target = Recorder(model_runner(noise=NOISE)), Recorder(model_runner())
    async with system(target, draft) as local:
        undisturbed = text(await generated(local, "undisturbed", prompt, sampling=sampling))
        request = GenerationRequest(
            sequence_id=sequence_id("a"),
            prompt_ids=tuple(prompt),
            sampling=sampling,
            stop=StopCriteria(max_tokens=40),
        )
        chunks = []
        async for chunk in local.client.generate(request):
            chunks.append(chunk)
            if len(chunks) in (2, 5):
                await getattr(local, loser).release([sequence_id("a")])
    assert text(chunks) == undisturbed
    assert all(0 not in forward.values() for forward in draft.forwards + target.forwards)
    recorder = {"target": target, "draft": draft}[loser]
    assert sum(count >= len(prompt) for count in recorder.shapes_of("a")) == 3, "fed anew after each loss"
    assert num_drafted(chunks[8:]) > 0


# A draft that cannot follow -------------------------------------------------------------------------------


async def test_prompt_beyond_the_drafts_context_is_decoded_without_it():
    prompt = tokens(100)
    draft = Recorder(model_runner(max_context=64))
    async with system(model_runner(max_context=256), draft) as local:
        chunks = await generated(local, "a", prompt)
    assert text(chunks) == greedy_reference(prompt)
    assert num_drafted(chunks) == 0
    assert draft.forwards == []


async def test_sequence_that_outgrows_the_drafts_context_goes_on_without_it():
    prompt = tokens(40)
    draft = Recorder(model_runner(max_context=64))
    async with system(model_runner(max_context=256), draft) as local:
        chunks = await generated(local, "a", prompt)
    assert text(chunks) == greedy_reference(prompt)
    assert chunks[1].num_drafted == GAMMA
    assert [chunk.num_drafted for chunk in chunks[-10:]] == [0] * 10


async def test_draft_without_room_for_a_sequence_is_not_asked_again():
    prompt = tokens(70)
    draft = Recorder(model_runner(kv_capacity_tokens=64))
    async with system(model_runner(), draft) as local:
        long, short = await asyncio.gather(
            generated(local, "long", prompt), generated(local, "short", tokens(8), max_tokens=20)
        )
    assert (text(long), text(short)) == (greedy_reference(prompt), greedy_reference(tokens(8), 20))
    assert num_drafted(long) == 0
    assert num_drafted(short) > 0
    assert draft.shapes_of("long") == []


async def test_sequence_up_to_the_targets_last_position_equals_plain_decoding():
    prompt = tokens(30)
    async with system(model_runner(max_context=64), model_runner(noise=NOISE)) as local:
        chunks = await generated(local, "a", prompt, max_tokens=1000)
    assert text(chunks) == greedy_reference(prompt, 34)
    assert chunks[-1].finish_reason == "length"


# Too little memory for all --------------------------------------------------------------------------------

NUM_OUTPUT = 60
PREFIX = tokens(35, seed=20)
CROWDS = {
    "strangers": ([tokens(20, seed=seed) for seed in range(4)], 11),
    "with a common beginning": ([PREFIX + tokens(5, seed=seed) for seed in range(4)], 10),
}
"""Four prompts, and blocks of 16 positions for what two or three of them grow to."""


@pytest.fixture(params=RUNNERS.values(), ids=RUNNERS)
def make_runner(request):
    return request.param


@pytest.fixture
def engine_calls(monkeypatch):
    """Replies of both engines; after each call the bookkeeping of its cache is checked."""
    replies = {"target": [], "draft": []}

    def watched(role, call):
        def checked(engine, request):
            reply = call(engine, request)
            replies[role].append(reply)
            if isinstance(engine.runner, ModelRunner):
                engine.runner.cache.blocks.check_invariants()
            return reply

        return checked

    monkeypatch.setattr(TargetEngine, "verify", watched("target", TargetEngine.verify))
    monkeypatch.setattr(DraftEngine, "propose", watched("draft", DraftEngine.propose))
    return replies


@pytest.fixture
def let_all_in(monkeypatch):
    """No room is kept for what they may still say."""
    monkeypatch.setattr(lane, "RESERVED_OUTPUT_TOKENS", 1)
    monkeypatch.setattr(lane, "MEMORY_RETRY_S", 0.01)


@pytest.mark.parametrize("short_of_memory", ["target", "draft"])
@pytest.mark.parametrize("crowd", CROWDS)
async def test_sequences_that_give_way_say_what_they_say_alone(
    make_runner, crowd, short_of_memory, engine_calls, let_all_in
):
    prompts, num_blocks = CROWDS[crowd]
    capacity = {"kv_capacity_tokens": 16 * num_blocks}
    target = make_runner(**capacity if short_of_memory == "target" else {})
    draft = make_runner(noise=NOISE, **capacity if short_of_memory == "draft" else {})
    async with system(target, draft) as local:
        batch = [generated(local, f"s{i}", p, max_tokens=NUM_OUTPUT) for i, p in enumerate(prompts)]
        together = await asyncio.gather(*batch)
    assert [text(chunks) for chunks in together] == [
        greedy_reference(prompt, NUM_OUTPUT, make_runner) for prompt in prompts
    ]
    losses = {
        role: [lost for reply in replies for lost in reply.lost] for role, replies in engine_calls.items()
    }
    gave_way = losses.pop(short_of_memory)
    assert gave_way
    assert all(lost.out_of_memory for lost in gave_way)
    assert list(losses.values()) == [[]]
    for runner in (target, draft):
        assert runner.kv_tokens_in_use == 0
        if isinstance(runner, ModelRunner):
            runner.cache.blocks.check_invariants()
            assert runner.cache.blocks.num_free == runner.cache.blocks.num_blocks


async def test_oldest_sequence_never_gives_way(make_runner, engine_calls, let_all_in):
    prompts, num_blocks = CROWDS["strangers"]
    async with system(make_runner(kv_capacity_tokens=16 * num_blocks), make_runner()) as local:
        started = asyncio.Event()
        first = generated(local, "s0", prompts[0], max_tokens=NUM_OUTPUT, started=started)
        running = [asyncio.create_task(first)]
        await started.wait()
        for i, prompt in enumerate(prompts[1:], start=1):
            running.append(asyncio.create_task(generated(local, f"s{i}", prompt, max_tokens=NUM_OUTPUT)))
        await asyncio.gather(*running)
    lost = [lost.sequence_id for reply in engine_calls["target"] for lost in reply.lost]
    assert lost
    assert "s0" not in lost


# Prefill in chunks ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("draft", DRAFTS)
async def test_long_prompt_arriving_beside_a_stream_changes_neither(draft):
    """Four tokens a round: the prompt is fed over many rounds in which the stream goes on."""
    stream, prompt = tokens(6, seed=1), tokens(61, seed=2)
    target = Recorder(model_runner())
    async with system(target, model_runner(**DRAFTS[draft]), prefill_chunk_tokens=4) as local:
        started = asyncio.Event()
        running = asyncio.create_task(generated(local, "stream", stream, max_tokens=300, started=started))
        await started.wait()
        late = await generated(local, "late", prompt, max_tokens=10)
        text_of_stream = text(await running)
    assert text_of_stream == greedy_reference(stream, 300)
    assert text(late) == greedy_reference(prompt, 10)
    chunks = target.shapes_of("late")
    assert chunks[:15] == [4] * 15, "60 tokens in chunks of four; the last token belongs to the first round"
    assert all("stream" in forward for forward in target.forwards if forward.get("late") == 4)


@pytest.mark.parametrize("chunk", [1, 3, 7, 512])
async def test_chunk_size_changes_no_text(chunk):
    prompt = tokens(33)
    async with system(model_runner(), model_runner(noise=NOISE), prefill_chunk_tokens=chunk) as local:
        assert text(await generated(local, "a", prompt, max_tokens=20)) == greedy_reference(prompt, 20)


@pytest.mark.parametrize("gamma", [0, 1, 2, 3, 5, 8])
async def test_draft_length_changes_no_text(gamma):
    prompt = tokens(9)
    request = GenerationRequest(
        sequence_id=sequence_id("a"),
        prompt_ids=tuple(prompt),
        sampling=GREEDY,
        stop=StopCriteria(max_tokens=40),
        max_draft_tokens=gamma,
    )
    async with system(model_runner(), model_runner(noise=NOISE), gamma=8) as local:
        chunks = [chunk async for chunk in local.client.generate(request)]
    assert text(chunks) == greedy_reference(prompt)
    assert max(chunk.num_drafted for chunk in chunks) == gamma


async def test_modes_side_by_side_do_not_disturb_the_greedy_one():
    sampled = SamplingParams(temperature=1.3, seed=3, mode=VerificationMode.REJECTION)
    async with system(model_runner(), model_runner(noise=NOISE)) as local:
        greedy, *_ = await asyncio.gather(
            generated(local, "greedy", tokens(9)),
            generated(local, "sampled", tokens(20), sampling=sampled),
            generated(local, "coupled", tokens(30), sampling=COUPLED),
        )
    assert text(greedy) == greedy_reference(tokens(9))
