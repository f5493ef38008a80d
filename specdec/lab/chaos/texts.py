"""Undisturbed texts, and whether an answer is one."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from specdec.lab.chaos.client import Answer, Client
from specdec.lab.chaos.errors import ChaosError
from specdec.lab.chaos.requests import Protocol, Question, Request
from specdec.lab.errors import RequestFailed

NUM_AT_ONCE = 8
"""Requests, where nobody is to be kept waiting."""


@dataclass(frozen=True, slots=True)
class Reference:
    """What a question is answered with."""

    text: str
    token_ids: tuple[int, ...]

    def difference(self, answer: Answer) -> str | None:
        """Where an answer departs from it, in words; None where it does not.

        Of an answer whose client left, what had arrived must be its beginning.
        """
        if answer.token_ids is not None:
            theirs = tuple(answer.token_ids)
            if not _agrees(self.token_ids, theirs, is_part=answer.has_left):
                return _describe("token", self.token_ids, theirs)
        if not _agrees(self.text, answer.text, is_part=answer.has_left):
            return _describe("word", self.text.split(), answer.text.split())
        return None


References = Mapping[int, Reference]
"""By number of the question."""


def _agrees(whole: str | tuple[int, ...], seen: str | tuple[int, ...], *, is_part: bool) -> bool:
    return seen == (whole[: len(seen)] if is_part else whole)


def _describe(unit: str, expected: Sequence[object], seen: Sequence[object]) -> str:
    pairs = enumerate(zip(expected, seen, strict=False))
    at = next((idx for idx, (mine, theirs) in pairs if mine != theirs), min(len(expected), len(seen)))
    return (
        f"{unit} {at} of {len(expected)}: {list(seen[at : at + 6])} instead of {list(expected[at : at + 6])}"
    )


async def undisturbed(client: Client, questions: Sequence[Question]) -> dict[int, Reference]:
    """Ask everything twice, in a stream over gRPC and whole over HTTP.

    Raises:
        ChaosError: the two differ, or one failed.
    """
    limit = asyncio.Semaphore(NUM_AT_ONCE)

    async def reference(question: Question) -> Reference:
        async with limit:
            first = await _ask(client, question, "grpc")
            found = Reference(first.text, tuple(first.token_ids or ()))
            difference = found.difference(await _ask(client, question, "http"))
        if difference is not None:
            raise ChaosError(f"question {question.number} has no reproducible text: {difference}")
        return found

    found = await asyncio.gather(*(reference(question) for question in questions))
    return dict(zip((question.number for question in questions), found, strict=True))


async def _ask(client: Client, question: Question, protocol: Protocol) -> Answer:
    try:
        return await client.ask(Request(question=question, protocol=protocol, is_streamed=protocol == "grpc"))
    except RequestFailed as error:
        raise ChaosError(f"question {question.number} failed without any fault: {error.message}") from error
