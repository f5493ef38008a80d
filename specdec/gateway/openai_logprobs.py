"""Log-probabilities in the two layouts of OpenAI's API."""

from __future__ import annotations

from collections.abc import Sequence

from specdec.gateway.events import LikelyToken, ScoredToken

Logprobs = dict[str, object]
"""A JSON object."""


def chat_logprobs(tokens: Sequence[ScoredToken]) -> Logprobs | None:
    """``choices[].logprobs`` of a chat completion; None for no tokens."""
    if not tokens:
        return None
    return {"content": token_logprobs(tokens), "refusal": None}


def token_logprobs(tokens: Sequence[ScoredToken]) -> list[Logprobs]:
    """An entry for each token, as chat completions and responses have it."""
    return [
        {**_chat_token(token), "top_logprobs": [_chat_token(likely) for likely in token.top]}
        for token in tokens
    ]


def completion_logprobs(tokens: Sequence[ScoredToken]) -> Logprobs | None:
    """``choices[].logprobs`` of a text completion: lists of equal lengths; None for no tokens."""
    if not tokens:
        return None
    return {
        "tokens": [token.text for token in tokens],
        "token_logprobs": [token.logprob for token in tokens],
        "top_logprobs": [_by_text(token) for token in tokens],
        "text_offset": [token.text_offset for token in tokens],
    }


def _chat_token(token: ScoredToken | LikelyToken) -> Logprobs:
    return {"token": token.text, "logprob": token.logprob, "bytes": list(token.utf8)}


def _by_text(token: ScoredToken) -> dict[str, float] | None:
    """The likeliest tokens and the token itself; of several with one text, the likeliest."""
    if token.logprob is None:
        return None
    by_text = {token.text: token.logprob}
    for likely in token.top:
        by_text[likely.text] = max(likely.logprob, by_text.get(likely.text, likely.logprob))
    return by_text
