"""Models that cannot be served exactly are refused at load, with the reason; never served wrongly."""

from collections.abc import Callable

import pytest
import torch
from transformers import PreTrainedModel
from transformers.models.llama import modeling_llama

from specdec.engine.attention.interface import IMPLEMENTATION
from specdec.engine.compatibility import refuse_incompatible
from specdec.engine.loading import choose_device, load_model
from specdec.errors import ConfigError, ModelUnavailable
from tests.tiny_models import WINDOW, loaded, tiny_config

CPU = torch.device("cpu")


# Known from the configuration: no weight is read ----------------------------------------------------------

RECURRENT = {
    "mamba": {},
    "recurrent_gemma": {"block_types": ["recurrent", "attention"]},
    "jamba": {},
    "falcon_h1": {},
    "bamba": {"mamba_n_heads": 4, "mamba_d_head": 16},
    "granitemoehybrid": {
        "layer_types": ["linear_attention", "full_attention"],
        "mamba_n_heads": 4,
        "mamba_d_head": 16,
    },
    "qwen3_next": {},
    "nemotron_h": {},
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "minimax": {},
}


@pytest.mark.parametrize("model_type", RECURRENT)
def test_layers_with_a_state_are_refused(model_type, tmp_path):
    tiny_config(model_type, **RECURRENT[model_type]).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="state cannot be rolled back"):
        load_model(str(tmp_path), "float32", CPU)


@pytest.mark.parametrize("model_type", ["rwkv", "xlstm"])
def test_recurrent_families_without_layer_types_are_refused(model_type, tmp_path):
    tiny_config(model_type).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="is recurrent"):
        load_model(str(tmp_path), "float32", CPU)


def test_chunked_attention_is_refused(tmp_path):
    tiny_config("llama4_text").save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="chunked attention"):
        load_model(str(tmp_path), "float32", CPU)


@pytest.mark.parametrize(
    ("model_type", "changes"),
    [
        ("bloom", {}),
        ("mpt", {}),
        ("falcon", {"alibi": True}),
        ("falcon", {"alibi": False}),
        ("stablelm", {}),
        ("gpt_neo", {"num_layers": 2, "attention_types": [[["global", "local"], 1]]}),
    ],
)
def test_families_with_their_own_attention_are_refused(model_type, changes, tmp_path):
    """ALiBi families among them: their bias could not be given to us."""
    tiny_config(model_type, **changes).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="does not allow its attention to be replaced"):
        load_model(str(tmp_path), "float32", CPU)


def test_sparse_attention_is_refused(tmp_path):
    config = tiny_config("deepseek_v32", num_key_value_heads=4)
    config.save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="indexed_attention"):
        load_model(str(tmp_path), "float32", CPU)


def test_folder_without_a_model_is_unavailable(tmp_path):
    with pytest.raises(ModelUnavailable, match="cannot load model"):
        load_model(str(tmp_path), "float32", CPU)


def test_encoder_is_unavailable(tmp_path):
    tiny_config("vit").save_pretrained(tmp_path)
    with pytest.raises(ModelUnavailable, match="cannot load model"):
        load_model(str(tmp_path), "float32", CPU)


def test_missing_cuda_is_a_configuration_error(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert choose_device("auto") == CPU
    with pytest.raises(ConfigError, match="no CUDA device is visible"):
        choose_device("cuda:0")


# Found by feeding a few tokens ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model_type", "changes", "reason"),
    [
        ("bert", {}, "not causal"),
        ("phimoe", {}, f"mask has a window of {WINDOW}, its layers None"),
        (
            "qwen2_moe",
            {"use_sliding_window": True, "max_window_layers": 1, "sliding_window": WINDOW},
            f"mask has a window of {WINDOW}, its layers None",
        ),
        ("diffllama", {}, "attends more than once"),
        ("nemotron", {}, "does not hand its arguments on"),
        ("doge", {}, "its forward fails"),
    ],
)
def test_families_that_do_more_than_they_hand_over_are_refused(model_type, changes, reason, tmp_path):
    with pytest.raises(ConfigError, match=reason) as refusal:
        loaded(tiny_config(model_type, **changes), tmp_path)
    assert str(tmp_path) in refusal.value.message


def test_window_as_wide_as_the_context_is_no_window(tmp_path):
    loaded(tiny_config("phimoe", sliding_window=512), tmp_path)


@pytest.fixture
def llama(tmp_path):
    """A model of our own to break; the shared one stays whole."""
    return loaded(tiny_config("llama"), tmp_path)


def wrap(module: torch.nn.Module, monkeypatch: pytest.MonkeyPatch, forward: Callable[..., object]) -> None:
    """Let ``forward`` take over; its first argument is the original."""
    original = module.forward
    monkeypatch.setattr(module, "forward", lambda *args, **kwargs: forward(original, *args, **kwargs))


def refusal_of(model: PreTrainedModel) -> str:
    with pytest.raises(ConfigError, match=r"model 'tiny' \(LlamaForCausalLM\) cannot be served") as refusal:
        refuse_incompatible("tiny", model)
    assert model.config._attn_implementation == IMPLEMENTATION
    return refusal.value.message


def test_unbroken_model_is_accepted_and_left_as_it_was(llama):
    refuse_incompatible("tiny", llama)
    assert llama.config._attn_implementation == IMPLEMENTATION


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_rounding_of_a_narrow_dtype_is_no_reason_to_refuse(llama, dtype):
    refuse_incompatible("tiny", llama.to(dtype))


@pytest.mark.parametrize("value", [torch.zeros(1), True, "alibi", 0.5])
def test_unknown_argument_of_attention_is_refused_by_name(llama, monkeypatch, value):
    def biased(original, *args, **kwargs):
        return original(*args, position_bias=value, **kwargs)

    wrap(llama.model.layers[1].self_attn, monkeypatch, biased)
    assert "its attention takes position_bias, which specdec does not know" in refusal_of(llama)


@pytest.mark.parametrize(
    "arguments",
    [
        {"position_bias": None},
        {"output_attentions": False},
        {"is_causal": True},
        {"cache_position": torch.arange(12)},
    ],
)
def test_argument_that_asks_for_nothing_is_accepted(llama, monkeypatch, arguments):
    def informed(original, *args, **kwargs):
        return original(*args, **arguments, **kwargs)

    wrap(llama.model.layers[1].self_attn, monkeypatch, informed)
    refuse_incompatible("tiny", llama)


def test_attention_that_is_not_causal_is_refused(llama, monkeypatch):
    def bidirectional(original, *args, **kwargs):
        return original(*args, is_causal=False, **kwargs)

    wrap(llama.model.layers[1].self_attn, monkeypatch, bidirectional)
    assert "is_causal" in refusal_of(llama)


def test_own_mask_is_refused(llama, monkeypatch):
    def masked(original, *args, **kwargs):
        return original(*args, **{**kwargs, "attention_mask": torch.zeros(1, 1, 12, 12)})

    wrap(llama.model.layers[0], monkeypatch, masked)
    assert "it makes its own attention mask" in refusal_of(llama)


def test_layer_that_is_used_twice_is_refused(llama):
    llama.model.layers[1] = llama.model.layers[0]
    assert "layer 0 attends more than once" in refusal_of(llama)


def test_model_that_ignores_position_ids_is_refused(llama, monkeypatch):
    def from_zero(original, hidden_states, position_ids):
        return original(hidden_states, torch.arange(hidden_states.shape[1]).unsqueeze(0))

    wrap(llama.model.rotary_emb, monkeypatch, from_zero)
    assert "fed in pieces it gives other logits" in refusal_of(llama)


def test_state_outside_the_cache_is_refused(llama, monkeypatch):
    """A token shift, as convolutions and recurrences have it: the token before is seen if fed together."""

    def shifted(original, hidden_states, *args, **kwargs):
        before = torch.nn.functional.pad(hidden_states, (0, 0, 1, 0))[:, :-1]
        return original(hidden_states + before, *args, **kwargs)

    wrap(llama.model.layers[1], monkeypatch, shifted)
    assert "fed in pieces it gives other logits" in refusal_of(llama)


def test_attention_with_a_twist_of_its_own_is_refused(llama, monkeypatch):
    """What a family adds in its own attention function, and so never tells us."""
    eager = modeling_llama.eager_attention_forward

    def twisted(module, query, key, value, attention_mask, scaling, **kwargs):
        return eager(module, query, key, value, attention_mask, 2 * scaling, **kwargs)

    monkeypatch.setattr(modeling_llama, "eager_attention_forward", twisted)
    assert "other logits" in refusal_of(llama)


def test_logits_that_are_not_numbers_are_refused(llama):
    llama.lm_head.weight[5] = torch.nan
    assert "nan" in refusal_of(llama)


def test_model_that_fails_is_refused_with_its_own_words(llama, monkeypatch):
    def failing(original, *args, **kwargs):
        raise RuntimeError("no kernel for this device")

    wrap(llama.model.layers[1].mlp, monkeypatch, failing)
    assert "RuntimeError: no kernel for this device" in refusal_of(llama)


def test_vocabulary_smaller_than_the_test_sentence_is_served(tmp_path):
    loaded(tiny_config("llama", vocab_size=5, pad_token_id=None), tmp_path)
