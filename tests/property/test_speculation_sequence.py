"""A sequence's state machine against two workers' caches, with losses and late answers at any moment.

The caches are plain lists that do what feeds say. What must hold throughout: where the coordinator's view and
a worker agree on the epoch, the worker's first ``length`` tokens are the log's.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from specdec.messages import Draft, Feed, Lost, Verdict
from specdec.speculation.sequence import CacheView, SequenceState
from specdec.types import GenerationRequest, SamplingParams, SequenceId, StopCriteria, VerificationMode

NAME = SequenceId("request-0")
STOP = 9
TOKENS = st.sampled_from([*range(STOP), STOP])
OUTPUT_TOKENS = st.sampled_from(range(STOP))
BLOCKS = st.lists(TOKENS, min_size=8, max_size=8)
CHUNKS = st.sampled_from([1, 2, 3, 5, 12, 100])
DRAFT_CONTEXT = 16


@dataclass
class Cache:
    """A worker's side of one sequence."""

    epoch: int | None = None
    """None: this worker does not hold the sequence."""
    token_ids: list[int] = field(default_factory=list)
    opened: set[int] = field(default_factory=set)
    """Epochs this worker was ever opened under."""

    def apply(self, feed: Feed) -> Lost | None:
        assert feed.token_ids, "nothing to feed"
        assert (feed.opening is not None) == (feed.keep == 0)
        if feed.keep == 0:
            self.epoch, self.token_ids = feed.epoch, []
            self.opened.add(feed.epoch)
        assert feed.epoch in self.opened, "this worker has never held what is to be kept"
        if self.epoch is None:
            return Lost(sequence_id=NAME, epoch=feed.epoch, reason="not cached here")
        assert self.epoch == feed.epoch, "a feed of another epoch must start from 0"
        assert feed.keep <= len(self.token_ids), "rolled back to more than there is"
        self.token_ids[feed.keep :] = feed.token_ids
        return None

    def forget(self) -> None:
        self.epoch, self.token_ids = None, []


class SequenceMachine(RuleBasedStateMachine):
    @initialize(
        prompt=st.lists(TOKENS, min_size=1, max_size=9),
        output=st.lists(OUTPUT_TOKENS, max_size=3),
        max_tokens=st.sampled_from([4, 9, 60]),
        max_draft_tokens=st.sampled_from([None, None, 1, 0]),
        mode=st.sampled_from(list(VerificationMode)),
    )
    def submit(self, prompt, output, max_tokens, max_draft_tokens, mode):
        self.state = SequenceState(
            GenerationRequest(
                sequence_id=NAME,
                prompt_ids=tuple(prompt),
                sampling=SamplingParams(mode=mode, seed=3),
                stop=StopCriteria(max_tokens=max_tokens, stop_token_ids=frozenset({STOP})),
                max_draft_tokens=max_draft_tokens,
                output_ids=tuple(output),
            )
        )
        self.emitted = list(output)
        self.target, self.draft = Cache(), Cache()
        self.block: Draft | None = None
        """Drafted, and not verified yet."""

    @property
    def is_running(self) -> bool:
        return self.state.finish_reason is None

    @rule(
        policy_gamma=st.integers(0, 8),
        tokens=BLOCKS,
        num_accepted=st.integers(0, 8),
        chosen=TOKENS,
        is_draft_replaced=st.booleans(),
    )
    @precondition(lambda self: self.is_running)
    def a_whole_round(self, policy_gamma, tokens, num_accepted, chosen, is_draft_replaced):
        if self.block is None:
            self.propose(policy_gamma, 100, tokens)
        if is_draft_replaced:
            self.the_draft_worker_is_replaced()
        self.verify(100, num_accepted, chosen)

    @rule(policy_gamma=st.integers(0, 8), chunk=CHUNKS, tokens=BLOCKS)
    @precondition(lambda self: self.is_running and self.block is None)
    def propose(self, policy_gamma, chunk, tokens):
        gamma = self.state.gamma(policy_gamma, DRAFT_CONTEXT)
        if gamma == 0:
            return
        item = self.state.propose_item(gamma, chunk)
        assert len(item.feed.token_ids) <= chunk
        if lost := self.draft.apply(item.feed):
            self.state.on_draft_lost(lost)
            return
        drafted = tokens[: item.num_draft_tokens]
        self.draft.token_ids += drafted[:-1]
        assert len(self.draft.token_ids) <= DRAFT_CONTEXT
        self.block = self.state.on_proposed(item, self._draft(drafted, item.feed.epoch))
        assert self.block is None or self.block.token_ids == tuple(drafted)

    @rule(chunk=CHUNKS, num_accepted=st.integers(0, 8), chosen=TOKENS)
    @precondition(lambda self: self.is_running)
    def verify(self, chunk, num_accepted, chosen):
        if self.state.num_prefill_tokens:
            self.block = None  # a lane does not verify drafts of a sequence that it prefills
        block, self.block = self.block, None
        item = self.state.verify_item(block, chunk)
        assert item.num_rows <= len(item.feed.token_ids)
        if lost := self.target.apply(item.feed):
            self.state.on_target_lost(lost)
        elif item.num_rows == 0:
            self.state.on_prefilled(item)
        else:
            self._judge(block, item.feed.epoch, num_accepted, chosen)

    def _judge(self, block: Draft | None, epoch: int, num_accepted: int, chosen: int) -> None:
        draft_ids = block.token_ids if block else ()
        num_accepted = min(num_accepted, len(draft_ids))
        if num_accepted < len(draft_ids) and chosen == draft_ids[num_accepted]:
            chosen = (chosen + 1) % (STOP + 1)
        expected = [*draft_ids[:num_accepted], chosen]
        chunk = self.state.on_verdict(block, self._verdict(draft_ids, num_accepted, chosen, epoch))
        assert chunk is not None
        assert (chunk.num_drafted, chunk.num_accepted) == (len(draft_ids), num_accepted)
        assert list(chunk.token_ids) == expected[: len(chunk.token_ids)]
        assert len(chunk.token_ids) == len(expected) or chunk.finish_reason is not None
        self.emitted += chunk.token_ids

    @staticmethod
    def _draft(token_ids, epoch: int) -> Draft:
        return Draft(sequence_id=NAME, epoch=epoch, token_ids=tuple(token_ids))

    def _verdict(self, draft_ids, num_accepted: int, chosen: int, epoch: int) -> Verdict:
        """Accept so many draft tokens, then commit ``chosen``, in the words of the mode."""
        token_ids = [*draft_ids[:num_accepted], *[chosen] * (len(draft_ids) + 1 - num_accepted)]
        is_rejection = self.state.request.sampling.mode is VerificationMode.REJECTION
        ratios = [1.0] * num_accepted + [0.0] * (len(draft_ids) - num_accepted)
        return Verdict(
            sequence_id=NAME,
            epoch=epoch,
            token_ids=tuple(token_ids),
            ratios=tuple(ratios) if is_rejection else (),
        )

    # What goes wrong ------------------------------------------------------------------------------------

    @rule(of_target=st.booleans())
    def a_worker_forgets_the_sequence(self, of_target):
        (self.target if of_target else self.draft).forget()

    @rule()
    @precondition(lambda self: self.is_running)
    def the_draft_worker_is_replaced(self):
        """Maybe while a block of the old one is being verified."""
        self.draft = Cache()
        self.state.leave_draft()

    @rule()
    @precondition(lambda self: self.is_running)
    def the_sequence_moves_to_other_workers(self):
        self.target, self.draft = Cache(), Cache()
        self.block = None
        self.state.leave_workers()

    @rule(epochs_ago=st.integers(1, 3), drafted=st.lists(TOKENS, max_size=3))
    @precondition(lambda self: self.is_running)
    def late_answers_arrive(self, epochs_ago, drafted):
        before = self._snapshot()
        self.state.on_target_lost(self._late_loss(self.state.target, epochs_ago))
        self.state.on_draft_lost(self._late_loss(self.state.draft, epochs_ago))
        item = self.state.propose_item(len(drafted), 100)
        draft = self._draft(drafted, self.state.draft.epoch - epochs_ago)
        assert self.state.on_proposed(item, draft) is None
        verdict = self._verdict(drafted, 0, 1, self.state.target.epoch - epochs_ago)
        assert self.state.on_verdict(draft, verdict) is None
        assert self._snapshot() == before

    @staticmethod
    def _late_loss(view: CacheView, epochs_ago: int) -> Lost:
        return Lost(sequence_id=NAME, epoch=view.epoch - epochs_ago, reason="late", out_of_memory=True)

    def _snapshot(self):
        views = [
            (view.epoch, view.length, view.num_losses, view.is_usable)
            for view in (self.state.target, self.state.draft)
        ]
        return views, self.state.log.tail(0), self.state.finish_reason

    # What must hold -------------------------------------------------------------------------------------

    @invariant()
    def caches_begin_with_the_log(self):
        self._check(self.state.target, self.target)
        self._check(self.state.draft, self.draft)

    def _check(self, view: CacheView, cache: Cache) -> None:
        if view.length and cache.epoch == view.epoch:
            assert view.length <= len(cache.token_ids)
            is_ended = self.state.finish_reason is not None  # the cut tail may still be cached
            length = min(view.length, len(self.state.log)) if is_ended else view.length
            assert tuple(cache.token_ids[:length]) == self.state.log.tail(0)[:length]
        assert self.state.finish_reason or self.state.target.length < len(self.state.log)

    @invariant()
    def the_log_is_what_was_emitted_and_ends_where_it_must(self):
        state = self.state
        assert list(state.log.output_ids) == self.emitted
        new = self.emitted[len(state.request.output_ids) :]
        cap = state.request.stop.max_tokens
        assert len(self.emitted) <= cap
        assert STOP not in new[:-1]
        if state.finish_reason == "stop":
            assert new[-1] == STOP
        elif state.finish_reason == "length":
            assert len(self.emitted) == cap
            assert new[-1] != STOP
        else:
            assert len(self.emitted) < cap
            assert STOP not in new


TestSequenceMachine = SequenceMachine.TestCase
TestSequenceMachine.settings = settings(max_examples=200, stateful_step_count=40, deadline=None)
