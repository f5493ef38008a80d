"""lm-eval's API models, as they are: the same scores with drafts, without them, and by transformers alone.

The tasks in `tasks` are small, and their data lie beside them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("lm_eval", reason="lm-eval is not installed: pip install -e '.[clients]'")

import datasets
import lm_eval
from lm_eval.tasks import TaskManager

from tests.clients.asks import MODEL, PLAIN
from tests.e2e.harness import Server

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(300)]

ROOT = Path(__file__).parents[2]
TASKS = Path(__file__).parent / "tasks"
LIKELIHOODS = ["specdec_capitals", "specdec_last_word", "specdec_passages"]
GENERATION = "specdec_name_the_capital"
ALL_TASKS = [*LIKELIHOODS, GENERATION]
REMOTE = {"tokenizer_backend": "remote", "batch_size": 8}
TOLERANCE = 1e-4
"""Relative, of perplexities: sums of float32 logarithms."""


@pytest.fixture(scope="module", autouse=True)
def offline(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(ROOT)  # the tasks name their data from here
        patch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
        patch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path_factory.mktemp("datasets"))
        yield


@dataclass(frozen=True)
class Evaluation:
    """What lm-eval makes of a model."""

    scores: dict[str, float]
    """By task and metric."""
    texts: list[Any]
    """Generated for each document."""


def evaluate(model: str, model_args: Mapping[str, Any], tasks: list[str], **options: Any) -> Evaluation:
    found = lm_eval.simple_evaluate(
        model=model,
        model_args=dict(model_args),
        tasks=tasks,
        task_manager=TaskManager(include_path=str(TASKS), include_defaults=False),
        bootstrap_iters=0,
        verbosity="ERROR",
        **options,
    )
    assert found is not None
    samples = sorted(found["samples"].get(GENERATION, ()), key=lambda sample: sample["doc_id"])
    return Evaluation(
        scores={
            f"{task} {metric}": float(value)
            for task, values in found["results"].items()
            for metric, value in values.items()
            if isinstance(value, float) and "stderr" not in metric
        },
        texts=[sample["resps"] for sample in samples],
    )


def completions(server: Server, tasks: list[str], args: dict[str, Any], **options: Any) -> Evaluation:
    address = {"model": MODEL, "base_url": f"{server.url}/v1/completions"}
    return evaluate("local-completions", {**address, **args}, tasks, **options)


def chat_completions(server: Server, **options: Any) -> Evaluation:
    address = {"model": MODEL, "base_url": f"{server.url}/v1/chat/completions"}
    chat = {"apply_chat_template": True, "fewshot_as_multiturn": True, "limit": 6}
    return evaluate("local-chat-completions", address, [GENERATION], **chat, **options)


def num_draft_tokens(server: Server) -> int:
    return int(server.settled()["num_draft_tokens"])


def assert_same(one: Evaluation, other: Evaluation) -> None:
    assert one.scores == pytest.approx(other.scores, rel=TOLERANCE)
    assert one.texts == other.texts


@pytest.fixture(scope="module")
def drafted(server: Server) -> Evaluation:
    """Of all tasks, drafts in use; the server tokenizes, and a request has several prompts."""
    before = num_draft_tokens(server)
    found = completions(server, ALL_TASKS, REMOTE)
    assert num_draft_tokens(server) > before
    print("with drafts:", found.scores)
    return found


def test_completions_score_the_same_without_drafts(drafted: Evaluation, server: Server) -> None:
    """Only generated texts are drafted: what is scored is fed to the target, and one token follows."""
    before = num_draft_tokens(server)
    likelihoods = completions(server, LIKELIHOODS, REMOTE)
    generated = completions(server, [GENERATION], REMOTE, gen_kwargs=PLAIN)
    assert num_draft_tokens(server) == before
    plain = Evaluation({**likelihoods.scores, **generated.scores}, generated.texts)
    print("without:    ", plain.scores)
    assert_same(plain, drafted)


def test_completions_score_as_transformers_does(drafted: Evaluation, target: str) -> None:
    model_args = {"pretrained": target, "dtype": "float32"}
    alone = evaluate("hf", model_args, ALL_TASKS, batch_size=8, device="cpu")
    print("transformers:", alone.scores)
    assert_same(alone, drafted)


@pytest.mark.parametrize("args", [{}, {"tokenized_requests": False}], ids=["ids", "text"])
def test_a_local_tokenizer_and_concurrent_requests_score_the_same(
    drafted: Evaluation, server: Server, target: str, args: dict[str, Any]
) -> None:
    local = {"tokenizer_backend": "huggingface", "tokenizer": target, "num_concurrent": 8, **args}
    assert_same(completions(server, ALL_TASKS, local), drafted)


def test_chat_completions_score_the_same_with_and_without_drafts(server: Server) -> None:
    drafted = chat_completions(server)
    before = num_draft_tokens(server)
    plain = chat_completions(server, gen_kwargs=PLAIN)
    assert num_draft_tokens(server) == before
    print("chat with drafts:", drafted.scores)
    print("chat without:    ", plain.scores)
    assert_same(plain, drafted)
