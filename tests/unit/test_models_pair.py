"""Pairs of tiny models: real tokenizers and configurations, no weights."""

import json
from pathlib import Path

import pytest
from tokenizers import AddedToken, Tokenizer
from tokenizers.models import WordLevel

from specdec.errors import IncompatiblePair, ModelUnavailable
from specdec.models import PairInfo, check_pair, load_tokenizer, model_info
from specdec.types import ModelInfo

WORDS = ("<eos>", "a", "b", "c", "d", "e")


@pytest.fixture
def make_model(tmp_path):
    """Return a function that writes a model folder without weights and returns its path."""

    def make(name, *, words=WORDS, added=(), rows=None, context=64, config=None, generation=None):
        folder = tmp_path / name
        folder.mkdir()
        if words is not None:
            write_tokenizer(folder, words, added)
        rows = len(words) + len(added) if rows is None else rows
        llama = {"model_type": "llama", "vocab_size": rows, "max_position_embeddings": context}
        # LlamaConfig's default is 2; None states that there is none.
        write_json(folder / "config.json", {"eos_token_id": None, **llama, **(config or {})})
        if generation is not None:
            write_json(folder / "generation_config.json", generation)
        return str(folder)

    return make


def write_tokenizer(folder, words, added):
    tokenizer = Tokenizer(WordLevel({word: i for i, word in enumerate(words)}, unk_token="<eos>"))
    tokenizer.add_special_tokens([AddedToken(token) for token in added])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<eos>"}
    write_json(folder / "tokenizer_config.json", settings)


def write_json(path, values):
    path.write_text(json.dumps(values))


def rewritten(path, **changes):
    """Change a JSON file."""
    write_json(path, {**json.loads(path.read_text()), **changes})


def swapped(words, i, j):
    words = list(words)
    words[i], words[j] = words[j], words[i]
    return words


def test_same_vocabulary_is_compatible(make_model):
    target, draft = make_model("target", context=128), make_model("draft", context=64)
    assert check_pair(target, draft) == PairInfo(
        vocab_size=6, target_context=128, draft_context=64, eos_token_ids=frozenset({0})
    )


def test_other_labels_on_the_same_vocabulary_are_compatible(make_model, tmp_path):
    """What the tokenizers and models are called says nothing about their tokens."""
    target, draft = make_model("target"), make_model("draft", config={"model_type": "mistral"})
    settings = {
        "name_or_path": "other/name",
        "padding_side": "left",
        "pad_token": "<eos>",
        "chat_template": "x",
    }
    rewritten(tmp_path / "draft" / "tokenizer_config.json", **settings)
    rewritten(tmp_path / "draft" / "config.json", architectures=["MistralForCausalLM"], pad_token_id=0)
    assert check_pair(target, draft).vocab_size == len(WORDS)


@pytest.mark.parametrize(("target_rows", "draft_rows"), [(6, 8), (8, 6), (16, 8)])
def test_differently_padded_embeddings_are_compatible_and_padding_is_never_emitted(
    make_model, target_rows, draft_rows
):
    pair = check_pair(make_model("target", rows=target_rows), make_model("draft", rows=draft_rows))
    assert pair.vocab_size == len(WORDS)


def test_sizes_that_differ_are_refused_naming_both(make_model):
    target, draft = make_model("target"), make_model("draft", words=WORDS[:4], rows=6)
    with pytest.raises(IncompatiblePair, match="the target has 6 tokens, the draft 4"):
        check_pair(target, draft)


@pytest.mark.parametrize(("i", "j"), [(1, 2), (2, 5), (4, 5)])
def test_permuted_vocabulary_is_refused_naming_the_first_difference(make_model, i, j):
    target, draft = make_model("target"), make_model("draft", words=swapped(WORDS, i, j))
    with pytest.raises(IncompatiblePair) as caught:
        check_pair(target, draft)
    assert f"token id {i} is {WORDS[i]!r} to the target and {WORDS[j]!r} to the draft" in str(caught.value)
    assert "(2 ids differ)" in str(caught.value)


def test_same_size_with_a_hole_is_refused(make_model):
    draft = make_model("draft")
    path = Path(draft) / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    tokenizer["model"]["vocab"]["e"] = 7
    write_json(path, tokenizer)
    with pytest.raises(IncompatiblePair, match="token id 5 is 'e' to the target and unknown to the draft"):
        check_pair(make_model("target"), draft)


def test_added_tokens_are_compared_too(make_model):
    target = make_model("target", added=("<tool>", "<think>"))
    assert check_pair(target, make_model("same", added=("<tool>", "<think>"))).vocab_size == 8
    with pytest.raises(IncompatiblePair, match="token id 6 is '<tool>' to the target and '<think>'"):
        check_pair(target, make_model("swapped", added=("<think>", "<tool>")))
    with pytest.raises(IncompatiblePair, match="the target has 8 tokens, the draft 6"):
        check_pair(target, make_model("without"))


def test_ids_beyond_the_targets_embedding_are_not_emitted(make_model):
    target, draft = make_model("target", rows=5), make_model("draft", rows=5)
    assert check_pair(target, draft).vocab_size == 5


def test_draft_without_embeddings_for_the_targets_tokens_is_refused(make_model):
    with pytest.raises(IncompatiblePair, match="embeddings for 5 tokens, but the target may emit 6"):
        check_pair(make_model("target"), make_model("draft", rows=5))


def test_draft_without_tokenizer_is_taken_at_its_size(make_model):
    target = make_model("target", rows=8)
    assert check_pair(target, make_model("same", words=None, rows=8)).vocab_size == len(WORDS)
    with pytest.raises(IncompatiblePair, match="the target has 8 tokens, the draft 7"):
        check_pair(target, make_model("other", words=None, rows=7))


def test_target_needs_a_tokenizer(make_model):
    with pytest.raises(ModelUnavailable, match="has no tokenizer"):
        check_pair(make_model("target", words=None, rows=6), make_model("draft"))


def test_model_info_describes_a_target_alone(make_model):
    info = model_info(make_model("target", rows=8, context=32))
    assert info == ModelInfo(vocab_size=6, max_context=32, eos_token_ids=frozenset({0}))


@pytest.mark.parametrize(
    ("config", "generation", "expected"),
    [
        (None, None, {0}),
        ({"eos_token_id": 3}, None, {0, 3}),
        ({"eos_token_id": [3, 4]}, None, {0, 3, 4}),
        (None, {"eos_token_id": 5}, {0, 5}),
        ({"eos_token_id": 3}, {"eos_token_id": [4, 5]}, {0, 3, 4, 5}),
        (None, {"temperature": 0.6, "do_sample": True}, {0}),
    ],
)
def test_eos_ids_are_gathered_from_generation_config_config_and_tokenizer(
    make_model, config, generation, expected
):
    target = make_model("target", config=config, generation=generation)
    assert model_info(target).eos_token_ids == expected


def test_multimodal_configuration_is_read_through_its_text_part(make_model):
    text = {"model_type": "llama", "vocab_size": 6, "max_position_embeddings": 48, "eos_token_id": 4}
    target = make_model("target", config={"model_type": "llava", "text_config": text, "eos_token_id": None})
    assert model_info(target) == ModelInfo(vocab_size=6, max_context=48, eos_token_ids=frozenset({0, 4}))


def test_model_that_states_no_context_is_refused(make_model):
    target = make_model("target", config={"model_type": "bloom", "max_position_embeddings": None})
    with pytest.raises(ModelUnavailable, match="does not state its context length"):
        model_info(target)


def test_unreadable_configuration_is_refused_by_name(make_model):
    target = make_model("target", config={"model_type": "no-such-family"})
    with pytest.raises(ModelUnavailable, match="cannot load the configuration of model"):
        model_info(target)


def test_load_tokenizer_round_trips_text(make_model):
    tokenizer = load_tokenizer(make_model("target"))
    assert tokenizer.convert_ids_to_tokens(tokenizer("c")["input_ids"]) == ["c"]


@pytest.mark.parametrize("content", ["{", "{}", '{"version": "1.0"}'])
def test_malformed_tokenizer_is_refused_by_name(make_model, content):
    target = make_model("target")
    (Path(target) / "tokenizer.json").write_text(content)
    with pytest.raises(ModelUnavailable, match="cannot load the tokenizer of"):
        load_tokenizer(target)
