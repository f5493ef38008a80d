"""How many cases a run takes."""

import os


def num_cases(share: float) -> int:
    """This share of ``SPECDEC_FUZZ_CASES``, or of few enough for an ordinary test run."""
    return max(10, int(share * int(os.environ.get("SPECDEC_FUZZ_CASES", "300"))))
