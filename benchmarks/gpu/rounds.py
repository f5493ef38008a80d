"""Rounds of a draft and a target engine as a coordinator drives them, for a batch of sequences."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from specdec.engine.drafting import DraftEngine
from specdec.engine.verifying import TargetEngine
from specdec.messages import Draft, ProposeRequest, VerifyRequest
from specdec.speculation.sequence import SequenceState
from specdec.types import GenerationRequest, SamplingParams, SequenceId, StopCriteria, VerificationMode

GREEDY = SamplingParams(temperature=0.0, mode=VerificationMode.GREEDY)
OWNER = "benchmark"
CHUNK = 512


@dataclass(slots=True)
class Text:
    """What came out."""

    token_ids: list[list[int]] = field(default_factory=list)
    num_rounds: int = 0
    num_drafted: int = 0
    num_accepted: int = 0


def generate(
    target: TargetEngine,
    draft: DraftEngine | None,
    prompts: Sequence[Sequence[int]],
    *,
    gamma: int,
    max_tokens: int,
    sampling: SamplingParams = GREEDY,
) -> Text:
    """All prompts as one batch to the end; nothing is a stop token."""
    states = [_state(f"s{i}", prompt, max_tokens, sampling) for i, prompt in enumerate(prompts)]
    text = Text()
    live = states
    while live:
        drafts = _propose(draft, live, gamma) if draft is not None and gamma else {}
        _verify(target, live, drafts, text)
        live = [state for state in live if state.finish_reason is None]
    ids = [state.sequence_id for state in states]
    target.sessions.release(ids)
    if draft is not None:
        draft.sessions.release(ids)
    text.token_ids = [list(state.log.output_ids) for state in states]
    return text


def _state(name: str, prompt: Sequence[int], max_tokens: int, sampling: SamplingParams) -> SequenceState:
    return SequenceState(
        GenerationRequest(
            sequence_id=SequenceId(name),
            prompt_ids=tuple(prompt),
            sampling=sampling,
            stop=StopCriteria(max_tokens=max_tokens),
        )
    )


def _propose(
    draft: DraftEngine, states: Sequence[SequenceState], gamma: int
) -> dict[SequenceId, Draft | None]:
    context = draft.runner.max_context
    items = tuple(state.propose_item(state.gamma(gamma, context), CHUNK) for state in states)
    reply = draft.propose(ProposeRequest(owner=OWNER, items=items))
    assert not reply.lost, reply.lost
    return {
        state.sequence_id: state.on_proposed(item, proposed)
        for state, item, proposed in zip(states, items, reply.drafts, strict=True)
    }


def _verify(
    target: TargetEngine,
    states: Sequence[SequenceState],
    drafts: dict[SequenceId, Draft | None],
    text: Text,
) -> None:
    items = tuple(state.verify_item(drafts.get(state.sequence_id), CHUNK) for state in states)
    reply = target.verify(VerifyRequest(owner=OWNER, items=items))
    assert not reply.lost, reply.lost
    verdicts = iter(reply.verdicts)
    text.num_rounds += 1
    for state, item in zip(states, items, strict=True):
        if not item.num_rows:
            state.on_prefilled(item)
            continue
        chunk = state.on_verdict(item.draft, next(verdicts))
        assert chunk is not None
        text.num_drafted += chunk.num_drafted
        text.num_accepted += chunk.num_accepted
