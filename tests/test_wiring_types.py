"""A wrong wire is a type error: the checker is run on recipes that are wrong, and on one that is not."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

ROOT = Path(__file__).parent.parent
RECIPES = Path(__file__).parent / "wrong_recipes"

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def complaints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[int, set[str]]]:
    """By file and line: the rules that pyright finds broken in tests/wrong_recipes."""
    folder = tmp_path_factory.mktemp("check")
    # Checkers do not follow an editable install's import hook.
    (folder / "rolecall").mkdir()
    for part in ("__init__.py", "py.typed", "runtime"):
        (folder / "rolecall" / part).symlink_to(ROOT / part)
    (folder / "recipes").symlink_to(RECIPES)
    (folder / "pyrightconfig.json").write_text('{"include": ["recipes"], "typeCheckingMode": "standard"}')
    command = [
        sys.executable,
        "-m",
        "pyright",
        "--outputjson",
        "--pythonpath",
        sys.executable,
        "-p",
        str(folder),
    ]
    finished = subprocess.run(command, check=False, capture_output=True, text=True, cwd=folder)
    assert finished.returncode in (0, 1), finished.stdout + finished.stderr
    report = msgspec.json.decode(finished.stdout)
    assert report["summary"]["filesAnalyzed"] == 2
    found: dict[str, dict[int, set[str]]] = {"right.py": {}, "wrong.py": {}}
    for one in report["generalDiagnostics"]:
        lines = found[Path(one["file"]).name]
        lines.setdefault(one["range"]["start"]["line"] + 1, set()).add(one["rule"])
    return found


def test_a_right_recipe_is_clean(complaints: dict[str, dict[int, set[str]]]):
    assert complaints["right.py"] == {}


def test_each_mistake_is_found_by_its_rule(complaints: dict[str, dict[int, set[str]]]):
    source = (RECIPES / "wrong.py").read_text().splitlines()
    marks = {number: re.search(r"# (report\w+):", line) for number, line in enumerate(source, 1)}
    expected = {number: mark[1] for number, mark in marks.items() if mark}
    found = complaints["wrong.py"]
    assert len(expected) == 16
    assert found.keys() == expected.keys()
    assert {number: rule for number, rule in expected.items() if rule not in found[number]} == {}
