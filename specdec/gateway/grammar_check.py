"""Whether a grammar can be followed, found out before a request is admitted."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from hashlib import blake2b

from specdec.errors import ServiceUnavailable
from specdec.gateway.grammar_child import CHECK_TIMEOUT_S

MAX_REMEMBERED = 512
ANSWER_TIMEOUT_S = 20.0
"""More than the child's own limit and its start; it is killed and the request answered 503."""


class GrammarChecker:
    """Tries grammars out in a process of its own, one at a time, and remembers what it found.

    The process starts with the first grammar and ends when nothing refers to this any more.
    """

    def __init__(self) -> None:
        self._child: _Child | None = None
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="specdec-grammar-check")
        self._lock = asyncio.Lock()
        self._faults: OrderedDict[bytes, str] = OrderedDict()

    async def fault_of(self, grammar: str) -> str:
        """Return what is wrong with a grammar; empty if it can be followed.

        Raises:
            ServiceUnavailable: it could not be tried out, for no fault of its own.
        """
        key = blake2b(grammar.encode(), digest_size=16).digest()
        if key not in self._faults:
            async with self._lock:
                # Another request may have asked the same meanwhile.
                if key not in self._faults:
                    self._remember(key, await self._ask(grammar))
        self._faults.move_to_end(key)
        return self._faults[key]

    def _remember(self, key: bytes, fault: str) -> None:
        self._faults[key] = fault
        if len(self._faults) > MAX_REMEMBERED:
            self._faults.popitem(last=False)

    async def _ask(self, grammar: str) -> str:
        # Taken away while it is at work: one that has not answered is not used again.
        child, self._child = self._child, None
        if child is None or not child.is_running:
            child = _Child()
        try:
            async with asyncio.timeout(ANSWER_TIMEOUT_S):
                answer = await asyncio.get_running_loop().run_in_executor(self._executor, child.ask, grammar)
        except TimeoutError as error:
            child.kill()
            raise ServiceUnavailable("the grammar could not be checked: the check does not answer") from error
        except BaseException:
            child.kill()
            raise
        if isinstance(answer, int):
            return _fault_of_end(answer)
        self._child = child
        return answer


class _Child:
    """The checking process. It ends when its input does: when nothing refers to this any more."""

    def __init__(self) -> None:
        command = (sys.executable, "-m", "specdec.gateway.grammar_child")
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        )

    @property
    def is_running(self) -> bool:
        return self._process.poll() is None

    def ask(self, grammar: str) -> str | int:
        """Return what is wrong with a grammar, or the exit status if the process ended over it."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps(grammar).encode() + b"\n")
            self._process.stdin.flush()
            answer = self._process.stdout.readline()
        except BrokenPipeError:
            answer = b""
        return str(json.loads(answer)) if answer else self._process.wait()

    def kill(self) -> None:
        """End it at once; a call of `ask` that waits for it returns."""
        self._process.kill()


def _fault_of_end(returncode: int) -> str:
    if returncode == -signal.SIGALRM:
        return f"it takes longer than {CHECK_TIMEOUT_S} s to compile"
    if returncode > 0 or returncode == -signal.SIGKILL:
        # It did not come so far as to read it, or somebody else ended it.
        raise ServiceUnavailable("the grammar could not be checked: the check ended without an answer")
    return "it is too complex to compile"
