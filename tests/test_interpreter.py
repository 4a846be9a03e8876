"""A role can be placed in an interpreter of its own, for what does not fit into one environment with the rest."""

from __future__ import annotations

import site
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from rolecall.runtime.errors import Unrecoverable
from rolecall.runtime.forkserver import check_interpreter

from .processes import Run
from .test_bad_input import run

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]


def environment(folder: Path, *, with_ours: bool) -> Path:
    """A new virtual environment; the path of its interpreter. with_ours: with all that is installed in this one."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    if with_ours:
        [packages] = (folder / "lib").glob("python*/site-packages")
        lines = [f"import site; site.addsitedir({path!r})" for path in site.getsitepackages()]
        (packages / "ours.pth").write_text("\n".join(lines))
    return folder / "bin" / "python"


def test_a_role_runs_in_the_interpreter_it_is_placed_in_also_after_its_death(tmp_path: Path):
    def act(run: Run, kind: str, name: str, value: Any) -> None:
        if (kind, name, value) == ("state", "there", "up") and not run.deaths:
            run.kill("there")

    python = environment(tmp_path / "other", with_ours=True)
    placed = Run("placed", tmp_path, {"python": str(python)}, act)
    outcome = placed.go()
    assert outcome.exit_code == 0, outcome.story
    assert placed.reports["there"] == [{"prefix": str(tmp_path / "other")}] * 2
    assert placed.reports["here"] == [{"prefix": sys.prefix}]
    assert placed.reports["asker"] == [{"doubled": 42}]
    log = (tmp_path / "logs" / "there.log").read_text()
    assert f"there runs in a fresh interpreter: it is placed in {python}" in log


def refusal(python: Path) -> str:
    with pytest.raises(Unrecoverable) as caught:
        check_interpreter(str(python), "there")
    assert caught.value.exit_code == 2
    sentence = str(caught.value)
    assert sentence.startswith(f"there can't run in the interpreter {python} (") and "\n" not in sentence
    return sentence


def test_what_is_no_interpreter_is_said_before_anything_starts(tmp_path: Path):
    (tmp_path / "text").write_text("print()")
    assert "No such file or directory" in refusal(tmp_path / "nowhere")
    assert "Permission denied" in refusal(tmp_path)
    assert "Permission denied" in refusal(tmp_path / "text")
    assert "it exits with code 1" in refusal(Path("/bin/false"))


def test_an_interpreter_without_this_package_is_no_use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("PYTHONPATH", raising=False)
    sentence = refusal(environment(tmp_path / "other", with_ours=False))
    assert "No module named 'rolecall'" in sentence
    assert sentence.endswith("install this package in its environment, too")


def test_the_recipes_say_it_at_once(tmp_path: Path):
    sentence = run(tmp_path, "engine=vllm", "engine_python=/nowhere/python")
    assert sentence.startswith(
        "rollout can't run in the interpreter /nowhere/python (No such file or directory)"
    )
