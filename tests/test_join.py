"""Machines that join a run and leave it, as their users have it: from the command line."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from rolecall.actors.ledger import Ledger
from rolecall.runtime.errors import Unrecoverable
from rolecall.runtime.join import Joining, chosen_gpus, prepare_again
from rolecall.runtime.remote import GIVE_UP_S, NoAnswer
from rolecall.runtime.runs import RunFolder

from .commands import Command, lines, proxy_url, until
from .s3 import S3Server
from .test_run import check_ledger

TESTS = Path(__file__).parent
RECIPE = "graphs.hosts"


class Trainer:
    """A run without workers of its own. `join` adds a machine, with a folder of its own.

    lease_s: after how long without a word a machine is given up, if not as by `rolecall run`.
    """

    def __init__(self, folder: Path, s3: S3Server, *settings: str, lease_s: float | None = None) -> None:
        self.root = folder
        path = os.pathsep.join(filter(None, [str(TESTS), os.environ.get("PYTHONPATH", "")]))
        self.environment = s3.environment() | {"PYTHONPATH": path}
        store = f"store=s3://{s3.bucket}/{folder.name}"
        settings = ("rollout_workers=0", store, *settings)
        here = folder / "here"
        here.mkdir()
        if lease_s is None:
            chosen = [word for setting in settings for word in ("--set", setting)]
            self.command = Command(["run", RECIPE, "--proxy", "127.0.0.1:0", *chosen], here, self.environment)
        else:
            program = [sys.executable, str(TESTS / "impatient.py")]
            words = [RECIPE, str(lease_s), *settings]
            self.command = Command(words, here, self.environment, program=program)
        self.folder = self.command.run_folder()
        self.machines: list[Command] = []

    def join(self, *arguments: str) -> Command:
        url, there = proxy_url(self.folder), self.root / f"there{len(self.machines)}"
        there.mkdir()
        shutil.copyfile(self.folder / "token", there / "token")
        words = ["join", url, "--token-file", "token", *arguments]
        self.machines.append(Command(words, there, self.environment))
        return self.machines[-1]

    def steps(self) -> int:
        return len(lines(self.folder / "metrics.jsonl"))

    def goes_on(self) -> None:
        """Wait until more has been trained than before."""
        before = self.steps()
        until(lambda: self.steps() > before + 1)

    def loans(self) -> dict[int, str]:
        """What is lent, by the prompt source's own file, and to whom."""
        ledger = Ledger(self.folder / "state" / "prompts" / "ledger.jsonl")
        return {id: loan.worker for id, loan in ledger.loans.items()}

    def machines_reported(self) -> list[list[str]]:
        events = lines(self.folder / "events.jsonl")
        return [event["values"]["machines"] for event in events if "machines" in event.get("values", {})]

    def finish(self) -> tuple[str, str]:
        (self.folder / "hurry").touch()
        code, out, err = self.command.finish()
        assert code == 0, err
        for machine in self.machines:
            machine.finish(30)
            if machine.process.returncode == 0:  # an orderly end is no error of anybody's
                logs = (machine.run_folder() / "logs").glob("*.log")
                assert [log.name for log in logs if "Traceback" in log.read_text()] == []
        assert [pid for one in (self.command, *self.machines) for pid in one.processes()] == []
        return out, err


@pytest.fixture
def trainer(tmp_path: Path, s3_server: S3Server) -> Iterator[Callable[..., Trainer]]:
    made: list[Trainer] = []

    def make(*settings: str, **how: Any) -> Trainer:
        made.append(Trainer(tmp_path, s3_server, *settings, **how))
        return made[-1]

    yield make
    for run in made:  # of a test that failed: it must not go on beside the others
        for pid in run.command.processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


@pytest.mark.slow
def test_a_run_without_workers_says_so_and_goes_on_with_the_first_machine(
    trainer: Callable[..., Trainer],
):
    run = trainer("steps=30", "pace_s=0.3")
    first = run.join()
    run.goes_on()
    shown = Command(["ps"], run.root / "here").finish()[1]
    assert re.search(r"^\S+-1/rollout +- up ", shown, re.M), shown
    first.process.send_signal(signal.SIGTERM)
    code, out, err = first.finish(30)
    assert (code, out.splitlines()[-1]) == (0, "left the run"), err
    assert first.processes() == []
    assert run.loans() == {}  # before anybody could have noticed that it is gone
    until(lambda: run.machines_reported()[-1] == [])
    second = run.join()
    run.goes_on()
    out, _ = run.finish()
    assert second.process.returncode == 0
    line = f"waiting for a machine to join with: rolecall join {proxy_url(run.folder)} --token-file {run.folder}/token"
    assert out.count(f"no rollout worker yet: {line}\n") == 1
    assert out.count(f"the last rollout worker has left: {line}\n") == 1
    assert "other machines join" not in out and "died" not in out
    check_ledger(run.folder, 30, 4)


@pytest.mark.slow
def test_a_second_sigterm_does_not_wait_for_goodbyes(trainer: Callable[..., Trainer]):
    run = trainer("steps=1000", "pace_s=0.1")
    machine = run.join("--workers", "2")
    run.goes_on()
    there = RunFolder(machine.run_folder())

    def states() -> list[str]:
        if machine.process.poll() is not None:  # it held nothing just then, so there was no goodbye to say
            return ["stopping"]
        return [actor.state for actor in there.status().actors if actor.name.startswith("rollout")]

    [proxy] = [actor.pid for actor in RunFolder(run.folder).status().actors if actor.name == "proxy"]
    os.kill(proxy, signal.SIGSTOP)  # so nobody hears that they give their prompts back
    machine.process.send_signal(signal.SIGTERM)
    until(lambda: "stopping" in states())
    machine.process.send_signal(signal.SIGTERM)
    machine.process.wait(4)  # with goodbyes it would take 5 s and more
    assert machine.processes() == []
    assert run.loans() != {}  # whose turn comes when they have not been heard of for long
    os.kill(proxy, signal.SIGCONT)
    run.command.process.send_signal(signal.SIGTERM)
    assert run.command.finish(30)[0] == 130
    assert run.command.processes() == []


@pytest.mark.slow
def test_a_machine_that_was_given_up_joins_again_under_a_new_name(trainer: Callable[..., Trainer]):
    run = trainer("steps=24", "pace_s=0.3", "lease_s=1", lease_s=2.0)
    machine = run.join()
    run.goes_on()
    [name] = run.machines_reported()[-1]
    machine.signal(signal.SIGSTOP)
    until(lambda: run.machines_reported()[-1] == [])
    machine.signal(signal.SIGCONT)
    [again] = until(lambda: run.machines_reported()[-1])
    run.goes_on()
    run.finish()
    code, out, err = machine.finish()
    assert (code, err) == (0, "")
    host = name.rpartition("-")[0]
    assert (name, again) == (f"{host}-1", f"{host}-2")
    said = [line for line in out.splitlines() if name in line]
    assert said == [f"the run went on without {name}: this machine joins it again", f"{name} is {again} now"]
    assert out.splitlines()[-1] == "the run has finished"


@pytest.mark.slow
def test_a_machine_that_was_given_up_and_is_asked_to_stop_does_not_join_again(
    trainer: Callable[..., Trainer],
):
    run = trainer("steps=1000", "pace_s=0.1", "lease_s=1", lease_s=2.0)
    machine = run.join()
    run.goes_on()
    machine.signal(signal.SIGSTOP)
    until(lambda: run.machines_reported()[-1] == [])
    machine.process.send_signal(signal.SIGTERM)
    machine.signal(signal.SIGCONT)
    code, out, err = machine.finish(30)
    assert (code, out.splitlines()[-1]) == (0, "left the run"), err
    assert machine.processes() == [] and run.machines_reported()[-1] == []
    RunFolder(run.folder).stop()
    assert run.command.finish(30)[0] == 130


def test_a_machine_that_was_cut_off_tries_to_join_again_for_a_while():
    now, tries = 0.0, 0

    def prepared() -> Joining:
        nonlocal tries
        tries += 1
        raise NoAnswer("no run answers")

    def pause(seconds: float) -> None:
        nonlocal now
        now += seconds

    with pytest.raises(NoAnswer):
        prepare_again(prepared, lambda: now, pause)
    assert GIVE_UP_S < now < GIVE_UP_S + 2.0
    assert tries == now + 1  # each second


@pytest.mark.slow
def test_engine_and_gpus_are_a_machines_own(trainer: Callable[..., Trainer]):
    run = trainer("steps=8")
    code, _, err = run.join("--engine-python", "python3").finish()
    assert code == 2
    assert (
        err == "rolecall: --engine-python: recipe graphs.hosts has no setting 'engine_python': leave it out\n"
    )
    code, _, err = run.join("--gpus", "0,3", "--workers", "3").finish()
    assert code == 2 and "each needs one of its own" in err
    machine = run.join("--engine", "other", "--gpus", "1,3")
    run.finish()
    there = machine.run_folder()
    files = {path.name: path.read_text() for path in there.glob("*.environment")}
    assert files == {"rollout-0.environment": "other 1", "rollout-1.environment": "other 3"}
    check_ledger(run.folder, 8, 4)


@pytest.mark.parametrize(
    ("text", "seen", "gpus"),
    [
        ("", None, ()),
        ("2", None, ("0", "1")),
        ("2", "4,5,6", ("4", "5")),
        ("0,1,3", "4", ("0", "1", "3")),
        ("1,", None, ("1",)),
        ("GPU-8f2,MIG-77", None, ("GPU-8f2", "MIG-77")),
    ],
)
def test_gpus_that_are_meant(
    monkeypatch: pytest.MonkeyPatch, text: str, seen: str | None, gpus: tuple[str, ...]
):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if seen is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", seen)
    assert chosen_gpus(text) == gpus


@pytest.mark.parametrize(("text", "seen"), [("0", "1"), ("3", "0,1"), ("1", ""), ("0,0", "0"), ("0, 1", "0")])
def test_gpus_that_cannot_be(monkeypatch: pytest.MonkeyPatch, text: str, seen: str):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", seen)
    with pytest.raises(Unrecoverable, match=f"--gpus {text}: ") as caught:
        chosen_gpus(text)
    assert caught.value.exit_code == 2
