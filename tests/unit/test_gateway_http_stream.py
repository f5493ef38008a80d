"""Server-sent events: bytes of the frames, and what travels in one write."""

from __future__ import annotations

import json

import pytest

from specdec.gateway.events import Finished, TextDelta, Totals, Usage
from specdec.gateway.http_stream import DONE_FRAME, ChunkFrames, frame, sse_frames
from specdec.gateway.openai_responses import ChatFormat, CompletionFormat
from specdec.types import SpeculationStats

TEXTS = [
    "plain",
    '"quoted" \\ back\nslash\ttab',
    "\x00\x01\x1f\x7f\u2028",
    "\\u0000",
    "日本語 😀 é",
    '"},"finish_reason":"stop"',
    " ",
]
MODELS = ["smollm2", 'od"d\\name', "\0", '"\\u0000"', "模型"]


def response_of(kind, model, *, wants_usage_chunk=False):
    return kind(
        request_id="id-1", model=model, created=1, wants_metrics=True, wants_usage_chunk=wants_usage_chunk
    )


def finished():
    usage = Usage(prompt_tokens=3, completion_tokens=len(TEXTS))
    return Finished(finish_reason="stop", totals=Totals(usage=usage, stats=SpeculationStats()))


async def writes_of(response, texts):
    async def events():
        for text in texts[1:]:
            yield TextDelta(text=text, token_ids=(1,))
        yield finished()

    first = TextDelta(text=texts[0], token_ids=(1,))
    return [body async for body in sse_frames(first, events(), ChunkFrames(response), "id-1")]


@pytest.mark.parametrize("kind", [ChatFormat, CompletionFormat])
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("wants_usage_chunk", [False, True])
async def test_frames_are_the_chunks_as_json_whatever_text_and_model(kind, model, wants_usage_chunk):
    response = response_of(kind, model, wants_usage_chunk=wants_usage_chunk)
    payloads = [
        *response.opening(),
        *(response.text_chunk(0, text) for text in TEXTS),
        *response.chunks(finished()),
    ]
    assert len(payloads) == len(response.opening()) + len(TEXTS) + 1 + wants_usage_chunk
    body = b"".join(await writes_of(response, TEXTS))
    assert body == b"".join(map(frame, payloads)) + DONE_FRAME
    frames = body.decode().split("\n\n")
    assert [json.loads(line.removeprefix("data: ")) for line in frames[: len(payloads)]] == payloads


async def test_one_write_an_event_and_none_for_tokens_without_text():
    writes = await writes_of(response_of(ChatFormat, "m", wants_usage_chunk=True), ["a", "", "b"])
    assert [write.count(b"data: ") for write in writes] == [2, 1, 3]  # role + a; b; end + usage + [DONE]
