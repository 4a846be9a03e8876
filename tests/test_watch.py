"""`Ref.watch`: exactly one Down for each incarnation; and `Ref.any`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from .processes import Run

pytestmark = pytest.mark.slow


def downs(run: Run) -> list[tuple[str, str, bool]]:
    """Whose ends were heard of: name, reason, for good."""
    reports = [report["down"] for report in run.reports["watcher"] if "down" in report]
    return [(name, reason, final) for name, _, reason, final in reports]


def test_each_incarnation_ends_once(tmp_path: Path):
    def act(run: Run, kind: str, name: str, value: Any) -> None:
        # Each death is awaited before the next kill: the watcher's report tells of it, `up` of the next life.
        if (name, kind, value) == ("mortal", "state", "up") and "watcher" in run.ups():
            run.kill("mortal")
        if (name, kind, value) == ("watcher", "state", "up"):
            run.kill("mortal")

    run = Run("watch", tmp_path, {"downs": 4}, act)
    assert run.go().exit_code == 0
    assert downs(run) == [("mortal", "killed by SIGKILL", False)] * 4
    incarnations = [report["down"][1] for report in run.reports["watcher"] if "down" in report]
    assert incarnations == sorted(set(incarnations))


def test_one_that_is_gone_for_good_is_told_so(tmp_path: Path):
    def act(run: Run, kind: str, name: str, value: Any) -> None:
        if (name, kind, value) == ("watcher", "state", "up"):
            run.kill("mortal")

    run = Run("watch", tmp_path, {"temporary": True}, act)
    assert run.go().exit_code == 0
    assert downs(run) == [("mortal", "killed by SIGKILL", True)]


def test_one_that_was_dead_before_is_told_at_once(tmp_path: Path):
    def act(run: Run, kind: str, name: str, value: Any) -> None:
        if (name, kind, value) == ("mortal", "state", "up"):
            run.kill("mortal")

    run = Run("watch", tmp_path, {"temporary": True}, act)
    assert run.go().exit_code == 0
    assert downs(run) == [("mortal", "killed by SIGKILL", True)]


def test_finishing_is_an_end_without_a_reason(tmp_path: Path):
    run = Run("watch", tmp_path, {"finish": True, "replicas": 3})
    assert run.go().exit_code == 0
    ((name, reason, final),) = downs(run)
    assert name.startswith("mortal-")
    assert (reason, final) == ("", True)


def test_a_restarted_watcher_watches_anew(tmp_path: Path):
    def act(run: Run, kind: str, name: str, value: Any) -> None:
        if (name, kind, value) == ("watcher", "state", "up"):
            run.kill("watcher" if run.ups().count("watcher") == 1 else "mortal")

    run = Run("watch", tmp_path, {}, act)
    assert run.go().exit_code == 0
    assert downs(run) == [("mortal", "killed by SIGKILL", False)]
    assert [report["mine"] for report in run.reports["watcher"] if "down" in report] == [
        run.reports["watcher"][-1]["mine"]
    ]
