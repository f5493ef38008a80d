"""`specdec generate`: one prompt through the whole system in this process, with the draft's work shown."""

from __future__ import annotations

import secrets
import time
from contextlib import aclosing

from rich.console import Console
from rich.text import Text

from specdec.config import AppConfig
from specdec.coordinator.local import LocalSystem, run_local
from specdec.engine.loading import load_runner
from specdec.engine.model_runner import ModelRunner
from specdec.engine.worker import ModelThread
from specdec.gateway.prompts import PromptEncoder, copy_of_backend
from specdec.gateway.requests import ChatMessage, ChatPrompt, ClientRequest, SamplingOptions, TextPrompt
from specdec.gateway.text import SequenceText
from specdec.gateway.validation import build_generation_request
from specdec.models import check_pair, load_tokenizer, model_info
from specdec.speculation.stats import AcceptanceCounter
from specdec.types import GenerationRequest, ModelInfo, SpeculationStats

ACCEPTED_STYLE = "green"


async def generate_once(
    config: AppConfig,
    prompt: str,
    *,
    max_tokens: int,
    temperature: float,
    seed: int | None,
    is_chat: bool,
    out: Console,
    info: Console,
) -> None:
    """Print the text to ``out``, accepted draft tokens in colour, and the figures to ``info``."""
    facts = model_info(config.target.model)
    tokenizer = load_tokenizer(config.target.model)
    asked = (
        ChatPrompt(messages=(ChatMessage(role="user", content=prompt),))
        if is_chat
        else TextPrompt(text=prompt)
    )
    client_request = ClientRequest(
        request_id=secrets.token_hex(8),
        prompts=(asked,),
        sampling=SamplingOptions(temperature=temperature, seed=seed, max_tokens=max_tokens),
    )
    prompt_ids = await PromptEncoder(tokenizer, facts.vocab_size).encode(asked)
    request = build_generation_request(client_request, asked, prompt_ids, config=config, model_info=facts)
    text = SequenceText(
        copy_of_backend(tokenizer), stop_strings=(), stop_token_ids=request.stop.stop_token_ids
    )
    thread = ModelThread()
    target, draft = thread.run(lambda: _load(config, facts))
    async with run_local(config, target, draft, thread) as system:
        started_s = time.perf_counter()
        stats, num_tokens = await _print_tokens(system, request, text, out)
        elapsed_s = time.perf_counter() - started_s
    out.print()
    info.print(_summary(stats, num_tokens, elapsed_s, has_draft=config.draft is not None), soft_wrap=True)


def _load(config: AppConfig, facts: ModelInfo) -> tuple[ModelRunner, ModelRunner | None]:
    target = load_runner(config.target, vocab_size=facts.vocab_size, max_context=facts.max_context)
    if config.draft is None:
        return target, None
    pair = check_pair(config.target.model, config.draft.model)
    return target, load_runner(config.draft, vocab_size=pair.vocab_size, max_context=pair.draft_context)


async def _print_tokens(
    system: LocalSystem, request: GenerationRequest, text: SequenceText, out: Console
) -> tuple[SpeculationStats, int]:
    counter = AcceptanceCounter()
    num_tokens = 0
    async with aclosing(system.client.generate(request)) as chunks:
        async for chunk in chunks:
            counter.record(chunk.num_drafted, chunk.num_accepted)
            num_tokens += len(chunk.token_ids)
            accepted = text.push(chunk.token_ids[: chunk.num_accepted]).text
            own = text.push(chunk.token_ids[chunk.num_accepted :]).text
            out.print(Text.assemble((accepted, ACCEPTED_STYLE), own), end="", soft_wrap=True)
    out.print(text.finish(), end="")
    return counter.snapshot(), num_tokens


def _summary(stats: SpeculationStats, num_tokens: int, elapsed_s: float, *, has_draft: bool) -> str:
    speed = f"{num_tokens} tokens in {elapsed_s:.2f} s ({num_tokens / elapsed_s:.1f} tokens/s)"
    if not has_draft:
        return speed
    return (
        f"{speed}; [{ACCEPTED_STYLE}]{stats.num_accepted_draft_tokens} accepted[/] of "
        f"{stats.num_draft_tokens} draft tokens ({stats.draft_acceptance_rate:.0%}), "
        f"{stats.mean_acceptance_length:.2f} tokens per speculative round"
    )
