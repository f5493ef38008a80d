"""Log-probabilities of the tokens a round commits, picked from what the target tells of its rows."""

from __future__ import annotations

from collections.abc import Sequence

from specdec.messages import RowLogprobs
from specdec.types import TokenLogprob


def token_logprobs(
    token_ids: Sequence[int], num_accepted: int, rows: RowLogprobs
) -> tuple[TokenLogprob, ...]:
    """One entry per token.

    Args:
        token_ids: at most one per row, in order.
        num_accepted: how many of them, the first ones, are draft tokens; the others are the rows' own.
        rows: what the target tells.
    """
    tops = zip(rows.top_ids.tolist(), rows.top_logprobs.tolist(), strict=True)
    values = [*rows.draft[:num_accepted].tolist(), *rows.own[num_accepted:].tolist()]
    return tuple(
        TokenLogprob(token_id=token, logprob=value, top=tuple(zip(*top, strict=True)))
        for token, value, top in zip(token_ids, values, tops, strict=False)
    )
