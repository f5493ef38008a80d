"""Tokens to text: characters never split, stop strings never leaked, text never lost."""

from __future__ import annotations

import time

import pytest
from tokenizers import Tokenizer, decoders, models

from specdec.gateway.text import MAX_PENDING_TOKENS, Detokenizer, SequenceText, StopScanner
from tests.fakes import EOS_ID, byte_ids_of, token_ids_of, toy_tokenizer

REPLACEMENT = "\ufffd"
FAMILY = "👨‍👩‍👧"


def detokenizer() -> Detokenizer:
    return Detokenizer(toy_tokenizer().backend_tokenizer)


def sequence_text(
    stop: list[str] | None = None, stop_ids: set[int] | None = None, min_tokens: int = 0
) -> SequenceText:
    return SequenceText(
        toy_tokenizer().backend_tokenizer,
        stop_strings=stop or [],
        stop_token_ids=stop_ids or set(),
        min_tokens=min_tokens,
    )


def byte_fallback_tokenizer() -> tuple[Tokenizer, dict[str, int]]:
    vocab = {f"<0x{byte:02X}>": byte for byte in range(256)} | {"▁hi": 256, "▁you": 257}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return tokenizer, vocab


@pytest.mark.parametrize("text", ["😀", FAMILY, "日本", "мир", "e\u0301", "a😀b"])
def test_a_character_appears_with_its_last_token(text):
    stream = detokenizer()
    deltas = [stream.push(token_id) for token_id in byte_ids_of(text)]
    assert "".join(deltas) == text
    assert all(REPLACEMENT not in delta for delta in deltas)
    assert stream.flush() == ""


@pytest.mark.parametrize("num_bytes", [1, 2, 3])
def test_truncated_last_character_is_flushed_once(num_bytes):
    stream = detokenizer()
    deltas = [stream.push(token_id) for token_id in byte_ids_of("ab😀")[: 2 + num_bytes]]
    assert "".join(deltas) == "ab"
    assert stream.flush() == REPLACEMENT
    assert stream.flush() == ""


def test_replacement_characters_of_the_model_are_not_held_for_ever():
    stream = detokenizer()
    deltas = [stream.push(token_id) for token_id in byte_ids_of(REPLACEMENT * 40)]
    shown = "".join(deltas)
    assert len(shown) >= 40 - MAX_PENDING_TOKENS
    assert shown + stream.flush() == REPLACEMENT * 40


def test_long_run_of_invalid_bytes_stays_right_when_a_character_follows():
    lone_continuation = byte_ids_of("é")[1:]
    token_ids = lone_continuation * 35 + byte_ids_of("😀!")
    stream = detokenizer()
    text = "".join(stream.push(token_id) for token_id in token_ids) + stream.flush()
    assert text == REPLACEMENT * 35 + "😀!"


def test_special_tokens_have_no_text_and_little_cost():
    stream = detokenizer()
    started = time.perf_counter()
    deltas = [stream.push(EOS_ID) for _ in range(20_000)]
    assert set(deltas) == {""}
    assert time.perf_counter() - started < 2.0  # Seconds would mean quadratic work.
    assert stream.push(token_ids_of("x")[0]) == "x"


def test_byte_fallback_run_that_turns_invalid_does_not_stop_the_stream():
    tokenizer, vocab = byte_fallback_tokenizer()
    stream = Detokenizer(tokenizer)
    token_ids = [vocab["▁hi"], 0xE4, 0xBD, 0xA0, 0xE4, vocab["▁you"], vocab["▁hi"]]
    text = "".join(stream.push(token_id) for token_id in token_ids) + stream.flush()
    assert text.startswith("hi你")
    assert text.endswith(" you hi")


def test_byte_fallback_truncated_behind_a_character():
    tokenizer, _ = byte_fallback_tokenizer()
    stream = Detokenizer(tokenizer)
    assert "".join(stream.push(token_id) for token_id in [0xE4, 0xBD, 0xA0, 0xE4]) == "你"
    assert stream.flush() == REPLACEMENT


@pytest.mark.parametrize(
    ("stops", "text", "expected"),
    [
        (["een bl"], "red green blue", "red gr"),
        (["blue"], "red green blue", "red green "),
        (["x"], "red green blue", "red green blue"),
        (["red"], "red green blue", ""),
        (["abc", "b"], "xabcy", "xa"),  # "b" is complete first
        (["bc", "abc"], "xabcy", "x"),  # complete together: before the longer
        (["aab"], "aaab", "a"),
        (["aba"], "xababa", "x"),
        (["\n\n"], "a\n\nb", "a"),
        (["日本"], "今日本", "今"),
        ([], "red", "red"),
    ],
)
def test_text_ends_before_the_stop_string_completed_first(stops, text, expected):
    for size in (1, 2, 3, len(text)):
        scanner = StopScanner(stops)
        shown = []
        for start in range(0, len(text), size):
            if scanner.is_matched:
                break
            shown.append(scanner.push(text[start : start + size]))
            assert expected.startswith("".join(shown))  # nothing of a stop string is ever shown
        assert "".join(shown) + scanner.flush() == expected
        assert scanner.is_matched == (expected != text)


def test_long_stop_strings_cost_constant_work_a_character():
    scanner = StopScanner(["a" * 1000 + "b"] * 16)
    started = time.perf_counter()
    shown = "".join(scanner.push("a" * 10) for _ in range(500)) + scanner.flush()
    assert shown == "a" * 5000
    assert time.perf_counter() - started < 2.0


def test_sequence_ends_with_the_token_that_completes_the_stop_string():
    token_ids = byte_ids_of("red green blue")
    text = sequence_text(stop=["een bl"])
    first = text.push(token_ids[:8])
    assert (first.text, text.is_stopped) == ("red gr", False)  # "ee" is held back
    second = text.push(token_ids[8:])
    assert second.token_ids == tuple(byte_ids_of("n bl"))
    assert (second.text, text.is_stopped, text.finish()) == ("", True, "")


def test_stop_token_is_returned_without_its_text():
    stop_id = token_ids_of(" green")[0]
    text = sequence_text(stop_ids={stop_id})
    piece = text.push([*token_ids_of("red"), stop_id, *token_ids_of("blue")])
    assert piece.text == "red"
    assert piece.token_ids == (*token_ids_of("red"), stop_id)
    assert text.is_stopped


def test_held_back_text_is_given_when_the_sequence_ends_otherwise():
    text = sequence_text(stop=["blue!"], stop_ids={EOS_ID})
    piece = text.push([*byte_ids_of("red blue"), EOS_ID])
    assert piece.text + text.finish() == "red blue"


def test_flushed_replacement_character_can_complete_a_stop_string():
    text = sequence_text(stop=["b\ufffd"])
    piece = text.push(byte_ids_of("ab😀")[:-1])
    assert piece.text + text.finish() == "a"
    assert text.is_stopped


@pytest.mark.parametrize(
    ("stop", "min_tokens", "expected"),
    [
        ("a", 0, ""),
        ("a", 1, "ab"),
        ("ab", 1, ""),  # complete with the second token
        ("ab", 2, "ab"),
        ("bab", 3, "a"),  # begins before, is complete after
        ("aba", 4, "ab"),  # occurrences overlap: the next one begins inside the one passed over
        ("aab", 3, "ababab"),
        ("b", 6, "ababab"),
    ],
)
def test_a_stop_string_complete_within_min_tokens_is_text(stop, min_tokens, expected):
    for size in (1, 2, 6):
        text = sequence_text(stop=[stop], min_tokens=min_tokens)
        token_ids = byte_ids_of("ababab")
        shown = ""
        for start in range(0, 6, size):
            shown += text.push(token_ids[start : start + size]).text
        assert shown + text.finish() == expected


@pytest.mark.parametrize(("min_tokens", "expected"), [(2, "a"), (4, "ab\ufffd")])
def test_a_replacement_character_completes_a_stop_string_only_behind_min_tokens(min_tokens, expected):
    text = sequence_text(stop=["b\ufffd"], min_tokens=min_tokens)
    piece = text.push(byte_ids_of("ab😀")[:4])
    assert piece.text + text.finish() == expected


def test_offsets_count_the_characters_before_each_token():
    text = sequence_text(stop=["é!"], stop_ids={EOS_ID})
    piece = text.push([*byte_ids_of("a😀é!"), EOS_ID])
    assert piece.offsets == (0, 1, 1, 1, 1, 2, 2, 3)
    assert len(piece.token_ids) == 8
