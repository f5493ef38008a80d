"""Mixed requests from a seed. What fixes a text is apart from how it is asked for."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from specdec.gateway.proto import generation_pb2 as pb
from specdec.lab.chaos.plan import Pair

VOCAB_SIZE = 200
"""Words of the simulated models: ``w0`` to ``w199``."""
LEAVING_SHARE = 0.15
"""Of requests whose client leaves before the end."""
MAX_STAY_S = 3.0
"""Most that a client which leaves waits before."""

Protocol = Literal["http", "grpc"]
Form = Literal["chat", "text", "token_ids"]
Pipeline = Literal["serial", "lookahead"]
_PIPELINES = {"serial": pb.PIPELINE_SERIAL, "lookahead": pb.PIPELINE_LOOKAHEAD}
_FIRST_STOP_WORD = 20
"""Words below are the beginnings of others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lengths:
    """Bounds of questions, in tokens."""

    max_prompt: int
    min_output: int
    max_output: int


LENGTHS: Mapping[Pair, Lengths] = {
    # Prompts longer than a prefill chunk, so that faults meet them halfway.
    "simulated": Lengths(max_prompt=900, min_output=40, max_output=320),
    # A word of a prompt is several of its tokens, and a step takes three times as long.
    "smollm2": Lengths(max_prompt=60, min_output=24, max_output=96),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """Everything that the text depends on."""

    number: int
    form: Form
    prompt_ids: tuple[int, ...]
    max_tokens: int
    seed: int | None
    """Of the coupled law at temperature 1; None is greedy decoding."""
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    stop: str | None = None

    @property
    def temperature(self) -> float:
        return 0.0 if self.seed is None else 1.0

    @property
    def prompt(self) -> str:
        """The same tokens as words."""
        return " ".join(f"w{token_id}" for token_id in self.prompt_ids)


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """A question, and how it is asked: nothing here may change the text."""

    question: Question
    protocol: Protocol
    is_streamed: bool
    max_gamma: int | None = None
    """Cap on draft tokens per round."""
    pipeline: Pipeline | None = None
    leaves_after_s: float | None = None
    """The client goes away then; None stays to the end."""


def make_questions(count: int, seed: int, lengths: Lengths = LENGTHS["simulated"]) -> tuple[Question, ...]:
    """Different prompts, lengths, laws and ends; every second one greedy."""
    rng = random.Random(f"questions {seed}")
    return tuple(_make_question(number, rng, lengths) for number in range(count))


def _make_question(number: int, rng: random.Random, lengths: Lengths) -> Question:
    forms: tuple[Form, ...] = ("chat", "text", "token_ids")
    # Most prompts are short, a few span several prefill chunks.
    num_prompt = int(4 * (lengths.max_prompt / 4) ** (rng.random() ** 2))
    return Question(
        number=number,
        form=rng.choice(forms),
        prompt_ids=tuple(rng.randrange(VOCAB_SIZE) for _ in range(num_prompt)),
        max_tokens=rng.randint(lengths.min_output, lengths.max_output),
        seed=None if number % 2 == 0 else rng.randrange(2**31),
        frequency_penalty=rng.choice((0.0, 0.0, 0.5)),
        repetition_penalty=rng.choice((1.0, 1.0, 1.2)),
        stop=f" w{rng.randrange(_FIRST_STOP_WORD, VOCAB_SIZE)}" if rng.random() < 0.25 else None,
    )


def draw_request(questions: tuple[Question, ...], rng: random.Random) -> Request:
    """Any question, asked in any way."""
    protocols: tuple[Protocol, ...] = ("http", "grpc")
    pipelines: tuple[Pipeline | None, ...] = (None, None, "serial", "lookahead")
    return Request(
        question=rng.choice(questions),
        protocol=rng.choice(protocols),
        is_streamed=rng.random() < 0.8,
        max_gamma=rng.choice((None, None, None, 2, 0)),
        pipeline=rng.choice(pipelines),
        leaves_after_s=rng.uniform(0.1, MAX_STAY_S) if rng.random() < LEAVING_SHARE else None,
    )


def http_call(request: Request) -> tuple[str, dict[str, Any]]:
    """Path and body."""
    question = request.question
    body: dict[str, Any] = {
        "max_tokens": question.max_tokens,
        "temperature": question.temperature,
        "frequency_penalty": question.frequency_penalty,
        "repetition_penalty": question.repetition_penalty,
        "seed": question.seed,
        "stop": question.stop,
        "stream": request.is_streamed,
        "speculative": {
            "metrics": True,
            "num_speculative_tokens": request.max_gamma,
            "mode": None if question.seed is None else "coupled",
            "pipeline": request.pipeline,
        },
    }
    if question.form == "chat":
        return "/v1/chat/completions", {**body, "messages": [{"role": "user", "content": question.prompt}]}
    prompt = question.prompt if question.form == "text" else list(question.prompt_ids)
    return "/v1/completions", {**body, "prompt": prompt}


def grpc_request(request: Request) -> pb.GenerateRequest:
    """The same as a message."""
    question = request.question
    message = pb.GenerateRequest(
        sampling=pb.SamplingOptions(
            temperature=question.temperature,
            frequency_penalty=question.frequency_penalty,
            repetition_penalty=question.repetition_penalty,
            max_tokens=question.max_tokens,
            seed=question.seed,
            stop=[question.stop] if question.stop else [],
        ),
        speculative=pb.SpeculativeOptions(metrics=True, num_speculative_tokens=request.max_gamma),
    )
    if question.seed is not None:
        message.speculative.mode = pb.VERIFICATION_MODE_COUPLED
    if request.pipeline is not None:
        message.speculative.pipeline = _PIPELINES[request.pipeline]
    if question.form == "chat":
        message.messages.messages.add(role="user", content=question.prompt)
    elif question.form == "text":
        message.text = question.prompt
    else:
        message.token_ids.ids.extend(question.prompt_ids)
    return message
