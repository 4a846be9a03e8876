"""Runs that are killed as a whole, at any moment, and resumed: nothing is trained twice, nothing is lost."""

from __future__ import annotations

import json
import os
import shutil
import signal
from pathlib import Path

import pytest
from rolecall.recipes import sync_grpo
from rolecall.runtime.runs import RunFolder
from rolecall.runtime.store import Store
from rolecall.runtime.testing import LocalRun

from .commands import Command, lines, until
from .s3 import S3Server
from .test_run import SMALL, check_ledger

pytestmark = pytest.mark.slow


def digest(store: str, folder: Path) -> str:
    head = Store(store).open(folder.name, folder).head()
    assert head is not None
    return head.digest


def kill_everybody(command: Command, folder: Path, *, after_steps: int) -> None:
    """As a machine dies: no process is spared, and none says goodbye."""
    until(lambda: len(lines(folder / "metrics.jsonl")) >= after_steps)
    for pid in [command.process.pid, *command.processes()]:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue  # its supervisor's death was its own
    command.finish(30)
    until(lambda: not command.processes())


def test_a_synchronous_run_killed_and_resumed_learns_the_same_bit_for_bit(tmp_path: Path):
    """As one that runs undisturbed, all of it in one process."""
    config = sync_grpo.Config(steps=8, batch=8, eval_problems=8, eval_every=4)
    LocalRun(sync_grpo.build(config), folder=tmp_path / "quiet", run="quiet").run()

    killed = Command(["run", "sync_grpo", *SMALL], tmp_path)
    folder = killed.run_folder()
    kill_everybody(killed, folder, after_steps=3)
    resumed = Command(["run", "sync_grpo", "--json", "--resume", folder.name], tmp_path)
    code, out, err = resumed.finish()
    assert code == 0, err
    assert json.loads(out)["groups_trained"] == 64
    check_ledger(folder, 8, 8)
    assert digest("file://", folder) == digest("file://", tmp_path / "quiet")


def test_an_asynchronous_run_whose_machine_is_lost_goes_on_from_its_bucket(
    tmp_path: Path, s3_server: S3Server
):
    store = ["--set", f"store=s3://{s3_server.bucket}/resumed"]
    for name in ("lost", "found"):
        (tmp_path / name).mkdir()
    lost = Command(["run", "async_grpo", *SMALL, *store], tmp_path / "lost", s3_server.environment())
    folder = lost.run_folder()
    kill_everybody(lost, folder, after_steps=4)
    name = folder.name
    shutil.rmtree(folder)
    command = ["run", "async_grpo", "--json", *SMALL, *store, "--resume", name]
    found = Command(command, tmp_path / "found", s3_server.environment())
    code, _, err = found.finish()
    assert code == 0, err
    folder = found.run_folder()
    assert folder.name == RunFolder(folder).info.id == name
    assert max(line["staleness/max"] for line in check_ledger(folder, 8, 8)) <= 2
    evaluated = [line["step"] for line in lines(folder / "eval.jsonl")]
    assert (evaluated[0], evaluated[-1]) == (0, 8)
