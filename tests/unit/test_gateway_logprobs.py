"""Log-probabilities and echo in both layouts: every token, the right one, streamed or not."""

from __future__ import annotations

import json
import math

import pytest
from tokenizers import Tokenizer, decoders, models, processors

from specdec.gateway.echo import echoed_prompt
from specdec.gateway.requests import TextPrompt, TokenPrompt
from specdec.gateway.vocabulary import LOWEST_LOGPROB, Vocabulary
from specdec.types import TokenChunk, TokenLogprob
from tests.fakes import (
    EOS_ID,
    VOCAB_SIZE,
    ScriptedBackend,
    byte_ids_of,
    logprob_of,
    token_ids_of,
    toy_tokenizer,
)
from tests.unit.http_calls import answer, by_index, client_of, refusal, stream

COLOURS = [*byte_ids_of("red green blue"), EOS_ID]
EMOJI = [*byte_ids_of("a😀é"), EOS_ID]
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
HELLO = {"messages": [{"role": "user", "content": "one"}]}
LISTS = ("tokens", "token_logprobs", "top_logprobs", "text_offset")


def scores_of(body):
    (choice,) = body["choices"]
    return choice["logprobs"]


def joined(chunks, layout):
    """The lists of a choice's chunks, put together."""
    parts = [choice["logprobs"] for choice in by_index(chunks)[0] if choice["logprobs"] is not None]
    return {name: [item for part in parts for item in part[name]] for name in layout}


# Text completions


@pytest.mark.parametrize("sizes", [(1,), (4,), (100,)])
async def test_every_token_of_every_chunk_has_its_own(sizes):
    async with client_of(ScriptedBackend(COLOURS, chunk_sizes=sizes)) as client:
        asked = {"prompt": "one", "logprobs": 2}
        body = await answer(client, TEXT, asked)
        chunks = await stream(client, TEXT, asked)
    scores = scores_of(body)
    assert [len(scores[name]) for name in LISTS] == [body["usage"]["completion_tokens"]] * 4
    assert scores["tokens"] == [*"red green blue", "<|im_end|>"]
    assert scores["token_logprobs"] == [logprob_of(token_id) for token_id in COLOURS]
    assert scores["text_offset"] == [*range(14), 14]
    assert joined(chunks, LISTS) == {name: scores[name] for name in LISTS}
    assert "".join(choice["text"] for choice in by_index(chunks)[0]) == "red green blue"


async def test_the_token_itself_is_always_among_the_likeliest():
    async with client_of(ScriptedBackend(COLOURS)) as client:
        none = scores_of(await answer(client, TEXT, {"prompt": "one", "logprobs": 0, "max_tokens": 1}))
        two = scores_of(await answer(client, TEXT, {"prompt": "one", "logprobs": 2, "max_tokens": 1}))
    own = logprob_of(COLOURS[0])
    assert none["top_logprobs"] == [{"r": own}]  # 0 is not "off"
    assert two["top_logprobs"] == [
        {"<|endoftext|>": logprob_of(0), "<|im_start|>": logprob_of(1), "r": own},
    ]


async def test_no_logprobs_unless_asked_for():
    async with client_of(ScriptedBackend(COLOURS)) as client:
        assert scores_of(await answer(client, TEXT, {"prompt": "one"})) is None
        assert scores_of(await answer(client, CHAT, {**HELLO, "logprobs": False})) is None
        assert scores_of(await answer(client, TEXT, {"prompt": "one", "logprobs": None})) is None


@pytest.mark.parametrize("sizes", [(1,), (4,), (100,)])
async def test_text_ids_logprobs_and_usage_end_at_the_token_that_completes_a_stop_string(sizes):
    async with client_of(ScriptedBackend(COLOURS, chunk_sizes=sizes)) as client:
        for path, asked in [(TEXT, {"prompt": "one", "logprobs": 1}), (CHAT, {**HELLO, "logprobs": True})]:
            body = await answer(client, path, {**asked, "stop": "een bl"})
            chunks = await stream(client, path, {**asked, "stop": "een bl"})
            key = "tokens" if path == TEXT else "content"
            tokens = scores_of(body)[key]
            assert len(tokens) == body["usage"]["completion_tokens"] == len("red green bl")
            assert joined(chunks, [key])[key] == tokens


async def test_parts_of_characters_are_told_by_their_bytes():
    async with client_of(ScriptedBackend(EMOJI, chunk_sizes=(3,))) as client:
        body = await answer(client, TEXT, {"prompt": "one", "logprobs": 0})
        chunks = await stream(client, TEXT, {"prompt": "one", "logprobs": 0})
        chat = await answer(client, CHAT, {**HELLO, "logprobs": True, "top_logprobs": 5})
    scores = scores_of(body)
    assert scores["tokens"] == [
        "a", "bytes:\\xf0", "bytes:\\x9f", "bytes:\\x98", "bytes:\\x80", "bytes:\\xc3", "bytes:\\xa9",
        "<|im_end|>",
    ]  # fmt: skip
    assert scores["text_offset"] == [0, 1, 1, 1, 1, 2, 2, 3]
    assert joined(chunks, LISTS) == scores
    content = scores_of(chat)["content"]
    assert bytes(byte for token in content[:-1] for byte in token["bytes"]).decode() == "a😀é"


async def test_two_tokens_of_one_text_keep_the_higher_value():
    class Twins(ScriptedBackend):
        """Two ids whose text is the same: neither has a token."""

        async def generate(self, request, not_before):
            top = ((VOCAB_SIZE, -0.25), (VOCAB_SIZE + 1, -4.0), (5, -math.inf))
            scored = TokenLogprob(token_id=VOCAB_SIZE + 1, logprob=-4.0, top=top)
            yield (
                TokenChunk(
                    sequence_id=request.sequence_id,
                    token_ids=(6,),
                    logprobs=(scored,),
                    finish_reason="length",
                ),
            )

    async with client_of(Twins()) as client:
        response = await client.post(TEXT, json={"prompt": "one", "logprobs": 3})
    assert "Infinity" not in response.text
    scores = scores_of(response.json())
    assert scores["top_logprobs"][0][""] == -0.25
    assert LOWEST_LOGPROB in scores["top_logprobs"][0].values()
    assert scores["token_logprobs"] == [-4.0]


# Echo


@pytest.mark.parametrize("prompt", ["one two", token_ids_of("one two"), [token_ids_of("one two")]])
@pytest.mark.parametrize("sizes", [(1,), (100,)])
async def test_echo_is_the_prompt_and_the_completion(prompt, sizes):
    async with client_of(ScriptedBackend(COLOURS, chunk_sizes=sizes)) as client:
        asked = {"prompt": prompt, "echo": True, "logprobs": 1, "max_tokens": 3}
        body = await answer(client, TEXT, asked)
        chunks = await stream(client, TEXT, asked)
        plain = await answer(client, TEXT, {**asked, "logprobs": None})
        plain_chunks = await stream(client, TEXT, {**asked, "logprobs": None})
    ids = [*token_ids_of("one two"), *COLOURS[:3]]
    (choice,) = body["choices"]
    scores = choice["logprobs"]
    assert choice["text"] == "one twored" == "".join(scores["tokens"])
    assert scores["token_logprobs"] == [None, *map(logprob_of, ids[1:])]
    assert scores["top_logprobs"][0] is None
    lengths = [len(token) for token in scores["tokens"]]
    assert scores["text_offset"] == [sum(lengths[:idx]) for idx in range(len(lengths))]
    assert body["usage"]["completion_tokens"] == 3
    assert joined(chunks, LISTS) == scores
    for parts in (chunks, plain_chunks):
        assert "".join(part["text"] for part in by_index(parts)[0]) == choice["text"]
    assert (plain["choices"][0]["text"], plain["choices"][0]["logprobs"]) == (choice["text"], None)


@pytest.mark.parametrize("logprobs", [None, 1])
async def test_echo_without_output(logprobs):
    backend = ScriptedBackend([EOS_ID])
    async with client_of(backend) as client:
        asked = {"prompt": "one two", "echo": True, "max_tokens": 0, "logprobs": logprobs}
        body = await answer(client, TEXT, asked)
        chunks = await stream(client, TEXT, asked)
    (choice,) = body["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("one two", "length")
    assert body["usage"]["completion_tokens"] == 0
    assert backend.requests[0].stop.max_tokens == 1
    assert "".join(part["text"] for part in by_index(chunks)[0]) == "one two"
    if logprobs is not None:
        assert len(choice["logprobs"]["tokens"]) == len(token_ids_of("one two"))
        assert joined(chunks, LISTS) == choice["logprobs"]


async def test_lm_evals_contract():
    contexts = [token_ids_of("red green blue"), [EOS_ID, *token_ids_of("one two three")], [5]]
    asked = {
        "model": None, "prompt": contexts, "temperature": 0, "max_tokens": 1, "logprobs": 1, "seed": 1234,
        "echo": True,
    }  # fmt: skip
    async with client_of(ScriptedBackend([EOS_ID])) as client:
        body = await answer(client, TEXT, asked)
    for choice, context in zip(body["choices"], contexts, strict=True):
        scores = choice["logprobs"]
        assert [len(scores[name]) for name in LISTS] == [len(context) + 1] * 4
        assert scores["token_logprobs"] == [None, *map(logprob_of, [*context[1:], EOS_ID])]
        # "Greedy" is float equality of a token with the maximum.
        for token_id, own, top in zip(
            [*context[1:], EOS_ID], scores["token_logprobs"][1:], scores["top_logprobs"][1:], strict=True
        ):
            assert (own == max(top.values())) == (token_id == 0)


async def test_several_prompts_and_choices_each_echo_their_own():
    async with client_of(ScriptedBackend(COLOURS)) as client:
        asked = {"prompt": ["one", "two three"], "n": 2, "echo": True, "max_tokens": 3, "logprobs": 0}
        body = await answer(client, TEXT, asked)
        chunks = by_index(await stream(client, TEXT, asked))
    assert [choice["text"] for choice in body["choices"]] == ["onered"] * 2 + ["two threered"] * 2
    for index, choice in enumerate(body["choices"]):
        assert "".join(part["text"] for part in chunks[index]) == choice["text"]


def test_a_bos_put_before_the_text_has_no_width():
    tokenizer = Tokenizer.from_str(toy_tokenizer().backend_tokenizer.to_str())
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", 0)]
    )
    ids = tuple(tokenizer.encode("red <|im_end|>é").ids)
    assert ids[0] == 0
    echo = echoed_prompt(TextPrompt(text="red <|im_end|>é"), ids, tokenizer)
    assert echo.text == "red <|im_end|>é"
    assert echo.offsets[:2] == (0, 0)
    assert echo.offsets[list(ids).index(EOS_ID)] == 4
    given = echoed_prompt(TokenPrompt(token_ids=ids), ids, tokenizer)
    assert given.text == "<|endoftext|>red <|im_end|>é"
    assert given.offsets[:2] == (0, len("<|endoftext|>"))


# Chat


@pytest.mark.parametrize("sizes", [(1,), (4,)])
async def test_chat_layout(sizes):
    async with client_of(ScriptedBackend(COLOURS, chunk_sizes=sizes)) as client:
        alone = await answer(client, CHAT, {**HELLO, "logprobs": True})
        asked = {**HELLO, "logprobs": True, "top_logprobs": 2}
        body = await answer(client, CHAT, asked)
        chunks = await stream(client, CHAT, asked)
    content = scores_of(body)["content"]
    assert len(content) == body["usage"]["completion_tokens"]
    assert content[0] == {
        "token": "r",
        "logprob": logprob_of(COLOURS[0]),
        "bytes": [ord("r")],
        "top_logprobs": [
            {"token": "<|endoftext|>", "logprob": 0.0, "bytes": list(b"<|endoftext|>")},
            {"token": "<|im_start|>", "logprob": logprob_of(1), "bytes": list(b"<|im_start|>")},
        ],
    }
    assert all(token["top_logprobs"] == [] for token in scores_of(alone)["content"])
    assert joined(chunks, ["content"])["content"] == content
    assert scores_of(body)["refusal"] is None


async def test_top_logprobs_needs_logprobs():
    async with client_of(ScriptedBackend(COLOURS)) as client:
        assert await refusal(client, CHAT, {**HELLO, "top_logprobs": 1}) == "top_logprobs"
        assert await refusal(client, CHAT, {**HELLO, "top_logprobs": 1, "logprobs": False}) == "top_logprobs"


async def test_a_backend_that_gives_none_is_our_fault_not_a_wrong_answer():
    class Silent(ScriptedBackend):
        async def _chunks(self, request):
            async for chunk in super()._chunks(request):
                yield TokenChunk(
                    sequence_id=chunk.sequence_id,
                    token_ids=chunk.token_ids,
                    finish_reason=chunk.finish_reason,
                )

    async with client_of(Silent(COLOURS)) as client:
        for asked in ({"logprobs": 1}, {"logprobs": 1, "echo": True}):
            response = await client.post(TEXT, json={"prompt": "one two", **asked})
            assert response.status_code == 500


# What a token stands for


def test_every_byte_has_its_token():
    vocabulary = Vocabulary(toy_tokenizer().backend_tokenizer)
    assert [vocabulary.piece(token_id).utf8 for token_id in byte_ids_of("a é")] == [
        b"a", b" ", b"\xc3", b"\xa9",
    ]  # fmt: skip
    assert {vocabulary.piece(token_id).utf8 for token_id in range(VOCAB_SIZE)} >= {
        bytes([byte]) for byte in range(256)
    }


@pytest.mark.parametrize("text", ["red green", "мама", "日本語", " two", "😀 é"])
def test_joined_bytes_are_the_text(text):
    vocabulary = Vocabulary(toy_tokenizer().backend_tokenizer)
    pieces = [vocabulary.piece(token_id) for token_id in token_ids_of(text)]
    assert b"".join(piece.utf8 for piece in pieces).decode() == text
    json.dumps([piece.text for piece in pieces])


def test_byte_fallback_tokenizers():
    vocab = {f"<0x{byte:02X}>": byte for byte in range(256)} | {"▁hi": 256, "you": 257}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    vocabulary = Vocabulary(tokenizer)
    assert [vocabulary.piece(token_id).text for token_id in (256, 257, 0x41, 0xF0)] == [
        " hi", "you", "A", "bytes:\\xf0",
    ]  # fmt: skip
    assert vocabulary.piece(0xF0).utf8 == b"\xf0"
    assert vocabulary.piece(10_000).utf8 == b""
