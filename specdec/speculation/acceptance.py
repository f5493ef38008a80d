"""The accept rule of the three verification modes."""

from __future__ import annotations

from collections.abc import Sequence

from specdec.types import VerificationMode


def count_accepted(
    mode: VerificationMode,
    draft_ids: Sequence[int],
    token_ids: Sequence[int],
    ratios: Sequence[float],
    uniforms: Sequence[float],
) -> int:
    """How many leading draft tokens are accepted.

    Args:
        mode: verification mode of the sequence.
        draft_ids: gamma drafted tokens.
        token_ids: gamma + 1 tokens of the verdict.
        ratios: gamma acceptance ratios, rejection mode only.
        uniforms: gamma draws in [0, 1), rejection mode only.
    """
    if mode is VerificationMode.REJECTION:
        # Strictly below: a token the target excludes has ratio 0 and is refused even by a draw of 0.0.
        accepted = [u < ratio for u, ratio in zip(uniforms, ratios, strict=True)]
    else:
        accepted = [drafted == chosen for drafted, chosen in zip(draft_ids, token_ids[:-1], strict=True)]
    return accepted.index(False) if False in accepted else len(accepted)
