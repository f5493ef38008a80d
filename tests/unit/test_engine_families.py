"""Model families against transformers' own attention: fed whole, in pieces, over rollbacks, side by side."""

from collections.abc import Mapping
from dataclasses import dataclass

import pytest
import torch
from transformers import PreTrainedModel

from specdec.engine.model_runner import ModelRunner
from tests.tiny_models import (
    WINDOW,
    fed,
    fed_in_chunks,
    item,
    loaded,
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

MIXED_LAYERS = {"layer_types": ["sliding_attention", "full_attention"]}
FAMILIES: dict[str, tuple[str, Mapping[str, object]]] = {
    "llama": ("llama", {}),
    "qwen2": ("qwen2", {}),
    "qwen2 with a window in its last layer": (
        "qwen2",
        {"use_sliding_window": True, "max_window_layers": 1, "sliding_window": WINDOW},
    ),
    "qwen3": ("qwen3", {}),
    "qwen3-moe": ("qwen3_moe", {}),
    "mistral": ("mistral", {}),
    "mistral without window": ("mistral", {"sliding_window": None}),
    "mixtral": ("mixtral", {}),
    "gemma": ("gemma", {}),
    "gemma2": ("gemma2", {}),
    "gemma3": ("gemma3_text", MIXED_LAYERS),
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
    "phi3": ("phi3", {}),
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


@dataclass(frozen=True)
class Family:
    reference: PreTrainedModel
    model: PreTrainedModel

    def expected(self, token_ids: list[int]) -> torch.Tensor:
        return reference_logits(self.reference, token_ids)

    def runner(self) -> ModelRunner:
        runner = runner_of(self.model)
        runner.open(A)
        runner.open(B)
        return runner


@pytest.fixture(scope="module", params=FAMILIES)
def family(request, tmp_path_factory):
    model_type, changes = FAMILIES[request.param]
    config = tiny_config(model_type, **changes)
    return Family(reference_model(config), loaded(config, tmp_path_factory.mktemp(model_type)))


def assert_same(actual: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=0.0, atol=1e-4)


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


# A rope that depends on the context served ----------------------------------------------------------------

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


@pytest.fixture(scope="module")
def longrope():
    return tiny_config("phi3", **LONGROPE)


def test_longrope_serves_a_short_context_with_short_factors(longrope, tmp_path):
    token_ids = tokens(PRETRAINED_CONTEXT)
    runner = runner_of(loaded(longrope, tmp_path, max_context=PRETRAINED_CONTEXT))
    runner.open(A)
    expected = reference_logits(reference_model(longrope), token_ids)
    assert_same(fed_in_chunks(runner, "a", token_ids, 5), expected)


def test_longrope_serves_a_long_context_with_long_factors_from_the_first_token_on(longrope, tmp_path):
    """transformers' choice for the whole sequence; its own cache would mix both kinds."""
    token_ids = tokens(2 * PRETRAINED_CONTEXT)
    runner = runner_of(loaded(longrope, tmp_path))
    runner.open(A)
    expected = reference_logits(reference_model(longrope), token_ids)
    assert_same(fed_in_chunks(runner, "a", token_ids, 5), expected)


def test_longrope_neighbour_beyond_the_pretrained_context_changes_nothing(longrope, tmp_path):
    runner = runner_of(loaded(longrope, tmp_path))
    for sequence in (A, B):
        runner.open(sequence)
    short = tokens(6, seed=1)
    alone = fed(runner, "b", short)
    runner.truncate(B, 0)
    fed(runner, "a", tokens(2 * PRETRAINED_CONTEXT))
    beside = runner.forward([item("a", tokens(1)), item("b", short)])[1:]
    assert_same(beside, alone)
