"""Token ids to the text a client may see, one token at a time.

Three stages for each sequence: `Detokenizer` turns tokens into text without ever splitting a character,
`StopScanner` holds back what may become a stop string, and `SequenceText` joins both and says at which token
the sequence ended. Streamed and unstreamed answers both come through here, so they are the same text.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

MAX_PENDING_TOKENS = 16
"""Tokens the detokenizer may sit on. An incomplete character spans at most 4 bytes, so a longer wait means
text that really is U+FFFD, or tokens without any text."""

MAX_CHARACTER_TOKENS = 4
"""Tokens one incomplete character can span, at a byte each."""


class Detokenizer:
    """Incremental decoding of one sequence, special tokens skipped or kept as their names.

    A character whose bytes are spread over several tokens appears with the last of them. The deltas, joined
    and followed by ``flush()``, are what decoding all tokens at once gives.
    """

    def __init__(self, tokenizer: Tokenizer, *, keeps_special_tokens: bool = False) -> None:
        self._tokenizer = tokenizer
        self._skips_special = not keeps_special_tokens
        self._stream = self._stream_behind([])
        self._context: list[int] = []
        """Tokens of the last delta: what decoders need to see in order to place spaces."""
        self._pending: list[int] = []
        """Tokens pushed since then."""

    def push(self, token_id: int) -> str:
        """Take one token; return the text it completes, often empty."""
        self._pending.append(token_id)
        delta = self._step(token_id)
        if delta is not None:
            self._context, self._pending = self._pending, []
            return delta
        if len(self._pending) >= MAX_PENDING_TOKENS:
            return self._relieve()
        return ""

    def flush(self) -> str:
        """End the sequence: return the bytes of a truncated last character, as U+FFFD, once."""
        text = self._text_of(self._pending)
        self._restart(context=[])
        return text

    def _restart(self, context: list[int]) -> None:
        self._stream = self._stream_behind(context)
        self._context = context
        self._pending = []

    def _step(self, token_id: int) -> str | None:
        try:
            return self._stream.step(self._tokenizer, token_id)
        except Exception:
            # The library raises nothing narrower. Byte-fallback decoders turn a whole run of bytes into
            # U+FFFD when its end is invalid; the stream then misses text it gave before. Go on behind it.
            text = self._text_of(self._pending)
            self._stream = self._stream_behind(self._pending)
            return text

    def _stream_behind(self, token_ids: list[int]) -> DecodeStream:
        return DecodeStream(token_ids, skip_special_tokens=self._skips_special)

    def _relieve(self) -> str:
        """Let go of what cannot be an incomplete character, so that the wait and the work are bounded."""
        text = self._text_of(self._pending)
        if not text:
            self._restart(self._context)
            return ""
        for cut in range(len(self._pending) - 1, len(self._pending) - 1 - MAX_CHARACTER_TOKENS, -1):
            head, tail = self._pending[:cut], self._pending[cut:]
            tail_text = self._decode(tail)
            # Inside a character the two halves decode to more U+FFFD than the whole.
            if tail_text and self._text_of(head) + tail_text == text:
                head_text = self._text_of(head)
                self._restart(context=[])
                return head_text + "".join(self.push(token_id) for token_id in tail)
        return ""

    def _text_of(self, token_ids: list[int]) -> str:
        """Text of tokens that follow the context."""
        before = self._decode(self._context)
        both = self._decode(self._context + token_ids)
        return both[len(before) :] if both.startswith(before) else self._decode(token_ids)

    def _decode(self, token_ids: list[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=self._skips_special)


class _PatternMatcher:
    """Knuth-Morris-Pratt automaton: constant work a character, whatever the pattern."""

    def __init__(self, pattern: str) -> None:
        self._pattern = pattern
        self._borders = _borders(pattern)
        self.num_matched = 0
        """Length of the longest prefix of the pattern that ends the text read so far."""

    def feed(self, character: str) -> bool:
        """Read one character; return whether the pattern ends with it. Feed on only after `go_on`."""
        while self.num_matched and self._pattern[self.num_matched] != character:
            self.num_matched = self._borders[self.num_matched - 1]
        if self._pattern[self.num_matched] == character:
            self.num_matched += 1
        return self.num_matched == len(self._pattern)

    def go_on(self) -> None:
        """Look for the next occurrence."""
        self.num_matched = self._borders[-1]


def _borders(pattern: str) -> list[int]:
    """Entry i: length of the longest proper prefix of ``pattern[:i + 1]`` that is also its suffix."""
    borders = [0] * len(pattern)
    length = 0
    for idx in range(1, len(pattern)):
        while length and pattern[length] != pattern[idx]:
            length = borders[length - 1]
        if pattern[length] == pattern[idx]:
            length += 1
        borders[idx] = length
    return borders


class StopScanner:
    """Cut text before the stop string that is completed first; never show part of a stop string.

    Where several stop strings are completed by the same character, the text ends before the longest.
    """

    def __init__(self, stop_strings: Sequence[str]) -> None:
        self._matchers = [_PatternMatcher(pattern) for pattern in stop_strings]
        self._held = ""
        self.is_matched = False
        """A stop string is complete: nothing may follow."""

    def push(self, text: str, *, may_stop: bool = True) -> str:
        """Take more text; return what is certain to stand before any stop string.

        Args:
            text: more text.
            may_stop: False: a stop string that it completes is text like any other.
        """
        if not self._matchers or not text:
            return text
        start = len(self._held) + 1
        self._held += text
        for end, character in enumerate(text, start=start):
            completed = [matcher for matcher in self._matchers if matcher.feed(character)]
            if completed and may_stop:
                self.is_matched = True
                return self._release(end - max(matcher.num_matched for matcher in completed))
            for matcher in completed:
                matcher.go_on()
        return self._release(len(self._held) - max(matcher.num_matched for matcher in self._matchers))

    def flush(self) -> str:
        """End the text: return what was held back, since no stop string was completed."""
        return "" if self.is_matched else self._release(len(self._held))

    def _release(self, length: int) -> str:
        released, self._held = self._held[:length], self._held[length:]
        return released


@dataclass(frozen=True, slots=True, kw_only=True)
class TextPiece:
    """What some tokens of a sequence gave."""

    text: str
    token_ids: tuple[int, ...]
    """The tokens taken: fewer than offered when the sequence ended among them."""
    offsets: tuple[int, ...]
    """For each, the characters of the uncut text before it; inside a character, those before that."""


class SequenceText:
    """One sequence's text, token by token, up to the stop token or the token that completes a stop string.

    None of the first ``min_tokens`` tokens ends it.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        stop_strings: Sequence[str],
        stop_token_ids: Collection[int],
        min_tokens: int = 0,
    ) -> None:
        self._detokenizer = Detokenizer(tokenizer)
        self._scanner = StopScanner(stop_strings)
        self._stop_token_ids = stop_token_ids
        self._num_left = min_tokens
        """Tokens that must come before one may end the sequence."""
        self._length = 0
        """Characters of all text so far, that of stop strings included."""
        self.is_stopped = False
        """The sequence has ended with a stop token or a stop string."""

    def push(self, token_ids: Sequence[int]) -> TextPiece:
        """Take the tokens of one round. The text of a stop token itself is not part of the answer."""
        texts: list[str] = []
        offsets: list[int] = []
        for token_id in token_ids:
            if self.is_stopped:
                break
            offsets.append(self._length)
            if token_id in self._stop_token_ids:
                self.is_stopped = True
            else:
                text = self._detokenizer.push(token_id)
                self._length += len(text)
                texts.append(self._scanner.push(text, may_stop=self._num_left <= 0))
                self.is_stopped = self._scanner.is_matched
            self._num_left -= 1
        return TextPiece(
            text="".join(texts), token_ids=tuple(token_ids[: len(offsets)]), offsets=tuple(offsets)
        )

    def finish(self) -> str:
        """End the sequence; return the text still held back."""
        if self._scanner.is_matched:
            return ""
        tail = self._scanner.push(self._detokenizer.flush(), may_stop=self._num_left < 0)
        # The replacement character of a truncated last character can complete a stop string, too.
        self.is_stopped = self.is_stopped or self._scanner.is_matched
        return tail + self._scanner.flush()
