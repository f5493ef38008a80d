"""What a load generator itself costs: ours beside GuideLLM, AIPerf and an httpx client.

Each drives the same cheap server, which streams one token per event at a fixed rate. CPU time is that of the
generator's whole process tree. Two runs of different length give the cost per token without start and end;
the peak of memory (proportional set size) and the CPU time of the short run are reported beside it.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx

from benchmarks.common import save
from benchmarks.peers.environments import VENVS, Environment, ensure
from specdec.models import resolve_model
from tests.e2e.harness import descendants, free_port, specdec_command

MODEL = "stub"
CLOCK_TICK_HZ = os.sysconf("SC_CLK_TCK")
GUIDELLM = Environment("guidellm", ("guidellm==0.8.1",), torch="torch==2.13.0+cpu")
AIPERF = Environment("aiperf", ("aiperf==0.13.0",), torch=None)


class Stub:
    """Answers ``/v1/models`` and streamed completions: ``rate`` one-token events a second and stream."""

    def __init__(self, rate: float) -> None:
        self._interval_s = 1 / rate

    async def serve(self, port: int) -> None:
        server = await asyncio.start_server(self._handle, "127.0.0.1", port)
        await server.serve_forever()

    async def _handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                path, body = await _read_request(reader)
                if path.endswith("completions"):
                    await self._stream(json.loads(body), writer, is_chat="chat" in path)
                else:
                    writer.write(_json_answer({"object": "list", "data": [{"id": MODEL, "object": "model"}]}))
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    async def _stream(self, body: dict[str, Any], writer: asyncio.StreamWriter, *, is_chat: bool) -> None:
        num_tokens = body.get("max_tokens") or body.get("max_completion_tokens") or 128
        usage = {"prompt_tokens": 32, "completion_tokens": num_tokens, "total_tokens": 32 + num_tokens}
        writer.write(
            b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
        )
        loop = asyncio.get_running_loop()
        due_s = loop.time()
        token = _event(is_chat, " word", None)
        for _ in range(num_tokens):
            due_s += self._interval_s
            await asyncio.sleep(max(0.0, due_s - loop.time()))
            writer.write(token)
        writer.write(_event(is_chat, "", "length"))
        writer.write(_chunk({"id": "x", "object": "x", "created": 1, "choices": [], "usage": usage}))
        writer.write(b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n")
        await writer.drain()


async def _read_request(reader: asyncio.StreamReader) -> tuple[str, bytes]:
    first, *headers = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
    lengths = [int(line.split(":")[1]) for line in headers if line.lower().startswith("content-length:")]
    return first.split()[1], await reader.readexactly(sum(lengths))


def _json_answer(content: object) -> bytes:
    body = json.dumps(content).encode()
    head = f"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    return head.encode() + body


def _event(is_chat: bool, text: str, finish_reason: str | None) -> bytes:
    choice = {"delta": {"content": text}} if is_chat else {"text": text}
    choices = [{"index": 0, **choice, "finish_reason": finish_reason}]
    kind = "chat.completion.chunk" if is_chat else "text_completion"
    return _chunk({"id": "x", "object": kind, "created": 1, "model": MODEL, "choices": choices})


def _chunk(payload: object) -> bytes:
    data = b"data: " + json.dumps(payload, separators=(",", ":")).encode() + b"\n\n"
    return f"{len(data):x}\r\n".encode() + data + b"\r\n"


async def httpx_load(url: str, num_requests: int, streams: int, max_tokens: int) -> None:
    """The plainest client on httpx, for comparison."""
    waiting = iter(range(num_requests))
    messages = [{"role": "user", "content": "x"}]
    body = {"model": MODEL, "messages": messages, "max_tokens": max_tokens, "stream": True}

    async def send_all(client: httpx.AsyncClient) -> None:
        for _ in waiting:
            async with client.stream("POST", f"{url}/v1/chat/completions", json=body) as answer:
                async for line in answer.aiter_lines():
                    if line.startswith("data: {"):
                        json.loads(line[6:])

    async with httpx.AsyncClient(timeout=600) as client:
        await asyncio.gather(*(send_all(client) for _ in range(streams)))


def commands(args: argparse.Namespace, url: str, folder: str) -> dict[str, Callable[[int], list[str]]]:
    """How to send a number of requests with each tool."""
    tokenizer = resolve_model("smollm2")
    guidellm = ensure(GUIDELLM, args.venvs).parent / "guidellm"
    aiperf = ensure(AIPERF, args.venvs).parent / "aiperf"
    streams, tokens = str(args.streams), str(args.max_tokens)
    ours = [specdec_command(), "bench", "serve", "--url", url, "--warmup", "0"]
    ours += ["--concurrency", streams, "--max-tokens", tokens, "--num-prompts"]
    # fmt: off
    return {
        "specdec": lambda count: [*ours, str(count)],
        "httpx": lambda count: [
            sys.executable, "-m", "benchmarks.load_generators", "--httpx", url, "--requests", str(count),
            "--streams", streams, "--max-tokens", tokens,
        ],
        "guidellm": lambda count: [
            str(guidellm), "run", "--backend", f"kind=openai_http,target={url},model={MODEL}",
            "--profile", f"kind=concurrent,streams={streams}",
            "--constraint", f"kind=max_requests,count={count}",
            "--tokenizer", f"kind=hf_auto,model={tokenizer}",
            "--data", f"kind=synthetic_text,prompt_tokens=32,output_tokens={tokens}",
            "--output", f"kind=json,path={folder}/guidellm.json", "--disable-console-interactive",
        ],
        "aiperf": lambda count: [
            str(aiperf), "profile", "--model", MODEL, "--url", url, "--endpoint-type", "chat", "--streaming",
            "--concurrency", streams, "--request-count", str(count), "--tokenizer", tokenizer,
            "--isl", "32", "--osl", tokens, "--use-server-token-count", "--ui", "none",
            "--artifact-dir", f"{folder}/aiperf",
        ],
    }
    # fmt: on


def run_and_watch(command: list[str]) -> dict[str, float]:
    """CPU seconds and peak memory of a command with everything it starts."""
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    cpu_s: dict[int, float] = {}
    peak_mib = 0.0
    while process.poll() is None:
        pids = [process.pid, *descendants(process.pid)]
        cpu_s |= {pid: used_s for pid in pids if (used_s := _cpu_s(pid)) is not None}
        peak_mib = max(peak_mib, sum(_pss_mib(pid) for pid in pids))
        time.sleep(0.2)
    assert process.returncode == 0, f"{command[0]} ended with {process.returncode}"
    return {"cpu_s": sum(cpu_s.values()), "peak_mib": peak_mib}


def _cpu_s(pid: int) -> float | None:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return (int(fields[11]) + int(fields[12])) / CLOCK_TICK_HZ


def _pss_mib(pid: int) -> float:
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0.0
    return sum(int(line.split()[1]) for line in lines if line.startswith("Pss:")) / 1024


def compare(args: argparse.Namespace, url: str, folder: str) -> dict[str, Any]:
    short, long = args.streams, args.streams * args.waves
    tools = commands(args, url, folder)
    runs: dict[str, list[dict[str, float]]] = {name: [] for name in tools}
    for _ in range(args.rounds):
        for name, command in tools.items():
            few, many = run_and_watch(command(short)), run_and_watch(command(long))
            thousands = (long - short) * args.max_tokens / 1000
            figures = {
                "cpu_s_per_1000_tokens": (many["cpu_s"] - few["cpu_s"]) / thousands,
                "cpu_s_of_short_run": few["cpu_s"],
                "peak_mib": many["peak_mib"],
            }
            runs[name].append(figures)
            print(name, figures)
    return {
        name: {key: round(statistics.median(run[key] for run in of_tool), 3) for key in of_tool[0]}
        for name, of_tool in runs.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--venvs", type=Path, default=VENVS)
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--rate", type=float, default=15.0, help="tokens a second and stream")
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--waves", type=int, default=4, help="length of the long run, in requests per stream")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--stub", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--httpx", help=argparse.SUPPRESS)
    parser.add_argument("--requests", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.stub is not None:
        asyncio.run(Stub(args.rate).serve(args.stub))
    elif args.httpx is not None:
        asyncio.run(httpx_load(args.httpx, args.requests, args.streams, args.max_tokens))
    else:
        port = free_port()
        module = [sys.executable, "-m", "benchmarks.load_generators"]
        stub = subprocess.Popen([*module, "--stub", str(port), "--rate", str(args.rate)])
        try:
            time.sleep(2.0)
            with tempfile.TemporaryDirectory() as folder:
                figures = compare(args, f"http://127.0.0.1:{port}", folder)
        finally:
            stub.terminate()
        settings = {key: getattr(args, key) for key in ("streams", "rate", "max_tokens", "waves", "rounds")}
        save("load_generators", {**settings, **figures})


if __name__ == "__main__":
    main()
