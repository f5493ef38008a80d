"""A `Runner` without a model: exact toy laws and chosen latencies.

It makes the coordinator testable and measurable without a GPU: the law of every output is known in closed
form, and a forward takes as long as it is told to.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from itertools import islice

import torch

from specdec.engine.runner import ForwardItem
from specdec.errors import KVCacheFull, StaleCache
from specdec.types import SequenceId


class ToyLaw:
    """A Markov law: the next token depends on the last two, by way of a table.

    Args:
        logits: [contexts, vocab] or [vocab, vocab, vocab] float: the next token's logits behind
            ``(before_last, last)`` are row ``(before_last * vocab + last) % contexts``. With as many rows as
            there are pairs each has its own; with fewer, pairs share rows as if at random.
    """

    def __init__(self, logits: torch.Tensor) -> None:
        self._logits = logits
        self._table = logits.reshape(-1, logits.shape[-1])

    @classmethod
    def random(cls, vocab_size: int, seed: int, scale: float = 1.0) -> ToyLaw:
        """Independent normal logits of the given standard deviation."""
        generator = torch.Generator().manual_seed(seed)
        return cls(torch.randn(vocab_size, vocab_size, vocab_size, generator=generator) * scale)

    def perturbed(self, seed: int, scale: float) -> ToyLaw:
        """A draft for this law: the same logits plus noise."""
        return ToyLaw(self._logits + ToyLaw.random(self.vocab_size, seed, scale)._logits)

    @property
    def vocab_size(self) -> int:
        return self._logits.shape[-1]

    def row(self, context: Sequence[int]) -> torch.Tensor:
        """[vocab] logits of the token behind a non-empty context."""
        return self.rows([(context[-2] if len(context) > 1 else 0, context[-1])])[0]

    def rows(self, contexts: Sequence[tuple[int, int]]) -> torch.Tensor:
        """[contexts, vocab] logits behind pairs of the last two tokens."""
        return self._table[self.pair_numbers(contexts) % len(self._table)]

    def pair_numbers(self, contexts: Sequence[tuple[int, int]]) -> torch.Tensor:
        """[contexts] int64 below vocab^2: one for each pair of tokens."""
        pairs = torch.tensor(contexts, dtype=torch.int64).view(-1, 2)
        return pairs[:, 0] * self.vocab_size + pairs[:, 1]


OVERSLEPT_S = 0.0002
"""More than a thread oversleeps; 0.1 ms is usual."""


def sleep_exactly(seconds: float) -> None:
    """As `time.sleep`, but a device does not oversleep: what is left at the end is waited for awake."""
    end_s = time.perf_counter() + seconds
    if seconds > OVERSLEPT_S:
        time.sleep(seconds - OVERSLEPT_S)
    while time.perf_counter() < end_s:
        time.sleep(0)  # lets other threads on


Latency = Callable[[int, int], float]
"""(sequences, tokens) of a forward to the seconds it takes, its arithmetic included."""


class SimulatedRunner:
    """See `Runner`. The "cache" of a sequence is the list of its tokens.

    Args:
        law: of the next token.
        max_context: positions.
        kv_capacity_tokens: of all sequences.
        latency: what a forward takes.
        sleep: waits so many seconds.
        clock: monotonic seconds.
        runs_ahead: as a GPU does: a forward returns at once, and its device takes up the next one when it is
            done with it.
    """

    def __init__(
        self,
        law: ToyLaw,
        *,
        max_context: int = 4096,
        kv_capacity_tokens: int = 1_000_000,
        latency: Latency = lambda num_sequences, num_tokens: 0.0,
        sleep: Callable[[float], None] = sleep_exactly,
        clock: Callable[[], float] = time.perf_counter,
        runs_ahead: bool = False,
    ) -> None:
        self._law = law
        self._max_context = max_context
        self._kv_capacity_tokens = kv_capacity_tokens
        self._latency = latency
        self._sleep = sleep
        self._clock = clock
        self._runs_ahead = runs_ahead
        self._ready_s = 0.0
        """When the device will have done all that was asked of it."""
        self._tokens: dict[SequenceId, list[int]] = {}
        self._room: dict[SequenceId, int] = {}
        """Positions that each may fill,"""
        self._tokens_in_use = 0
        """and all together."""
        self._num_unseen: dict[SequenceId, int] = {}

    @property
    def vocab_size(self) -> int:
        return self._law.vocab_size

    @property
    def max_context(self) -> int:
        return self._max_context

    @property
    def kv_capacity_tokens(self) -> int:
        return self._kv_capacity_tokens

    @property
    def kv_tokens_in_use(self) -> int:
        return self._tokens_in_use

    @property
    def runs_ahead(self) -> bool:
        return self._runs_ahead

    def wait(self) -> None:
        """See `Runner.wait`."""
        delay_s = self._ready_s - self._clock()
        if delay_s > 0:
            self._sleep(delay_s)

    def open(self, sequence_id: SequenceId) -> None:
        self._num_unseen.pop(sequence_id, None)
        self._tokens[sequence_id] = []
        self._give_room(sequence_id, 0)

    def close(self, sequence_id: SequenceId) -> None:
        self._tokens.pop(sequence_id, None)
        self._tokens_in_use -= self._room.pop(sequence_id, 0)

    def fork(self, sequence_id: SequenceId, copy_id: SequenceId, length: int) -> None:
        """See `Runner.fork`."""
        tokens = self._tokens[sequence_id]
        if length > len(tokens):
            raise StaleCache(f"sequence {sequence_id}: {length} of {len(tokens)} positions wanted")
        self.open(copy_id)
        self._tokens[copy_id] = tokens[:length]
        self._give_room(copy_id, length)

    def rename(self, sequence_id: SequenceId, new_id: SequenceId) -> None:
        self.close(new_id)
        self._tokens[new_id] = self._tokens.pop(sequence_id)
        self._room[new_id] = self._room.pop(sequence_id)

    def length(self, sequence_id: SequenceId) -> int:
        return len(self._tokens[sequence_id])

    def truncate(self, sequence_id: SequenceId, length: int) -> None:
        if sequence_id in self._num_unseen:
            self.settle(sequence_id, ())
        tokens = self._tokens[sequence_id]
        if length > len(tokens):
            raise StaleCache(f"sequence {sequence_id}: keep {length}, but {len(tokens)} positions are cached")
        del tokens[length:]
        self._give_room(sequence_id, length)

    def reserve(self, item: ForwardItem, num_extra: int = 0) -> None:
        """See `Runner.reserve`."""
        sequence_id = item.sequence_id
        wanted = len(self._tokens[sequence_id]) + len(item.token_ids) + num_extra
        if wanted > self._max_context:
            raise StaleCache(
                f"sequence {sequence_id}: {wanted} positions exceed the context of {self._max_context}"
            )
        held = self._room[sequence_id]
        if wanted <= held:
            return
        if self._tokens_in_use - held + wanted > self._kv_capacity_tokens:
            raise KVCacheFull(f"room for {wanted} tokens wanted, {self._kv_capacity_tokens} in all")
        self._give_room(sequence_id, wanted)

    def forward(
        self, items: Sequence[ForwardItem], device_token_ids: torch.Tensor | None = None
    ) -> torch.Tensor:
        """See `Runner.forward`."""
        started_s = self._clock()
        unseen = None if device_token_ids is None else iter(device_token_ids.tolist())
        for item in items:
            self.reserve(item)
        contexts: list[tuple[int, int]] = []
        for item in items:
            tokens = self._tokens[item.sequence_id]
            if unseen is None:
                tokens.extend(item.token_ids)
            else:
                tokens.extend(islice(unseen, len(item.token_ids)))
                fed_before = self._num_unseen.get(item.sequence_id, 0)
                self._num_unseen[item.sequence_id] = fed_before + len(item.token_ids)
            ends = range(len(tokens) - item.num_rows, len(tokens))
            contexts.extend((tokens[end - 1] if end > 0 else 0, tokens[end]) for end in ends)
        rows = self._law.rows(contexts)
        num_tokens = sum(len(item.token_ids) for item in items)
        self._ready_s = max(self._ready_s, started_s) + self._latency(len(items), num_tokens)
        if not self._runs_ahead:
            self.wait()
        return rows

    def settle(self, sequence_id: SequenceId, token_ids: Sequence[int]) -> None:
        """See `Runner.settle`."""
        tokens = self._tokens[sequence_id]
        del tokens[len(tokens) - self._num_unseen.pop(sequence_id, 0) :]
        tokens.extend(token_ids)

    def _give_room(self, sequence_id: SequenceId, room: int) -> None:
        self._tokens_in_use += room - self._room.get(sequence_id, 0)
        self._room[sequence_id] = room
