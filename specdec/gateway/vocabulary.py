"""What each single token stands for: its bytes, and a text that JSON can hold."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

from tokenizers import Tokenizer

from specdec.gateway.events import LikelyToken, ScoredToken
from specdec.types import TokenLogprob

LOWEST_LOGPROB = -9999.0
"""In place of minus infinity, which JSON cannot hold."""

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_SPACE_MARK = "▁"


@dataclass(frozen=True, slots=True)
class TokenPiece:
    """One token by itself."""

    text: str
    """Its characters; of bytes that are no whole characters ``bytes:\\xf0\\x9f``, which tells them apart."""
    utf8: bytes
    """What it adds to the output: joined over tokens, the UTF-8 bytes of their text."""


class Vocabulary:
    """The pieces of one tokenizer, looked up when they are needed. Special tokens stand for their names."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._added = {
            token_id: token.content for token_id, token in tokenizer.get_added_tokens_decoder().items()
        }
        decoders = _decoder_types(tokenizer)
        self._is_byte_level = "ByteLevel" in decoders
        self._has_byte_tokens = "ByteFallback" in decoders
        self._pieces: dict[int, TokenPiece] = {}

    def piece(self, token_id: int) -> TokenPiece:
        """Return what a token stands for; nothing for an id without a token."""
        known = self._pieces.get(token_id)
        if known is None:
            utf8 = self._utf8(token_id)
            known = self._pieces[token_id] = TokenPiece(_shown(utf8), utf8)
        return known

    def scored(self, token: TokenLogprob, text_offset: int) -> ScoredToken:
        """Return a token with its piece and its likeliest rivals.

        Args:
            token: as the target judged it.
            text_offset: characters of the choice's text before it.
        """
        # Where the token is one of the likeliest, clients compare the two values for equality.
        own = next((logprob for token_id, logprob in token.top if token_id == token.token_id), token.logprob)
        piece = self.piece(token.token_id)
        return ScoredToken(
            token_id=token.token_id,
            text=piece.text,
            utf8=piece.utf8,
            logprob=_finite(own),
            top=tuple(self._likely(token_id, logprob) for token_id, logprob in token.top),
            text_offset=text_offset,
        )

    def unscored(self, token_id: int, text_offset: int) -> ScoredToken:
        """Return a token that nothing stands before, so that no law speaks of it."""
        piece = self.piece(token_id)
        return ScoredToken(
            token_id=token_id, text=piece.text, utf8=piece.utf8, logprob=None, text_offset=text_offset
        )

    def _likely(self, token_id: int, logprob: float) -> LikelyToken:
        piece = self.piece(token_id)
        return LikelyToken(token_id=token_id, text=piece.text, utf8=piece.utf8, logprob=_finite(logprob))

    def _utf8(self, token_id: int) -> bytes:
        if token_id in self._added:
            return self._added[token_id].encode()
        token = self._tokenizer.id_to_token(token_id)
        if token is None:
            return b""
        if self._is_byte_level:
            return bytes(_BYTES_OF_CHARACTERS[character] for character in token)
        if self._has_byte_tokens and (match := _BYTE_TOKEN.fullmatch(token)):
            return bytes([int(match[1], 16)])
        if _SPACE_MARK in token:
            # Decoding it alone would strip the space, as at the start of a text.
            return token.replace(_SPACE_MARK, " ").encode()
        return self._tokenizer.decode([token_id], skip_special_tokens=False).encode()


def mean_logprob(tokens: Sequence[ScoredToken]) -> float:
    """Return the mean over a choice's tokens; of none, the lowest."""
    values = [token.logprob for token in tokens if token.logprob is not None]
    return sum(values) / len(values) if values else LOWEST_LOGPROB


def _finite(logprob: float) -> float:
    return logprob if math.isfinite(logprob) else LOWEST_LOGPROB


def _shown(utf8: bytes) -> str:
    try:
        return utf8.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in utf8)


def _byte_level_alphabet() -> dict[str, int]:
    """Byte-level BPE writes printable Latin-1 as itself and the other bytes, in order, from 256 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + idx): byte for idx, byte in enumerate(others)}


_BYTES_OF_CHARACTERS = _byte_level_alphabet()


def _decoder_types(tokenizer: Tokenizer) -> frozenset[str]:
    if tokenizer.decoder is None:
        return frozenset()
    state = json.loads(tokenizer.decoder.__getstate__())
    return frozenset(part["type"] for part in state.get("decoders", [state]))
