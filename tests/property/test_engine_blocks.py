"""The block bookkeeping against a memory that is written as the engine writes it.

A position of the memory holds a token and all tokens before it, as a key holds what it attended to. Whatever
was shared, copied, rolled back or given to others in between, every sequence must read exactly its own.
"""

import random
from collections import Counter

import pytest
from hypothesis import event, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from specdec.engine.blocks import BlockManager
from specdec.errors import KVCacheFull, StaleCache
from tests.tiny_models import sequence_id

SIZE = 3
NUM_BLOCKS = 9
TOKENS = (0, 1)
NAMES = [sequence_id(name) for name in "abcd"]
GARBAGE = (-1, None)


class Mirror:
    """A block manager, the memory it speaks of, and what each sequence should find there."""

    def __init__(self):
        self.blocks = BlockManager(NUM_BLOCKS, SIZE)
        self.memory = {}
        self.texts = {}
        self.counts = Counter()
        for name in NAMES:
            self.open(name)

    def count(self, name):
        self.counts[name] += 1

    def open(self, sequence):
        self.blocks.open(sequence)
        self.texts[sequence] = []

    def close(self, sequence):
        self.blocks.close(sequence)
        self.texts.pop(sequence, None)

    def begin_like(self, sequence, other):
        """A second request with the prompt of a first."""
        prompt = [*self.texts[other], TOKENS[0]]
        self.open(sequence)
        self.feed({sequence: prompt})

    def truncate(self, sequence, length):
        self.blocks.truncate(sequence, length)
        del self.texts[sequence][length:]

    def fork(self, sequence, other, length):
        """``other`` begins with what ``sequence`` holds, partly filled blocks included."""
        self.blocks.fork(sequence, other, length)
        self.texts[other] = self.texts[sequence][:length]

    def take_over(self, sequence, other):
        """A prepared continuation becomes the sequence's own."""
        self.blocks.rename(other, sequence)
        self.texts[sequence] = self.texts.pop(other)
        self.open(other)

    def reject(self, sequence, num_tokens):
        self.truncate(sequence, max(0, len(self.texts[sequence]) - num_tokens))

    def feed(self, feeds, *, num_extra=0, fails=False):
        """One forward: every sequence gets its room first; then all are written, and counted if none failed.

        A sequence that finds no room is rolled back to where it was.
        """
        rest = {}
        for sequence, token_ids in feeds.items():
            num_adopted = self.adopt(sequence, token_ids)
            if self.reserve(sequence, len(token_ids) - num_adopted + num_extra):
                rest[sequence] = token_ids[num_adopted:]
            else:
                self.truncate(sequence, len(self.texts[sequence]) - num_adopted)
        for sequence, token_ids in rest.items():
            self.write(sequence, token_ids, fails=fails)
        if not fails:
            for sequence, token_ids in rest.items():
                self.blocks.append(sequence, token_ids)
                self.texts[sequence] += token_ids

    def feed_unseen(self, sequence, token_ids, num_kept):
        """A draft whose tokens are told when all are fed; ``num_kept`` None is a call that died before."""
        if not self.reserve(sequence, len(token_ids)):
            return
        self.write(sequence, token_ids, fails=False)
        for _ in token_ids:
            self.blocks.append_unseen(sequence, 1)
            self.blocks.check_invariants()
        assert self.blocks.length(sequence) == len(self.texts[sequence]) + len(token_ids)
        if num_kept is None:
            self.blocks.truncate(sequence, len(self.texts[sequence]))
        else:
            self.blocks.settle(sequence, token_ids[:num_kept])
            self.texts[sequence] += token_ids[:num_kept]

    def adopt(self, sequence, token_ids):
        used = {block for other in self.texts for block in self.blocks.table(other)}
        before = len(self.blocks.table(sequence))
        num_adopted = self.blocks.adopt(sequence, token_ids)
        adopted = self.blocks.table(sequence)[before:]
        assert len(adopted) * SIZE == num_adopted <= len(token_ids)
        for block in adopted:
            self.count("adopted from a sequence" if block in used else "adopted from the past")
        self.texts[sequence] += token_ids[:num_adopted]
        return num_adopted

    def reserve(self, sequence, num_tokens):
        """False when there is no room, and then nothing has changed."""
        length, table = len(self.texts[sequence]), list(self.blocks.table(sequence))
        is_copy = length % SIZE > 0 and num_tokens > 0 and self.num_users(table[length // SIZE]) > 1
        num_wanted = max(0, -(-(length + num_tokens) // SIZE) - len(table)) + is_copy
        num_free, num_empty = self.blocks.num_free, len(self.blocks._free)
        if num_wanted > num_free:
            with pytest.raises(KVCacheFull):
                self.blocks.reserve(sequence, num_tokens)
            assert (list(self.blocks.table(sequence)), self.blocks.num_free) == (table, num_free)
            self.count("full")
            return False
        copied = self.blocks.reserve(sequence, num_tokens)
        assert (copied is not None) == is_copy
        assert self.blocks.num_free == num_free - num_wanted
        if num_wanted > num_empty:
            self.count("taken from the past")
        if copied is not None:
            source, copy = copied
            assert (source, copy) == (table[length // SIZE], self.blocks.table(sequence)[length // SIZE])
            for offset in range(SIZE):
                # What was never written is copied like the rest, and not read.
                self.memory[copy, offset] = self.memory.get((source, offset))
            self.count("copied")
        return True

    def num_users(self, block):
        return sum(block in self.blocks.table(sequence) for sequence in self.texts)

    def write(self, sequence, token_ids, *, fails):
        table, start = self.blocks.table(sequence), len(self.texts[sequence])
        history = [*self.texts[sequence], *token_ids]
        for position in range(start, len(history)):
            place = table[position // SIZE], position % SIZE
            self.memory[place] = GARBAGE if fails else (history[position], tuple(history[:position]))

    def check(self):
        self.blocks.check_invariants()
        for sequence, text in self.texts.items():
            assert self.blocks.length(sequence) == len(text)
            table = self.blocks.table(sequence)
            found = [self.memory[table[i // SIZE], i % SIZE] for i in range(len(text))]
            assert found == [(token, tuple(text[:i])) for i, token in enumerate(text)]
        used = {block for sequence in self.texts for block in self.blocks.table(sequence)}
        assert self.blocks.num_used == len(used)

    def close_all(self):
        for sequence in list(self.texts):
            self.close(sequence)
            self.check()
        assert self.blocks.num_free == NUM_BLOCKS


TEXTS = st.lists(st.sampled_from(TOKENS), min_size=1, max_size=2 * SIZE)
REJECTED = st.integers(0, 2 * SIZE)
SEQUENCES = st.sampled_from(NAMES)


class BlockMachine(RuleBasedStateMachine):
    def __init__(self):
        super().__init__()
        self.mirror = Mirror()
        self.mirror.count = event

    @rule(sequence=SEQUENCES)
    def end(self, sequence):
        self.mirror.close(sequence)
        self.mirror.close(sequence)
        self.mirror.open(sequence)

    @rule(sequence=SEQUENCES)
    def reopen(self, sequence):
        self.mirror.open(sequence)

    @rule(sequence=SEQUENCES, num_rejected=REJECTED, text=TEXTS, num_extra=st.integers(0, SIZE + 1))
    def go_on(self, sequence, num_rejected, text, num_extra):
        """A round: the tokens that were rejected make way for others."""
        self.mirror.reject(sequence, num_rejected)
        self.mirror.feed({sequence: text}, num_extra=num_extra)

    @rule(texts=st.dictionaries(SEQUENCES, TEXTS, min_size=2), num_rejected=REJECTED)
    def go_on_together(self, texts, num_rejected):
        for sequence in texts:
            self.mirror.reject(sequence, num_rejected)
        self.mirror.feed(texts)

    @rule(sequence=SEQUENCES, other=SEQUENCES)
    def begin_like(self, sequence, other):
        self.mirror.begin_like(sequence, other)

    @rule(sequence=SEQUENCES, other=SEQUENCES, missing=st.integers(0, SIZE))
    def fork(self, sequence, other, missing):
        if sequence != other:
            self.mirror.fork(sequence, other, max(0, len(self.mirror.texts[sequence]) - missing))

    @rule(sequence=SEQUENCES, other=SEQUENCES)
    def take_over(self, sequence, other):
        if sequence != other:
            self.mirror.take_over(sequence, other)

    @rule(sequence=SEQUENCES, other=SEQUENCES, beyond=st.integers(1, 5))
    def fork_too_far(self, sequence, other, beyond):
        if sequence != other:
            with pytest.raises(StaleCache):
                self.mirror.blocks.fork(sequence, other, len(self.mirror.texts[sequence]) + beyond)

    @rule(sequence=SEQUENCES, text=TEXTS)
    def fail_half_way(self, sequence, text):
        """A forward that dies: what was written to is known to nobody."""
        self.mirror.feed({sequence: text}, fails=True)

    @rule(sequence=SEQUENCES, text=TEXTS, num_kept=st.none() | st.integers(0, 2 * SIZE))
    def draft_unseen(self, sequence, text, num_kept):
        self.mirror.feed_unseen(sequence, text, num_kept)

    @rule(sequence=SEQUENCES, num_rejected=REJECTED)
    def roll_back(self, sequence, num_rejected):
        self.mirror.reject(sequence, num_rejected)

    @rule(sequence=SEQUENCES, beyond=st.integers(1, 5))
    def roll_back_too_far(self, sequence, beyond):
        with pytest.raises(StaleCache):
            self.mirror.blocks.truncate(sequence, len(self.mirror.texts[sequence]) + beyond)

    @invariant()
    def everyone_reads_their_own(self):
        self.mirror.check()

    def teardown(self):
        self.mirror.close_all()


TestBlocks = BlockMachine.TestCase
TestBlocks.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)


def test_long_walk_meets_everything_that_can_happen():
    """So that the machine above, which walks the same ground, is known to see it."""
    rng, mirror = random.Random(0), Mirror()

    def text():
        return rng.choices(TOKENS, k=rng.randint(1, 2 * SIZE))

    steps = "go on", "go on", "together", "like another", "like another", "unseen", "fail", "open"
    for _ in range(2000):
        sequence, other = rng.choices(NAMES, k=2)
        match rng.choice(steps):
            case "go on":
                mirror.reject(sequence, rng.randint(0, 2 * SIZE))
                mirror.feed({sequence: text()}, num_extra=rng.randint(0, SIZE))
            case "together":
                for name in NAMES:
                    mirror.reject(name, rng.randint(0, 2 * SIZE))
                mirror.feed({name: text() for name in NAMES})
            case "like another":
                mirror.begin_like(sequence, other)
            case "unseen":
                mirror.feed_unseen(sequence, text(), rng.choice((None, 0, 1, SIZE, 2 * SIZE)))
            case "fail":
                mirror.feed({sequence: text()}, fails=True)
            case "open":
                mirror.open(sequence)
        mirror.check()
    mirror.close_all()
    kinds = "adopted from a sequence", "adopted from the past", "copied", "taken from the past", "full"
    assert [kind for kind in kinds if mirror.counts[kind] < 50] == []
