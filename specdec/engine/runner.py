"""The seam to a model: several ragged sequences per forward, explicit rollback."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import msgspec
import torch

from specdec.types import SequenceId


class ForwardItem(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Tokens to feed behind what a sequence's cache holds."""

    sequence_id: SequenceId
    token_ids: Sequence[int]
    """At least one."""
    num_rows: int
    """Logits are wanted for the last ``num_rows`` of them, 0 <= num_rows <= len(token_ids)."""


class Runner(Protocol):
    """A causal language model with its own KV cache; one thread at a time.

    Implementations: `specdec.engine.model_runner.ModelRunner` and `specdec.engine.simulated.SimulatedRunner`;
    both pass the same contract tests.
    """

    @property
    def vocab_size(self) -> int:
        """Ids below it are real tokens; logits rows may be wider (padding)."""
        ...

    @property
    def max_context(self) -> int:
        """Most positions a sequence's cache can hold."""
        ...

    @property
    def kv_capacity_tokens(self) -> int: ...

    @property
    def kv_tokens_in_use(self) -> int:
        """Positions of the cache that sequences hold, in whole blocks; shared ones count once."""
        ...

    @property
    def runs_ahead(self) -> bool:
        """Whether `forward` returns before its logits are there: looking at a value waits for the device."""
        ...

    def open(self, sequence_id: SequenceId) -> None:
        """Give a sequence an empty cache; an existing one is dropped first."""
        ...

    def close(self, sequence_id: SequenceId) -> None:
        """Free a sequence's cache; unknown ids are ignored."""
        ...

    def fork(self, sequence_id: SequenceId, copy_id: SequenceId, length: int) -> None:
        """Open ``copy_id`` with the first ``length`` cached positions of a sequence; nothing is computed.

        Raises:
            StaleCache: the sequence holds fewer.
        """
        ...

    def rename(self, sequence_id: SequenceId, new_id: SequenceId) -> None:
        """Give a sequence's cache to another id; what that held is freed."""
        ...

    def length(self, sequence_id: SequenceId) -> int:
        """Cached positions of an open sequence."""
        ...

    def truncate(self, sequence_id: SequenceId, length: int) -> None:
        """Roll back to ``length`` positions, in O(1).

        Raises:
            StaleCache: ``length`` is more than the cache holds.
        """
        ...

    def reserve(self, item: ForwardItem, num_extra: int = 0) -> None:
        """Make room for an item that will be fed next, and for ``num_extra`` tokens behind it.

        Feeding it then cannot fail for want of room, whatever else is fed in between. Rolling back gives what
        is not needed any more free again.

        Raises:
            KVCacheFull: there is no room.
            StaleCache: the sequence would outgrow ``max_context``.
        """
        ...

    def forward(
        self, items: Sequence[ForwardItem], device_token_ids: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Feed every item's tokens and return the wanted logits.

        Args:
            items: distinct open sequences, reserved or not.
            device_token_ids: [tokens of all items] int64 on the model's device, if the host has not seen the
                tokens. The items' own then only say how many there are, and all rows are wanted. Nothing but
                more such tokens may follow until `settle` says what they were.

        Returns:
            [sum of num_rows, >= vocab_size] raw logits, items in order, on the model's device; the next
            forward may overwrite them.

        Raises:
            KVCacheFull: the tokens of an item not reserved do not fit; nothing was fed.
            StaleCache: such a sequence would outgrow ``max_context``; nothing was fed.
        """
        ...

    def wait(self) -> None:
        """Until the device has done all that was asked of it, so that the host may look at values."""
        ...

    def settle(self, sequence_id: SequenceId, token_ids: Sequence[int]) -> None:
        """Say what the tokens were that were fed unseen; those behind ``token_ids`` are rolled back."""
        ...
