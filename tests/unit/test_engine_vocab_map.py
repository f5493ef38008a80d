"""A draft that speaks a part of the vocabulary: its logits, its drafts, and files that cannot be right."""

import numpy as np
import pytest
import torch

from specdec.config import DraftConfig, parse_config
from specdec.engine.decoder.forward import Decoder
from specdec.engine.drafting import DraftEngine
from specdec.engine.loading import load_forward, load_vocab_map
from specdec.errors import ConfigError
from tests.tiny_models import (
    COUPLED,
    GREEDY,
    REJECTION,
    VOCAB_SIZE,
    fed,
    feed,
    propose,
    reference_model,
    runner_of,
    sequence_id,
    tiny_config,
    tokens,
)

IDS = torch.tensor([3, 5, 8, 13, 21, 34, 55, 63])


@pytest.fixture(scope="module", params=[True, False], ids=["tied head", "own head"])
def forwards(request, tmp_path_factory):
    """The same model with its whole vocabulary and with a part of it."""
    folder = tmp_path_factory.mktemp("draft")
    reference_model(tiny_config("llama", tie_word_embeddings=request.param)).save_pretrained(folder)
    whole, part = (
        load_forward(str(folder), "float32", torch.device("cpu"), max_context=512, vocab_map=ids)
        for ids in (None, IDS)
    )
    assert isinstance(part, Decoder)
    return whole, part


def test_logits_are_the_models_own_where_it_speaks_and_minus_infinity_elsewhere(forwards):
    whole, part = (runner_of(forward) for forward in forwards)
    for runner in (whole, part):
        runner.open(sequence_id("a"))
    expected = torch.full((9, VOCAB_SIZE), -torch.inf)
    expected[:, IDS] = fed(whole, "a", tokens(9))[:, IDS]
    torch.testing.assert_close(fed(part, "a", tokens(9)), expected, rtol=0.0, atol=1e-5)


@pytest.mark.parametrize("sampling", [GREEDY, COUPLED, REJECTION], ids=["greedy", "coupled", "rejection"])
def test_drafts_hold_no_other_token(forwards, sampling):
    engine = DraftEngine(runner_of(forwards[1]), support=16)
    reply = engine.propose(
        propose(*((feed(name, tokens(5, seed=i), sampling=sampling), 8) for i, name in enumerate("abc")))
    )
    drafted = [token for draft in reply.drafts for token in draft.token_ids]
    assert len(drafted) == 24
    assert set(drafted) <= set(IDS.tolist())
    for draft in reply.drafts if sampling is REJECTION else ():
        assert set(draft.support_ids[draft.support_probs > 0].tolist()) <= set(IDS.tolist())
        np.testing.assert_allclose(draft.support_probs.sum(axis=1), 1.0, atol=1e-6)


def test_family_without_a_fast_path_computes_all(tmp_path):
    reference_model(tiny_config("gpt2", n_inner=48)).save_pretrained(tmp_path)
    forward = load_forward(str(tmp_path), "float32", torch.device("cpu"), max_context=64, vocab_map=IDS)
    runner = runner_of(forward, max_context=64)
    runner.open(sequence_id("a"))
    assert torch.isfinite(fed(runner, "a", tokens(4))).all()


# The file -------------------------------------------------------------------------------------------------


def config(vocab_map: str | None = "auto") -> DraftConfig:
    return DraftConfig(model="draft", draft_vocab_map=vocab_map)


def saved(folder, values, name="draft_vocab.npy"):
    np.save(folder / name, np.asarray(values))
    return str(folder / name)


def test_models_own_file_is_found(tmp_path):
    saved(tmp_path, np.array([7, 2, 30], dtype=np.int32))
    assert load_vocab_map(config(), str(tmp_path), VOCAB_SIZE).tolist() == [2, 7, 30]


def test_model_without_a_file_speaks_all(tmp_path):
    assert load_vocab_map(config(), str(tmp_path), VOCAB_SIZE) is None


def test_null_speaks_all_whatever_lies_there(tmp_path):
    saved(tmp_path, [1, 2])
    assert load_vocab_map(config(None), str(tmp_path), VOCAB_SIZE) is None


def test_another_file_may_be_named(tmp_path):
    saved(tmp_path, [1, 2])
    other = saved(tmp_path, [4, 5], name="other.npy")
    assert load_vocab_map(config(other), str(tmp_path), VOCAB_SIZE).tolist() == [4, 5]


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ([1, 1, 2], "not a list of distinct ids"),
        ([[1, 2]], "not a list of distinct ids"),
        ([1.0, 2.0], "not a list of distinct ids"),
        ([], "not a list of distinct ids"),
        ([-1, 2], f"outside the vocabulary of {VOCAB_SIZE}"),
        ([1, VOCAB_SIZE], f"outside the vocabulary of {VOCAB_SIZE}"),
    ],
)
def test_file_that_cannot_be_right_is_refused_by_name(tmp_path, values, reason):
    path = saved(tmp_path, values)
    with pytest.raises(ConfigError, match=reason) as refusal:
        load_vocab_map(config(path), str(tmp_path), VOCAB_SIZE)
    assert path in refusal.value.message


def test_file_that_is_missing_or_no_array_is_refused(tmp_path):
    (tmp_path / "text.npy").write_text("1 2 3")
    for name in ("text.npy", "missing.npy"):
        with pytest.raises(ConfigError, match="cannot be read"):
            load_vocab_map(config(str(tmp_path / name)), str(tmp_path), VOCAB_SIZE)


def test_a_target_has_no_such_setting():
    with pytest.raises(ConfigError, match=r"target\.draft_vocab_map"):
        parse_config({"target": {"model": "m", "draft_vocab_map": "ids.npy"}})
