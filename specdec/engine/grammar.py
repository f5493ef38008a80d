"""Grammars inside a worker: which tokens may follow what a sequence has said, by llguidance."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np

from specdec.errors import ConfigError, WorkerError
from specdec.messages import Int32Array

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer
    from transformers import PreTrainedTokenizerBase

BITS = 32
"""Tokens a word of a mask tells about."""
NUM_KEPT = 32
"""Compiled grammars that are kept: a large schema takes 0.3 s, in which nobody's tokens are computed."""


class GrammarState:
    """Where one sequence's output stands in its grammar; follows the output wherever it is rolled back to.

    Args:
        matcher: fresh.
        vocab_size: ids a mask tells about.
        is_optional: whether what follows may be anything once the grammar cannot be followed.
    """

    def __init__(self, matcher: LLMatcher, vocab_size: int, *, is_optional: bool) -> None:
        self._matcher = matcher
        self._is_optional = is_optional
        self._mask = np.zeros(-(-vocab_size // BITS), dtype=np.int32)
        self._consumed: list[int] = []

    def allowed(self, output_ids: Sequence[int]) -> Int32Array | None:
        """Bit ``t % 32`` of word ``t // 32`` tells whether token ``t`` may follow the output.

        The end-of-sequence tokens may where the output is complete. None behind an output that the grammar
        does not allow: a draft may propose one, but nothing behind it can be accepted.

        Raises:
            WorkerError: nothing can follow, since the grammar wants text that the vocabulary cannot spell or
                has become too complex. Going on without it would give the client what it has ruled out.
        """
        if not self._follow(list(output_ids)):
            return None
        # A new array each time: rows of one sequence are looked at together.
        mask = np.zeros_like(self._mask)
        self._matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
        if self._matcher.is_error() or not mask.any():
            if self._is_optional:
                return None
            reason = self._matcher.get_error() or "no token can follow"
            raise WorkerError(f"the grammar cannot be followed any further: {reason}")
        return mask

    def _follow(self, output_ids: list[int]) -> bool:
        common = _common_length(self._consumed, output_ids)
        if common < len(self._consumed):
            self._matcher.rollback(len(self._consumed) - common)
        # It stops in front of the first token that is not allowed and stays usable.
        num_new = self._matcher.try_consume_tokens(output_ids[common:])
        self._consumed = output_ids[: common + num_new]
        return len(self._consumed) == len(output_ids)


class Grammars:
    """Makes the states of a worker's sequences.

    Args:
        load_tokenizer: the target's; called when the first grammar comes.
        vocab_size: ids that may be emitted.
        eos_token_ids: allowed where an output is complete.
        are_optional: whether a grammar that cannot be followed is given up; else the sequence fails.
    """

    def __init__(
        self,
        load_tokenizer: Callable[[], PreTrainedTokenizerBase],
        vocab_size: int,
        eos_token_ids: Iterable[int],
        *,
        are_optional: bool = False,
    ) -> None:
        self._load_tokenizer = load_tokenizer
        self._vocab_size = vocab_size
        self._eos_token_ids = sorted(eos_token_ids)
        self._are_optional = are_optional
        self._tokenizer: LLTokenizer | None = None
        self._fresh = lru_cache(NUM_KEPT)(self._compiled)

    def for_drafts(self) -> Grammars:
        """The same for a draft, which may propose anything: the target decides."""
        return Grammars(self._load_tokenizer, self._vocab_size, self._eos_token_ids, are_optional=True)

    def start(self, grammar: str) -> GrammarState:
        """The state of an empty output.

        Args:
            grammar: as llguidance reads it.

        Raises:
            ConfigError: the tokenizer is of a kind that llguidance cannot read, or names no end of text.
        """
        matcher = self._fresh(grammar).deep_copy()
        return GrammarState(matcher, self._vocab_size, is_optional=self._are_optional)

    def _compiled(self, grammar: str) -> LLMatcher:
        from llguidance import LLMatcher

        return LLMatcher(self.tokenizer(), grammar, log_level=0)

    def tokenizer(self) -> LLTokenizer:
        """The tokenizer as llguidance reads it; half a second at first.

        Raises:
            ConfigError: it is of a kind that llguidance cannot read, or names no end of text.
        """
        if self._tokenizer is None:
            self._tokenizer = _read(self._load_tokenizer(), self._vocab_size, self._eos_token_ids)
        return self._tokenizer


def _read(tokenizer: PreTrainedTokenizerBase, vocab_size: int, eos_token_ids: list[int]) -> LLTokenizer:
    import llguidance.hf

    if not eos_token_ids:
        raise ConfigError("the model has no end-of-sequence token, so a grammar could not end its output")
    try:
        return llguidance.hf.from_tokenizer(tokenizer, n_vocab=vocab_size, eos_token=eos_token_ids)
    except Exception as error:  # llguidance raises ValueError and what its Rust parts raise
        raise ConfigError(f"the model's tokenizer cannot be used with grammars: {error}") from error


def _common_length(one: list[int], other: list[int]) -> int:
    if one == other[: len(one)]:
        return len(one)
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), len(other))
