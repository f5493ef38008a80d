"""The GPU benchmark is one short chance on a rented machine: here its code runs on the CPU."""

import json

from benchmarks.gpu import run


def test_every_section_has_figures_and_all_is_exact(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("OUT", str(tmp_path))
    status = run.main(["--cpu", "--tiny"])
    kept = json.loads((tmp_path / "gpu.json").read_text())
    assert status == 0
    sections = kept["sections"]
    assert list(sections) == list(run.BUDGETS_S)
    assert not [name for name, section in sections.items() if "error" in section]
    assert sections["exactness"]["failures"] == []
    acceptance = {row["draft"]: row["acceptance"] for row in sections["exactness"]["greedy"]}
    assert acceptance["equal"] == 1.0
    assert acceptance["random"] < 0.5
    assert all(row["tokens_per_s"] > 0 for row in sections["texts"] if "error" not in row)
    assert "## exactness" in capsys.readouterr().out


def test_section_that_fails_is_noted_and_fails_the_run(tmp_path, monkeypatch):
    monkeypatch.setenv("OUT", str(tmp_path))
    monkeypatch.setattr("benchmarks.gpu.exactness.check", lambda *_: 1 / 0)
    assert run.main(["--cpu", "--tiny", "--sections", "exactness", "roofline"]) == 1
    kept = json.loads((tmp_path / "gpu.json").read_text())["sections"]
    assert "ZeroDivisionError" in kept["exactness"]["error"]
    assert kept["roofline"]["read_gb_per_s"] > 0
