"""Prompts as they are given back: their text, and where in it each token stands."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tokenizers import Tokenizer

from specdec.errors import InvariantViolation
from specdec.gateway.events import PromptEcho, ScoredToken
from specdec.gateway.requests import Prompt, TextPrompt
from specdec.gateway.text import Detokenizer
from specdec.gateway.vocabulary import Vocabulary
from specdec.types import TokenLogprob


@dataclass(frozen=True, slots=True, kw_only=True)
class EchoedPrompt:
    text: str
    """What the client wrote; of token ids and conversations what they decode to, special tokens included."""
    token_ids: tuple[int, ...]
    offsets: tuple[int, ...]
    """Characters of the text before each token."""

    def event(
        self, index: int, logprobs: Sequence[TokenLogprob] | None, vocabulary: Vocabulary
    ) -> PromptEcho:
        """Return the prompt of one choice.

        Args:
            index: the choice.
            logprobs: of the tokens from the second on; None: not asked for.
            vocabulary: the target's.

        Raises:
            InvariantViolation: they are not as many as the prompt has tokens.
        """
        if logprobs is None:
            return PromptEcho(index=index, text=self.text)
        if len(logprobs) != len(self.token_ids) - 1:
            raise InvariantViolation(f"{len(logprobs)} logprobs of {len(self.token_ids)} prompt tokens")
        first, *others = self.offsets
        scored = map(vocabulary.scored, logprobs, others)
        tokens: tuple[ScoredToken, ...] = (vocabulary.unscored(self.token_ids[0], first), *scored)
        return PromptEcho(index=index, text=self.text, tokens=tokens)


def echoed_prompt(prompt: Prompt, token_ids: tuple[int, ...], tokenizer: Tokenizer) -> EchoedPrompt:
    """Lay out a prompt that was encoded to ``token_ids``."""
    if isinstance(prompt, TextPrompt):
        text = prompt.text
        num_added = _num_added(text, token_ids, tokenizer)
    else:
        text = tokenizer.decode(list(token_ids), skip_special_tokens=False)
        num_added = 0
    stream = Detokenizer(tokenizer, keeps_special_tokens=True)
    offsets = [0] * num_added
    length = 0
    for token_id in token_ids[num_added:]:
        offsets.append(length)
        length += len(stream.push(token_id))
    return EchoedPrompt(text=text, token_ids=token_ids, offsets=tuple(offsets))


def _num_added(text: str, token_ids: tuple[int, ...], tokenizer: Tokenizer) -> int:
    """How many special tokens, like BOS, the tokenizer has put before the text: they have no width in it."""
    added = tokenizer.get_added_tokens_decoder()
    for idx, token_id in enumerate(token_ids):
        if token_id not in added or text.startswith(added[token_id].content):
            return idx
    return len(token_ids)
