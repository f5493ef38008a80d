"""Ray stays in one folder, so that everything else runs and is tested in a plain interpreter."""

import ast
import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

import specdec

PACKAGE = Path(specdec.__file__).parent


def imported_modules(source):
    """Every module that ``source`` imports by an absolute name, also inside functions."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            yield node.module


def imports_ray(source):
    return any(name.split(".")[0] == "ray" for name in imported_modules(source))


def test_ray_is_imported_under_specdec_cluster_alone():
    importers = [
        str(path.relative_to(PACKAGE))
        for path in sorted(PACKAGE.rglob("*.py"))
        if path.relative_to(PACKAGE).parts[0] != "cluster" and imports_ray(path.read_text(encoding="utf-8"))
    ]
    assert importers == []


def test_the_scan_sees_every_form_of_import():
    assert imports_ray("import ray")
    assert imports_ray("import os, ray.serve as serve")
    assert imports_ray("def late():\n    from ray import serve")
    assert not imports_ray(
        "import rays\nfrom . import ray\nfrom specdec.cluster import app\nname = 'import ray'"
    )


def test_installed_packages_fit_together():
    """As whoever installs anew gets them: no package wants another version of one that is there."""
    if importlib.util.find_spec("pip") is None:
        pytest.skip("pip is not installed")
    check = subprocess.run(
        [sys.executable, "-m", "pip", "check"], capture_output=True, text=True, check=False
    )
    assert check.returncode == 0, check.stdout
