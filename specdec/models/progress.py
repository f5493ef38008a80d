"""The steps of a pull and the bar that shows them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from enum import Enum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console


class Step(Enum):
    """A step of a pull: what the bar says, and how many seconds it usually takes (its share of the bar)."""

    WAIT = ("waiting for another process", 0.0)
    DOWNLOAD = ("downloading", 4.0)
    VERIFY = ("verifying", 0.5)
    EXTRACT = ("extracting", 1.0)
    CONVERT = ("converting", 18.0)
    SAVE = ("saving", 4.0)
    DRAFT = ("assembling the draft", 1.0)

    def __init__(self, label: str, typical_s: float) -> None:
        self.label = label
        self.typical_s = typical_s


Report = Callable[[Step], None]
"""Called as each step starts."""


def no_report(step: Step) -> None:
    """Report to nobody."""


@contextlib.contextmanager
def progress_bar(console: Console | None, name: str) -> Iterator[Report]:
    """Show one bar over all steps on ``console`` while the block runs; nothing when it is None."""
    if console is None:
        yield no_report
        return
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress:
        total = sum(step.typical_s for step in Step)
        task = progress.add_task(name, total=total)

        def report(step: Step) -> None:
            description = f"{name}: {step.label}"
            progress.update(task, description=description, completed=_seconds_before(step), refresh=True)

        yield report
        progress.update(task, description=f"{name}: ready", completed=total)


def _seconds_before(step: Step) -> float:
    steps = list(Step)
    return sum(earlier.typical_s for earlier in steps[: steps.index(step)])
