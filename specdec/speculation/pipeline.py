"""What the draft prepares while the target verifies: how many guesses behind each accept length."""

from __future__ import annotations

GUESSED = (0.6, 0.2, 0.1, 0.05)
"""How often a recovered token is the draft's first, second, ... other choice."""


def fan_out(gamma: int, acceptance_rate: float, num_branches: int) -> tuple[int, ...]:
    """Share ``num_branches`` guesses out over the outcomes of a block, the likeliest first
    (arXiv:2603.03251).

    After ``a < gamma`` accepted tokens, which happens with a probability of ``alpha^a (1 - alpha)``, the
    recovered token is one of the draft's other choices. After all of them the bonus token is the draft's own
    choice as often as any draft token is accepted.

    Args:
        gamma: tokens of the block, >= 0.
        acceptance_rate: alpha, in [0, 1].
        num_branches: guesses in all, >= 1.

    Returns:
        gamma + 1 numbers of guesses, by accept length; their sum is ``num_branches`` or less.
    """
    hopes = [
        (acceptance_rate**accepted * (1.0 - acceptance_rate) * share, accepted)
        for accepted in range(gamma)
        for share in GUESSED
    ]
    bonus = acceptance_rate**gamma
    hopes.append((bonus * acceptance_rate, gamma))
    hopes += [(bonus * (1.0 - acceptance_rate) * share, gamma) for share in GUESSED]
    chosen = sorted(hopes, key=lambda hope: hope[0], reverse=True)[:num_branches]
    counts = [0] * (gamma + 1)
    for probability, accepted in chosen:
        counts[accepted] += probability > 0.0
    return tuple(counts)
