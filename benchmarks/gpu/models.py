"""Models of real sizes with random weights, and runners over them.

Only what the engine itself needs is imported: torch, transformers, numba.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, PreTrainedConfig, PreTrainedModel

from specdec.engine.attention import interface
from specdec.engine.compatibility import check, observe
from specdec.engine.decoder import families
from specdec.engine.decoder.forward import Decoder
from specdec.engine.decoder.graphs import GraphedDecoder
from specdec.engine.model_runner import ModelRunner

OWN_ATTENTION = "sdpa"
"""Of transformers, in the models compared with."""
State = Mapping[str, torch.Tensor]


def llama(
    hidden: int, mlp: int, layers: int, heads: int, kv_heads: int, vocab: int, *, tied: bool = True
) -> LlamaConfig:
    """Its weights are wide enough that layers outweigh the embedding: else tokens would only repeat."""
    return LlamaConfig(
        initializer_range=hidden**-0.5,
        hidden_size=hidden,
        intermediate_size=mlp,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=hidden // heads,
        vocab_size=vocab,
        tie_word_embeddings=tied,
        max_position_embeddings=8192,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )


LLAMA_VOCAB = 128_256
SHAPES = {
    "tiny": llama(64, 128, 2, 4, 2, 512),
    "tiny-draft": llama(32, 64, 1, 4, 2, 512),
    "100m": llama(768, 2048, 12, 12, 4, LLAMA_VOCAB),
    "1b": llama(2048, 8192, 16, 32, 8, LLAMA_VOCAB),
    "8b": llama(4096, 14_336, 32, 32, 8, LLAMA_VOCAB, tied=False),
}


@dataclass(frozen=True, slots=True)
class Source:
    """A model to build: a shape with random weights, a folder of real ones, or given weights."""

    name: str
    """A key of `SHAPES` or a folder."""
    device: torch.device
    seed: int = 0
    state: State | None = None

    @property
    def config(self) -> PreTrainedConfig:
        """One of one's own: a model notes its attention there."""
        known = SHAPES.get(self.name)
        return AutoConfig.from_pretrained(self.name) if known is None else copy.deepcopy(known)

    @property
    def vocab_size(self) -> int:
        return int(self.config.get_text_config().vocab_size)

    def model(self, dtype: torch.dtype, attention: str = OWN_ATTENTION) -> PreTrainedModel:
        """In transformers' own layers; the same source gives the same weights."""
        if self.name not in SHAPES and self.state is None:
            model = AutoModelForCausalLM.from_pretrained(
                self.name, dtype=dtype, attn_implementation=attention
            )
        else:
            torch.manual_seed(self.seed)
            with self.device:
                model = AutoModelForCausalLM.from_config(
                    self.config, dtype=dtype, attn_implementation=attention
                )
            if self.state is not None:
                model.load_state_dict(self.state)
        return model.to(self.device).eval().requires_grad_(False)

    def decoder(self, dtype: torch.dtype, max_context: int) -> Decoder:
        """On the fast path, compared with the model's own attention as a worker compares it at load."""
        interface.register()
        model = self.model(dtype, interface.IMPLEMENTATION)
        observed = observe(self.name, model)
        decoder = Decoder(families.take_apart(model, observed.traits, max_context))
        check(decoder, observed)
        return decoder

    def perturbed(self, amount: float) -> Source:
        """The same weights plus ``amount`` standard deviations of noise."""
        generator = torch.Generator(self.device).manual_seed(self.seed + 1)
        noisy = {
            name: weight
            + amount
            * weight.float().std(correction=0).to(weight.dtype)
            * torch.randn(weight.shape, generator=generator, device=self.device, dtype=weight.dtype)
            for name, weight in self.model(torch.float32).state_dict().items()
        }
        return Source(self.name, self.device, self.seed, noisy)


def runner_of(
    decoder: Decoder, vocab_size: int, *, max_context: int, capacity: int, graphs: bool = False
) -> ModelRunner:
    """``graphs`` captures what is met, not everything at once."""
    runner = ModelRunner(decoder, vocab_size=vocab_size, max_context=max_context, kv_capacity_tokens=capacity)
    if graphs and GraphedDecoder.supports(decoder):
        runner.model = GraphedDecoder(decoder, runner.cache, max_context)
    return runner


def bytes_per_step(source: Source, dtype: torch.dtype) -> int:
    """Weights that one step of one sequence reads: all but the input embedding, unless it is the output's."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(source.config, dtype=dtype)
    weights = {id(p): p for p in model.parameters()}
    if not source.config.tie_word_embeddings:
        del weights[id(model.get_input_embeddings().weight)]
    return sum(p.numel() * p.element_size() for p in weights.values())


def free(device: torch.device) -> None:
    """Give the memory of what was let go back to the device."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
