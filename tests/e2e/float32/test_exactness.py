"""Speculation never changes the text: real weights in float32, real server, three kinds of draft."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from specdec.gateway.proto import generation_pb2 as pb
from tests.e2e.harness import Server, chat, ids_of
from tests.e2e.prompts import PROMPTS
from tests.e2e.reference import prompt_tokens, reference_model

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(900)]

GAMMAS = (1, 2, 5, 8)
NUM_TOKENS = {"trained": 64, "self": 24, "random": 24}
"""What only the trained draft has is rounds of every length; the others' are all alike."""
TIE = 1e-3
"""Two logits closer than this are a tie to float32: either token is right."""

only_trained = pytest.mark.parametrize("draft_kind", ["trained"], indirect=True, scope="package")
"""For what does not depend on the kind of draft."""

coupled_texts: dict[tuple[str, int], tuple[int, ...]] = {}
"""(prompt, seed) to token ids, over all drafts: one seed gives one text whatever the draft."""


@pytest.fixture(scope="package")
def plain(server: Server, draft_kind: str) -> list[pb.GenerateResponse]:
    """Plain decoding of every prompt, by the same server."""
    answers = ask(server, [chat(text, gamma=0, max_tokens=NUM_TOKENS[draft_kind]) for text in PROMPTS])
    assert all(answer.speculative_metrics.num_draft_tokens == 0 for answer in answers)
    return answers


def ask(server: Server, requests: list[pb.GenerateRequest]) -> list[pb.GenerateResponse]:
    """Send all at once; they are decoded as one batch."""
    stub = server.stub()
    with ThreadPoolExecutor(len(requests)) as pool:
        return list(pool.map(lambda request: stub.Generate(request, timeout=600), requests))


@pytest.mark.parametrize("gamma", GAMMAS)
def test_greedy_text_equals_plain_decoding(
    server: Server, plain: list[pb.GenerateResponse], draft_kind: str, gamma: int
) -> None:
    answers = ask(server, [chat(text, gamma=gamma, max_tokens=NUM_TOKENS[draft_kind]) for text in PROMPTS])
    for prompt, reference, answer in zip(PROMPTS, plain, answers, strict=True):
        assert_same_tokens(prompt, ids_of(reference), ids_of(answer))
    metrics = [answer.speculative_metrics for answer in answers]
    drafted = sum(m.num_draft_tokens for m in metrics)
    accepted = sum(m.num_accepted_draft_tokens for m in metrics)
    print(f"draft {draft_kind}, gamma {gamma}: accepted {accepted} of {drafted} draft tokens")
    assert drafted > len(PROMPTS)
    if draft_kind == "self":
        # Every token in every round: the histogram has no round that accepted fewer than it drafted,
        # but for blocks cut short by the token cap.
        assert accepted == drafted
    if draft_kind == "trained":
        assert accepted / drafted > 0.05  # falls with gamma: positions behind a rejection count as drafted
    if draft_kind == "random":
        assert accepted / drafted < 0.05


@only_trained
def test_plain_decoding_equals_the_library(plain: list[pb.GenerateResponse]) -> None:
    for prompt, answer in list(zip(PROMPTS, plain, strict=True))[:4]:
        assert_same_tokens(prompt, library_tokens(prompt, 24), ids_of(answer)[:24])


@pytest.mark.parametrize("gamma", [0, *GAMMAS])
def test_one_seed_gives_one_text_for_any_gamma_and_draft(server: Server, draft_kind: str, gamma: int) -> None:
    cases = [(prompt, seed) for prompt in PROMPTS[:4] for seed in (1, 2)]
    requests = [chat(p, seed=s, temperature=1.0, gamma=gamma, max_tokens=32) for p, s in cases]
    answers = ask(server, requests)
    for case, answer in zip(cases, answers, strict=True):
        assert coupled_texts.setdefault(case, tuple(ids_of(answer))) == tuple(ids_of(answer)), case
    assert len({coupled_texts[PROMPTS[0], seed] for seed in (1, 2)}) == 2
    if gamma > 0:
        assert sum(answer.speculative_metrics.num_draft_tokens for answer in answers) > 0
    if gamma > 0 and draft_kind == "self":
        assert all(
            a.speculative_metrics.num_accepted_draft_tokens == a.speculative_metrics.num_draft_tokens
            for a in answers
        )


@only_trained
def test_company_does_not_change_a_text(server: Server) -> None:
    """Greedy, coupled and rejection requests of different lengths, together and alone."""
    requests = [
        chat(PROMPTS[0], max_tokens=30, gamma=3),
        chat(PROMPTS[5], max_tokens=40, gamma=8),
        chat(PROMPTS[7], max_tokens=20, temperature=0.8, seed=11, gamma=2),
        chat(PROMPTS[9], max_tokens=35, temperature=1.2, seed=12),
        chat(PROMPTS[11], max_tokens=25, gamma=0),
        chat(PROMPTS[13], max_tokens=30, temperature=1.0, seed=13, mode="rejection", gamma=4),
    ]
    together = ask(server, requests)
    alone = [ask(server, [request])[0] for request in requests]
    # The last is rejection sampling: keyed by its seed too, and so just as repeatable with one gamma.
    for request, a, b in zip(requests, together, alone, strict=True):
        assert ids_of(a) == ids_of(b), request


@only_trained
def test_prompts_of_very_different_length_do_not_disturb_each_other(server: Server) -> None:
    long_text = "Here is a list of numbers: " + ", ".join(str(n) for n in range(400)) + ". What comes next?"
    requests = [chat(text, max_tokens=24, gamma=4) for text in ("Hi", PROMPTS[7], long_text)]
    together = ask(server, requests)
    alone = [ask(server, [request])[0] for request in requests]
    for a, b in zip(together, alone, strict=True):
        assert ids_of(a) == ids_of(b)
    assert together[2].usage.prompt_tokens > 1000


def library_tokens(prompt: str, max_tokens: int) -> list[int]:
    """Greedy tokens by transformers alone."""
    prompt_ids = torch.tensor([prompt_tokens(prompt)])
    output = reference_model().generate(prompt_ids, max_new_tokens=max_tokens, do_sample=False)
    return [int(token) for token in output[0, prompt_ids.shape[1] :]]


def assert_same_tokens(prompt: str, expected: list[int], got: list[int]) -> None:
    """Equal, or different only behind a position where float32 cannot tell the two best tokens apart."""
    if expected == got:
        return
    at = next((i for i, (a, b) in enumerate(zip(expected, got, strict=False)) if a != b), None)
    assert at is not None, f"{prompt!r}: one text is a prefix of the other: {expected} {got}"
    context = torch.tensor([[*prompt_tokens(prompt), *expected[:at]]])
    with torch.inference_mode():
        logits = reference_model()(context).logits[0, -1]
    gap = float(logits.max() - logits[[expected[at], got[at]]].min())
    print(f"{prompt!r}: a tie at token {at}, gap {gap:.1e}")
    assert gap < TIE, f"{prompt!r}: differs at token {at}, gap {gap:.3f}: {expected} {got}"
