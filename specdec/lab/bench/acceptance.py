"""Counters of speculation as servers report them: specdec in each answer, vLLM under ``/metrics``."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

_VLLM_COUNTERS = {
    "vllm:spec_decode_num_drafts_total": "num_spec_steps",
    "vllm:spec_decode_num_draft_tokens_total": "num_draft_tokens",
    "vllm:spec_decode_num_accepted_tokens_total": "num_accepted_draft_tokens",
}
_SAMPLE = re.compile(r"^(?P<name>[\w:]+)(?:\{[^}]*\})?\s+(?P<value>\S+)", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Acceptance:
    """Counts, from which every rate is derived; docs/metrics.md has the formulas."""

    num_spec_steps: int = 0
    num_draft_tokens: int = 0
    num_accepted_draft_tokens: int = 0

    @classmethod
    def from_metrics(cls, metrics: Mapping[str, Any]) -> Acceptance:
        """From ``metrics.speculative_decoding`` of a specdec answer."""
        return cls(
            int(metrics.get("num_spec_steps", 0)),
            int(metrics.get("num_draft_tokens", 0)),
            int(metrics.get("num_accepted_draft_tokens", 0)),
        )

    @classmethod
    def from_prometheus(cls, text: str) -> Acceptance | None:
        """Read vLLM's counters, summed over its engines; None if it has none."""
        counts: dict[str, float] = {}
        for sample in _SAMPLE.finditer(text):
            if (key := _VLLM_COUNTERS.get(sample["name"])) is not None:
                counts[key] = counts.get(key, 0.0) + float(sample["value"])
        return cls(**{key: round(value) for key, value in counts.items()}) if counts else None

    @classmethod
    def total(cls, parts: Iterable[Acceptance | None]) -> Acceptance | None:
        """The sum of what is known; None when nothing is."""
        known = [part for part in parts if part is not None]
        if not known:
            return None
        return cls(
            sum(part.num_spec_steps for part in known),
            sum(part.num_draft_tokens for part in known),
            sum(part.num_accepted_draft_tokens for part in known),
        )

    def since(self, earlier: Acceptance) -> Acceptance:
        return Acceptance(
            self.num_spec_steps - earlier.num_spec_steps,
            self.num_draft_tokens - earlier.num_draft_tokens,
            self.num_accepted_draft_tokens - earlier.num_accepted_draft_tokens,
        )

    @property
    def draft_acceptance_rate(self) -> float:
        return self.num_accepted_draft_tokens / self.num_draft_tokens if self.num_draft_tokens else 0.0

    @property
    def mean_acceptance_length(self) -> float:
        return 1 + self.num_accepted_draft_tokens / self.num_spec_steps if self.num_spec_steps else 1.0
