"""Judging drafts: acceptance, residual distribution, recovered and bonus tokens.

Sources: Leviathan et al. 2023 (arXiv:2211.17192) and Chen et al. 2023 (arXiv:2302.01318) for rejection;
Daliri et al. 2024 (arXiv:2408.07978) for coupling by shared Gumbel noise.

In every mode a round over gamma draft tokens ends as ``draft[:a] + [token_ids[a]]``, where ``a`` is the
number of accepted draft tokens (`specdec.speculation.acceptance`) and ``token_ids`` has gamma + 1 entries.
"""

from __future__ import annotations

import torch


def race(weights: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
    """Draw one token per row by an exponential race: argmin noise / weight.

    The winner's law is ``weights`` normalised; the same as ``argmax(log weight + Gumbel noise)`` with Gumbel
    noise ``-log(noise)``.

    Args:
        weights: [rows, n], >= 0, not all zero in a row; need not sum to 1.
        noise: [rows, n], independent standard exponentials, > 0.

    Returns:
        [rows] int64 indices; an index of weight 0 is never drawn.
    """
    return (noise.to(weights.dtype) / weights).argmin(dim=-1)


def truncate_support(draft_probs: torch.Tensor, support: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Keep the ``support`` most likely tokens of each row and renormalise: the law the draft samples from.

    Any draft law is legal as long as it is the one really sampled, so this costs acceptance, not exactness.

    Args:
        draft_probs: [rows, vocab], rows sum to 1.
        support: K >= 1.

    Returns:
        ids [rows, min(K, vocab)] int64 and probs, same shape, rows sum to 1; unlikely entries may be 0.
    """
    probs, ids = draft_probs.topk(min(support, draft_probs.shape[-1]), dim=-1)
    return ids, probs / probs.sum(dim=-1, keepdim=True)


def residual_probs(
    target_probs: torch.Tensor, support_ids: torch.Tensor, support_probs: torch.Tensor
) -> torch.Tensor:
    """norm(max(0, target - draft)), what to draw from after a rejection: `residual_weights`, normalised."""
    weights = residual_weights(target_probs, support_ids, support_probs)
    return weights / weights.sum(dim=-1, keepdim=True)


def residual_weights(
    target_probs: torch.Tensor, support_ids: torch.Tensor, support_probs: torch.Tensor
) -> torch.Tensor:
    """max(0, target - draft), in proportion to which a token is drawn after a rejection.

    Args:
        target_probs: [rows, vocab], rows sum to 1.
        support_ids: [rows, K] the draft's support; repeated ids must have probability 0 but once.
        support_probs: [rows, K] its probabilities there.

    Returns:
        [rows, vocab], no row all 0: it is ``target_probs`` itself where both laws are equal. Nothing can be
        rejected there, so the value is unused; it keeps the function total.

    Source: Leviathan et al. 2023, arXiv:2211.17192, Algorithm 1.
    """
    excess = target_probs.scatter_add(1, support_ids, -support_probs).clamp_min_(0.0)
    is_empty = excess.sum(dim=-1) <= 0.0
    if is_empty.any():
        excess[is_empty] = target_probs[is_empty]
    return excess


def acceptance_ratios(
    target_probs: torch.Tensor,
    draft_ids: torch.Tensor,
    support_ids: torch.Tensor,
    support_probs: torch.Tensor,
) -> torch.Tensor:
    """target_prob / draft_prob of each drafted token.

    Args:
        target_probs: [rows, vocab], one row per drafted token.
        draft_ids: [rows] the drafted tokens.
        support_ids: [rows, K] the draft's support.
        support_probs: [rows, K].

    Returns:
        [rows], >= 0; accept a token when a uniform draw in [0, 1) is below its ratio. A token the draft
        gives probability 0 could not have been drawn from that law; its ratio is 0, so it is refused.
    """
    target_prob = target_probs.gather(1, draft_ids.unsqueeze(1)).squeeze(1)
    draft_prob = torch.where(support_ids == draft_ids.unsqueeze(1), support_probs, 0.0).sum(dim=-1)
    return torch.where(
        draft_prob > 0.0, target_prob / draft_prob.clamp_min(torch.finfo(draft_prob.dtype).tiny), 0.0
    )
