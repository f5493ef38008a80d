"""Tiny random models of many families, runners over them, and the messages a coordinator would send.

Weights are float32 and wide enough that logits differ clearly: with near-ties, exact comparisons would depend
on rounding.
"""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from specdec.engine.compatibility import refuse_incompatible
from specdec.engine.decoder.forward import Decoder
from specdec.engine.loading import load_forward, load_model
from specdec.engine.model_runner import Forward, ModelRunner, TransformersForward
from specdec.engine.runner import ForwardItem, Runner
from specdec.engine.simulated import SimulatedRunner, ToyLaw
from specdec.engine.threads import set_num_threads
from specdec.messages import Draft, Feed, Opening, ProposeItem, ProposeRequest, VerifyItem, VerifyRequest
from specdec.types import SamplingParams, SequenceId, VerificationMode

VOCAB_SIZE = 64
WINDOW = 8
"""Sliding window of the families that have one: a test of two dozen tokens crosses it."""
OWNER = "coordinator-0"

set_num_threads(1)  # the models are so small that threads only wait for each other

_SIZES = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 48,
    "moe_intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 512,
    "initializer_range": 0.3,
    "num_local_experts": 4,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "sliding_window": WINDOW,
    "query_pre_attn_scalar": 8,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
"""By the names most families use; others translate them (`PreTrainedConfig.attribute_map`)."""


def tiny_config(model_type: str, **changes: object) -> PreTrainedConfig:
    """The family's own configuration with tiny sizes; ``changes`` win."""
    config_class = CONFIG_MAPPING[model_type]
    known = {*config_class().to_dict(), *config_class.attribute_map}
    sizes = {name: size for name, size in _SIZES.items() if name in known}
    return config_class(**{**sizes, **changes})


def reference_model(config: PreTrainedConfig, seed: int = 0) -> PreTrainedModel:
    """As transformers runs it, with its own attention. The same seed gives the same weights.

    Biases and norms are random, too: as a model is made, most of them would do nothing.
    """
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager")
        model.eval().requires_grad_(False)
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter += 0.2 * torch.randn(parameter.shape)
    return model


def reference_logits(model: PreTrainedModel, token_ids: Sequence[int]) -> torch.Tensor:
    """[tokens, vocab], all tokens in one forward without a cache."""
    return model(input_ids=torch.tensor([list(token_ids)]), use_cache=False).logits[0]


def loaded(
    config: PreTrainedConfig, folder: Path, *, seed: int = 0, max_context: int | None = None
) -> PreTrainedModel:
    """The same model as our loader gives it for the general path."""
    reference_model(config, seed).save_pretrained(folder)
    model = load_model(str(folder), "float32", torch.device("cpu"), max_context=max_context)
    refuse_incompatible(str(folder), model)
    return model


def loaded_forward(
    config: PreTrainedConfig, folder: Path, *, seed: int = 0, max_context: int = 512, dtype: str = "float32"
) -> Forward:
    """The same model as a worker runs it: on the fast path where there is one."""
    reference_model(config, seed).save_pretrained(folder)
    return load_forward(str(folder), dtype, torch.device("cpu"), max_context=max_context)


@functools.cache
def tiny_llama(seed: int = 0, noise: float = 0.0) -> PreTrainedModel:
    """Loaded once per test run, ready for `ModelRunner`; do not modify it.

    Args:
        seed: of the weights.
        noise: makes it a draft for the model without: the weights plus normal noise of this deviation.
    """
    with tempfile.TemporaryDirectory() as folder:
        model = loaded(tiny_config("llama"), Path(folder), seed=seed)
    generator = torch.Generator().manual_seed(seed + 1)
    for parameter in model.parameters():
        parameter += noise * torch.randn(parameter.shape, generator=generator)
    return model


@functools.cache
def tiny_decoder(seed: int = 0, noise: float = 0.0) -> Decoder:
    """`tiny_llama` on the fast path."""
    with tempfile.TemporaryDirectory() as folder:
        tiny_llama(seed, noise).save_pretrained(folder)
        forward = load_forward(folder, "float32", torch.device("cpu"), max_context=512)
    assert isinstance(forward, Decoder)
    return forward


def runner_of(
    model: PreTrainedModel | Forward,
    *,
    vocab_size: int = VOCAB_SIZE,
    max_context: int = 512,
    kv_capacity_tokens: int = 4096,
    shares_prefixes: bool = True,
) -> ModelRunner:
    forward = TransformersForward(model) if isinstance(model, PreTrainedModel) else model
    return ModelRunner(
        forward,
        vocab_size=vocab_size,
        max_context=max_context,
        kv_capacity_tokens=kv_capacity_tokens,
        shares_prefixes=shares_prefixes,
    )


def model_runner(*, seed: int = 0, noise: float = 0.0, **limits: int) -> ModelRunner:
    """On the general path."""
    return runner_of(tiny_llama(seed, noise), **limits)


def decoder_runner(*, seed: int = 0, noise: float = 0.0, **limits: int) -> ModelRunner:
    """The same model on the fast path."""
    return runner_of(tiny_decoder(seed, noise), **limits)


def simulated_runner(
    *, seed: int = 0, noise: float = 0.0, max_context: int = 512, kv_capacity_tokens: int = 4096
) -> SimulatedRunner:
    """``noise`` does to it about what it does to the model: it is amplified like rounding there."""
    law = ToyLaw.random(VOCAB_SIZE, seed, scale=2.0).perturbed(seed + 1, 200 * noise)
    return SimulatedRunner(law, max_context=max_context, kv_capacity_tokens=kv_capacity_tokens)


RUNNERS = {"model": model_runner, "decoder": decoder_runner, "simulated": simulated_runner}


def block_size(runner: Runner) -> int:
    """Positions of its KV cache that go together."""
    return runner.cache.block_size if isinstance(runner, ModelRunner) else 1


def in_blocks(runner: Runner, *lengths: int) -> int:
    """Positions that sequences of these lengths take when they share nothing."""
    size = block_size(runner)
    return sum(-(-length // size) * size for length in lengths)


# Forwards -------------------------------------------------------------------------------------------------


def sequence_id(name: str) -> SequenceId:
    return SequenceId(name)


def tokens(count: int, seed: int = 0) -> list[int]:
    """Random token ids, special ones left out."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, VOCAB_SIZE, (count,), generator=generator).tolist()


def item(name: str, token_ids: Sequence[int], num_rows: int | None = None) -> ForwardItem:
    """All rows are wanted unless said otherwise."""
    return ForwardItem(
        sequence_id=sequence_id(name),
        token_ids=list(token_ids),
        num_rows=len(token_ids) if num_rows is None else num_rows,
    )


def fed(runner: Runner, name: str, token_ids: Sequence[int], num_rows: int | None = None) -> torch.Tensor:
    """Logits of one sequence alone."""
    return runner.forward([item(name, token_ids, num_rows)])


def fed_in_chunks(runner: Runner, name: str, token_ids: Sequence[int], size: int) -> torch.Tensor:
    """All rows, the tokens fed ``size`` at a time."""
    starts = range(0, len(token_ids), size)
    return torch.cat([fed(runner, name, token_ids[start : start + size]) for start in starts])


def fresh_logits(runner: Runner, token_ids: Sequence[int]) -> torch.Tensor:
    """All rows of a sequence that was never rolled back or cut in chunks."""
    runner.open(sequence_id("fresh"))
    logits = fed(runner, "fresh", token_ids)
    runner.close(sequence_id("fresh"))
    return logits


# Messages -------------------------------------------------------------------------------------------------

GREEDY = SamplingParams(temperature=0.0, mode=VerificationMode.GREEDY)
REJECTION = SamplingParams(temperature=1.0, seed=7, mode=VerificationMode.REJECTION)
COUPLED = SamplingParams(temperature=1.0, seed=7, mode=VerificationMode.COUPLED)


def feed(
    name: str,
    token_ids: Sequence[int],
    *,
    keep: int = 0,
    epoch: int = 0,
    serial: int = 0,
    sampling: SamplingParams = GREEDY,
    stop_token_ids: Iterable[int] = (),
) -> Feed:
    """With an opening exactly when it starts at position 0."""
    opening = Opening(prompt_len=len(token_ids), sampling=sampling, stop_token_ids=frozenset(stop_token_ids))
    return Feed(
        sequence_id=sequence_id(name),
        epoch=epoch,
        serial=serial,
        keep=keep,
        token_ids=tuple(token_ids),
        opening=opening if keep == 0 else None,
    )


def propose(*items: tuple[Feed, int], owner: str = OWNER) -> ProposeRequest:
    """Each item is a feed and the number of tokens to draft behind it."""
    return ProposeRequest(
        owner=owner, items=tuple(ProposeItem(feed=f, num_draft_tokens=gamma) for f, gamma in items)
    )


def verify(*items: VerifyItem, owner: str = OWNER) -> VerifyRequest:
    return VerifyRequest(owner=owner, items=items)


def prefill(f: Feed) -> VerifyItem:
    """A chunk that does not reach the end of the log."""
    return VerifyItem(feed=f, num_rows=0)


def judge(f: Feed, draft: Draft | None = None) -> VerifyItem:
    """Feed the committed tokens of ``f`` and the draft behind them."""
    draft_ids = draft.token_ids if draft else ()
    whole = Feed(
        sequence_id=f.sequence_id,
        epoch=f.epoch,
        serial=f.serial,
        keep=f.keep,
        token_ids=f.token_ids + draft_ids,
        opening=f.opening,
    )
    return VerifyItem(feed=whole, num_rows=len(draft_ids) + 1, draft=draft)
