"""Grammars: what a worker allows, and texts of the whole system that match theirs whatever the draft."""

from __future__ import annotations

import asyncio
import itertools
import json
import re

import numpy as np
import pytest
from llguidance import LLMatcher
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from specdec.engine.grammar import Grammars
from specdec.engine.simulated import ToyLaw
from specdec.errors import ConfigError, GenerationFailed
from specdec.models.simulated import simulated_tokenizer
from specdec.types import SamplingParams, VerificationMode
from tests.laws import app_config, generate_all, generation, toy_law, toy_system

CHARACTERS = 'ab01{}":,'
EOS = len(CHARACTERS)
VOCAB_SIZE = EOS + 1
TARGET = toy_law("normal", VOCAB_SIZE, 41)
DRAFTS = {
    "SELF": TARGET,
    "MIX": ToyLaw(TARGET._logits + 0.5 * toy_law("normal", VOCAB_SIZE, 42)._logits),
    "ADV": toy_law("peaky", VOCAB_SIZE, 43),
}
REGEX = LLMatcher.grammar_from_regex("[01]{3,9}(ab)+")
SCHEMA = {
    "type": "object",
    "properties": {"a": {"enum": [0, 1, 10, 101]}, "b": {"enum": [1, {}]}},
    "required": ["a"],
    "additionalProperties": False,
}
LAZY = LLMatcher.grammar_from_lark(
    r"""
    start: TEXT | opening body (opening body){0,40} TEXT
    opening[lazy]: OPENING
    OPENING: /[^a]*a/
    TEXT: /[^a]*/
    body: /[01]{2,4}b/
    """
)
"""Text in which an ``a`` opens something that is held to a form."""
JSON = LLMatcher.grammar_from_json_schema(SCHEMA, overrides={"whitespace_flexible": False})


def tokenizer() -> PreTrainedTokenizerFast:
    """A token for each character."""
    vocab = {character: token for token, character in enumerate(CHARACTERS)} | {"<eos>": EOS}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<eos>")


def grammars() -> Grammars:
    return Grammars(tokenizer, VOCAB_SIZE, [EOS])


def ids(text: str) -> list[int]:
    return [EOS if character == "$" else CHARACTERS.index(character) for character in text]


def shown_text(token_ids: list[int]) -> str:
    return "".join((CHARACTERS + "$")[token] for token in token_ids)


def shown(mask: np.ndarray | None) -> str | None:
    """The allowed characters, ``$`` for the end."""
    if mask is None:
        return None
    return "".join((CHARACTERS + "$")[t] for t in range(VOCAB_SIZE) if mask[t // 32] >> (t % 32) & 1)


def test_a_state_follows_its_output_forth_and_back():
    state = grammars().start(REGEX)
    for text, allowed in [
        ("", "01"),
        ("010", "a01"),
        ("0101", "a01"),
        ("010ab", "a$"),
        ("010ab$", "$"),
        ("010a", "b"),
        ("0bb", None),
        ("0b", None),
        ("0", "01"),
        ("110ab", "a$"),
        ("110aba", "b"),
        ("", "01"),
    ]:
        assert shown(state.allowed(ids(text))) == allowed, text


def test_rows_of_one_sequence_have_masks_of_their_own():
    state = grammars().start(REGEX)
    first, second = state.allowed(ids("010")), state.allowed(ids("010a"))
    assert (shown(first), shown(second)) == ("a01", "b")


@pytest.mark.parametrize("grammar", [REGEX, JSON, LAZY], ids=["regex", "json", "lazy"])
@pytest.mark.parametrize("mode", list(VerificationMode))
@pytest.mark.parametrize(("gamma", "draft"), [(0, "SELF"), *itertools.product((1, 4), DRAFTS)])
async def test_every_text_matches_its_grammar(gamma, draft, mode, grammar):
    params = [
        SamplingParams(mode=mode, seed=seed, grammar=grammar, temperature=1.5, logit_bias=((EOS, 1.0),))
        for seed in range(8)
    ]
    requests = [
        generation(
            i, params[i], prompt=((0, 1), (3,), (2, 2, 5))[i % 3], max_tokens=400, stop_token_ids=[EOS]
        )
        for i in range(8)
    ]
    results = await generate_all(app_config(gamma), TARGET, DRAFTS[draft], requests, grammars=grammars())
    for result in results:
        *output, last = result.token_ids
        text = "".join(CHARACTERS[token] for token in output)
        assert (last, result.finish_reason) == (EOS, "stop")
        if grammar is JSON:
            value = json.loads(text)
            assert value["a"] in (0, 1, 10, 101)
            assert value.get("b", 1) in (1, {})
        elif grammar is LAZY:
            assert re.fullmatch("[^a]*(a[01]{2,4}b[^a]*)*", text)
        else:
            assert re.fullmatch("[01]{3,9}(ab)+", text)
        if draft == "SELF":
            assert result.num_accepted == result.num_drafted
    assert any(result.num_drafted for result in results) == (gamma > 0)
    if grammar is LAZY:
        assert any(ids("a")[0] in result.token_ids for result in results)
    if mode is not VerificationMode.REJECTION:
        plain = await generate_all(app_config(0), TARGET, None, requests, grammars=grammars())
        assert [result.token_ids for result in results] == [result.token_ids for result in plain]


@pytest.mark.parametrize("pipeline", ["lookahead", "groups"])
async def test_drafting_ahead_follows_the_grammar_too(pipeline):
    params = SamplingParams(mode=VerificationMode.GREEDY, grammar=REGEX)
    requests = [
        generation(i, params, prompt=(i % 4, i % 3), max_tokens=60, stop_token_ids=[EOS]) for i in range(6)
    ]
    config = app_config(3, pipeline=pipeline)
    results = await generate_all(config, TARGET, DRAFTS["MIX"], requests, grammars=grammars())
    plain = await generate_all(app_config(0), TARGET, None, requests, grammars=grammars())
    assert [result.token_ids for result in results] == [result.token_ids for result in plain]
    assert sum(result.num_accepted for result in results) > 0


async def test_a_grammar_that_the_vocabulary_cannot_spell_fails_its_own_request_alone():
    """Never text that the client has ruled out; whoever is in the same batch goes on."""
    cannot = SamplingParams(mode=VerificationMode.GREEDY, grammar=LLMatcher.grammar_from_regex("0?1?z"))
    can = SamplingParams(mode=VerificationMode.GREEDY, grammar=REGEX)
    requests = [generation(i, params, max_tokens=60) for i, params in enumerate([cannot, can])]
    async with toy_system(app_config(3), TARGET, DRAFTS["SELF"], grammars=grammars()) as system:

        async def text_of(request):
            return [token async for chunk in system.client.generate(request) for token in chunk.token_ids]

        failed, text = await asyncio.gather(*map(text_of, requests), return_exceptions=True)
    assert isinstance(failed, GenerationFailed)
    assert "could not process this sequence" in str(failed)
    assert shown_text(text).startswith(("0", "1"))


@pytest.mark.parametrize(
    ("made", "says"),
    [
        (Grammars(lambda: simulated_tokenizer(20), 20, [3]), "tokenizer cannot be used with grammars"),
        (Grammars(tokenizer, VOCAB_SIZE, []), "no end-of-sequence token"),
    ],
)
def test_a_model_that_cannot_be_constrained_is_refused(made, says):
    with pytest.raises(ConfigError, match=says):
        made.start(REGEX)
