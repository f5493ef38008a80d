"""The KV cache against plain lists: any order of opening, feeding, rolling back and closing."""

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from specdec.engine.kv_store import KVStore
from specdec.errors import KVCacheFull, StaleCache
from tests.tiny_models import sequence_id

CAPACITY = 400
NUM_LAYERS = 2


class KVStoreMachine(RuleBasedStateMachine):
    """The reference holds, per sequence, the stamps of its positions."""

    sequences = Bundle("sequences")

    def __init__(self) -> None:
        super().__init__()
        self.store = KVStore(CAPACITY)
        self.reference: dict[str, list[float]] = {}
        self.next_stamp = 0.0
        self.num_opened = 0

    @rule(target=sequences)
    def open(self):
        sequence = sequence_id(f"s{self.num_opened}")
        self.num_opened += 1
        self.store.open(sequence)
        self.reference[sequence] = []
        return sequence

    @rule(sequence=sequences)
    def reopen(self, sequence):
        self.store.open(sequence)
        self.reference[sequence] = []

    @rule(sequence=consumes(sequences))
    def close(self, sequence):
        self.store.close(sequence)
        del self.reference[sequence]
        self.store.close(sequence)

    @rule(sequence=sequences, count=st.integers(1, 70))
    def feed(self, sequence, count):
        used = sum(map(len, self.reference.values()))
        if used + count > CAPACITY:
            with pytest.raises(KVCacheFull):
                self.store.reserve(count)
            return
        self.store.reserve(count)
        self.reference[sequence] += [self.next_stamp + i for i in range(count)]
        self.write(sequence, count)
        self.store.advance(sequence, count)
        self.next_stamp += count

    @rule(sequence=sequences, count=st.integers(1, 70))
    def fail_half_way(self, sequence, count):
        """A forward that dies behind its first layer: nothing was fed."""
        key = torch.full((1, count, 1), -1.0)
        self.store.append(sequence, 0, key, key)

    @rule(sequence=sequences, kept=st.floats(0, 1))
    def roll_back(self, sequence, kept):
        length = int(kept * len(self.reference[sequence]))
        self.store.truncate(sequence, length)
        del self.reference[sequence][length:]

    @rule(sequence=sequences, beyond=st.integers(1, 10))
    def roll_back_too_far(self, sequence, beyond):
        with pytest.raises(StaleCache):
            self.store.truncate(sequence, len(self.reference[sequence]) + beyond)

    def write(self, sequence, count):
        """Append in every layer, and see that the views show exactly what the reference holds."""
        stamps = torch.arange(count, dtype=torch.float64).view(1, count, 1) + self.next_stamp
        for layer_idx in range(NUM_LAYERS):
            keys, values = self.store.append(sequence, layer_idx, stamps + 0.25 * layer_idx, -stamps)
            expected = self.reference[sequence]
            assert keys.flatten().tolist() == [stamp + 0.25 * layer_idx for stamp in expected]
            assert values.flatten().tolist() == [-stamp for stamp in expected]

    @invariant()
    def lengths_and_total_agree(self):
        self.store.check_invariants()
        for sequence, stamps in self.reference.items():
            assert self.store.length(sequence) == len(stamps)
        assert self.store.tokens_in_use == sum(map(len, self.reference.values()))


TestKVStore = KVStoreMachine.TestCase
TestKVStore.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
