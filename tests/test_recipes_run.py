"""Each recipe that comes with the package, as a user runs it: it learns, and every group is trained once."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from .commands import Command
from .test_run import check_ledger

pytestmark = pytest.mark.slow

# Of those whose processes are others than the ones that test_readme and test_run start.
RECIPES = ["expert_iteration", "judged"]
SHORT = ["--set", "steps=12", "--set", "lr=3e-3", "--set", "eval_problems=64", "--set", "eval_every=12"]


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_learns_in_processes(tmp_path: Path, name: str):
    command = Command(["run", name, "--json", *SHORT], tmp_path)
    code, out, err = command.finish(180)
    assert code == 0, err
    result = msgspec.json.decode(out)
    assert result["accuracy_after"] >= result["accuracy_before"] + 0.15
    assert result["restarts"] == 0
    check_ledger(command.run_folder(), 12, 16)
    assert command.processes() == []
