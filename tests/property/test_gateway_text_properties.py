"""Whatever the text, its tokens, the cuts between rounds and the stop strings: one rule for the result."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from specdec.gateway.text import Detokenizer, SequenceText
from tests.fakes import VOCAB_SIZE, byte_ids_of, token_ids_of, toy_tokenizer

BACKEND = toy_tokenizer().backend_tokenizer

ALPHABET = st.one_of(
    st.sampled_from(
        [
            "😀",
            "👨‍👩‍👧",
            "🇩🇪",
            "日",
            "本",
            "е",
            "é",
            "e\u0301",
            "\ufffd",
            "\u200d",
            "a",
            "b",
            " ",
            "\n",
            "\x00",
        ]
    ),
    st.characters(exclude_categories=["Cs"]),
)
TEXT = st.lists(ALPHABET, max_size=30).map("".join)
SIZES = st.lists(st.integers(1, 7), min_size=1, max_size=5)


def chunks(items, sizes):
    start = 0
    while start < len(items):
        size = sizes[start % len(sizes)]
        yield items[start : start + size]
        start += size


def stream(token_ids, sizes, stops=()):
    """Joined deltas, and the tokens taken, of a sequence cut into rounds of these sizes."""
    sequence = SequenceText(BACKEND, stop_strings=stops, stop_token_ids=())
    text, taken = "", []
    for chunk in chunks(token_ids, sizes):
        piece = sequence.push(chunk)
        text += piece.text
        taken += piece.token_ids
        if sequence.is_stopped:
            break
    return text + sequence.finish(), taken


def cut_at_first_stop(text, stops):
    """The rule, written plainly: the occurrence that ends first; of several, the one that starts first."""
    found = [(text.index(stop) + len(stop), text.index(stop)) for stop in stops if stop in text]
    return text[: min(found)[1]] if found else text


def decode(token_ids):
    return BACKEND.decode(token_ids, skip_special_tokens=True)


@given(text=TEXT, sizes=SIZES, is_bytewise=st.booleans())
@settings(max_examples=150, deadline=None)
def test_any_text_survives_any_cuts(text, sizes, is_bytewise):
    token_ids = byte_ids_of(text) if is_bytewise else token_ids_of(text)
    assert stream(token_ids, sizes) == (text, token_ids)


@given(token_ids=st.lists(st.integers(0, VOCAB_SIZE - 1), max_size=60), sizes=SIZES)
@settings(max_examples=150, deadline=None)
def test_any_tokens_give_what_decoding_them_at_once_gives(token_ids, sizes):
    assert stream(token_ids, sizes)[0] == decode(token_ids)


@given(token_ids=st.lists(st.integers(128, 255), max_size=80))
@settings(max_examples=100, deadline=None)
def test_any_broken_bytes_give_what_decoding_them_at_once_gives(token_ids):
    assert stream(token_ids, [1])[0] == decode(token_ids)


@given(text=TEXT)
@settings(max_examples=100, deadline=None)
def test_no_delta_holds_a_replacement_character_that_the_text_does_not(text):
    detokenizer = Detokenizer(BACKEND)
    deltas = [detokenizer.push(token_id) for token_id in byte_ids_of(text)]
    assert sum(delta.count("\ufffd") for delta in deltas) <= text.count("\ufffd")


@given(
    text=st.text("ab😀 ", max_size=40),
    stops=st.lists(st.text("ab😀 ", min_size=1, max_size=5), min_size=1, max_size=4),
    sizes=SIZES,
    is_bytewise=st.booleans(),
)
@settings(max_examples=300, deadline=None)
def test_stop_strings_cut_like_searching_the_whole_text(text, stops, sizes, is_bytewise):
    token_ids = byte_ids_of(text) if is_bytewise else token_ids_of(text)
    shown, taken = stream(token_ids, sizes, stops)
    assert shown == cut_at_first_stop(text, stops)
    if any(stop in text for stop in stops):
        # The last token taken is the one that completes the stop string: one fewer holds none.
        assert any(stop in decode(taken) for stop in stops)
        assert not any(stop in decode(taken[:-1]) for stop in stops)
