"""Servers side by side on one machine: only the one being measured may run.

An idle server is not free: vLLM's OpenMP threads spin, Ray's processes poll. Starting each anew for every
measure would take minutes, so all stay loaded and those not measured are stopped with SIGSTOP, with
everything they started.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from tests.e2e.harness import descendants, is_running

CLOCK_TICK_HZ = os.sysconf("SC_CLK_TCK")


def tree(pid: int) -> list[int]:
    return [pid, *descendants(pid)]


def pause(pid: int) -> None:
    """Twice: between looking and stopping, a process may have started another one."""
    for _ in range(2):
        _signal(tree(pid), signal.SIGSTOP)


def equalise(pid: int, niceness: int) -> None:
    """Give every thread of a tree the same niceness, as far as this user may.

    Ray starts its workers at 15: beside any other process a peer without that habit would come first.
    """
    for process in tree(pid):
        with suppress(OSError):
            for thread in Path(f"/proc/{process}/task").iterdir():
                os.setpriority(os.PRIO_PROCESS, int(thread.name), niceness)


def resume(pid: int) -> None:
    _signal(tree(pid), signal.SIGCONT)


def stop(pid: int, timeout_s: float = 60.0) -> None:
    """Interrupt; what is left after the timeout is killed."""
    resume(pid)
    processes = tree(pid)
    _signal([pid], signal.SIGINT)
    deadline_s = time.monotonic() + timeout_s
    while any(is_running(process) for process in processes) and time.monotonic() < deadline_s:
        time.sleep(0.2)
    _signal([process for process in processes if is_running(process)], signal.SIGKILL)


def _signal(processes: Iterable[int], number: signal.Signals) -> None:
    for process in processes:
        with suppress(ProcessLookupError):
            os.kill(process, number)


class ForeignLoad:
    """How many cores other processes used meanwhile: a measure beside a busy neighbour is none."""

    def __init__(self, own: Iterable[int]) -> None:
        self._roots = list(own)
        self._started_s = time.monotonic()
        self._busy_s = _machine_busy_s()
        self._own_s = self._trees_s()

    def cores(self) -> float:
        """Since construction."""
        busy_s = _machine_busy_s() - self._busy_s
        own_s = self._trees_s() - self._own_s
        return max(0.0, (busy_s - own_s) / (time.monotonic() - self._started_s))

    def _trees_s(self) -> float:
        return sum(_cpu_s(pid) for pid in {pid for root in self._roots for pid in tree(root)})


def wait_until_quiet(own: Iterable[int], foreign_cores: float, timeout_s: float = 60.0) -> None:
    """Until two seconds pass in which others use no more than this; after the timeout all the same."""
    deadline_s = time.monotonic() + timeout_s
    roots = list(own)
    while time.monotonic() < deadline_s:
        load = ForeignLoad(roots)
        time.sleep(2.0)
        if load.cores() <= foreign_cores:
            return


def _machine_busy_s() -> float:
    user, nice, system, _idle, _iowait, irq, softirq, *_ = map(
        int, Path("/proc/stat").read_text().splitlines()[0].split()[1:]
    )
    return (user + nice + system + irq + softirq) / CLOCK_TICK_HZ


def _cpu_s(pid: int) -> float:
    """Its own and that of children that ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return sum(int(field) for field in fields[11:15]) / CLOCK_TICK_HZ
