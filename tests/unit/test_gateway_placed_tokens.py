"""Which tokens an answer's content is, however text and tokens are cut."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specdec.gateway.answers import CallArguments, CallBroken, CallStart, Content, PlainParser, Reasoning
from specdec.gateway.events import ScoredToken
from specdec.gateway.placed_tokens import PlacedTokens
from specdec.gateway.reasoning import ReasoningSplitter, Thinking
from specdec.gateway.tools.hermes import HermesParser
from specdec.gateway.tools.llama3 import Llama3Parser
from tests.chat_templates import call_text

NAMES = frozenset({"f"})
CALL = call_text("f", {"a": 1})
PARSERS = {
    "plain": PlainParser,
    "hermes": lambda: HermesParser(NAMES),
    "llama3": lambda: Llama3Parser(NAMES),
    "thinking": lambda: ReasoningSplitter(Thinking.POSSIBLE, HermesParser(NAMES)),
    "thinking, opened": lambda: ReasoningSplitter(Thinking.OPEN, PlainParser()),
}


def token(number: int, offset: int) -> ScoredToken:
    return ScoredToken(token_id=number, text="", utf8=b"", logprob=-1.0, text_offset=offset)


def read(parser, text, offsets, lag=0, step=1):
    """Parts of a text whose tokens begin at these offsets; text comes ``lag`` characters after its tokens."""
    placed = PlacedTokens(parser)
    tokens = [token(number, offset) for number, offset in enumerate(offsets)]
    parts, num_told = [], 0
    for end in range(step, len(text) + lag + step, step):
        new = [each for each in tokens[num_told:] if each.text_offset < end]
        num_told += len(new)
        parts += placed.push(text[max(0, end - step - lag) : max(0, min(end - lag, len(text)))], new)
    placed.push("", tokens[num_told:])
    return [*parts, *placed.finish()]


def shown(parts):
    """Each content with its tokens' numbers."""
    return [(part.text, [each.token_id for each in part.tokens]) for part in parts if hasattr(part, "tokens")]


def ids(parts):
    return [number for _, numbers in shown(parts) for number in numbers]


def test_every_token_but_the_end_is_of_a_plain_text():
    # The second and third are parts of one character; the last ends the output.
    assert shown(read(PlainParser(), "a😀bc", [0, 1, 1, 2, 4], step=4)) == [("a😀bc", [0, 1, 2, 3])]


def test_tokens_of_tags_reasoning_and_calls_belong_to_no_content():
    text = f"<think>\nhm</think>\n\nI see.\n{CALL} So."
    starts = [0, 7, 8, 10, 18, 20, 21, 25, 26]  # <think> \n hm </think> \n\n I _see . \n
    call = text.index(CALL)
    starts += [*range(call, call + len(CALL), 3), call + len(CALL), call + len(CALL) + 1]
    parts = read(PARSERS["thinking"](), text, starts, step=5)
    assert "".join(text for text, _ in shown(parts)) == "I see. So."
    assert ids(parts) == [5, 6, 7, len(starts) - 2, len(starts) - 1]
    assert {type(part) for part in parts} == {Reasoning, Content, CallStart, CallArguments}


def test_a_malformed_calls_tokens_are_contents():
    text = 'x <tool_call>{"name": "f", "arguments": {"a": nope}} y'
    parts = read(PARSERS["hermes"](), text, range(0, len(text), 2))
    assert any(isinstance(part, CallBroken) for part in parts)
    assert ids(parts) == list(range(-(-len(text) // 2)))


def test_a_token_of_two_kinds_is_the_contents():
    text = "</think>red"
    for step in (1, 20):
        assert ids(read(PARSERS["thinking, opened"](), text, [0, 5, 10], step=step)) == [1, 2]


pieces = st.lists(
    st.sampled_from(
        ["<", "<tool", "<think>", "</think>", CALL, "; ", "{", "<|python_tag|>", "\n\n", " ", "é"]
    )
    | st.text(st.sampled_from("ab <\n"), max_size=5),
    max_size=6,
).map("".join)


@pytest.mark.parametrize("parser_of", PARSERS.values(), ids=PARSERS)
def test_content_has_the_tokens_it_shares_characters_with_however_it_is_cut(parser_of):
    @given(pieces, st.data())
    def check(text, data):
        # With a token for each character, the tokens spell the content.
        characters = read(parser_of(), text, range(len(text)))
        for content, numbers in shown(characters):
            assert "".join(text[number] for number in numbers) == content
        offsets = [0, *sorted(data.draw(st.sets(st.integers(0, max(0, len(text) - 1)), max_size=12)) - {0})]
        ends = [*offsets[1:], len(text)]
        expected = [
            number
            for number, (start, end) in enumerate(zip(offsets, ends, strict=True))
            if any(start <= at < end for at in ids(characters))
        ]
        lag, step = data.draw(st.integers(0, 9)), data.draw(st.integers(1, 9))
        parts = read(parser_of(), text, offsets, lag=lag, step=step)
        assert "".join(text for text, _ in shown(parts)) == "".join(text for text, _ in shown(characters))
        assert ids(parts) == expected

    check()
