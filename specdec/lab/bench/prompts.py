"""Prompts for a load: made up to a length, or read from a file."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Iterator
from pathlib import Path

from specdec.lab.errors import BenchError

Body = dict[str, object]
"""The part of a request that holds its prompt: ``{"messages": ...}`` or ``{"prompt": ...}``."""

# One token each, with the space before it, in the vocabularies of current models.
_WORDS = """
the of and to in a is that for it as was with be by on not he his but at are this have from or had
an they which one you were her all she there would their we him been has when who will more no if
out so said what up its about into than them can only other new some could time these two may then
do first any my now such like our over man me even most made after also did many before must through
back years where much your way well down should because each just those people how too little state
good very make world still own see men work long get here between both life being under never day
same another know while last might us great old year off come since against go came right used take
three
""".split()  # noqa: SIM905


def made_up(num_tokens: int) -> Iterator[Body]:
    """Chat turns of about ``num_tokens`` tokens, no two alike from their first words on.

    So a prefix cache finds no more than the chat template in them.
    """
    for index in itertools.count():
        words = random.Random(index).choices(_WORDS, k=max(num_tokens, 1))
        yield chat(" ".join(words))


def chat(text: str) -> Body:
    return {"messages": [{"role": "user", "content": text}]}


def from_file(path: Path) -> Iterator[Body]:
    """The lines of a file, again and again: each a text, or a JSON object with ``prompt`` or ``messages``.

    Raises:
        BenchError: it cannot be read, is empty, or a line that starts with ``{`` is no such object.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise BenchError(f"--prompts-file: cannot read {path}: {error}") from error
    bodies = [_parse_line(path, number, line) for number, line in enumerate(lines, 1) if line.strip()]
    if not bodies:
        raise BenchError(f"--prompts-file: {path} holds no prompt")
    return itertools.cycle(bodies)


def _parse_line(path: Path, number: int, line: str) -> Body:
    if not line.lstrip().startswith("{"):
        return chat(line)
    try:
        content = json.loads(line)
    except ValueError as error:
        raise BenchError(f"--prompts-file: {path}, line {number}: not JSON: {error}") from error
    keys = {"prompt", "messages"} & set(content)
    if len(keys) != 1:
        raise BenchError(f"--prompts-file: {path}, line {number}: one of 'prompt' and 'messages' is expected")
    (key,) = keys
    return {key: content[key]}
