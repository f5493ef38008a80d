"""lm-eval's API models, as they are: the same scores with a draft, without one, and by transformers alone.

The tasks in `tasks` are small, and their data lie beside them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("lm_eval", reason="lm-eval is not installed: make clients-test")

import datasets
import lm_eval
from lm_eval.tasks import TaskManager

from tests.clients.asks import MODEL
from tests.clients.conftest import pair_of
from tests.e2e.conftest import run_server
from tests.e2e.harness import Server

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(300)]

ROOT = Path(__file__).parents[2]
TASKS = Path(__file__).parent / "tasks"
GENERATION = "specdec_name_the_capital"
ALL_TASKS = ["specdec_capitals", "specdec_last_word", "specdec_passages", GENERATION]
TOLERANCE = 1e-4
"""Relative, of perplexities: sums of float32 logarithms."""


@pytest.fixture(scope="module")
def plain(target: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """The target without a draft."""
    yield from run_server(tmp_path_factory.mktemp("server-plain"), pair_of(target))


@pytest.fixture(scope="module", autouse=True)
def offline(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(ROOT)  # the tasks name their data from here
        patch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
        patch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path_factory.mktemp("datasets"))
        yield


class Evaluation:
    """Scores by task and metric, and the text generated for each document."""

    def __init__(self, model: str, model_args: Mapping[str, Any], tasks: list[str], **options: Any) -> None:
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
        self.scores = {
            f"{task} {metric}": value
            for task, values in found["results"].items()
            for metric, value in values.items()
            if isinstance(value, float) and "stderr" not in metric
        }
        samples = sorted(found["samples"][GENERATION], key=lambda sample: sample["doc_id"])
        self.texts = [sample["resps"] for sample in samples]


def completions(server: Server, tasks: list[str], **args: Any) -> Evaluation:
    args = {"model": MODEL, "base_url": f"{server.url}/v1/completions", **args}
    return Evaluation("local-completions", args, tasks)


def chat_completions(server: Server, **args: Any) -> Evaluation:
    args = {"model": MODEL, "base_url": f"{server.url}/v1/chat/completions", **args}
    return Evaluation(
        "local-chat-completions", args, [GENERATION], apply_chat_template=True, fewshot_as_multiturn=True
    )


def assert_same(one: Evaluation, other: Evaluation) -> None:
    assert one.scores == pytest.approx(other.scores, rel=TOLERANCE)
    assert one.texts == other.texts


@pytest.fixture(scope="module")
def with_draft(server: Server) -> Evaluation:
    """Prompts tokenized by the server, several in a request."""
    return completions(server, ALL_TASKS, tokenizer_backend="remote", batch_size=8)


def test_completions_score_the_same_with_and_without_a_draft(
    with_draft: Evaluation, server: Server, plain: Server
) -> None:
    without = completions(plain, ALL_TASKS, tokenizer_backend="remote", batch_size=8)
    print("with a draft:", with_draft.scores)
    print("without:     ", without.scores)
    assert_same(with_draft, without)
    assert server.status()["num_accepted_draft_tokens"] > 0
    assert plain.status()["num_draft_tokens"] == 0


def test_completions_score_as_transformers_does(with_draft: Evaluation, target: str) -> None:
    model_args = {"pretrained": target, "dtype": "float32"}
    assert_same(with_draft, Evaluation("hf", model_args, ALL_TASKS, batch_size=1, device="cpu"))


@pytest.mark.parametrize(
    "args",
    [
        {"tokenizer_backend": "huggingface", "num_concurrent": 8},
        {"tokenizer_backend": "huggingface", "tokenized_requests": False},
    ],
    ids=["local tokenizer, concurrent", "prompts as text"],
)
def test_other_ways_to_ask_score_the_same(
    with_draft: Evaluation, server: Server, target: str, args: dict[str, Any]
) -> None:
    assert_same(with_draft, completions(server, ALL_TASKS, tokenizer=target, **args))


def test_chat_completions_score_the_same_with_and_without_a_draft(server: Server, plain: Server) -> None:
    with_draft, without = (chat_completions(each) for each in (server, plain))
    print("chat, with a draft:", with_draft.scores)
    print("chat, without:     ", without.scores)
    assert_same(with_draft, without)
