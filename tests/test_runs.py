"""Run folders: their names, what is in them, one that is damaged, and what a live run answers."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest
from msgspec.structs import replace
from rolecall import Unrecoverable
from rolecall.runtime.cli import main
from rolecall.runtime.control import ActorStatus, RunStatus
from rolecall.runtime.files import read_lines, write_whole
from rolecall.runtime.runs import RunFolder, create_run, find_run, named, nobody

from .commands import ROLECALL, Command, lines, until


def test_runs_of_one_second_on_machines_that_share_a_store_have_different_ids(tmp_path: Path):
    runs = [create_run(tmp_path / str(number), "async_grpo", {}) for number in range(3)]
    assert len({run.info.id for run in runs}) > 1  # all three alike: once in 2³² times
    for run in runs:
        assert re.fullmatch(r"async_grpo-\d{8}-\d{6}-[0-9a-f]{4}", run.path.name)
        assert run.info.id == run.path.name


def test_a_joining_machine_keeps_the_runs_id(tmp_path: Path):
    run = create_run(tmp_path, "join-async_grpo", {}, id="theirs")
    assert run.info.id == "theirs"
    assert run.path.name.startswith("join-async_grpo-")


def test_a_run_starts_with_its_process(tmp_path: Path):
    code = (
        "import sys; sys.stdin.read(1); from pathlib import Path; from rolecall.runtime.runs import create_run; "
        f"print(create_run(Path({str(tmp_path)!r}), 'x', {{}}).info.started)"
    )
    before = time.time()
    process = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    after = time.time()
    out, _ = process.communicate(b"x")
    assert before - 0.05 <= float(out) <= after + 0.05  # the kernel counts hundredths


def test_what_is_written_is_whole(tmp_path: Path):
    path = tmp_path / "run.json"
    for data in (b"old", b"new"):
        write_whole(path, data)
        assert path.read_bytes() == data
    assert list(tmp_path.iterdir()) == [path]


def test_a_line_that_is_being_written_is_no_line_yet(tmp_path: Path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n{"step": 2}\n{"st')
    assert RunFolder(tmp_path).lines("metrics.jsonl") == [{"step": 1}, {"step": 2}]
    assert read_lines(tmp_path / "nothing.jsonl") == []


@pytest.mark.parametrize("damage", ["", "{", "[]", '{"id": 3}', "\x00"])
def test_a_damaged_run_hides_no_other(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], damage: str, monkeypatch: pytest.MonkeyPatch
):
    good = create_run(tmp_path, "async_grpo", {})
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad" / "run.json").write_text(damage)
    assert find_run(tmp_path, None).path == good.path
    with pytest.raises(Unrecoverable, match=f"there is no live run in {tmp_path}"):
        find_run(tmp_path, None, live=True)
    for command in (
        ["ps", "bad"],
        ["stop", "bad"],
        ["restart", "trainer", "bad"],
        ["logs", "trainer", "bad"],
        ["sample", "bad", "hello"],
    ):
        assert main([*command, "--runs", str(tmp_path)]) == 2
        text = capsys.readouterr().err
        assert text.startswith(f"rolecall: {tmp_path / 'bad' / 'run.json'} is damaged (")
        assert text.endswith("): choose another run\n") and text.count("\n") == 1


ACTORS = ["prompts", "rollout-0", "rollout-1", "rollout-10"]


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("prompts", ["prompts"]),
        ("rollout", ["rollout-0", "rollout-1", "rollout-10"]),
        ("rollout-1", ["rollout-1"]),
        ("rollou", []),
        ("rollout-", []),
        ("", []),
    ],
)
def test_a_name_means_one_actor_or_all_replicas_of_a_role(name: str, meant: list[str]):
    assert named(name, ACTORS) == meant


def test_a_name_that_means_nobody_is_told_of_those_there_are():
    error = nobody("there is no role 'rolout'", "rolout", ACTORS)
    assert error.exit_code == 2
    assert str(error) == (
        "there is no role 'rolout'; did you mean 'rollout'? There are: prompts, rollout, rollout-0, rollout-1, "
        "rollout-10"
    )
    assert str(nobody("there is no log of 'x'", "x", [])) == "there is no log of 'x'. There are: none"


def test_a_supervisor_that_listens_no_more_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    run = create_run(tmp_path, "async_grpo", {})
    (tmp_path / "sockets").mkdir()
    run.write_info(replace(run.info, sockets=str(tmp_path / "sockets")))
    for command in (["ps"], ["restart", "trainer"], ["logs", "trainer"]):
        assert main([*command, "--runs", str(tmp_path)]) == 1
        assert (
            f"the supervisor of {run.path.name} (pid {os.getpid()}) does not answer"
            in capsys.readouterr().err
        )


IDLERS = """
from dataclasses import dataclass

from rolecall import Actor, Finished, Graph

class Idler(Actor):
    pass

class Brief(Actor):
    def step(self):
        raise Finished

class Clumsy(Actor):
    def fall(self):
        raise ValueError("fell")

class Tripper(Actor):
    def __init__(self, clumsy):
        self.clumsy = clumsy

    def step(self):
        self.clumsy.tell(Clumsy.fall)

@dataclass
class Config:
    pass

def build(config):
    graph = Graph("idlers")
    graph.place(graph.add("pair", Idler), replicas=2)
    graph.add("brief", Brief)
    graph.add("tripper", Tripper, graph.add("clumsy", Clumsy))
    return graph
"""
NAMES = ["pair-0", "pair-1", "brief", "clumsy", "tripper"]


@pytest.fixture
def live(tmp_path: Path) -> Iterator[RunFolder]:
    """A live run in `tmp_path`: a pair that idles, one that has finished, one that died of a message and is back."""
    (tmp_path / "idlers.py").write_text(IDLERS)
    command = Command(["run", "idlers.py"], tmp_path)
    folder = command.run_folder()

    def settled() -> bool:
        events = [
            event for event in lines(folder / "events.jsonl") if event["event"] in ("state", "dead_letter")
        ]
        last = {event["actor"]: event.get("state") for event in events if event["event"] == "state"}
        died = [event for event in events if (event["actor"], event.get("state")) == ("clumsy", "waiting")]
        expected = {name: "done" if name == "brief" else "up" for name in NAMES}
        return last == expected and bool(died) and any(event["event"] == "dead_letter" for event in events)

    try:
        until(settled)
        yield RunFolder(folder)
    finally:
        command.process.kill()
        command.finish()


def do(folder: Path, *arguments: str) -> str:
    code, out, err = Command(list(arguments), folder).finish()
    assert (code, err) == (0, "")
    return out


def refused(folder: Path, *arguments: str) -> tuple[int, str]:
    """Exit code, and the one sentence on stderr."""
    code, out, err = Command(list(arguments), folder).finish()
    assert out == "" and err.startswith("rolecall: ") and err.count("\n") == 1
    return code, err.removeprefix("rolecall: ").rstrip()


@pytest.mark.slow
def test_ps_shows_every_actor_and_where_dead_letters_are(live: RunFolder, tmp_path: Path):
    name, titles, *rows, letters = do(tmp_path, "ps").splitlines()
    assert name == live.path.name
    assert titles.split()[:6] == ["ROLE", "PID", "STATE", "INCARNATION", "RESTARTS", "WAITING"]
    status = msgspec.json.decode(do(tmp_path, "ps", "--json", str(live.path)), type=RunStatus)
    assert [actor.name for actor in status.actors] == NAMES
    for row, actor in zip(rows, status.actors, strict=True):
        known = (actor.name, actor.pid or "-", actor.state, actor.incarnation, actor.restarts, 0, "-", "-")
        assert row.split()[:8] == [str(value) for value in known]
        assert (" MiB" in row) == (actor.rss > 0) == (actor.pid > 0) == (actor.name != "brief")
    assert {actor.name: actor.restarts for actor in status.actors if actor.restarts} == {"clumsy": 1}
    assert status.dead_letters == 1
    assert letters == f"1 dead letter: {live.path / 'dead_letters.jsonl'}"
    assert len(live.lines("dead_letters.jsonl")) == 1


@pytest.mark.slow
def test_ps_fits_the_terminal(live: RunFolder, tmp_path: Path):
    ours, theirs = os.openpty()
    termios.tcsetwinsize(theirs, (24, 50))
    subprocess.run([*ROLECALL, "ps"], cwd=tmp_path, stdout=theirs, check=True)
    os.close(theirs)
    with os.fdopen(ours, "rb") as terminal:
        _, titles, *rest = terminal.read1().decode().splitlines()
    assert titles.startswith("ROLE")
    assert all(len(line) <= 50 for line in (titles, *rest[: len(NAMES)]))
    assert rest[len(NAMES)].startswith("no room for INCARNATION")


@pytest.mark.slow
def test_restart_is_no_death(live: RunFolder, tmp_path: Path):
    def actors() -> dict[str, ActorStatus]:
        return {actor.name: actor for actor in live.status().actors}

    def restarted(*names: str) -> dict[str, ActorStatus]:
        """Everybody, once these are up as new processes."""
        until(lambda: all(actors()[name].incarnation > before[name].incarnation for name in names))
        return until(lambda: (now := actors()) and {now[name].state for name in names} == {"up"} and now)

    before = actors()
    assert do(tmp_path, "restart", "pair") == f"restarting pair-0, pair-1 of {live.path.name}\n"
    now = restarted("pair-0", "pair-1")
    changed = {name for name in NAMES if now[name].pid != before[name].pid}
    assert changed == {"pair-0", "pair-1"}
    before = now
    assert do(tmp_path, "restart", "pair-1") == f"restarting pair-1 of {live.path.name}\n"
    now = restarted("pair-1")
    assert [name for name in NAMES if now[name].pid != before[name].pid] == ["pair-1"]
    assert {name for name in NAMES if now[name].restarts} == {"clumsy"}
    assert {event["actor"] for event in live.lines("events.jsonl") if event["event"] == "death"} == {"clumsy"}


@pytest.mark.slow
def test_who_cannot_be_restarted(live: RunFolder, tmp_path: Path):
    assert refused(tmp_path, "restart", "pear") == (
        2,
        f"run {live.path.name} has no role 'pear'; did you mean 'pair'? There are: pair, pair-0, pair-1, brief, "
        "clumsy, tripper",
    )
    code, text = refused(tmp_path, "restart", "brief")
    assert code == 1 and text.startswith("nobody is restarted: brief has no process now")


@pytest.mark.slow
@pytest.mark.parametrize("by", [lambda run: run.name, str], ids=["name", "folder"])
def test_stop_ends_the_run_that_is_named(live: RunFolder, tmp_path: Path, by: Callable[[Path], str]):
    create_run(tmp_path / "runs", "newer", {})
    assert do(tmp_path, "stop", by(live.path)) == f"asked {live.path.name} to stop\n"
    until(lambda: not live.live)
    stopped = {line["actor"] for line in live.lines("events.jsonl") if line.get("state") in ("done", "gone")}
    assert stopped == set(NAMES)
    assert refused(tmp_path, "stop", by(live.path)) == (2, f"run {live.path.name} is not live: it has ended")


def has_a_socket(pid: int) -> bool:
    for file in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # closed meanwhile
            if os.readlink(file).startswith("socket:"):
                return True
    return False


@pytest.mark.slow
@pytest.mark.parametrize("command", [["ps"], ["restart", "pair"], ["logs", "lost"]])
def test_a_supervisor_that_is_frozen_or_killed_is_named(live: RunFolder, tmp_path: Path, command: list[str]):
    pid = live.info.pid
    os.kill(pid, signal.SIGSTOP)
    code, text = refused(tmp_path, *command)
    assert code == 1 and text.startswith(f"the supervisor of {live.path.name} (pid {pid}) does not answer")
    asking = Command([*command, live.path.name], tmp_path)
    until(lambda: has_a_socket(asking.process.pid))
    os.kill(pid, signal.SIGKILL)
    code, out, err = asking.finish()
    assert code in (1, 2) and out == ""  # 2: it died before the question had left
    assert err.count("\n") == 1 and re.search("has ended|before it could answer|has no log of 'lost'", err)


def test_actors_of_other_machines_are_named_by_their_roles_too():
    actors = ["prompts", "rollout-0", "gpu-7-1/rollout-0", "gpu-7-1/rollout-1"]
    assert named("rollout", actors) == actors[1:]
    assert named("gpu-7-1/rollout-0", actors) == ["gpu-7-1/rollout-0"]
    assert named("gpu", actors) == []
