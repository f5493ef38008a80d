"""What one streamed answer said, and when: pure bookkeeping over events and their times."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import Any

from specdec.lab.bench.acceptance import Acceptance
from specdec.lab.errors import RequestFailed


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """One request that succeeded. Times are of one monotonic clock, in seconds."""

    started_s: float
    first_text_s: float
    last_text_s: float
    """Of the last text, or of the ``finish_reason`` if that came later."""
    ended_s: float
    num_prompt_tokens: int
    num_tokens: int
    is_counted: bool
    """The server said how many tokens; otherwise events with text stand for them."""
    num_text_events: int
    gaps_s: tuple[float, ...]
    """Between one event with text and the next."""
    acceptance: Acceptance | None = None

    @property
    def ttft_s(self) -> float:
        return self.first_text_s - self.started_s

    @property
    def latency_s(self) -> float:
        return self.ended_s - self.started_s

    @property
    def tpot_s(self) -> float | None:
        """Time per token after the first; None for a single token.

        Per token, not per event: a round of speculation may put several tokens into one event.
        """
        if self.num_tokens < 2:
            return None
        return (self.last_text_s - self.first_text_s) / (self.num_tokens - 1)


@dataclass(slots=True)
class Answer:
    """Collects the events of one stream."""

    started_s: float
    _text_times_s: list[float] = field(default_factory=list)
    _finished_s: float | None = None
    _usage: dict[str, Any] = field(default_factory=dict)
    _acceptance: Acceptance | None = None

    def add(self, at_s: float, event: dict[str, Any]) -> None:
        """Take one event in.

        Raises:
            RequestFailed: the event reports an error, kind ``error_event``.
        """
        if event.get("error"):
            error = event["error"]
            message = error.get("message", error) if isinstance(error, dict) else error
            raise RequestFailed("error_event", f"the stream ended with an error: {message}")
        for choice in event.get("choices") or ():
            if _text_of(choice):
                self._text_times_s.append(at_s)
            if choice.get("finish_reason"):
                self._finished_s = at_s
        self._usage = event.get("usage") or self._usage
        metrics = event.get("metrics")
        if isinstance(metrics, dict) and isinstance(metrics.get("speculative_decoding"), dict):
            self._acceptance = Acceptance.from_metrics(metrics["speculative_decoding"])

    def finish(self, ended_s: float, *, is_done: bool) -> Record:
        """The record of a stream that is over; ``is_done`` says that it ended with ``[DONE]``.

        Raises:
            RequestFailed: it broke off (kind ``broken_stream``) or had no text (kind ``no_text``).
        """
        if not is_done and self._finished_s is None:
            raise RequestFailed(
                "broken_stream", f"the stream broke off after {len(self._text_times_s)} events with text"
            )
        if not self._text_times_s:
            raise RequestFailed("no_text", "the stream ended without any text")
        times_s = self._text_times_s
        num_tokens = self._usage.get("completion_tokens")
        return Record(
            started_s=self.started_s,
            first_text_s=times_s[0],
            last_text_s=max(times_s[-1], self._finished_s or 0.0),
            ended_s=ended_s,
            num_prompt_tokens=int(self._usage.get("prompt_tokens") or 0),
            num_tokens=int(num_tokens) if num_tokens is not None else len(times_s),
            is_counted=num_tokens is not None,
            num_text_events=len(times_s),
            gaps_s=tuple(after - before for before, after in itertools.pairwise(times_s)),
            acceptance=self._acceptance,
        )


def _text_of(choice: dict[str, Any]) -> str:
    delta = choice.get("delta")
    if not isinstance(delta, dict):
        return str(choice.get("text") or "")
    return str(delta.get("content") or delta.get("reasoning_content") or delta.get("reasoning") or "")
