"""`docs/api.md` names the test of every field and of every case; the tests are there."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
CASES = {f"A{number}" for number in range(1, 123)} | {f"B{number}" for number in range(1, 40)}


def rows() -> list[tuple[str, str]]:
    """First and last cell of each row of the tables."""
    _, _, section = (ROOT / "docs/api.md").read_text().partition("\n## Which test shows it\n")
    cells = [line.strip("| ").split(" | ") for line in section.splitlines() if line.startswith("| ")]
    return [(row[0], row[-1]) for row in cells if row[-1] != "test"]


def file_of(name: str) -> Path | None:
    folder, _, stem = name.rpartition("/")
    paths = [
        ROOT / "tests" / (folder or "unit") / f"{prefix}{stem}.py" for prefix in ("test_gateway_", "test_")
    ]
    return next((path for path in paths if path.exists()), None)


def absent(reference: str) -> list[str]:
    """What of ``file: test, test`` or ``file, file`` is not there; anything with spaces is prose."""
    name, colon, tests = reference.partition(": ")
    if not colon:
        return [name for name in reference.split(", ") if " " not in name and file_of(name) is None]
    file = file_of(name)
    if file is None:
        return [name]
    text = file.read_text()
    return [test for test in tests.split(", ") if f"def test_{test}(" not in text]


def test_every_test_that_is_named_is_there():
    references = [reference for _, cell in rows() for reference in cell.split("; ")]
    assert len(references) > 100
    assert [name for reference in references for name in absent(reference)] == []


def test_every_case_has_a_row():
    found = set()
    for cell, _ in rows():
        for first, last in re.findall(r"\b([AB]\d+)(?: to [AB](\d+))?", cell):
            end = int(last or first[1:])
            found |= {f"{first[0]}{number}" for number in range(int(first[1:]), end + 1)}
    assert found == CASES
