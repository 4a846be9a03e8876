"""Actors are forked where that is safe; where it is not they get a fresh interpreter, and say so."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
from rolecall.runtime.forkserver import ForkServer, become_subreaper

from .processes import Run

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]


def start(folder: Path, kind: str, act: Any = lambda run, kind, name, value: None) -> Run:
    """A finished run of graphs/fresh.py."""
    run = Run("fresh", folder, {"kind": kind}, act)
    outcome = run.go()
    assert outcome.exit_code == 0, outcome.story
    assert run.reports["asker"] == [{"doubled": 42}]
    return run


def is_fresh(report: dict[str, Any]) -> bool:
    return report["command"][:4] == [sys.executable, "-P", "-m", "rolecall.runtime.process"]


def log(folder: Path, name: str) -> str:
    return (folder / "logs" / f"{name}.log").read_text()


def test_an_actor_that_is_not_fork_safe_has_a_fresh_interpreter(tmp_path: Path):
    def act(run: Run, kind: str, name: str, value: Any) -> None:
        if (kind, name, value) == ("state", "middle", "up") and not run.deaths:
            run.kill("middle")

    run = start(tmp_path, "Fresh", act)
    assert [is_fresh(report) for report in run.reports["middle"]] == [True, True]  # after its death, too
    assert [is_fresh(run.reports[name][0]) for name in ("before", "after")] == [False, False]
    assert "middle runs in a fresh interpreter: Fresh.fork_safe is False" in log(tmp_path, "middle")
    assert log(tmp_path, "forkserver") == ""


def test_a_fresh_interpreter_is_the_supervisors_like_any_other(tmp_path: Path):
    run = start(tmp_path, "Fresh")
    [fresh], [forked] = run.reports["middle"], run.reports["before"]
    spec = fresh["command"][-1]
    assert spec.startswith(str(run.supervisor.sockets))
    assert fresh | {"command": []} == forked | {"command": []}
    assert fresh["parent"] == os.getpid()
    assert fresh["leads_session"] and fresh["dies_with_parent"] and fresh["ignores_sigint"]


def test_a_preload_that_starts_threads_makes_forking_unsafe_and_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "starts_threads.py").write_text(
        "import threading\n"
        "for _ in range(2):\n"
        "    threading.Thread(target=threading.Event().wait, daemon=True).start()\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    run = start(tmp_path, "Threaded")
    fresh = {name: is_fresh(run.reports[name][0]) for name in ("before", "middle", "after")}
    assert fresh == {"before": False, "middle": True, "after": True}
    reason = "the fork server has 3 threads, started by importing starts_threads (2)"
    for name in ("middle", "after"):
        sentence = f"{name} runs in a fresh interpreter: forking is not safe because {reason}"
        assert sentence in log(tmp_path, name)
        assert sentence in log(tmp_path, "forkserver")


def test_what_the_recipes_preload_can_be_forked(tmp_path: Path):
    run = start(tmp_path, "Heavy")
    assert not is_fresh(run.reports["middle"][0])
    assert not is_fresh(run.reports["after"][0])


def test_an_actor_that_is_killed_as_soon_as_it_is_known_costs_the_fork_server_nothing(tmp_path: Path):
    become_subreaper()
    sockets = tmp_path / "sockets"
    sockets.mkdir()
    server = ForkServer(tmp_path / "log", sockets)
    request = {"name": "a", "spec": "/nowhere", "log": str(tmp_path / "a.log"), "preloads": [], "fresh": ""}
    for _ in range(100):
        server.send(request)
        reply = server.reply()
        assert reply is not None, "it has ended"
        os.kill(reply["pid"], signal.SIGKILL)
        os.waitpid(reply["pid"], 0)
    server.kill()
    server.close()
    assert sockets.is_dir()
