"""Whoever dies, by whatever signal: two seconds later nobody of the run is left, children of actors included."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from rolecall.runtime.leftovers import MARK, kill_marked
from rolecall.runtime.runs import RunFolder

from .commands import Command, until
from .processes import GRAPHS, Run, wait_for_ends

pytestmark = [pytest.mark.slow, pytest.mark.timeout(60)]

SECONDS = 2.0


class Leavers(Command):
    """`rolecall run graphs/leavers.py`, ready: its actors and their children are there."""

    def __init__(self, folder: Path, does: str) -> None:
        self.count = 8 if does == "wander" else 6
        self.pipe = folder / "pipe"
        os.mkfifo(self.pipe)
        settings = ["--set", f"pipe={self.pipe}", "--set", f"does={does}"]
        super().__init__(["run", str(GRAPHS / "leavers.py"), *settings], folder)

    def wait_until_here(self) -> list[int]:
        """The pids of all: supervisor, fork server, two actors, a shell and its sleep; two more of one that wanders."""
        with self.pipe.open() as pipe:
            assert pipe.read() == "here\n"
        until(lambda: self.actor("idle") and len(self.processes()) == self.count)
        return self.processes()

    def actor(self, name: str) -> int:
        """Its pid; 0 before it has started."""
        path = self.run_folder() / "state" / name / "pid"
        return int(path.read_text() or 0) if path.exists() else 0

    def forkserver(self) -> int:
        """Its pid; 0 if there is none. Its command line is its children's, too."""
        pids = [
            pid
            for pid in self.processes()
            if "runtime.forkserver" in Path(f"/proc/{pid}/cmdline").read_text()
        ]
        servers = [pid for pid in pids if pid not in (self.actor("parent"), self.actor("idle"))]
        return servers[0] if servers else 0

    @property
    def stopped(self) -> bool:
        """Whether on_stop has run."""
        return (self.run_folder() / "state" / "parent" / "stopped").exists()

    def kill(self) -> None:
        for pid in self.processes():
            os.kill(pid, signal.SIGKILL)
        self.process.communicate()


@pytest.fixture
def leavers(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Leavers]:
    command = Leavers(tmp_path, getattr(request, "param", "nothing"))
    yield command
    command.kill()


@pytest.fixture
def leavers_of_nohup(request: pytest.FixtureRequest) -> Iterator[Leavers]:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # inherited by whoever is started meanwhile
    try:
        yield request.getfixturevalue("leavers")
    finally:
        signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize("leavers", ["nothing", "be fresh"], indirect=True)
def test_the_supervisor_is_killed(leavers: Leavers):
    pids = leavers.wait_until_here()
    sockets = Path(RunFolder(leavers.run_folder()).info.sockets)
    assert sockets.is_dir()
    os.kill(leavers.process.pid, signal.SIGKILL)
    assert wait_for_ends(pids, SECONDS) == []
    assert leavers.processes() == []
    assert not leavers.stopped
    assert not sockets.exists()


def test_the_supervisor_is_killed_while_its_fork_server_imports(tmp_path: Path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    (tmp_path / "slow_to_import.py").write_text(
        f"open({str(pipe)!r}, 'w').write('here\\n')\nimport time\nwhile True:\n    time.sleep(0.01)\n"
    )
    command = Command(["run", str(GRAPHS / "importer.py")], tmp_path, {"PYTHONPATH": str(tmp_path)})
    with pipe.open() as opened:
        assert opened.read(5) == "here\n"
        pids = command.processes()
        assert len(pids) == 2
        sockets = Path(RunFolder(command.run_folder()).info.sockets)
        assert sockets.is_dir()
        os.kill(command.process.pid, signal.SIGKILL)
        left = wait_for_ends(pids, SECONDS)
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    command.process.communicate()
    assert left == []
    assert not sockets.exists()


def test_the_supervisor_is_killed_after_its_fork_server_was(leavers: Leavers):
    pids = leavers.wait_until_here()
    server = leavers.forkserver()
    os.kill(server, signal.SIGKILL)
    assert wait_for_ends([server], SECONDS) == []
    until(leavers.forkserver)
    pids += leavers.processes()
    os.kill(leavers.process.pid, signal.SIGKILL)
    assert wait_for_ends(pids, SECONDS) == []
    assert leavers.processes() == []


def test_a_signal_that_is_ignored_stays_ignored(leavers_of_nohup: Leavers):
    leavers_of_nohup.wait_until_here()
    os.kill(leavers_of_nohup.process.pid, signal.SIGHUP)
    ps = Command(["ps"], leavers_of_nohup.folder)
    code, out, err = ps.finish(30.0)
    assert code == 0, err
    assert "stopping" not in out and out.count(" up ") == 2
    os.kill(leavers_of_nohup.process.pid, signal.SIGTERM)
    assert leavers_of_nohup.finish(30.0)[0] == 130


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_asked_once_it_stops_in_order(leavers: Leavers, number: signal.Signals):
    pids = leavers.wait_until_here()
    os.kill(leavers.process.pid, number)
    code, _, errors = leavers.finish(30.0)
    assert (code, "stopped by request" in errors) == (130, True)
    assert wait_for_ends(pids, SECONDS) == []
    assert leavers.processes() == []
    assert leavers.stopped


def test_a_ctrl_c_reaches_the_whole_group_and_still_stops_in_order(leavers: Leavers):
    pids = leavers.wait_until_here()
    os.killpg(leavers.process.pid, signal.SIGINT)
    assert leavers.finish(30.0)[0] == 130
    assert wait_for_ends(pids, SECONDS) == []
    assert leavers.stopped


@pytest.mark.parametrize("leavers", ["hang"], indirect=True)
def test_asked_twice_it_stops_at_once(leavers: Leavers):
    pids = leavers.wait_until_here()
    os.kill(leavers.process.pid, signal.SIGINT)
    assert (
        wait_for_ends([leavers.actor("idle")], SECONDS) == []
    )  # it stops first, then the other one is asked
    os.kill(leavers.process.pid, signal.SIGINT)
    assert wait_for_ends(pids, SECONDS) == []
    assert leavers.finish(30.0)[0] == 130
    assert not leavers.stopped


@pytest.mark.parametrize("leavers", ["finish"], indirect=True)
def test_the_run_finishes(leavers: Leavers):
    with leavers.pipe.open() as pipe:
        assert pipe.read() == "here\n"
    code, _, errors = leavers.finish(30.0)
    assert code == 0, errors
    assert until(lambda: not leavers.processes(), SECONDS)
    assert leavers.stopped


@pytest.mark.parametrize("leavers", ["wander"], indirect=True)
def test_who_has_left_the_session_is_gone_when_the_run_ends_in_order(leavers: Leavers):
    pids = leavers.wait_until_here()
    os.kill(leavers.process.pid, signal.SIGTERM)
    assert leavers.finish(30.0)[0] == 130
    assert wait_for_ends(pids, SECONDS) == []
    assert leavers.processes() == []


@pytest.mark.parametrize("leavers", ["wander"], indirect=True)
def test_who_has_left_the_session_is_gone_when_the_supervisor_is_killed_and_other_runs_live(
    leavers: Leavers, tmp_path: Path
):
    other_folder = tmp_path / "other"
    other_folder.mkdir()
    other = Leavers(other_folder, "wander")
    try:
        pids, others = leavers.wait_until_here(), other.wait_until_here()
        os.kill(leavers.process.pid, signal.SIGKILL)
        assert wait_for_ends(pids, SECONDS) == []
        assert leavers.processes() == []
        assert sorted(other.processes()) == sorted(others)
    finally:
        other.kill()


@pytest.fixture
def sleepers() -> Iterator[Callable[..., subprocess.Popen[bytes]]]:
    """Starts a process with this in its environment."""
    started: list[subprocess.Popen[bytes]] = []

    def start(**environment: str) -> subprocess.Popen[bytes]:
        started.append(subprocess.Popen(["/bin/sleep", "1000"], env=environment, start_new_session=True))
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.wait()


def test_only_who_has_the_mark_of_the_run_is_killed(
    tmp_path: Path, sleepers: Callable[..., subprocess.Popen[bytes]]
):
    mark = str(tmp_path)
    ours = [sleepers(**{MARK: mark}), sleepers(PATH="/bin", **{MARK: mark})]
    others = [
        sleepers(),
        sleepers(**{MARK: mark + "x"}),
        sleepers(**{MARK: str(tmp_path.parent)}),
        sleepers(NOTE=f"{MARK}={mark}"),
        sleepers(**{"X" + MARK: mark}),
    ]
    kill_marked(tmp_path, SECONDS)
    assert [process.wait(SECONDS) for process in ours] == [-signal.SIGKILL] * 2
    assert [process.poll() for process in others] == [None] * 5


def test_the_children_of_a_killed_actor_die_before_it_is_restarted(tmp_path: Path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    children: list[int] = []
    left: list[int] = []

    def act(run: Run, kind: str, name: str, value: Any) -> None:
        if (kind, name) != ("report", "parent"):
            return
        if not children:
            children.extend(_session(run.pid("parent")))
            run.kill("parent")
        else:
            left.extend(wait_for_ends(children, SECONDS))
            run.supervisor.stop()

    assert Run("leavers", tmp_path, {"pipe": pipe}, act).go().exit_code == 130
    os.close(reader)
    assert len(children) == 3  # itself, a shell and its sleep
    assert left == []


def _session(leader: int) -> list[int]:
    """The processes of a session."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                session = int((entry / "stat").read_text().rpartition(")")[2].split()[3])
            except (FileNotFoundError, ProcessLookupError):
                continue  # it has just ended
            if session == leader:
                found.append(int(entry.name))
    return found
