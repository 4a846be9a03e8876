"""A hung actor is found, says in its log where it hangs, and is restarted; one that only computes is left alone."""

from __future__ import annotations

import ctypes
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rolecall.runtime.hang import HangWatch

from .processes import Run

pytestmark = [pytest.mark.slow, pytest.mark.timeout(60)]

OVER = re.compile(r"hung: \d+\.\d s over its max_run_s")
FROZEN = re.compile(r"hung: frozen by SIGSTOP for \d+\.\d s")
Act = Callable[[Run, str, str, Any], None]


def hang(folder: Path, act: Act = lambda run, kind, name, value: None, **settings: Any) -> Run:
    """A finished run of graphs/hang.py, looked at ten times a second."""
    run = Run("hang", folder, settings, act)
    run.supervisor.frozen_s = 0.2
    assert run.go().exit_code == 0
    return run


def results(run: Run) -> list[str]:
    return run.reports["caller"][-1]["results"]


def stacks(folder: Path, name: str = "target") -> str:
    """What the actor's log says from the first dump of stacks on."""
    _, dump, text = (folder / "logs" / f"{name}.log").read_text().partition("most recent call first")
    assert dump, "no stacks in the log"
    return text


def test_a_handler_over_its_limit(tmp_path: Path):
    run = hang(tmp_path, does="handler")
    [(name, reason)] = run.deaths
    assert name == "target"
    assert OVER.fullmatch(reason)
    told, again = results(run)
    assert (reason in told, again) == (True, "limited")
    assert "in hang_once" in stacks(tmp_path)
    assert run.delays == [0.0]


def test_a_step_over_its_limit(tmp_path: Path):
    run = hang(tmp_path, kind="Stepper", does="step")
    assert [bool(OVER.fullmatch(reason)) for _, reason in run.deaths] == [True]
    assert "in step" in stacks(tmp_path)
    assert results(run)[-1] == "limited"


def test_a_start_over_its_limit(tmp_path: Path):
    run = hang(tmp_path, kind="SlowStarter", does="on_start")
    assert [bool(OVER.fullmatch(reason)) for _, reason in run.deaths] == [True]
    assert "in on_start" in stacks(tmp_path)
    assert run.ups() == ["ticker", "target", "caller"]
    assert results(run) == ["limited"]


def test_code_in_c_that_holds_the_gil(tmp_path: Path):
    run = hang(tmp_path, asks="count_in_c")
    assert [bool(OVER.fullmatch(reason)) for _, reason in run.deaths] == [True]
    assert "in count_in_c" in stacks(tmp_path)
    assert results(run)[-1] == "counted"


def test_a_handler_without_a_limit_computes_for_as_long_as_it_likes(tmp_path: Path):
    def act(run: Run, kind: str, name: str, value: Any) -> None:
        if "long" in value:
            looks.append(run.supervisor._hangs.next_look)
        elif looks and "tick" in value and run.supervisor._hangs.next_look != looks[-1]:
            looks.append(run.supervisor._hangs.next_look)
            if len(looks) == 10:
                (tmp_path / "state" / "target" / "enough").touch()

    looks: list[float] = []
    run = hang(tmp_path, act, asks="limited long")  # the first one's limit is not the second one's
    assert len(looks) >= 10
    assert results(run) == ["limited", "long"]
    assert run.deaths == []


def test_a_frozen_actor(tmp_path: Path):
    def act(run: Run, kind: str, name: str, value: Any) -> None:
        if "long" in value and not run.deaths:
            os.kill(run.pid("target"), signal.SIGSTOP)
        elif kind == "death":
            (tmp_path / "state" / "target" / "enough").touch()

    run = hang(tmp_path, act, asks="long")
    assert [bool(FROZEN.fullmatch(reason)) for _, reason in run.deaths] == [True], run.deaths
    assert "in long" in stacks(tmp_path)
    assert results(run)[-1] == "long"


def test_an_actor_frozen_in_its_start(tmp_path: Path):
    def act(run: Run, kind: str, name: str, value: Any) -> None:
        if "tick" in value and (tmp_path / "state" / "target" / "hung").exists() and not stopped:
            stopped.append(run.pid("target"))
            os.kill(stopped[0], signal.SIGSTOP)

    stopped: list[int] = []
    run = hang(tmp_path, act, does="on_start without a limit")
    assert [bool(FROZEN.fullmatch(reason)) for _, reason in run.deaths] == [True], run.deaths
    assert "in on_start" in stacks(tmp_path)


def test_an_actor_that_is_frozen_and_continued_in_time_is_left_alone(tmp_path: Path):
    def act(run: Run, kind: str, name: str, value: Any) -> None:
        if "long" in value:
            os.kill(run.pid("target"), signal.SIGSTOP)
        elif "tick" in value and run.supervisor._hangs._frozen and not seen:
            seen.append(run.pid("target"))
            (tmp_path / "state" / "target" / "enough").touch()
            os.kill(seen[0], signal.SIGCONT)

    seen: list[int] = []
    run = Run("hang", tmp_path, {"asks": "long"}, act)  # with the usual five seconds
    assert run.go().exit_code == 0
    assert len(seen) == 1
    assert (results(run), run.deaths) == (["long"], [])


def test_a_frozen_fork_server_is_replaced(tmp_path: Path):
    def act(run: Run, kind: str, name: str, value: Any) -> None:
        if (kind, name, value) == ("state", "ticker", "up"):
            assert run.supervisor._forks is not None
            os.kill(run.supervisor._forks.pid, signal.SIGSTOP)

    run = hang(tmp_path, act)
    [(name, reason)] = run.deaths
    assert (name, bool(FROZEN.fullmatch(reason))) == ("forkserver", True)
    assert results(run) == ["limited"]


def test_deaths_of_hanging_are_counted_like_any_other(tmp_path: Path):
    def act(run: Run, kind: str, name: str, value: Any) -> None:
        if "long" in value:
            os.kill(run.pid("target"), signal.SIGSTOP)

    run = Run("hang", tmp_path, {"asks": "long long long", "max_restarts": 1}, act)
    run.supervisor.frozen_s = 0.2
    outcome = run.go()
    assert outcome.exit_code == 1
    assert "target died: hung: frozen by SIGSTOP" in outcome.story
    assert "That was death 2 within 60 s" in outcome.story
    assert "in long" in outcome.story


def test_only_a_stop_that_lasts_is_a_hang():
    process = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])
    pid, watch = process.pid, HangWatch(5.0)

    def now_it(stops: bool) -> None:
        os.kill(pid, signal.SIGSTOP if stops else signal.SIGCONT)
        os.waitpid(pid, os.WUNTRACED if stops else os.WCONTINUED)

    try:
        assert watch.why(pid, None, 0.0) == ""
        now_it(stops=True)
        assert [watch.why(pid, None, now) for now in (10.0, 14.9)] == ["", ""]
        now_it(stops=False)
        assert watch.why(pid, None, 15.1) == ""
        now_it(stops=True)
        assert [watch.why(pid, None, now) for now in (16.0, 20.9)] == ["", ""]
        assert watch.why(pid, None, 21.5) == "hung: frozen by SIGSTOP for 5.5 s"
    finally:
        process.kill()
        process.wait()
    assert watch.why(pid, None, 30.0) == ""


def test_a_debugger_may_stop_a_process_for_as_long_as_it_likes():
    pid = os.fork()
    if pid == 0:
        ctypes.CDLL(None).ptrace(0, 0, 0, 0)  # PTRACE_TRACEME
        os.kill(os.getpid(), signal.SIGSTOP)
        os._exit(0)
    try:
        os.waitpid(pid, os.WUNTRACED)
        watch = HangWatch(5.0)
        assert [watch.why(pid, None, now) for now in (0.0, 100.0)] == ["", ""]
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
