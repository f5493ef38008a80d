"""One sequence's round state machine: what to feed each worker, and what a verdict commits.

Positions, with n committed tokens ``c[0..n)``: a cache holds a prefix of the log. The target is fed the
tokens it lacks and the draft block ``x_1..x_g``, so that after ``a`` accepted tokens it holds ``n + a``
valid positions. The draft, asked for g tokens, feeds ``x_1..x_(g-1)`` itself and so holds
``n + min(a, g - 1)``: after full acceptance it still lacks ``x_g`` and is fed it next round. Rollback is
never implied: each feed names the positions to ``keep``.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from specdec.messages import Draft, Feed, Lost, Opening, ProposeItem, Scores, Verdict, VerifyItem
from specdec.sampling.noise import Purpose, uniform
from specdec.speculation.acceptance import SmoothedAcceptance, count_accepted
from specdec.speculation.log import CommittedLog, cut_block
from specdec.speculation.logprobs import token_logprobs
from specdec.speculation.pipeline import fan_out
from specdec.types import (
    FinishReason,
    GenerationRequest,
    SequenceId,
    TokenChunk,
    TokenLogprob,
    VerificationMode,
    WorkerId,
)

MAX_SCORED_TOKENS = 256
"""Of a prompt in one chunk: each costs a row of logits, 600 KB for a vocabulary of 150,000."""


@dataclass(slots=True)
class CacheView:
    """What the coordinator knows of one worker's cache of this sequence."""

    epoch: int = 0
    serial: int = 0
    """Of the last feed."""
    length: int = 0
    """Leading positions that agree with the log."""
    num_losses: int = 0
    """Times the worker lost it since tokens were last committed."""
    is_usable: bool = True
    """False when this draft worker has no room for the sequence: do not ask it again."""

    def restart(self) -> None:
        """Forget the cache: the next feed starts from position 0 under a new epoch."""
        self.epoch += 1
        self.length = 0


class SequenceState:
    """Owned by one lane of one coordinator; all changes happen at round boundaries."""

    def __init__(self, request: GenerationRequest) -> None:
        self.request = request
        self.sequence_id: SequenceId = request.sequence_id
        self.log = CommittedLog(request.prompt_ids, request.output_ids)
        self.target = CacheView()
        self.draft = CacheView()
        self.draft_id: WorkerId | None = None
        """The draft worker that holds this sequence, or will."""
        self.group = 0
        """Of its lane, which it is drafted for and verified with."""
        self.acceptance = SmoothedAcceptance()
        """Replaced by the lane's, which shares what is known of its other sequences."""
        self.finish_reason: FinishReason | None = None
        self._stop = request.stop
        self.is_flexible = request.pipeline in (None, "auto") and request.max_draft_tokens != 0
        """Whether the lane's policy chooses how its rounds overlap; a request may say so itself, or want no
        drafts."""
        self._opening = Opening(
            prompt_len=len(request.prompt_ids),
            sampling=request.sampling,
            stop_token_ids=request.stop.stop_token_ids,
            num_logprobs=request.num_logprobs,
        )
        # A sequence that goes on from elsewhere has told them there.
        self._scores_prompt = request.wants_prompt_logprobs and not request.output_ids
        self._prompt_logprobs: list[TokenLogprob] = []
        """Of prompt tokens 1, 2, ...; told with the first tokens."""

    @property
    def max_total_tokens(self) -> int:
        """Log length at which the sequence ends at the latest."""
        return self.log.prompt_len + self._stop.max_tokens

    def limit_to_context(self, max_context: int) -> None:
        """End at the target's context window at the latest; the prompt is shorter than it."""
        room = max_context - self.log.prompt_len
        self._stop = replace(self._stop, max_tokens=min(self._stop.max_tokens, room))

    @property
    def num_prefill_tokens(self) -> int:
        """Log tokens the target lacks, not counting the last one, which every round feeds."""
        return len(self.log) - 1 - self.target.length

    def leave_draft(self) -> None:
        """Forget the draft worker: the next one is fed from the log."""
        self.draft.restart()
        self.draft.is_usable = True
        self.draft_id = None

    def leave_workers(self) -> None:
        """Forget both workers: the sequence goes on elsewhere, from its log."""
        self.target.restart()
        self.leave_draft()

    # Proposing ------------------------------------------------------------------------------------------

    @property
    def acceptance_rate(self) -> float:
        """How likely the next draft token is accepted, in [0, 1]."""
        return self.acceptance.rate

    @property
    def num_missing(self) -> int:
        """Tokens the draft worker lacks."""
        return len(self.log) - self.draft.length

    @property
    def max_gamma(self) -> int:
        """Within the cap of the request and the tokens still to come, of which one is the target's own."""
        cap = self.request.max_draft_tokens
        room = self.max_total_tokens - len(self.log) - 1
        return (room if cap is None else min(cap, room)) if self.draft.is_usable else 0

    def gamma(self, policy_gamma: int, draft_context: int) -> int:
        """Tokens to draft this round: the policy's choice within every limit.

        A prompt longer than the draft's context means 0, not an error.
        """
        num_tokens = len(self.log)
        room = draft_context - num_tokens + 1 if num_tokens <= draft_context else 0
        return max(0, min(policy_gamma, self.max_gamma, room))

    def propose_item(self, gamma: int, chunk_tokens: int, num_branches: int = 0) -> ProposeItem:
        """What to ask of the draft: catch up by at most ``chunk_tokens``, and draft once caught up.

        With ``num_branches`` it is to look ahead at so many outcomes afterwards.
        """
        feed = self._feed(self.draft, chunk_tokens, ())
        if feed.keep + len(feed.token_ids) < len(self.log):
            return ProposeItem(feed=feed, num_draft_tokens=0)
        guesses = fan_out(gamma, round(self.acceptance.rate, 2), num_branches) if num_branches else ()
        return ProposeItem(feed=feed, num_draft_tokens=gamma, fan_out=guesses)

    def on_proposed(self, item: ProposeItem, draft: Draft) -> Draft | None:
        """Take the draft's answer; None when it is stale or empty.

        Draft positions beyond the log are not counted yet: the verdict decides how many stay.
        """
        if draft.epoch != self.draft.epoch:
            return None
        self.draft.length = item.feed.keep + len(item.feed.token_ids)
        return draft if draft.token_ids else None

    def on_draft_lost(self, lost: Lost) -> None:
        """The draft has lost this sequence: start it anew there, unless it has no room for it."""
        if lost.epoch == self.draft.epoch:
            self.draft.restart()
            self.draft.is_usable = not lost.out_of_memory

    def on_target_lost(self, lost: Lost) -> None:
        """The target has lost this sequence: start it anew."""
        if lost.epoch == self.target.epoch:
            self.target.restart()
            self.target.num_losses += 1

    # Verifying ------------------------------------------------------------------------------------------

    def verify_item(self, draft: Draft | None, chunk_tokens: int) -> VerifyItem:
        """What the target is fed: a prefill chunk, or the last tokens of the log and the draft block."""
        if self._scores_prompt and self.num_prefill_tokens > 0:
            return self._scored_chunk(chunk_tokens)
        if self.num_prefill_tokens >= chunk_tokens:
            return VerifyItem(feed=self._feed(self.target, chunk_tokens, ()), num_rows=0)
        draft_ids = draft.token_ids if draft else ()
        feed = self._feed(self.target, None, draft_ids)
        return VerifyItem(feed=feed, num_rows=len(draft_ids) + 1, draft=draft)

    def _scored_chunk(self, chunk_tokens: int) -> VerifyItem:
        """A chunk whose every row is wanted; the prompt's last token is left to the first round."""
        feed = self._feed(self.target, min(chunk_tokens, MAX_SCORED_TOKENS, self.num_prefill_tokens), ())
        scored = self.log.tail(feed.keep + 1, len(feed.token_ids))
        return VerifyItem(feed=feed, num_rows=len(scored), scored_ids=scored)

    def on_scores(self, item: VerifyItem, scores: Scores) -> None:
        """The target has taken a prefill chunk and tells what it thinks of its tokens."""
        if scores.epoch == self.target.epoch:
            self.on_prefilled(item)
            # Tokens fed again after a loss are told anew.
            del self._prompt_logprobs[item.feed.keep :]
            self._prompt_logprobs += token_logprobs(item.scored_ids, 0, scores.logprobs)

    def on_prefilled(self, item: VerifyItem) -> None:
        """The target has taken a prefill chunk."""
        self.target.length = item.feed.keep + len(item.feed.token_ids)

    def on_verdict(self, draft: Draft | None, verdict: Verdict) -> TokenChunk | None:
        """Commit what the verdict accepts and set how far each cache is valid; None if it is stale."""
        if verdict.epoch != self.target.epoch:
            return None
        draft_ids = draft.token_ids if draft else ()
        num_tokens = len(self.log)
        num_accepted = self._count_accepted(draft_ids, verdict)
        block = (*draft_ids[:num_accepted], verdict.token_ids[num_accepted])
        committed, self.finish_reason = cut_block(block, self._stop, self.log.num_output_tokens)
        self.log.commit(committed)
        if draft_ids:
            self.acceptance.record(len(draft_ids), num_accepted)
        self.target.num_losses = 0
        self.target.length = num_tokens + num_accepted
        if draft is not None and draft_ids and draft.epoch == self.draft.epoch:
            self.draft.length = num_tokens + min(num_accepted, len(draft_ids) - 1)
        prompt_logprobs = tuple(self._prompt_logprobs)
        self._prompt_logprobs.clear()
        self._scores_prompt = False
        logprobs = verdict.logprobs
        return TokenChunk(
            sequence_id=self.sequence_id,
            token_ids=committed,
            logprobs=token_logprobs(committed, num_accepted, logprobs) if logprobs is not None else (),
            prompt_logprobs=prompt_logprobs,
            num_drafted=len(draft_ids),
            num_accepted=num_accepted,
            is_prepared=draft is not None and draft.is_prepared,
            finish_reason=self.finish_reason,
        )

    def _count_accepted(self, draft_ids: tuple[int, ...], verdict: Verdict) -> int:
        sampling = self.request.sampling
        uniforms: list[float] = []
        if sampling.mode is VerificationMode.REJECTION:
            start = len(self.log)
            uniforms = [uniform(sampling.seed, start + i, Purpose.ACCEPT) for i in range(len(draft_ids))]
        return count_accepted(sampling.mode, draft_ids, verdict.token_ids, verdict.ratios, uniforms)

    def _feed(self, view: CacheView, limit: int | None, draft_ids: tuple[int, ...]) -> Feed:
        # At least one token: a worker that is fed nothing cannot tell the law behind the log. The draft holds
        # all of it when the target was lost between a draft and its verdict.
        keep = min(view.length, len(self.log) - 1)
        view.serial += 1
        return Feed(
            sequence_id=self.sequence_id,
            epoch=view.epoch,
            serial=view.serial,
            keep=keep,
            token_ids=self.log.tail(keep, limit) + draft_ids,
            opening=self._opening if keep == 0 else None,
        )
