"""The main job as a user runs it: whole runs, real processes, real kills."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import msgspec
import pytest
from rolecall.runtime.runs import RunFolder

from .commands import Command, lines, until
from .s3 import S3Server

pytestmark = pytest.mark.slow

SMALL = ["--set", "steps=8", "--set", "batch=8", "--set", "eval_problems=8", "--set", "eval_every=4"]
ROLES = ["prompts", "reward", "buffer", "rollout-0", "trainer", "evaluator"]
RESULT = {
    "recipe", "steps", "accuracy_before", "accuracy_after", "wall_s", "first_step_s", "adapter", "restarts",
    "groups_trained", "groups_dropped", "trainer_wait_share", "bottleneck",
}  # fmt: skip


def check_result(out: str, **expected: Any) -> dict[str, Any]:
    """What --json prints: one object, on one line, with the same keys for every recipe, and these values."""
    assert out.count("\n") == 1
    result = msgspec.json.decode(out)
    assert set(result) == RESULT
    assert {key: result[key] for key in expected} == expected
    assert 0 < result["first_step_s"] <= result["wall_s"]
    return result


def check_ledger(folder: Path, steps: int, batch: int) -> list[dict[str, Any]]:
    """Each step is there once, each group was trained once, and none is missing."""
    metrics = lines(folder / "metrics.jsonl")
    assert [line["step"] for line in metrics] == list(range(1, steps + 1))
    trained = [id for line in metrics for id in line["groups"]]
    assert sorted(trained) == list(range(steps * batch))
    return metrics


def check_main_job(folder: Path, steps: int) -> None:
    metrics = check_ledger(folder, steps, 16)
    assert max(line["staleness/max"] for line in metrics) <= 2
    fresh = [line["fresh/ratio_mean"] for line in metrics if "fresh/ratio_mean" in line]
    assert fresh and all(abs(ratio - 1.0) < 0.005 for ratio in fresh)
    assert (folder / "curves.png").stat().st_size > 10_000
    evaluated = [line["step"] for line in lines(folder / "eval.jsonl")]
    assert (evaluated[0], evaluated[-1]) == (0, steps)


def test_the_main_job_learns_to_show_its_working_over_s3(tmp_path: Path, s3_server: S3Server):
    """The README's first line is the same over a folder."""
    store = f"store=s3://{s3_server.bucket}/main-job"
    command = Command(["run", "async_grpo", "--json", "--set", store], tmp_path, s3_server.environment())
    code, out, err = command.finish(180)
    assert code == 0, err
    result = check_result(
        out, recipe="async_grpo", steps=40, groups_trained=640, restarts=0, groups_dropped={}
    )
    assert result["accuracy_before"] <= 0.40
    assert result["accuracy_after"] >= 0.85
    assert (Path(result["adapter"]) / "adapter_model.safetensors").exists()
    check_main_job(command.run_folder(), 40)
    assert command.processes() == []


def test_a_run_with_a_tool_learns_to_use_it_whoever_is_killed(tmp_path: Path):
    command = Command(["run", "tool_grpo", "--json", "--set", "eval_every=40"], tmp_path)
    folder = command.run_folder()
    for role, at_step in (("environment", 3), ("rollout-1", 8)):
        _kill(folder, role, at_step)
    code, out, err = command.finish(240)
    assert code == 0, err
    result = check_result(out, recipe="tool_grpo", restarts=2)
    assert result["accuracy_before"] <= 0.35
    assert result["accuracy_after"] >= 0.85
    assert lines(folder / "eval.jsonl")[-1]["greedy"] >= 0.95
    metrics = check_ledger(folder, 40, 16)
    fresh = [line["fresh/ratio_mean"] for line in metrics if "fresh/ratio_mean" in line]
    assert all(abs(ratio - 1.0) < 0.005 for ratio in fresh)
    assert command.processes() == []


# Each kill waits for a step after the one before, so it finds a run that has gone on. Six in one run would be too
# many: a sixth death within a minute ends it.
@pytest.mark.parametrize(
    ("recipe", "max_staleness", "roles"),
    [("async_grpo", 2, ROLES[::2]), ("one_step_off", 1, ROLES[1::2])],
    ids=["async_grpo", "one_step_off"],
)
def test_killed_roles_cost_nothing_but_time(
    tmp_path: Path, recipe: str, max_staleness: int, roles: list[str]
):
    command = Command(["run", recipe, "--json", *SMALL], tmp_path)
    folder = command.run_folder()
    for role, at_step in zip(roles, (1, 3, 5), strict=True):
        _kill(folder, role, at_step)
    code, out, err = command.finish()
    assert code == 0, err
    check_result(out, recipe=recipe, steps=8, groups_trained=64, restarts=3)
    for role in roles:
        assert err.count(f"{role} died: killed by SIGKILL") == 1
    metrics = check_ledger(folder, 8, 8)
    assert max(line["staleness/max"] for line in metrics) <= max_staleness
    assert lines(folder / "eval.jsonl")[-1]["step"] == 8
    assert command.processes() == []


def _kill(folder: Path, role: str, at_step: int) -> None:
    """Once that many steps have been made."""
    until(lambda: len(lines(folder / "metrics.jsonl")) >= at_step)
    [pid] = [actor.pid for actor in RunFolder(folder).status().actors if actor.name == role]
    assert pid, f"{role} has not been started"
    os.kill(pid, signal.SIGKILL)


def test_a_bucket_that_dies_twice_costs_nothing_but_time(tmp_path: Path):
    """Also with completions that go on under new versions."""
    (tmp_path / "s3").mkdir()
    server = S3Server(tmp_path / "s3")
    server.start()
    try:
        store = f"store=s3://{server.bucket}/killed"
        arguments = ["run", "inflight_grpo", "--json", *SMALL, "--set", store]
        command = Command(arguments, tmp_path, server.environment())
        folder = command.run_folder()
        for at_step in (2, 5):
            until(lambda at_step=at_step: len(lines(folder / "metrics.jsonl")) >= at_step)
            server.kill()
            server.restart()
        code, out, err = command.finish()
    finally:
        server.stop()
    assert code == 0, err
    check_result(out, recipe="inflight_grpo", steps=8, groups_trained=64, restarts=0)
    assert max(line["staleness/max"] for line in check_ledger(folder, 8, 8)) <= 4
    assert command.processes() == []


def test_sync_goes_on_after_kills_of_a_worker_and_of_the_trainer(tmp_path: Path):
    command = Command(["run", "sync_grpo", "--json", *SMALL], tmp_path)
    folder = command.run_folder()
    for role, at_step in (("rollout-1", 2), ("trainer", 4)):
        _kill(folder, role, at_step)
    code, out, err = command.finish()
    assert code == 0, err
    check_result(out, recipe="sync_grpo", steps=8, groups_trained=64, restarts=2)
    metrics = check_ledger(folder, 8, 8)
    assert {line["staleness/max"] for line in metrics} == {0}
    assert command.processes() == []


def test_a_ctrl_c_leaves_no_process(tmp_path: Path):
    """Nor do other signals: tests/test_nobody_left.py tries them on smaller actors."""
    command = Command(["run", "async_grpo", *SMALL, "--set", "steps=1000"], tmp_path)
    folder = command.run_folder()
    until(lambda: lines(folder / "metrics.jsonl"))
    command.process.send_signal(signal.SIGINT)
    code, _, err = command.finish(30)
    assert code == 130 and "stopped by request" in err
    assert command.processes() == []
