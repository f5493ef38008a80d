"""The committed-token log: the only truth about a sequence. Every KV cache is a disposable copy of it."""

from __future__ import annotations

from collections.abc import Sequence

from specdec.types import FinishReason, StopCriteria


class CommittedLog:
    """Prompt and output tokens of one sequence; grows only by `commit`, never shrinks."""

    def __init__(self, prompt_ids: Sequence[int], output_ids: Sequence[int] = ()) -> None:
        assert prompt_ids, "a sequence needs at least one prompt token"
        self._tokens = [*prompt_ids, *output_ids]
        self._prompt_len = len(prompt_ids)

    def __len__(self) -> int:
        return len(self._tokens)

    @property
    def prompt_len(self) -> int:
        return self._prompt_len

    @property
    def num_output_tokens(self) -> int:
        return len(self._tokens) - self._prompt_len

    @property
    def output_ids(self) -> tuple[int, ...]:
        return tuple(self._tokens[self._prompt_len :])

    def tail(self, start: int, limit: int | None = None) -> tuple[int, ...]:
        """Tokens from position ``start`` on, at most ``limit`` of them."""
        end = None if limit is None else start + limit
        return tuple(self._tokens[start:end])

    def commit(self, token_ids: Sequence[int]) -> None:
        self._tokens.extend(token_ids)


def cut_block(
    token_ids: Sequence[int], stop: StopCriteria, num_output_tokens: int
) -> tuple[tuple[int, ...], FinishReason | None]:
    """End a block of new tokens where the sequence ends.

    Args:
        token_ids: what the round would commit.
        stop: the sequence's stop criteria.
        num_output_tokens: output tokens committed before this block, below ``stop.max_tokens``.

    Returns:
        The tokens to commit, the stop token included, and why the sequence ended, if it did. A stop token
        at the very cap counts as ``stop``.
    """
    room = stop.max_tokens - num_output_tokens
    block = tuple(token_ids[:room])
    if not stop.stop_token_ids.isdisjoint(block):
        first = next(i for i, token in enumerate(block) if token in stop.stop_token_ids)
        return block[: first + 1], "stop"
    return block, "length" if len(token_ids) >= room else None
