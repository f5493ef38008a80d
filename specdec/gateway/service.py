"""The service of one model behind HTTP and gRPC: checks a request, submits it, and makes text of its tokens.

Knows nothing of either protocol, nor of what is behind the `Backend`.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import replace
from functools import partial

from specdec.config import AppConfig
from specdec.engine.grammar import Grammars
from specdec.gateway.answer_style import AnswerStyle, showing_tags
from specdec.gateway.backend import Backend
from specdec.gateway.choices import (
    SequenceRunner,
    Tally,
    num_candidates,
    plan_sequences,
    until,
)
from specdec.gateway.echo import EchoedPrompt, echoed_prompt
from specdec.gateway.events import Finished, GenerationEvent
from specdec.gateway.interleave import interleaved
from specdec.gateway.output_grammars import OutputGrammars, OutputShape
from specdec.gateway.prompts import PromptEncoder, PromptTokenizer, copy_of_backend
from specdec.gateway.request_shape import check_shape
from specdec.gateway.requests import ClientRequest, Prompt
from specdec.gateway.shared import Shared
from specdec.gateway.validation import build_generation_request
from specdec.gateway.vocabulary import Vocabulary
from specdec.messages import CoordinatorStatus
from specdec.types import GenerationRequest, ModelInfo

PROMPT_END_TOKENS = 16


class GenerationService:
    """One gateway's service for one pair; which of them a request is for is `ServedModels`' to say.

    Args:
        backend: where tokens come from.
        tokenizer: the target's; a ``transformers.PreTrainedTokenizerBase`` with a fast backend.
        config: the pair's configuration; its ``gateway`` is the gateway's, but for the parsers.
        model_info: facts about the target model.
        created: Unix time in whole seconds, shown by ``/v1/models``.
        shared: what it has in common with the gateway's other services; None: made from ``config``.

    Raises:
        ConfigError: the tokenizer has no fast backend, or the file of API keys cannot be used.
    """

    def __init__(
        self,
        backend: Backend,
        tokenizer: PromptTokenizer,
        config: AppConfig,
        model_info: ModelInfo,
        created: int = 0,
        shared: Shared | None = None,
    ) -> None:
        self.config = config
        self.created = created
        self.shared = shared or Shared.of(config.gateway)
        self._backend = backend
        self._prompt_encoder = PromptEncoder(tokenizer, model_info.vocab_size)
        self._decoding_tokenizer = showing_tags(copy_of_backend(tokenizer))
        self._runner = SequenceRunner(
            backend=backend,
            tokenizer=self._decoding_tokenizer,
            vocabulary=Vocabulary(self._decoding_tokenizer),
            pace=self.shared.pace,
        )
        self._model_info = model_info
        self._answer_style = AnswerStyle(
            self._prompt_encoder.template,
            tool_parser=config.gateway.tool_parser,
            reasoning_parser=config.gateway.reasoning_parser,
        )
        self._output_grammars = OutputGrammars(
            Grammars(lambda: tokenizer, model_info.vocab_size, model_info.eos_token_ids)
        )

    @property
    def model_name(self) -> str:
        return self.config.model_name

    @property
    def model_info(self) -> ModelInfo:
        """The model's facts, with the context bounded by what target workers report."""
        reported = [status.max_context for status in self._backend.statuses() if status.max_context > 0]
        return replace(self._model_info, max_context=min([self._model_info.max_context, *reported]))

    def is_ready(self) -> bool:
        """Whether a request sent now would be served."""
        return self._backend.is_ready()

    def coordinators(self) -> tuple[CoordinatorStatus, ...]:
        """The coordinators known, as of the last poll."""
        return self._backend.statuses()

    def timeout_s(self, request: ClientRequest) -> float:
        """Seconds the request may take: the client's deadline or the gateway's, whichever is shorter."""
        limit = self.config.gateway.request_timeout_s
        return limit if request.timeout_s is None else min(limit, request.timeout_s)

    async def tokenize(self, prompt: Prompt) -> tuple[int, ...]:
        """Return the token ids that a request with this prompt would begin with; may be none.

        Raises:
            RequestError: it cannot be encoded.
            DeadlineExceeded: it took longer than ``gateway.request_timeout_s``.
        """
        return await until(self._own_deadline(), self._prompt_encoder.tokenize(prompt))

    async def detokenize(self, token_ids: Sequence[int]) -> str:
        """Return the text of token ids, special tokens included; raises as `tokenize` does."""
        return await until(self._own_deadline(), self._prompt_encoder.detokenize(token_ids))

    def describe_tokenizer(self) -> dict[str, object]:
        """Special tokens, chat template, vocabulary: see `PromptEncoder.describe`."""
        return self._prompt_encoder.describe()

    def _own_deadline(self) -> float:
        return asyncio.get_running_loop().time() + self.config.gateway.request_timeout_s

    async def generate(self, request: ClientRequest) -> AsyncGenerator[GenerationEvent, None]:
        """Yield text as it is committed; each choice ends with a `Finished`, the last of which has totals.

        The first text comes at once. Under load what several rounds committed comes in one piece: see
        ``gateway.max_stream_messages_per_s``. With ``best_of`` all candidates
        come: see `specdec.gateway.choices.best_choices`.

        All that is wrong with a request raises before the first event. One failing choice fails the request.
        Close the generator to cancel: the backend's generators are closed before ``aclose()`` returns, and
        each as soon as its stop string is complete.

        Raises:
            RequestError: the request cannot be served as it stands.
            ServiceUnavailable: nothing can serve it now, or it could not be completed.
            DeadlineExceeded: it took longer than its deadline.
        """
        deadline = asyncio.get_running_loop().time() + self.timeout_s(request)
        prepared = await until(deadline, self._prepare(request))
        plans = [
            plan
            for prompt_no, (generation, echo, shape) in enumerate(prepared)
            for plan in plan_sequences(request, generation, prompt_no, echo, shape)
        ]
        tally = Tally(prompt_tokens=sum(len(generation.prompt_ids) for generation, _, _ in prepared))
        num_unfinished = len(prepared) * num_candidates(request)
        with self.shared.limits.request(request.client):
            sources = [self._runner.events(plan, tally, deadline) for plan in plans]
            async with aclosing(interleaved(sources)) as events:
                async for event in events:
                    if isinstance(event, Finished):
                        num_unfinished -= 1
                        yield event if num_unfinished else replace(event, totals=tally.totals())
                    else:
                        yield event

    async def _prepare(
        self, request: ClientRequest
    ) -> list[tuple[GenerationRequest, EchoedPrompt | None, OutputShape]]:
        """Check all of a request. Of each prompt: its first choice, its text to echo, the outputs' shape."""
        check_shape(request, self.config)
        info = self.model_info
        bad_words = await self._prompt_encoder.encode_words(request.sampling.bad_words, "bad_words")
        prepared: list[tuple[GenerationRequest, EchoedPrompt | None, OutputShape]] = []
        for prompt in request.prompts:
            prompt_ids = await self._prompt_encoder.encode(prompt)
            generation = build_generation_request(
                request, prompt, prompt_ids, bad_words=bad_words, config=self.config, model_info=info
            )
            shape = self._answer_style.shape(
                prompt, partial(self._end_of, prompt_ids), request.sampling.constraint
            )
            sampling = replace(generation.sampling, grammar=await self._output_grammars.of(shape))
            echo = await self._echo(prompt, prompt_ids) if request.echo else None
            prepared.append((replace(generation, sampling=sampling), echo, shape))
        return prepared

    def _end_of(self, prompt_ids: tuple[int, ...]) -> str:
        """The end of a prompt's text: enough to see whether it has opened a tag."""
        end = list(prompt_ids[-PROMPT_END_TOKENS:])
        return self._decoding_tokenizer.decode(end, skip_special_tokens=False)

    async def _echo(self, prompt: Prompt, prompt_ids: tuple[int, ...]) -> EchoedPrompt:
        return await asyncio.to_thread(echoed_prompt, prompt, prompt_ids, self._decoding_tokenizer)
