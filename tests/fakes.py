"""In-process stand-ins: a scripted backend, a small tokenizer, and servers on free ports."""

from __future__ import annotations

import asyncio
import functools
import itertools
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import uvicorn
from fastapi import FastAPI
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from specdec.config import AppConfig, parse_config
from specdec.errors import SpecDecError
from specdec.gateway.backend import Backend
from specdec.gateway.models import ServedModels
from specdec.gateway.service import GenerationService
from specdec.messages import CoordinatorStatus
from specdec.types import GenerationRequest, ModelInfo, SpeculationStats, TokenChunk, TokenLogprob

MODEL_NAME = "org/toy-model"

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['role'] == 'tool' and loop.first %}{{ raise_exception('a tool speaks first') }}{% endif %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] }}"
    "{% for call in message.get('tool_calls', []) %}{{ call['function'] | tojson }}{% endfor %}"
    "{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


@functools.cache
def toy_tokenizer() -> PreTrainedTokenizerFast:
    """A byte-level BPE over all 256 bytes with a few merges and ChatML's special tokens."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=340,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        show_progress=False,
    )
    corpus = [
        "red green blue",
        "one two three four",
        "user assistant system",
        "мама мыла раму",
        "日本語の文章",
    ]
    backend.train_from_iterator(corpus * 4, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="<|im_end|>", chat_template=CHAT_TEMPLATE
    )


def token_ids_of(text: str) -> list[int]:
    return toy_tokenizer().encode(text, add_special_tokens=False)


def byte_ids_of(text: str) -> list[int]:
    """One token a byte, as a model might choose to write it."""
    return [token_id for byte in text.encode() for token_id in [_byte_vocabulary()[byte]]]


@functools.cache
def _byte_vocabulary() -> dict[int, int]:
    vocabulary = {}
    backend = toy_tokenizer().backend_tokenizer
    for character in pre_tokenizers.ByteLevel.alphabet():
        token_id = backend.token_to_id(character)
        vocabulary[_byte_of(character)] = token_id
    return vocabulary


def _byte_of(character: str) -> int:
    """Invert the byte-level alphabet: printable Latin-1 is itself, the other bytes follow from 256 on."""
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    if ord(character) < 256:
        return ord(character)
    return [byte for byte in range(256) if byte not in printable][ord(character) - 256]


EOS_ID = toy_tokenizer().convert_tokens_to_ids("<|im_end|>")
VOCAB_SIZE = len(toy_tokenizer())


@dataclass
class ScriptedBackend:
    """Yields the same tokens to everybody, cut as a coordinator would cut them, and keeps a record.

    A sequence that reaches the end of the script waits there for ever when ``block_after`` chunks were given,
    else goes on with the script's first token.
    """

    token_ids: Sequence[int] = ()
    script_of: Callable[[GenerationRequest], Sequence[int]] | None = None
    """Instead of ``token_ids``: each request its own."""
    chunk_sizes: Sequence[int] = (1,)
    """Sizes of the chunks, repeated."""
    block_after: int | None = None
    """Yield this many chunks, then never another one."""
    error: SpecDecError | None = None
    error_after: int = 0
    """Raise ``error`` instead of the chunk of this number."""
    delay_s: float = 0.0
    """Before each chunk."""
    is_open: bool = True
    max_context: int = 0
    """What a target worker reports; 0 for none attached."""
    requests: list[GenerationRequest] = field(default_factory=list)
    num_running: int = 0
    num_closed: int = 0
    """Generators closed or cancelled before their end."""
    on_chunk: Callable[[], None] = lambda: None
    waits: bool = False
    """Hand out in one batch all that would have come before the caller's time."""

    def is_ready(self) -> bool:
        return self.is_open

    def statuses(self) -> tuple[CoordinatorStatus, ...]:
        return (_status(self.max_context),)

    async def generate(
        self, request: GenerationRequest, not_before: Callable[[], float]
    ) -> AsyncGenerator[tuple[TokenChunk, ...], None]:
        self.requests.append(request)
        self.num_running += 1
        try:
            batch: list[TokenChunk] = []
            not_before_s = not_before()
            async for chunk in self._chunks(request):
                self.on_chunk()
                batch.append(chunk)
                is_early = asyncio.get_running_loop().time() < not_before_s
                if self.waits and is_early and not chunk.is_last:
                    continue
                yield tuple(batch)
                batch, not_before_s = [], not_before()
        except (asyncio.CancelledError, GeneratorExit):
            self.num_closed += 1
            raise
        finally:
            self.num_running -= 1

    async def _chunks(self, request: GenerationRequest) -> AsyncIterator[TokenChunk]:
        script = self.token_ids if self.script_of is None else self.script_of(request)
        output, reason = _cut(itertools.cycle(script), request)
        start = 0
        for idx, size in enumerate(itertools.cycle(self.chunk_sizes)):
            await asyncio.sleep(self.delay_s)
            if self.error is not None and idx == self.error_after:
                raise self.error
            if idx == self.block_after:
                await asyncio.Event().wait()
            end = min(start + size, len(output))
            is_last = end == len(output)
            yield TokenChunk(
                sequence_id=request.sequence_id,
                token_ids=tuple(output[start:end]),
                num_drafted=2,
                num_accepted=1,
                logprobs=_logprobs(output[start:end], request),
                prompt_logprobs=_prompt_logprobs(request) if idx == 0 else (),
                finish_reason=reason if is_last else None,
            )
            if is_last:
                return
            start = end


def logprob_of(token_id: int) -> float:
    """What a `ScriptedBackend` says of a token, wherever it stands; id 0 is the likeliest."""
    return -float(token_id) / 64


def _logprobs(token_ids: Sequence[int], request: GenerationRequest) -> tuple[TokenLogprob, ...]:
    if request.num_logprobs is None:
        return ()
    top = tuple((token_id, logprob_of(token_id)) for token_id in range(request.num_logprobs))
    return tuple(
        TokenLogprob(token_id=token_id, logprob=logprob_of(token_id), top=top) for token_id in token_ids
    )


def _prompt_logprobs(request: GenerationRequest) -> tuple[TokenLogprob, ...]:
    return _logprobs(request.prompt_ids[1:], request) if request.wants_prompt_logprobs else ()


def _cut(tokens: itertools.cycle[int], request: GenerationRequest) -> tuple[list[int], str]:
    output: list[int] = []
    for token_id in tokens:
        output.append(token_id)
        if token_id in request.stop.stop_token_ids:
            return output, "stop"
        if len(output) == request.stop.max_tokens:
            return output, "length"
    raise AssertionError("the script is empty")


def scripted_stats(num_chunks: int) -> SpeculationStats:
    """What that many chunks of a `ScriptedBackend` add up to."""
    return SpeculationStats(
        num_rounds=num_chunks,
        num_spec_steps=num_chunks,
        num_draft_tokens=2 * num_chunks,
        num_accepted_draft_tokens=num_chunks,
        acceptance_histogram=(0, num_chunks, 0),
    )


def _status(max_context: int) -> CoordinatorStatus:
    return CoordinatorStatus(
        coordinator_id="c",
        pid=1,
        is_ready=True,
        num_running=0,
        num_waiting=0,
        model=MODEL_NAME,
        target_model=MODEL_NAME,
        max_context=max_context,
        num_speculative_tokens=2,
        targets=(),
        drafts=(),
        num_spec_steps=0,
        num_draft_tokens=0,
        num_accepted_draft_tokens=0,
        num_output_tokens=0,
        num_sequence_rounds=0,
        round_s=0.0,
        num_prepared_drafts=0,
    )


def toy_config(**gateway: object) -> AppConfig:
    return parse_config(
        {
            "target": {"model": MODEL_NAME},
            "draft": {"model": "org/toy-draft"},
            "gateway": {"grpc_port": 0, **gateway},
        }
    )


def toy_service(backend: Backend, *, max_context: int = 256, **gateway: object) -> GenerationService:
    info = ModelInfo(
        max_context=max_context,
        vocab_size=VOCAB_SIZE,
        eos_token_ids=frozenset({EOS_ID}),
    )
    return GenerationService(backend, toy_tokenizer(), toy_config(**gateway), info, created=1_700_000_000)


def only(service: GenerationService) -> Callable[[], ServedModels]:
    """What gives `build_http_app` one service, and the same metrics every time."""
    models = ServedModels(service)
    return lambda: models


@asynccontextmanager
async def serving(app: FastAPI) -> AsyncIterator[str]:
    """Run an HTTP app on a free port of the running loop; yields its base URL."""
    config = uvicorn.Config(app, port=0, log_level="warning", lifespan="off")
    config.load()
    server = uvicorn.Server(config)
    # Started and stopped by hand: serve() and shutdown() poll, which would cost tenths of a second a test.
    server.lifespan = config.lifespan_class(config)
    await server.startup()
    port = server.servers[0].sockets[0].getsockname()[1]
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        for listener in server.servers:
            listener.close()
        for connection in list(server.server_state.connections):
            connection.shutdown()
        async with asyncio.timeout(1.0):
            await asyncio.gather(*server.server_state.tasks)


async def eventually(condition: Callable[[], bool], timeout_s: float = 5.0) -> None:
    """Return as soon as the condition holds; fail after ``timeout_s``."""
    async with asyncio.timeout(timeout_s):
        while not condition():  # noqa: ASYNC110 - conditions are plain functions
            await asyncio.sleep(0.005)


def in_thread(function: Callable[[], object]) -> Awaitable[object]:
    """Run a blocking client beside the servers of this loop."""
    return asyncio.to_thread(function)
