"""The same token ids for every peer: tokenized once, here."""

from __future__ import annotations

import itertools
from typing import Any

from specdec.lab.bench.prompts import made_up
from specdec.models import load_tokenizer
from tests.e2e.prompts import PROMPTS


class PromptIds:
    """Prompts of a round; other rounds have others, so that nothing computed before is of use."""

    def __init__(self, target: str) -> None:
        self._tokenizer: Any = load_tokenizer(target)

    def short(self, round_index: int, count: int) -> list[list[int]]:
        """Chat turns of some twenty to sixty tokens."""
        texts = itertools.islice(itertools.cycle(PROMPTS), round_index * 2, None)
        numbered = (f"{round_index}.{number}. {text}" for number, text in enumerate(texts))
        return [self._chat(text) for text in itertools.islice(numbered, count)]

    def long(self, seed: int, num_tokens: int) -> list[int]:
        """Exactly ``num_tokens`` ids, different from the first ones on for each seed."""
        (body,) = itertools.islice(made_up(num_tokens), seed, seed + 1)
        ids = self._tokenizer(_content(body), add_special_tokens=False).input_ids
        assert len(ids) >= num_tokens, "a word is at least one token"
        return list(ids[:num_tokens])

    def _chat(self, text: str) -> list[int]:
        messages = [{"role": "user", "content": text}]
        ids = self._tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        return list(ids)


def _content(body: dict[str, Any]) -> str:
    return str(body["messages"][0]["content"])
