"""Reasoning of thinking models, apart from the answer."""

from __future__ import annotations

import json

import httpx
import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st

from specdec.gateway.answers import Answer, PlainParser
from specdec.gateway.http import build_http_app
from specdec.gateway.reasoning import ReasoningSplitter, Thinking, thinking_after
from specdec.gateway.tools.hermes import HermesParser
from tests.chat_templates import (
    CLOCK,
    HERMES,
    PLAIN,
    THINKING,
    THINKING_OPEN,
    RandomFollower,
    call_text,
    service_with,
    tokenizer_with,
)
from tests.fakes import EOS_ID, ScriptedBackend, byte_ids_of, in_thread, only, serving


def split(thinking, pieces, parser=None):
    splitter = ReasoningSplitter(thinking, parser or PlainParser())
    answer = Answer()
    for piece in pieces:
        answer.add(splitter.push(piece))
    answer.add(splitter.finish())
    return answer.reasoning, answer.content, answer.calls


@pytest.mark.parametrize(
    ("thinking", "text", "reasoning", "content"),
    [
        (Thinking.POSSIBLE, "<think>\nhm\n</think>\n\nhi", "hm", "hi"),
        (Thinking.POSSIBLE, "\n <think>hm</think>hi\n", "hm", "hi\n"),
        (Thinking.POSSIBLE, "hi <think>hm</think>", "", "hi <think>hm</think>"),
        (Thinking.POSSIBLE, "  hi", "", "  hi"),
        (Thinking.POSSIBLE, "<think>\n\n</think>\n\nhi", "", "hi"),
        (Thinking.POSSIBLE, "<thi", "", "<thi"),
        (Thinking.POSSIBLE, "", "", ""),
        (Thinking.POSSIBLE, "<think>cut off </thin", "cut off </thin", ""),
        (Thinking.POSSIBLE, "<think>a < b </ c</think><think>", "a < b </ c", "<think>"),
        (Thinking.OPEN, "hm\n</think>\n\nhi", "hm", "hi"),
        (Thinking.OPEN, "cut off\n", "cut off", ""),
        (Thinking.OPEN, "</think>hi", "", "hi"),
    ],
)
def test_text_between_the_tags_is_reasoning(thinking, text, reasoning, content):
    assert split(thinking, [text]) == (reasoning, content, ())
    assert split(thinking, text) == (reasoning, content, ())


pieces_of_text = st.lists(
    st.sampled_from(
        ["<think>", "</think>", "\n", " ", "a", "<", "</", "<tool_call>", call_text("f", {"a": 1})]
    ),
    max_size=10,
)


@given(st.sampled_from([Thinking.OPEN, Thinking.POSSIBLE]), pieces_of_text, st.data())
def test_any_split_of_the_text_gives_the_same_answer(thinking, pieces, data):
    text = "".join(pieces)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    cut = [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    names = frozenset({"f"})
    whole = split(thinking, [text], HermesParser(names))
    assert split(thinking, cut, HermesParser(names)) == whole
    assert split(thinking, text, HermesParser(names)) == whole


@pytest.mark.parametrize(
    ("prompt", "thinking"),
    [
        ("<|im_start|>assistant\n", Thinking.POSSIBLE),
        ("<|im_start|>assistant\n<think>\n", Thinking.OPEN),
        ("<|im_start|>assistant\n<think>\n\n</think>\n\n", Thinking.ABSENT),
        ("what is <think> for?<|im_end|>\n<|im_start|>assistant\n", Thinking.POSSIBLE),
        ("<think>old</think>answer<|im_end|>\n<|im_start|>assistant\n", Thinking.POSSIBLE),
    ],
)
def test_the_prompts_end_tells_where_the_answer_begins(prompt, thinking):
    assert thinking_after(prompt) is thinking


BODY = {"messages": [{"role": "user", "content": "one"}]}


def app_of(text_or_script, template, **options):
    script = text_or_script
    backend = (
        ScriptedBackend([*byte_ids_of(script), EOS_ID], chunk_sizes=(3,))
        if isinstance(script, str)
        else ScriptedBackend(script_of=script)
    )
    service = service_with(backend, template, **options)
    return build_http_app(only(service)), backend


async def post(url, body):
    async with httpx.AsyncClient(timeout=30) as client:
        response = await client.post(f"{url}/v1/chat/completions", json=body)
    assert response.status_code == 200, response.text
    return response


@pytest.mark.parametrize(
    ("template", "text"),
    [(THINKING, "<think>\nhm, hm\n</think>\n\nhi"), (THINKING_OPEN, "hm, hm\n</think>\n\nhi")],
)
async def test_whole_and_streamed_answers_have_the_reasoning_apart(template, text):
    app, _ = app_of(text, template)
    async with serving(app) as url:
        (choice,) = (await post(url, {**BODY, "logprobs": True})).json()["choices"]
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="unused", max_retries=0)
        chunks = await in_thread(
            lambda: list(client.chat.completions.create(model="org/toy-model", **BODY, stream=True))
        )
    assert choice["message"] == {
        "role": "assistant", "content": "hi", "reasoning_content": "hm, hm", "refusal": None,
    }  # fmt: skip
    assert len(choice["logprobs"]["content"]) == len(text) + 1
    deltas = [chunk.choices[0].delta for chunk in chunks]
    assert "".join(getattr(delta, "reasoning_content", None) or "" for delta in deltas) == "hm, hm"
    assert "".join(delta.content or "" for delta in deltas) == "hi"


async def test_reasoning_that_the_cap_cuts_off_leaves_no_content():
    app, _ = app_of("<think>hm, hm", THINKING)
    async with serving(app) as url:
        (choice,) = (await post(url, {**BODY, "max_tokens": 10})).json()["choices"]
    assert (choice["message"]["content"], choice["message"]["reasoning_content"]) == (None, "hm,")
    assert choice["finish_reason"] == "length"


async def test_calls_behind_the_reasoning_are_calls():
    app, _ = app_of(f"<think>{call_text('clock', {})}</think>{call_text('clock', {})}", THINKING)
    async with serving(app) as url:
        (choice,) = (await post(url, {**BODY, "tools": [CLOCK]})).json()["choices"]
    assert choice["message"]["reasoning_content"] == call_text("clock", {})
    assert len(choice["message"]["tool_calls"]) == 1


async def test_a_template_without_reasoning_leaves_the_tags_in_the_text():
    text = "<think>hm</think>hi"
    app, _ = app_of(text, HERMES)
    async with serving(app) as url:
        (choice,) = (await post(url, BODY)).json()["choices"]
    assert choice["message"] == {"role": "assistant", "content": text, "refusal": None}


@pytest.mark.parametrize(
    ("template", "parser", "is_split"), [(PLAIN, "think", True), (THINKING, "none", False)]
)
async def test_the_operator_may_say_whether_there_is_reasoning(template, parser, is_split):
    app, _ = app_of("<think>hm</think>hi", template, reasoning_parser=parser)
    async with serving(app) as url:
        (choice,) = (await post(url, BODY)).json()["choices"]
    assert ("reasoning_content" in choice["message"]) == is_split


async def test_template_options_reach_the_template_and_change_what_is_expected():
    app, backend = app_of("<think>hm</think>hi", THINKING)
    async with serving(app) as url:
        body = {**BODY, "chat_template_kwargs": {"enable_thinking": False}}
        (choice,) = (await post(url, body)).json()["choices"]
    assert tokenizer_with(THINKING).decode(backend.requests[0].prompt_ids).endswith("<think>\n\n</think>\n\n")
    assert choice["message"]["content"] == "<think>hm</think>hi"


async def test_earlier_reasoning_goes_to_the_template():
    app, backend = app_of("hi", THINKING)
    history = [{"role": "assistant", "content": "hi", "reasoning_content": "why not"}, *BODY["messages"]]
    async with serving(app) as url:
        await post(url, {"messages": history})
    assert "<think>\nwhy not\n</think>\n\nhi" in tokenizer_with(THINKING).decode(
        backend.requests[0].prompt_ids
    )


@pytest.mark.parametrize("tokens", [(), ("<think>", "</think>")])
@pytest.mark.parametrize("template", [THINKING, THINKING_OPEN])
async def test_a_schema_binds_the_answer_and_not_the_reasoning(template, tokens):
    follower = RandomFollower(tokenizer_with(template, tokens), is_thinking=True)
    app, _ = app_of(follower, template, tokens=tokens)
    schema = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]}
    response_format = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
    num_reasoned = 0
    async with serving(app) as url:
        for _ in range(10):
            body = {**BODY, "response_format": response_format, "max_tokens": 3000}
            (choice,) = (await post(url, body)).json()["choices"]
            num_reasoned += "reasoning_content" in choice["message"]
            assert isinstance(json.loads(choice["message"]["content"])["a"], bool)
    assert num_reasoned


@pytest.mark.parametrize(
    "options",
    [
        {"unknown": True},
        {"messages": []},
        {"tools": "x"},
        {"chat_template": "{{ 1 }}"},
        {"add_generation_prompt": False},
        {"tokenize": True},
        {"eos_token": "x"},
        {"raise_exception": "x"},
        {"enable_thinking": {"a": 1}},
        {"enable thinking": 1},
    ],
)
async def test_other_template_options_are_refused(options):
    app, backend = app_of("hi", THINKING + "{# raise_exception('x') #}")
    async with serving(app) as url, httpx.AsyncClient() as client:
        body = {**BODY, "chat_template_kwargs": options}
        response = await client.post(f"{url}/v1/chat/completions", json=body)
    assert response.status_code == 400
    assert response.json()["error"]["param"].startswith("chat_template_kwargs")
    assert not backend.requests
