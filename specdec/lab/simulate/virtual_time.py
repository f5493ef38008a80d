"""Time that passes only while everybody waits: an event loop, and model threads that sleep in it.

One of them computes at a time: the loop starts a job of a thread and waits until it sleeps or is done. So
nothing depends on how the machine schedules threads, and the same scenario gives the same figures every time.
"""

from __future__ import annotations

import asyncio
import selectors
import threading
from collections import deque
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, ParamSpec, TypeVar

from specdec.engine.threads import get_num_threads, set_num_threads
from specdec.engine.worker import ModelThread
from specdec.lab.simulate.errors import SimulationError

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")

PATIENCE_S = 600.0
"""Virtual seconds without a device at work after which nothing is expected to happen any more. Deadlines and
pauses of the coordinator are shorter."""


class _Clockwork(selectors.DefaultSelector):
    """Where a loop would wait for the next timer, time is put forward instead."""

    def __init__(self, advance: Callable[[float | None], None]) -> None:
        super().__init__()
        self._advance = advance

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        """What is ready now; there is no input or output here but the loop's own wake-ups."""
        if timeout is None or timeout > 0:
            self._advance(timeout)
        return super().select(0)


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """An event loop that begins at 0 s and skips the time in which it has nothing to do.

    Args:
        patience_s: virtual seconds without a device at work until it gives up.
    """

    def __init__(self, patience_s: float = PATIENCE_S) -> None:
        self._now_s = 0.0
        self._patience_s = patience_s
        self._num_asleep = 0
        self._worked_at_s = 0.0
        super().__init__(_Clockwork(self._advance))

    def time(self) -> float:
        """Virtual seconds."""
        return self._now_s

    def on_asleep(self) -> None:
        """A model thread sleeps as long as its device works."""
        self._num_asleep += 1

    def on_awake(self) -> None:
        """It does so no more."""
        self._num_asleep -= 1
        self._worked_at_s = self._now_s

    def _advance(self, seconds: float | None) -> None:
        """Raises SimulationError: nothing happens any more."""
        if seconds is None:
            raise SimulationError(
                f"the simulation stands still at {self._now_s:g} s: all wait for each other"
            )
        self._now_s += seconds
        idle_s = self._now_s - self._worked_at_s
        if self._num_asleep == 0 and idle_s > self._patience_s:
            self._worked_at_s = self._now_s  # whoever cleans up may still need time
            raise SimulationError(f"nothing happens in the simulation: no device worked for {idle_s:g} s")


class _Abandoned(BaseException):
    """Ends a sleeping job; no handler of errors is meant to see it."""


@dataclass(frozen=True, slots=True)
class _Job:
    call: Callable[[], Any]
    future: Future[Any]


class VirtualThread(ModelThread):
    """A model thread whose jobs take no time but what they sleep.

    Only the loop's thread may submit jobs and shut it down.

    Args:
        loop: which makes its time.
    """

    def __init__(self, loop: VirtualTimeLoop) -> None:
        super().__init__()
        self._loop = loop
        self._jobs: deque[_Job] = deque()
        self._job: _Job | None = None
        """The one that is being done."""
        self._is_busy = False
        """A job is being done, or the loop has been asked to start one."""
        self._is_over = False
        self._outcome: tuple[Any, BaseException | None] = None, None
        self._nap_s: float | None = None
        """What the thread asked for when it gave the turn back; None: it is done."""
        self._alarm: asyncio.TimerHandle | None = None
        self._thread_turn = threading.Semaphore(0)
        self._loop_turn = threading.Semaphore(0)

    def submit(
        self, fn: Callable[Parameters, Result], /, *args: Parameters.args, **kwargs: Parameters.kwargs
    ) -> Future[Result]:
        """Behind all jobs that have come before, and not before the caller is done."""
        if self._is_over:
            raise RuntimeError("cannot schedule new futures after shutdown")
        future: Future[Result] = Future()
        self._jobs.append(_Job(partial(fn, *args, **kwargs), future))
        if not self._is_busy:
            self._is_busy = True
            self._loop.call_soon(self._start_next)
        return future

    def sleep(self, seconds: float) -> None:
        """Let so much virtual time pass; called by the job."""
        self._nap_s = seconds
        self._loop_turn.release()
        self._thread_turn.acquire()
        if self._is_over:
            raise _Abandoned

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """At once: a job that sleeps is abandoned, and those behind it never begin."""
        self._is_over = True
        for job in self._jobs:
            job.future.cancel()
        self._jobs.clear()
        if self._alarm is not None:
            self._alarm.cancel()
            self._alarm, self._job = None, None
            self._loop.on_awake()
            self._thread_turn.release()
            self._loop_turn.acquire()
        super().shutdown(wait, cancel_futures=cancel_futures)

    def _start_next(self) -> None:
        self._job = self._pop()
        if self._job is None:
            self._is_busy = False
            return
        super().submit(self._work, self._job.call)
        self._give_turn()

    def _pop(self) -> _Job | None:
        """The next job that is still wanted."""
        while self._jobs:
            job = self._jobs.popleft()
            if job.future.set_running_or_notify_cancel():
                return job
        return None

    def _wake(self) -> None:
        self._alarm = None
        self._loop.on_awake()
        self._thread_turn.release()
        self._give_turn()

    def _give_turn(self) -> None:
        """Wait until the thread sleeps or is done."""
        self._loop_turn.acquire()
        if self._nap_s is not None:
            self._loop.on_asleep()
            self._alarm = self._loop.call_later(self._nap_s, self._wake)
        else:
            self._finish()

    def _finish(self) -> None:
        job, self._job = self._job, None
        result, error = self._outcome
        self._outcome = None, None
        if job is not None:
            job.future.set_exception(error) if error else job.future.set_result(result)
        # The answer is on its way to the loop before the next job begins.
        self._loop.call_soon(self._start_next)

    def _work(self, call: Callable[[], Any]) -> None:
        """A job, on the thread."""
        try:
            self._outcome = call(), None
        except BaseException as error:
            self._outcome = None, error
        self._nap_s = None
        self._loop_turn.release()


@contextmanager
def _single_threaded() -> Iterator[None]:
    """Toy laws are so small that torch's threads only wait for each other; new model threads take it over."""
    before = get_num_threads()
    set_num_threads(1)
    try:
        yield
    finally:
        set_num_threads(before)


def run_in_virtual_time(
    main: Callable[[VirtualTimeLoop], Coroutine[Any, Any, Result]], patience_s: float = PATIENCE_S
) -> Result:
    """Run a coroutine on a loop of its own from 0 s on.

    Args:
        main: makes it for the loop.
        patience_s: see `VirtualTimeLoop`.

    Raises:
        SimulationError: nothing would ever happen again.
    """
    loop = VirtualTimeLoop(patience_s)
    with _single_threaded(), asyncio.Runner(loop_factory=lambda: loop) as runner:
        return runner.run(main(loop))
