"""What other actor runtimes were reported to do wrong with processes: each must not happen here."""

from __future__ import annotations

import gc
import os
import random
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from .commands import Command, until
from .processes import GRAPHS, Run

pytestmark = [pytest.mark.slow, pytest.mark.timeout(60)]

SECONDS = 2.0
RECIPE = str(GRAPHS / "reports_of_processes.py")


def crowd(scene: str, folder: Path, act: Any = lambda *event: None, **settings: Any) -> Run:
    return Run("reports_of_processes", folder, {"scene": scene, **settings}, act)


# --- storms ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("max_restarts", [5, 20])
@pytest.mark.parametrize("longest", [False, True], ids=["shortest waits", "longest waits"])
def test_a_storm_that_dies_half_a_second_after_each_start_ends_the_run(
    tmp_path: Path, max_restarts: int, longest: bool
):
    """It came up every time, so that only the count of deaths can tell that it is a storm."""

    class Waits(random.Random):
        def uniform(self, a: float, b: float) -> float:
            return b if longest else a

    def act(run: Run, kind: str, name: str, value: Any) -> None:
        nonlocal now
        if (kind, name, value) == ("state", "b", "waiting"):
            now += run.delays[-1] or 0.0
        if (kind, name, value) == ("state", "b", "up"):
            now += 0.5
            run.kill("b")
        if kind == "death" and len(run.deaths) > 2 * max_restarts:
            run.supervisor.stop()  # it goes on for ever

    now = 0.0
    run = Run("tree", tmp_path, {"max_restarts": max_restarts}, act, rng=Waits())
    run.supervisor.clock = lambda: now
    outcome = run.go()
    assert outcome.exit_code == 1, outcome.story
    assert f"b died: killed by SIGKILL. That was death {max_restarts + 1} within 60 s" in outcome.story
    assert run.ups().count("b") == max_restarts + 1


@pytest.mark.parametrize(("killed", "reason"), [("false", "MemoryError"), ("true", "killed by SIGKILL")])
def test_a_run_whose_actor_runs_out_of_memory_again_and_again_fails(tmp_path: Path, killed: str, reason: str):
    """Reported of Torchforge: the actor was gone, and the script waited for it for ever."""
    command = Command(["run", RECIPE, *settings(scene="glutton", flag=killed, max_restarts=2)], tmp_path)
    code, _, errors = command.finish(30.0)
    assert code == 1
    assert f"died: {reason}" in errors
    assert command.processes() == []


# --- grandchildren -----------------------------------------------------------------------------------------


class Spawning(Command):
    """Two actors that start process after process, each of which starts another."""

    def __init__(self, folder: Path, **more: Any) -> None:
        super().__init__(["run", RECIPE, *settings(scene="spawners", size=2, **more)], folder)

    def wait_until_each_has(self, count: int) -> None:
        folder = self.run_folder()
        until(lambda: all((folder / f"spawner-{number}-{count}").exists() for number in range(2)))


@pytest.fixture
def spawning(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Spawning]:
    command = Spawning(tmp_path, **getattr(request, "param", {}))
    yield command
    for pid in command.processes():
        os.kill(pid, signal.SIGKILL)
    command.process.communicate()


@pytest.mark.parametrize("count", [1, 4, 9])
@pytest.mark.parametrize(
    "signals",
    [[signal.SIGTERM], [signal.SIGTERM, signal.SIGTERM], [signal.SIGKILL]],
    ids=["stopped", "stopped twice", "killed"],
)
def test_a_run_that_ends_while_its_actors_start_processes_leaves_none(
    spawning: Spawning, signals: list[signal.Signals], count: int
):
    """Reported of OTP: what was just being started outlived the shutdown. And reported of Ray."""
    spawning.wait_until_each_has(count)
    for number in signals:
        os.kill(spawning.process.pid, number)
    assert until(lambda: not spawning.processes(), SECONDS)


def test_an_actor_that_is_killed_while_it_starts_processes_leaves_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Reported of Ray: its grandchildren kept the GPU."""
    victims: list[int] = []

    def act(run: Run, kind: str, name: str, value: Any) -> None:
        if kind == "report" and value["count"] == 3 + len(victims) and run.pid(name) not in victims:
            if len(victims) == 4:
                run.supervisor.stop()
            else:
                victims.append(run.pid(name))
                run.kill(name)

    assert crowd("spawners", tmp_path, act).go().exit_code == 130
    assert len(victims) == 4
    assert until(lambda: not in_sessions(victims), SECONDS)


@pytest.mark.parametrize("spawning", [{"flag": "true"}], indirect=True, ids=["own session"])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL], ids=["stopped", "killed"])
def test_a_process_that_leads_a_session_of_its_own_ends_with_the_run(
    spawning: Spawning, number: signal.Signals
):
    spawning.wait_until_each_has(1)
    os.kill(spawning.process.pid, number)
    assert until(lambda: not spawning.processes(), SECONDS)


def in_sessions(leaders: list[int]) -> list[int]:
    """Live processes of these sessions."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except (FileNotFoundError, ProcessLookupError):
                continue  # it has just ended
            if int(fields[3]) in leaders and fields[0] != "Z":
                found.append(int(entry.name))
    return found


# --- crowds and memory -------------------------------------------------------------------------------------


def test_200_actors_of_500_messages_each_lose_and_double_none(tmp_path: Path):
    """Reported of Thespian."""

    def act(run: Run, kind: str, name: str, value: Any) -> None:
        if kind == "report" and len(run.reports) == 200:
            run.supervisor.stop()

    run = crowd("count", tmp_path, act, size=200, count=500)
    assert run.go().exit_code == 130
    assert len(run.reports) == 200
    assert all(reports == [{"heard": 500}] for reports in run.reports.values())
    assert run.deaths == []


def test_a_fast_producer_and_a_slow_consumer_hold_no_more_than_their_credit(tmp_path: Path):
    """Reported of Ray: memory grew with the queue until the machine was out of it."""
    run = crowd("flood", tmp_path, count=1000)
    assert run.go().exit_code == 0
    [report] = run.reports["fast"]
    assert report["handled"] == 1000
    assert max(report["fast_mb"], report["slow_mb"]) < 350  # of 1000 that are sent, 256 may be on their way


# --- starts ------------------------------------------------------------------------------------------------

DEATHS = {
    "raises": "raise ImportError('broken_module can not be')",
    "exits": "os._exit(3)",
    "crashes": "os.kill(os.getpid(), 11)",
}


@pytest.mark.parametrize("late", [False, True], ids=["preloaded", "imported by its actor"])
@pytest.mark.parametrize("death", DEATHS)
def test_the_last_words_of_a_process_that_dies_of_an_import_are_in_the_error_within_a_second(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, late: bool, death: str
):
    """Reported of Mars: the parent waited for its child for ever, and said nothing."""
    died_at = tmp_path / "died_at"
    (tmp_path / "broken_module.py").write_text(
        "import os, sys, time\nfrom pathlib import Path\n"
        "sys.stderr.write('libbroken.so.1: no such file\\n')\nsys.stderr.flush()\n"
        f"Path({str(died_at)!r}).write_text(str(time.monotonic()))\n{DEATHS[death]}\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    outcome = crowd("importing", tmp_path, flag=late, max_restarts=0).go()
    heard_s = time.monotonic() - float(died_at.read_text())
    assert outcome.exit_code == 1
    assert "libbroken.so.1: no such file" in outcome.story
    assert outcome.story.startswith("importing died" if late else "forkserver died")
    assert heard_s < 1.0


def test_who_becomes_ready_while_the_supervisor_is_busy_is_seen_to_be_up(tmp_path: Path):
    """Found with 200 actors: those that were ready before their fork was noted counted as starting for ever."""

    def act(run: Run, kind: str, name: str, value: Any) -> None:
        assert run.supervisor._forks is not None
        prompts = [child for child in run.supervisor.children if child.role.name == "prompt"]
        if (kind, name, value) == ("state", "chatter", "up"):
            os.kill(run.supervisor._forks.pid, signal.SIGSTOP)  # so that none is forked yet
        if kind == "report" and {child.state for child in prompts} == {"spawning"}:
            os.kill(run.supervisor._forks.pid, signal.SIGCONT)
            until(lambda: all((tmp_path / child.name).exists() for child in prompts))
        elif kind == "report" and all(child.alive for child in prompts) and all_up not in seen:
            seen.append([child.state for child in prompts])
            if seen[-1] == all_up or len(seen) == 100:
                run.supervisor.stop()

    seen, all_up = list[list[str]](), ["up"] * 5
    assert crowd("busy", tmp_path, act, size=5).go().exit_code == 130
    assert all_up in seen


def test_fifty_runs_in_one_process_leave_nothing(tmp_path: Path):
    """Reported of CPython: pools that were started and ended left zombies, descriptors and shared memory."""

    def one(number: int) -> None:
        run = crowd("brief", tmp_path / str(number))
        assert run.go().exit_code == 0
        assert not run.supervisor.sockets.exists()

    one(0)
    before = belongings()
    for number in range(1, 51):
        one(number)
    assert belongings() == before


def belongings() -> dict[str, Any]:
    """What this process holds that a run could leave: descriptors, threads, children, shared memory."""
    gc.collect()  # what waits in cycles for its collection is not left for ever
    own = Path("/proc/self")
    return {
        "descriptors": len(list((own / "fd").iterdir())),
        "threads": (threading.active_count(), len(list((own / "task").iterdir()))),
        "children": sorted(
            pid for task in (own / "task").glob("*/children") for pid in task.read_text().split()
        ),
        "shared memory": sorted(path.name for path in Path("/dev/shm").iterdir()),
        "mappings": sum("rolecall-" in line for line in (own / "maps").read_text().splitlines()),
    }


def settings(**values: Any) -> list[str]:
    return [word for key, value in values.items() for word in ("--set", f"{key}={value}")]
