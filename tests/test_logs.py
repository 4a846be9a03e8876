"""Logs of roles: read once, followed as they grow, over restarts, until the run has ended."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from rolecall.runtime.cli import main
from rolecall.runtime.logs import LOOK_EVERY_S, log_names, read_logs
from rolecall.runtime.runs import RunFolder, create_run

from .commands import Command, until


def write(path: Path, text: str) -> None:
    with path.open("a") as file:
        file.write(text)


def once(folder: Path, name: str) -> list[str]:
    return list(read_logs(folder, name, ended=lambda: True))


def story(folder: Path, name: str, *acts: Callable[[], object]) -> list[str]:
    """What a follower reads while these happen, each between two of its looks."""
    left = list(acts)

    def sleep(seconds: float) -> None:
        assert seconds == LOOK_EVERY_S
        left.pop(0)()

    return list(read_logs(folder, name, ended=lambda: not left, sleep=sleep))


def test_one_log_is_given_as_it_is(tmp_path: Path):
    (tmp_path / "trainer.log").write_bytes(b"one\n\n  two\r\n\xff three | \xe2\x88\x91\nno end")
    assert once(tmp_path, "trainer") == ["one", "", "  two\r", "\ufffd three | ∑", "no end"]


def test_replicas_are_told_apart_and_counted_as_numbers(tmp_path: Path):
    for name in ("rollout-10", "rollout-9", "rollout-0", "prompts", "forkserver", "rollout_b"):
        write(tmp_path / f"{name}.log", f"{name} here\n")
    write(tmp_path / "notes.txt", "no log\n")
    assert log_names(tmp_path) == [
        "forkserver",
        "prompts",
        "rollout-0",
        "rollout-9",
        "rollout-10",
        "rollout_b",
    ]
    assert once(tmp_path, "rollout") == [
        "rollout-0 | rollout-0 here",
        "rollout-9 | rollout-9 here",
        "rollout-10 | rollout-10 here",
    ]
    assert once(tmp_path, "rollout-9") == ["rollout-9 here"]
    assert once(tmp_path, "forkserver") == ["forkserver here"]
    assert once(tmp_path / "nowhere", "trainer") == []


def test_a_follower_reads_what_comes_and_new_replicas(tmp_path: Path):
    one, two = tmp_path / "rollout-0.log", tmp_path / "rollout-1.log"
    write(one, "first\n")
    assert story(
        tmp_path,
        "rollout",
        lambda: write(one, "second\nthi"),
        lambda: write(two, "hello\n"),
        lambda: write(one, "rd\n"),
        lambda: None,
        lambda: write(two, "again\n"),
    ) == [
        "rollout-0 | first",
        "rollout-0 | second",
        "rollout-1 | hello",
        "rollout-0 | third",
        "rollout-1 | again",
    ]


def test_a_line_that_is_never_ended_is_given_at_the_end(tmp_path: Path):
    log = tmp_path / "trainer.log"
    euro = "€".encode()
    assert story(
        tmp_path,
        "trainer",
        lambda: log.write_bytes(b"price: " + euro[:1]),
        lambda: log.open("ab").write(euro[1:]),
    ) == ["price: €"]


def test_what_is_written_just_before_the_end_is_read(tmp_path: Path):
    log = tmp_path / "trainer.log"

    def ended() -> bool:
        write(log, "last words\n")
        return True

    assert list(read_logs(tmp_path, "trainer", ended=ended)) == ["last words"]


def test_a_log_that_was_emptied_is_read_from_its_beginning(tmp_path: Path):
    log = tmp_path / "trainer.log"
    write(log, "a long line\nand a begun one")
    acts = [lambda: log.write_text(""), lambda: write(log, "new\n")]
    assert story(tmp_path, "trainer", *acts) == ["a long line", "new"]


def test_a_role_without_a_log_is_told_of_those_there_are(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    run = create_run(tmp_path, "async_grpo", {})
    for args in (["trainr"], ["trainr", "-f"], ["../run"], [""]):
        assert main(["logs", *args, "--runs", str(tmp_path)]) == 2
        assert "There are: none" in capsys.readouterr().err
    (run.path / "logs").mkdir()
    for name in ("trainer", "rollout-0", "forkserver"):
        write(run.path / "logs" / f"{name}.log", "here\n")
    assert main(["logs", "trainr", run.path.name, "--runs", str(tmp_path)]) == 2
    assert capsys.readouterr().err == (
        f"rolecall: run {run.path.name} has no log of 'trainr'; did you mean 'trainer'? There are: forkserver, "
        "rollout, rollout-0, trainer\n"
    )
    for follow in ([], ["-f"]):  # a run that has ended is not waited for
        assert main(["logs", *follow, "rollout", "--runs", str(tmp_path)]) == 0
        assert capsys.readouterr().out == "rollout-0 | here\n"


TALKERS = """
from dataclasses import dataclass

from rolecall import Actor, Graph

class Talker(Actor):
    def on_start(self):
        print(self.name, "begins")

    def on_stop(self):
        print("ends")

class Gate(Actor):
    def on_start(self):
        open("gate").read()

@dataclass
class Config:
    pass

def build(config):
    graph = Graph("talkers")
    graph.place(graph.add("talker", Talker), replicas=2)
    graph.add("gate", Gate)
    graph.add("late", Talker)
    return graph
"""


@pytest.fixture
def live(tmp_path: Path) -> Iterator[Command]:
    """A run of two talkers, who are up, and of one who is started when somebody has opened the pipe `gate`."""
    (tmp_path / "talkers.py").write_text(TALKERS)
    os.mkfifo(tmp_path / "gate")
    run = Command(["run", "talkers.py"], tmp_path, {"PYTHONUNBUFFERED": ""})
    logs = run.run_folder() / "logs"
    try:
        until(lambda: all(once(logs, f"talker-{number}") for number in (0, 1)))
        yield run
    finally:
        run.process.kill()
        run.finish()


def do(folder: Path, *arguments: str) -> str:
    code, out, err = Command(list(arguments), folder).finish()
    assert (code, err) == (0, "")
    return out


class Follower:
    """A running `rolecall logs ROLE -f`."""

    def __init__(self, folder: Path, role: str) -> None:
        self.command = Command(["logs", role, "-f"], folder)
        assert self.command.process.stdout is not None
        self.stdout = self.command.process.stdout

    def read(self, count: int) -> list[str]:
        """The next lines (waits for them), without the order in which two files were looked at."""
        return sorted(self.stdout.readline() for _ in range(count))


BEGIN = ["talker-0 | talker-0 begins\n", "talker-1 | talker-1 begins\n"]


@pytest.mark.slow
def test_a_follower_sees_restarts_and_ends_with_the_run(live: Command, tmp_path: Path):
    follower = Follower(tmp_path, "talker")
    assert follower.read(2) == BEGIN
    assert do(tmp_path, "restart", "talker-1") == f"restarting talker-1 of {live.run_folder().name}\n"
    assert follower.read(2) == ["talker-1 | ends\n", "talker-1 | talker-1 begins\n"]
    os.kill(live.process.pid, signal.SIGSTOP)
    assert do(tmp_path, "logs", "talker-0") == "talker-0 begins\n"  # needs no supervisor
    os.kill(live.process.pid, signal.SIGCONT)
    do(tmp_path, "stop")
    code, out, err = follower.command.finish()
    assert (code, sorted(out.splitlines()), err) == (0, ["talker-0 | ends", "talker-1 | ends"], "")
    assert live.finish()[0] == 130
    assert do(tmp_path, "logs", "talker-0", live.run_folder().name) == "talker-0 begins\nends\n"
    assert do(tmp_path, "logs", "-f", "talker-1") == "talker-1 begins\nends\ntalker-1 begins\nends\n"


@pytest.mark.slow
def test_a_role_that_has_not_started_can_be_followed(live: Command, tmp_path: Path):
    assert do(tmp_path, "logs", "late") == ""
    assert "late" not in log_names(live.run_folder() / "logs")
    follower = Follower(tmp_path, "late")
    (tmp_path / "gate").open("w").close()
    assert follower.read(1) == ["late begins\n"]
    live.process.kill()  # a follower ends with its run however that ends
    assert follower.command.finish() == (0, "", "")


@pytest.mark.slow
def test_an_interrupt_ends_following_and_not_the_run(live: Command, tmp_path: Path):
    follower = Follower(tmp_path, "talker")
    assert follower.read(2) == BEGIN
    follower.command.process.send_signal(signal.SIGINT)
    assert follower.command.finish() == (130, "", "")
    assert RunFolder(live.run_folder()).live


@pytest.mark.slow
def test_nobody_is_followed_for_a_reader_that_has_gone(live: Command, tmp_path: Path):
    follower = Follower(tmp_path, "talker-0")
    assert follower.read(1) == ["talker-0 begins\n"]
    follower.stdout.close()
    do(tmp_path, "restart", "talker-0")
    assert follower.command.process.wait(60) == 0
