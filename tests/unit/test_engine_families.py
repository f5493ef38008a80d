"""Model families by every path against transformers' own layers: whole, in pieces, rolled back, together."""

from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedConfig, PreTrainedModel

from specdec.engine.batch import TILE
from specdec.engine.decoder import forward as decoder_forward
from specdec.engine.decoder.cpu_step import CpuStep
from specdec.engine.decoder.forward import Decoder
from specdec.engine.decoder.torch_step import TorchStep
from specdec.engine.model_runner import Forward, ModelRunner, TransformersForward
from tests.tiny_models import (
    WINDOW,
    fed,
    fed_in_chunks,
    item,
    loaded,
    loaded_forward,
    reference_logits,
    reference_model,
    runner_of,
    sequence_id,
    tiny_config,
    tokens,
)

A, B = sequence_id("a"), sequence_id("b")
NUM_TOKENS = 3 * WINDOW
"""Three windows: every mask of a windowed layer slides."""
LONG = 2 * TILE + 7
"""A prompt whose tokens the CPU's attention takes in three portions."""

MIXED_LAYERS = {"layer_types": ["sliding_attention", "full_attention"]}
PRETRAINED_CONTEXT = 16
LONGROPE = {
    "rope_parameters": {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "short_factor": [1.0] * 4,
        "long_factor": [2.0, 3.0, 4.0, 5.0],
        "original_max_position_embeddings": PRETRAINED_CONTEXT,
    },
    "original_max_position_embeddings": PRETRAINED_CONTEXT,
    "sliding_window": None,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}

FAST: dict[str, tuple[str, Mapping[str, object]]] = {
    "llama": ("llama", {}),
    "llama with biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama with tied embeddings": ("llama", {"tie_word_embeddings": True}),
    "llama without groups, of one layer": ("llama", {"num_key_value_heads": 4, "num_hidden_layers": 1}),
    "llama with the rope of llama 3": ("llama", {"rope_parameters": LLAMA3_ROPE}),
    "qwen2": ("qwen2", {}),
    "qwen2 with a window in its last layer": (
        "qwen2",
        {"use_sliding_window": True, "max_window_layers": 1, "sliding_window": WINDOW},
    ),
    "qwen3": ("qwen3", {}),
    "qwen3 with heads wider than the model": ("qwen3", {"head_dim": 24}),
    "mistral": ("mistral", {}),
    "mistral without window": ("mistral", {"sliding_window": None}),
    "mistral with a window wider than a portion": ("mistral", {"sliding_window": TILE + 5}),
    "gemma": ("gemma", {}),
    "gemma2": ("gemma2", {}),
    "gemma3": ("gemma3_text", MIXED_LAYERS),
    "phi3": ("phi3", {}),
    "phi3 with half of each head rotated": ("phi3", {"partial_rotary_factor": 0.5}),
    "phi3 with longrope": ("phi3", LONGROPE),
}
"""Served on the fast path."""
GENERAL: dict[str, tuple[str, Mapping[str, object]]] = {
    "qwen3-moe": ("qwen3_moe", {}),
    "mixtral": ("mixtral", {}),
    "llama with a rope that changes": (
        "llama",
        {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}},
    ),
    "llama with another activation": ("llama", {"hidden_act": "gelu"}),
    "gemma3n, last layers sharing keys and values": (
        "gemma3n_text",
        {
            "num_hidden_layers": 4,
            "num_kv_shared_layers": 2,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "activation_sparsity_pattern": [0.0] * 4,
            "hidden_size_per_layer_input": 8,
            "vocab_size_per_layer_input": 64,
        },
    ),
    "phi": ("phi", {}),
    "gpt2": ("gpt2", {"n_inner": 48}),
    "gpt-neox": ("gpt_neox", {}),
    "gpt-oss": ("gpt_oss", MIXED_LAYERS),
    "gpt-bigcode": ("gpt_bigcode", {"n_inner": 48}),
    "opt": ("opt", {"word_embed_proj_dim": 32, "ffn_dim": 48, "init_std": 0.3}),
    "olmo2": ("olmo2", {}),
    "granite": ("granite", {}),
    "granite-hybrid, attention layers only": (
        "granitemoehybrid",
        {
            "layer_types": ["full_attention"] * 2,
            "mamba_n_heads": 4,
            "mamba_d_head": 16,
            "shared_intermediate_size": 48,
        },
    ),
    "cohere": ("cohere", {}),
    "cohere2": ("cohere2", MIXED_LAYERS),
    "starcoder2": ("starcoder2", {}),
    "smollm3": ("smollm3", {}),
    "deepseek-v3": (
        "deepseek_v3",
        {
            "num_key_value_heads": 4,
            "q_lora_rank": 16,
            "kv_lora_rank": 16,
            "qk_rope_head_dim": 8,
            "qk_nope_head_dim": 8,
            "v_head_dim": 12,
            "n_routed_experts": 4,
            "n_group": 1,
            "topk_group": 1,
            "first_k_dense_replace": 1,
        },
    ),
    "jetmoe": ("jetmoe", {"kv_channels": 8}),
}


def config_of(name: str) -> PreTrainedConfig:
    model_type, changes = (FAST | GENERAL)[name]
    return tiny_config(model_type, **deepcopy(changes))


def general(config: PreTrainedConfig, folder: Path, max_context: int = 512) -> Forward:
    return TransformersForward(loaded(config, folder, max_context=max_context))


def fast(config: PreTrainedConfig, folder: Path, max_context: int = 512) -> Forward:
    """Through the compiled loops."""
    forward = loaded_forward(config, folder, max_context=max_context)
    assert isinstance(forward, Decoder), "a silent step back to the general path"
    assert forward._step is CpuStep
    return forward


def fast_in_torch(config: PreTrainedConfig, folder: Path, max_context: int = 512) -> Forward:
    """As on CUDA, in a dtype that there are no loops for."""
    forward = loaded_forward(config, folder, max_context=max_context, dtype="float64")
    assert isinstance(forward, Decoder)
    assert forward._step is TorchStep
    return forward


SERVED_LONG = config_of("phi3 with longrope")
"""What longrope is in a long context, for short sequences, too."""
SERVED_LONG.rope_parameters["short_factor"] = LONGROPE["rope_parameters"]["long_factor"]


@dataclass(frozen=True)
class Family:
    reference: PreTrainedModel
    forward: Forward

    def expected(self, token_ids: list[int]) -> torch.Tensor:
        return reference_logits(self.reference, token_ids)

    def runner(self) -> ModelRunner:
        runner = runner_of(self.forward)
        runner.open(A)
        runner.open(B)
        return runner


CASES = [
    *((name, general) for name in FAST | GENERAL),
    *((name, path) for name in FAST for path in (fast, fast_in_torch)),
]


@pytest.fixture(scope="module", params=CASES, ids=lambda case: f"{case[0]}-{case[1].__name__}")
def family(request, tmp_path_factory):
    name, path = request.param
    reference = reference_model(SERVED_LONG if "longrope" in name else config_of(name))
    return Family(reference, path(config_of(name), tmp_path_factory.mktemp("model")))


def assert_same(actual: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(actual.float(), expected, rtol=0.0, atol=1e-4)


def test_reference_tells_positions_apart(family):
    """Otherwise the tests below would prove little."""
    logits = family.expected(tokens(NUM_TOKENS))
    assert (logits[1:] - logits[:-1]).abs().amax(dim=-1).min() > 0.05


def test_whole_prefill(family):
    token_ids = tokens(NUM_TOKENS)
    assert_same(fed(family.runner(), "a", token_ids), family.expected(token_ids))


def test_prefill_in_chunks_of_three(family):
    token_ids = tokens(NUM_TOKENS)
    assert_same(fed_in_chunks(family.runner(), "a", token_ids, 3), family.expected(token_ids))


def test_decoding_one_by_one(family):
    token_ids = tokens(NUM_TOKENS)
    assert_same(fed_in_chunks(family.runner(), "a", token_ids, 1), family.expected(token_ids))


def test_last_rows_only(family):
    token_ids = tokens(NUM_TOKENS)
    assert_same(fed(family.runner(), "a", token_ids, num_rows=2), family.expected(token_ids)[-2:])


@pytest.mark.parametrize("cached", [WINDOW - 4, WINDOW - 2, 2 * WINDOW - 3])
def test_going_on_behind_a_block_of_which_three_tokens_are_rejected(family, cached):
    """The block ends before, across and beyond the edge of the window."""
    token_ids, runner = tokens(NUM_TOKENS), family.runner()
    kept = cached + 2
    rejected = tokens(3, seed=9)
    fed(runner, "a", token_ids[:cached])
    block = token_ids[cached:kept] + rejected
    assert_same(fed(runner, "a", block), family.expected(token_ids[:kept] + rejected)[cached:])
    runner.truncate(A, kept)
    rest = token_ids[kept:]
    decoded = torch.cat([fed(runner, "a", rest[:1]), fed(runner, "a", rest[1:])])
    assert_same(decoded, family.expected(token_ids)[kept:])


def test_two_ragged_sequences(family):
    """A long one decodes while a short one arrives; then they change places."""
    long, short, runner = tokens(NUM_TOKENS), tokens(7, seed=1), family.runner()
    fed(runner, "a", long[:-5])
    first = runner.forward([item("a", long[-5:-2], 2), item("b", short[:4], 4)])
    second = runner.forward([item("b", short[4:], 3), item("a", long[-2:], 2)])
    assert_same(torch.cat([first[:2], second[3:]]), family.expected(long)[-4:])
    assert_same(torch.cat([first[2:], second[:3]]), family.expected(short))


def test_long_prefill(family):
    """Through the fused attention of a whole prompt, where there is one."""
    token_ids = tokens(LONG)
    assert_same(fed(family.runner(), "a", token_ids), family.expected(token_ids))


@pytest.mark.parametrize("size", [TILE - 1, TILE + 1])
def test_long_prefill_in_chunks(family, size):
    token_ids = tokens(LONG)
    assert_same(fed_in_chunks(family.runner(), "a", token_ids, size), family.expected(token_ids))


def test_long_prefill_behind_a_rollback(family):
    """Windows slide across the place where the first prompt was cut."""
    token_ids, runner = tokens(2 * LONG, seed=1), family.runner()
    kept = LONG - 3
    fed(runner, "a", token_ids[:kept] + tokens(TILE, seed=2))
    runner.truncate(A, kept)
    assert_same(fed(runner, "a", token_ids[kept:]), family.expected(token_ids)[kept:])


def test_long_prefill_verification_and_single_tokens_in_one_batch(family):
    texts = {"long": tokens(LONG + 10), "drafted": tokens(30, seed=1), "one": tokens(20, seed=2), "new": [9]}
    fed_first = {"long": 10, "drafted": 26, "one": 19, "new": 0}
    runner = family.runner()
    for name, count in fed_first.items():
        runner.open(sequence_id(name))
        if count:
            fed(runner, name, texts[name][:count])
    for order in (list(texts), list(texts)[::-1]):
        logits = runner.forward([item(name, texts[name][fed_first[name] :]) for name in order])
        assert_same(logits, torch.cat([family.expected(texts[name])[fed_first[name] :] for name in order]))
        for name, count in fed_first.items():
            runner.truncate(sequence_id(name), count)


def test_shared_prefix(family):
    prompt, runner = tokens(LONG), family.runner()
    fed(runner, "a", prompt)
    other = prompt[:-9] + tokens(9, seed=1)
    logits = fed(runner, "b", other, num_rows=9)
    assert runner.cache.blocks.table(A)[:3] == runner.cache.blocks.table(B)[:3]
    assert_same(logits, family.expected(other)[-9:])


# Which path -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", GENERAL)
def test_other_families_are_served_on_the_general_path(name, tmp_path, caplog):
    assert isinstance(loaded_forward(config_of(name), tmp_path), TransformersForward)
    assert caplog.records == []


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("name", FAST)
def test_narrow_dtypes_are_served_on_the_fast_path(name, dtype, tmp_path):
    config, token_ids = config_of(name), tokens(LONG)
    forward = loaded_forward(config, tmp_path, dtype=dtype)
    assert isinstance(forward, Decoder)
    assert forward._step is (CpuStep if dtype == "bfloat16" else TorchStep)
    runner = runner_of(forward)
    runner.open(A)
    expected = reference_logits(reference_model(config), token_ids)
    error = (fed(runner, "a", token_ids).float() - expected).abs().mean(dim=-1)
    assert error.median() < {"bfloat16": 0.2, "float16": 0.02}[dtype] * expected.std()


def wrong(self, batch, cache, original=decoder_forward.Decoder.forward):
    return 1.1 * original(self, batch, cache)


def failing(self, batch, cache):
    raise RuntimeError("no such kernel")


@pytest.mark.parametrize(
    ("forward", "reason"), [(wrong, "it gives other logits"), (failing, "RuntimeError: no such kernel")]
)
def test_known_family_that_says_something_else_falls_back_with_a_warning(
    forward, reason, tmp_path, monkeypatch, caplog
):
    monkeypatch.setattr(Decoder, "forward", forward)
    config, token_ids = config_of("llama"), tokens(LONG)
    served = loaded_forward(config, tmp_path)
    assert isinstance(served, TransformersForward)
    [record] = caplog.records
    assert (record.name, record.levelname) == ("specdec.engine.loading", "WARNING")
    assert reason in record.message
    assert "served by transformers' own layers, which is slower" in record.message
    runner = runner_of(served)
    runner.open(A)
    assert_same(fed(runner, "a", token_ids), reference_logits(reference_model(config), token_ids))


# A rope that depends on the context served ----------------------------------------------------------------


@pytest.fixture(params=[general, fast, fast_in_torch], ids=lambda path: path.__name__)
def longrope_runner(request, tmp_path):
    def make(max_context: int = 512) -> ModelRunner:
        runner = runner_of(request.param(config_of("phi3 with longrope"), tmp_path, max_context))
        runner.open(A)
        runner.open(B)
        return runner

    return make


def longrope_logits(token_ids):
    return reference_logits(reference_model(config_of("phi3 with longrope")), token_ids)


def test_longrope_serves_a_short_context_with_short_factors(longrope_runner):
    token_ids = tokens(PRETRAINED_CONTEXT)
    runner = longrope_runner(PRETRAINED_CONTEXT)
    assert_same(fed_in_chunks(runner, "a", token_ids, 5), longrope_logits(token_ids))


def test_longrope_serves_a_long_context_with_long_factors_from_the_first_token_on(longrope_runner):
    """transformers' choice for the whole sequence; its own cache would mix both kinds."""
    token_ids = tokens(2 * PRETRAINED_CONTEXT)
    assert_same(fed_in_chunks(longrope_runner(), "a", token_ids, 5), longrope_logits(token_ids))


def test_longrope_neighbour_beyond_the_pretrained_context_changes_nothing(longrope_runner):
    runner, short = longrope_runner(), tokens(6, seed=1)
    alone = fed(runner, "b", short)
    runner.truncate(B, 0)
    fed(runner, "a", tokens(2 * PRETRAINED_CONTEXT))
    beside = runner.forward([item("a", tokens(1)), item("b", short)])[1:]
    assert_same(beside, alone.float())
