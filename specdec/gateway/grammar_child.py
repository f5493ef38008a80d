"""The process that tries grammars out: ``python -m specdec.gateway.grammar_child``.

A grammar from outside may overflow the native stack, or take memory or time without end; here it ends nobody
else's process. Reads one JSON string a line, a grammar; answers each with one, what is wrong with it.
"""

from __future__ import annotations

import json
import signal
import sys
import threading

from llguidance import LLMatcher, LLParserLimits

CHECK_TIMEOUT_S = 5
STACK_BYTES = 2 * 1024 * 1024
"""A quarter of what threads have in the processes that are to follow the grammar."""
MEMORY_BYTES = 2 * 1024**3
"""Address space, libraries included."""
MAX_FAULT_CHARS = 1000


def main() -> None:
    """Serve until the input ends."""
    import resource  # no Windows has it; the gateway imports this module

    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    threading.stack_size(STACK_BYTES)
    thread = threading.Thread(target=_serve)
    thread.start()
    thread.join()


def _serve() -> None:
    limits = LLParserLimits(verbose_errors=False)
    for line in sys.stdin:
        # Ends this process, whatever the thread is doing and whether or not anybody still waits.
        signal.alarm(CHECK_TIMEOUT_S)
        is_error, messages = LLMatcher.validate_grammar_with_warnings(json.loads(line), limits=limits)
        signal.alarm(0)
        fault = messages[0] if is_error else ""
        sys.stdout.write(json.dumps(fault[:MAX_FAULT_CHARS]) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
