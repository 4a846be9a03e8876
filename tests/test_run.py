"""The main job as a user runs it: whole runs, real processes, real kills."""

from __future__ import annotations

import os
import random
import signal
from pathlib import Path
from typing import Any

import msgspec
import pytest
from rolecall.runtime.runs import RunFolder

from .commands import Command, lines, proxy_url, until
from .s3 import S3Server

pytestmark = pytest.mark.slow

SMALL = ["--set", "steps=8", "--set", "batch=8", "--set", "eval_problems=32", "--set", "eval_every=4"]
ROLES = ["prompts", "reward", "buffer", "rollout-0", "trainer", "evaluator"]


def _check_ledger(folder: Path, steps: int, batch: int) -> list[dict[str, Any]]:
    """Each step is there once, each group was trained once, and none is missing."""
    metrics = lines(folder / "metrics.jsonl")
    assert [line["step"] for line in metrics] == list(range(1, steps + 1))
    trained = [id for line in metrics for id in line["groups"]]
    assert sorted(trained) == list(range(steps * batch))
    return metrics


def test_the_main_job_learns_to_show_its_working(tmp_path: Path):
    command = Command(["run", "async_grpo", "--json"], tmp_path)
    code, out, err = command.finish(180)
    assert code == 0, err
    result = msgspec.json.decode(out)
    assert result["accuracy_before"] <= 0.40
    assert result["accuracy_after"] >= 0.85
    assert result["groups_trained"] == 640
    metrics = _check_ledger(command.run_folder(), 40, 16)
    assert max(line["staleness/max"] for line in metrics) <= 2
    fresh = [line["fresh/ratio_mean"] for line in metrics if "fresh/ratio_mean" in line]
    assert fresh and all(abs(ratio - 1.0) < 0.005 for ratio in fresh)
    assert (Path(result["adapter"]) / "adapter_model.safetensors").exists()
    assert (command.run_folder() / "curves.png").stat().st_size > 10_000
    assert command.processes() == []

    shown = Command(["sample", str(command.run_folder()), "Ann has 3 pens, buys 4 and loses 2. How many pens now?"],
                    tmp_path)  # fmt: skip
    code, out, err = shown.finish()
    assert code == 0, err
    assert "base" in out and "trained" in out and out.count("#### ") >= 4


def test_the_main_job_over_s3(tmp_path: Path, s3_server: S3Server):
    store = f"store=s3://{s3_server.bucket}/main-job"
    command = Command(["run", "async_grpo", "--json", "--set", store], tmp_path, s3_server.environment())
    code, out, err = command.finish(180)
    assert code == 0, err
    assert msgspec.json.decode(out)["accuracy_after"] >= 0.85
    _check_ledger(command.run_folder(), 40, 16)


@pytest.mark.parametrize("role", ROLES)
def test_a_killed_role_costs_nothing_but_time(tmp_path: Path, role: str):
    command = Command(["run", "async_grpo", "--json", *SMALL], tmp_path)
    folder = command.run_folder()
    at_step = random.Random(role).randint(1, 4)
    until(lambda: len(lines(folder / "metrics.jsonl")) >= at_step)
    actor = next(actor for actor in RunFolder(folder).status().actors if actor.name == role)
    os.kill(actor.pid, signal.SIGKILL)
    code, out, err = command.finish()
    assert code == 0, err
    assert msgspec.json.decode(out)["restarts"] == 1
    assert f"{role} died: killed by SIGKILL" in err
    metrics = _check_ledger(folder, 8, 8)
    assert max(line["staleness/max"] for line in metrics) <= 2
    assert lines(folder / "eval.jsonl")[-1]["final"]
    assert command.processes() == []


def test_sync_goes_on_after_kills_of_a_worker_and_of_the_trainer(tmp_path: Path):
    command = Command(["run", "sync_grpo", "--json", *SMALL], tmp_path)
    folder = command.run_folder()
    for role, at_step in (("rollout-1", 2), ("trainer", 4)):
        until(lambda at_step=at_step: len(lines(folder / "metrics.jsonl")) >= at_step)
        actor = next(actor for actor in RunFolder(folder).status().actors if actor.name == role)
        os.kill(actor.pid, signal.SIGKILL)
    code, _, err = command.finish()
    assert code == 0, err
    metrics = _check_ledger(folder, 8, 8)
    assert {line["staleness/max"] for line in metrics} == {0}
    assert command.processes() == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_stop_leaves_no_process(tmp_path: Path, number: signal.Signals):
    command = Command(["run", "async_grpo", *SMALL, "--set", "steps=1000"], tmp_path)
    folder = command.run_folder()
    until(lambda: lines(folder / "metrics.jsonl"))
    command.process.send_signal(number)
    code, _, err = command.finish(30)
    assert code == 130 and "stopped by request" in err
    assert command.processes() == []


def test_ps_and_stop_from_another_terminal(tmp_path: Path):
    command = Command(["run", "async_grpo", *SMALL, "--set", "steps=1000"], tmp_path)
    folder = command.run_folder()
    until(lambda: lines(folder / "metrics.jsonl"))
    code, out, err = Command(["ps"], tmp_path).finish()
    assert code == 0, err
    assert all(role in out for role in ROLES)
    code, out, err = Command(["stop", folder.name], tmp_path).finish()
    assert code == 0, err
    code, _, _ = command.finish(30)
    assert code == 130
    assert command.processes() == []
    code, _, err = Command(["ps", folder.name], tmp_path).finish()
    assert code == 2 and "has ended" in err


def test_a_machine_that_only_dials_out_joins_and_its_groups_are_trained(tmp_path: Path, s3_server: S3Server):
    here, there = tmp_path / "here", tmp_path / "there"
    here.mkdir()
    there.mkdir()
    store = f"store=s3://{s3_server.bucket}/join"
    arguments = ["run", "async_grpo", "--json", "--proxy", "127.0.0.1:0", *SMALL,
                 "--set", "rollout_workers=0", "--set", store]  # fmt: skip
    run = Command(arguments, here, s3_server.environment())
    folder = run.run_folder()
    url = proxy_url(folder)
    (there / "token").write_text((folder / "token").read_text())
    assert (folder / "token").stat().st_mode & 0o077 == 0
    join = Command(["join", url, "--token-file", "token", "--workers", "2"], there, s3_server.environment())
    code, out, err = run.finish(180)
    assert code == 0, err
    metrics = _check_ledger(folder, 8, 8)
    workers = {worker for line in metrics for worker in line["workers"]}
    assert len(workers) == 2 and all("/rollout-" in worker for worker in workers)
    token = (folder / "token").read_text().strip()
    code, out, err = join.finish(60)
    assert code == 0, err
    assert "the run has finished" in out
    for path in [*folder.rglob("*"), *there.rglob("*")]:
        if path.is_file() and path.name != "token":
            assert token.encode() not in path.read_bytes(), path
    assert run.processes() == [] and join.processes() == []
