"""Which block of the KV cache holds what: tables, reference counts, shared prefixes. No tensors.

The cache is cut into blocks of a fixed number of positions. A sequence has a table of blocks; rolling it back
sets a length and lets go of whole blocks behind it, and moves nothing. Blocks are shared between sequences
that begin with the same tokens: a full block is known by the digest of all tokens up to its end. When its
last user lets go it stays known, until the block is needed for something else, the longest untouched first.

A block is written only by a sequence that is its sole user: a shared one is copied first. So rejected drafts
and cancelled sequences never change what others see.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

from specdec.errors import InvariantViolation, KVCacheFull, StaleCache
from specdec.types import SequenceId


@dataclass(slots=True)
class _Table:
    """One sequence."""

    blocks: list[int] = field(default_factory=list)
    """Its positions in order; the last ones may be reserved and not written yet."""
    token_ids: list[int] = field(default_factory=list)
    """Exactly the cached tokens, but for the unseen ones."""
    num_unseen: int = 0
    """Cached tokens behind them whose values are not known yet."""
    digests: list[bytes] = field(default_factory=list)
    """Of the full blocks among them."""

    @property
    def length(self) -> int:
        """Cached positions."""
        return len(self.token_ids) + self.num_unseen


class BlockManager:
    """Owns all block bookkeeping of one worker; one thread at a time.

    Args:
        num_blocks: blocks of the cache.
        block_size: positions per block.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._free = list(range(num_blocks - 1, -1, -1))
        self._idle: OrderedDict[int, None] = OrderedDict()
        """Unused blocks whose content is still known, the longest unused first."""
        self._num_users = [0] * num_blocks
        self._digest_of: dict[int, bytes] = {}
        self._block_of: dict[bytes, int] = {}
        self._tables: dict[SequenceId, _Table] = {}

    # Questions ------------------------------------------------------------------------------------------

    @property
    def num_used(self) -> int:
        """Blocks that sequences hold."""
        return self.num_blocks - self.num_free

    @property
    def num_free(self) -> int:
        """Blocks that could be had now; known content of unused blocks gives way."""
        return len(self._free) + len(self._idle)

    def length(self, sequence_id: SequenceId) -> int:
        """Cached positions of an open sequence."""
        return self._tables[sequence_id].length

    def table(self, sequence_id: SequenceId) -> Sequence[int]:
        """Its blocks in order of position, reserved ones included; not to be changed."""
        return self._tables[sequence_id].blocks

    # Changes --------------------------------------------------------------------------------------------

    def open(self, sequence_id: SequenceId) -> None:
        """Begin with nothing cached; what the id held before is let go."""
        self.close(sequence_id)
        self._tables[sequence_id] = _Table()

    def close(self, sequence_id: SequenceId) -> None:
        """Let go of everything; unknown ids are ignored."""
        table = self._tables.pop(sequence_id, None)
        if table is not None:
            self._let_go(table.blocks)

    def fork(self, sequence_id: SequenceId, copy_id: SequenceId, length: int) -> None:
        """Begin ``copy_id`` with the first ``length`` positions of a sequence, in the same blocks.

        Raises:
            StaleCache: the sequence holds fewer; unseen ones do not count.
        """
        source = self._tables[sequence_id]
        if length > len(source.token_ids):
            raise StaleCache(f"sequence {sequence_id}: {length} of {len(source.token_ids)} positions wanted")
        self.open(copy_id)
        copy = self._tables[copy_id]
        copy.blocks = source.blocks[: self._blocks_for(length)]
        copy.token_ids = source.token_ids[:length]
        copy.digests = source.digests[: length // self.block_size]
        for block in copy.blocks:
            self._num_users[block] += 1

    def rename(self, sequence_id: SequenceId, new_id: SequenceId) -> None:
        """Give a sequence's cache to another id; what that held is let go."""
        self.close(new_id)
        self._tables[new_id] = self._tables.pop(sequence_id)

    def truncate(self, sequence_id: SequenceId, length: int) -> None:
        """Keep the first ``length`` positions; blocks wholly behind them are let go, reserved ones too.

        Raises:
            StaleCache: the sequence holds fewer; unseen ones do not count.
        """
        table = self._tables[sequence_id]
        if length > len(table.token_ids):
            raise StaleCache(
                f"sequence {sequence_id}: keep {length}, but {len(table.token_ids)} positions are cached"
            )
        table.num_unseen = 0
        num_blocks = self._blocks_for(length)
        self._let_go(table.blocks[num_blocks:])
        del table.blocks[num_blocks:]
        del table.token_ids[length:]
        del table.digests[length // self.block_size :]

    def adopt(self, sequence_id: SequenceId, token_ids: Sequence[int]) -> int:
        """Take over cached blocks that hold the next tokens of a sequence.

        Args:
            sequence_id: an open sequence with nothing reserved behind its length.
            token_ids: the tokens that would be fed next.

        Returns:
            How many of them are cached now: whole blocks, 0 unless the sequence ends with a full block.
        """
        table = self._tables[sequence_id]
        num_adopted = 0
        if table.num_unseen or len(table.blocks) * self.block_size != len(table.token_ids):
            return 0
        while num_adopted + self.block_size <= len(token_ids):
            content = token_ids[num_adopted : num_adopted + self.block_size]
            digest = _digest(table, content)
            block = self._block_of.get(digest)
            if block is None:
                break
            self._idle.pop(block, None)
            self._num_users[block] += 1
            table.blocks.append(block)
            table.token_ids.extend(content)
            table.digests.append(digest)
            num_adopted += self.block_size
        return num_adopted

    def reserve(self, sequence_id: SequenceId, num_tokens: int) -> tuple[int, int] | None:
        """Make the next ``num_tokens`` positions of a sequence its own to write.

        Returns:
            (source, copy) if a block shared with others is written next: copy its content before anything
            else is reserved.

        Raises:
            KVCacheFull: there are not enough blocks; nothing was changed.
        """
        table = self._tables[sequence_id]
        length = table.length
        first = length // self.block_size
        is_partial = length % self.block_size > 0 and num_tokens > 0
        is_shared = is_partial and self._num_users[table.blocks[first]] > 1
        num_new = max(0, self._blocks_for(length + num_tokens) - len(table.blocks))
        if num_new + is_shared > self.num_free:
            raise KVCacheFull(
                f"sequence {sequence_id}: {num_new + is_shared} KV cache blocks wanted, {self.num_free} free"
            )
        if is_partial and not is_shared:
            self._forget(table.blocks[first])  # about to be overwritten behind its kept positions
        copied = self._replace(table, first) if is_shared else None
        table.blocks.extend(self._take() for _ in range(num_new))
        return copied

    def append(self, sequence_id: SequenceId, token_ids: Sequence[int]) -> None:
        """Count tokens as cached: they have been written to reserved positions."""
        table = self._tables[sequence_id]
        assert not table.num_unseen
        start = len(table.token_ids) // self.block_size * self.block_size
        table.token_ids.extend(token_ids)
        while start + self.block_size <= len(table.token_ids):
            digest = _digest(table, table.token_ids[start : start + self.block_size])
            table.digests.append(digest)
            self._remember(table.blocks[start // self.block_size], digest)
            start += self.block_size

    def append_unseen(self, sequence_id: SequenceId, num_tokens: int) -> None:
        """Count tokens as cached whose values `settle` tells later; until then nobody can share them."""
        self._tables[sequence_id].num_unseen += num_tokens

    def settle(self, sequence_id: SequenceId, token_ids: Sequence[int]) -> None:
        """Say what the unseen tokens were; those behind ``token_ids`` are not kept."""
        table = self._tables[sequence_id]
        assert len(token_ids) <= table.num_unseen
        table.num_unseen = 0
        self.append(sequence_id, token_ids)

    # Blocks ---------------------------------------------------------------------------------------------

    def _blocks_for(self, length: int) -> int:
        return -(-length // self.block_size)

    def _take(self) -> int:
        """A block of one's own."""
        if self._free:
            block = self._free.pop()
        else:
            block, _ = self._idle.popitem(last=False)
            self._forget(block)
        self._num_users[block] = 1
        return block

    def _let_go(self, blocks: Sequence[int]) -> None:
        # The end goes first: a prefix is worth more than what follows it, which is useless without.
        for block in reversed(blocks):
            self._num_users[block] -= 1
            if self._num_users[block] == 0:
                if block in self._digest_of:
                    self._idle[block] = None
                else:
                    self._free.append(block)

    def _replace(self, table: _Table, idx: int) -> tuple[int, int]:
        shared, own = table.blocks[idx], self._take()
        self._num_users[shared] -= 1
        table.blocks[idx] = own
        return shared, own

    def _remember(self, block: int, digest: bytes) -> None:
        if digest not in self._block_of:  # two sequences may have computed the same
            self._block_of[digest] = block
            self._digest_of[block] = digest

    def _forget(self, block: int) -> None:
        digest = self._digest_of.pop(block, None)
        if digest is not None:
            del self._block_of[digest]

    # Laws -----------------------------------------------------------------------------------------------

    def check_invariants(self) -> None:
        """Every block is free, idle or used, and by as many as its count says; tables hold what they claim.

        Raises:
            InvariantViolation: naming the law that is broken.
        """
        self._check_conservation()
        for sequence_id, table in self._tables.items():
            self._check_table(sequence_id, table)
        for block, digest in self._digest_of.items():
            if self._block_of.get(digest) != block:
                raise InvariantViolation(f"block {block} is not found by its own digest")
        if len(self._block_of) != len(self._digest_of):
            raise InvariantViolation("more digests than blocks that have one")

    def _check_conservation(self) -> None:
        used = [block for table in self._tables.values() for block in table.blocks]
        counts = [0] * self.num_blocks
        for block in used:
            counts[block] += 1
        if counts != self._num_users:
            raise InvariantViolation("users of blocks do not add up to the tables")
        places = [*self._free, *self._idle, *set(used)]
        if sorted(places) != list(range(self.num_blocks)):
            raise InvariantViolation("blocks are lost or in two places")
        if any(block in self._digest_of for block in self._free):
            raise InvariantViolation("a free block still has a digest")
        if any(block not in self._digest_of for block in self._idle):
            raise InvariantViolation("an idle block has no digest")

    def _check_table(self, sequence_id: SequenceId, table: _Table) -> None:
        if len(table.blocks) < self._blocks_for(table.length):
            raise InvariantViolation(f"sequence {sequence_id}: {table.length} positions exceed its blocks")
        if len(table.digests) != len(table.token_ids) // self.block_size:
            raise InvariantViolation(f"sequence {sequence_id}: digests do not match its full blocks")
        for block, digest in zip(table.blocks, table.digests, strict=False):
            if self._digest_of.get(block, digest) != digest:
                raise InvariantViolation(f"sequence {sequence_id}: block {block} holds something else")


def _digest(table: _Table, content: Sequence[int]) -> bytes:
    """Of a block and all before it; 128 bits, so that no two contents meet by chance or by intent."""
    parent = table.digests[-1] if table.digests else b""
    return hashlib.blake2b(parent + array("q", content).tobytes(), digest_size=16).digest()
