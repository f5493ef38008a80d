"""Assembling the draft and writing tidy folders, on models of a few kilobytes."""

import json

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from specdec.models import convert
from specdec.models.catalog import DRAFT_DATA_FILES, DRAFT_LAYERS_FILE

CONFIG = LlamaConfig(
    vocab_size=32,
    hidden_size=16,
    intermediate_size=32,
    num_hidden_layers=1,
    num_attention_heads=2,
    num_key_value_heads=1,
    tie_word_embeddings=True,
    dtype="bfloat16",
    architectures=["LlamaForCausalLM"],
)


@pytest.fixture
def target(tmp_path):
    folder = tmp_path / "target"
    torch.manual_seed(0)
    LlamaForCausalLM(CONFIG).to(torch.bfloat16).save_pretrained(folder)
    for name in convert._SHARED_WITH_DRAFT:
        (folder / name).write_text("{}")
    return folder


@pytest.fixture
def draft_data(tmp_path):
    folder = tmp_path / "data"
    folder.mkdir()
    torch.manual_seed(1)
    weights = LlamaForCausalLM(CONFIG).to(torch.bfloat16).state_dict()
    layers = {name: t for name, t in weights.items() if name not in (convert.EMBEDDING, convert.HEAD)}
    for name in DRAFT_DATA_FILES:
        (folder / name).write_text(name)
    save_file(layers, folder / DRAFT_LAYERS_FILE)
    CONFIG.save_pretrained(folder)
    return folder


@pytest.fixture
def draft(tmp_path, target, draft_data):
    folder = tmp_path / "draft"
    folder.mkdir()
    convert.assemble_draft(draft_data, target, folder)
    return folder


def embedding(folder):
    with safe_open(folder / convert.WEIGHTS_FILE, framework="pt") as weights:
        return weights.get_tensor(convert.EMBEDDING)


def test_draft_has_the_targets_embedding_and_its_own_layers(draft, target, draft_data):
    assert torch.equal(embedding(draft), embedding(target))
    weights = load_file(draft / convert.WEIGHTS_FILE)
    for name, tensor in load_file(draft_data / DRAFT_LAYERS_FILE).items():
        assert torch.equal(weights[name], tensor)


def test_draft_is_an_ordinary_causal_lm_with_a_tied_head(draft, target):
    model, info = AutoModelForCausalLM.from_pretrained(draft, dtype=torch.bfloat16, output_loading_info=True)
    assert not any(info.values()), info
    assert torch.equal(model.lm_head.weight, embedding(target))


def test_draft_keeps_its_reduced_vocabulary_and_the_targets_tokenizer(draft):
    names = {path.name for path in draft.iterdir()}
    assert {"draft_vocab.npy", "README.md", "config.json", *convert._SHARED_WITH_DRAFT} <= names
    assert DRAFT_LAYERS_FILE not in names


def test_saved_configuration_shows_no_trace_of_the_gguf_file(tmp_path):
    config = LlamaConfig.from_dict(
        {
            **CONFIG.to_dict(),
            "dtype": "float32",
            "_model_name_or_path": "Odd Name 8k",
            "quantization_config": {"quant_method": "gguf"},
        }
    )
    convert._save_config(config, tmp_path)
    saved = json.loads((tmp_path / "config.json").read_text())
    assert saved["dtype"] == "bfloat16"
    assert saved["architectures"] == ["LlamaForCausalLM"]
    assert not {"quantization_config", "_name_or_path", "_model_name_or_path"} & set(saved)
    assert json.loads((tmp_path / "generation_config.json").read_text())["eos_token_id"] == 2


def test_silence_ends_with_the_block():
    from transformers import modeling_gguf_pytorch_utils as gguf_reader
    from transformers.utils import logging

    before = (logging.get_verbosity(), logging.is_progress_bar_enabled(), gguf_reader.tqdm)
    with convert._quiet_transformers():
        assert not logging.is_progress_bar_enabled()
        assert list(gguf_reader.tqdm([1, 2], desc="quiet")) == [1, 2]
    assert (logging.get_verbosity(), logging.is_progress_bar_enabled(), gguf_reader.tqdm) == before
