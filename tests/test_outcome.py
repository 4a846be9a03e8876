"""What a run says of itself: progress, result, curves, samples."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from msgspec import json
from rolecall import Unrecoverable
from rolecall.actors import curves, outcome
from rolecall.recipes import sync_grpo
from rolecall.runtime.runs import RunFolder, RunInfo
from rolecall.runtime.testing import LocalRun

from .fakes import fake_ring

PNG = b"\x89PNG\r\n\x1a\n"


@pytest.fixture
def finished(tmp_path: Path) -> tuple[LocalRun, RunFolder]:
    """A run that has ended, with the files the command line would have left."""
    local = LocalRun(fake_ring(steps=5, batch=4, max_staleness=1), folder=tmp_path, run="local")
    local.run()
    run = RunFolder(tmp_path)
    step_times = [line["time"] for line in run.lines("metrics.jsonl")]
    run.write_info(
        RunInfo(
            id="local", recipe="async_grpo", config={"store": "file://"}, started=step_times[0] - 2.5, pid=1
        )
    )
    events = [
        {"time": step_times[0], "actor": name, "event": "report", "values": reports[-1]}
        for name, reports in local.reports.items()
    ]
    events.append({"time": step_times[-1], "actor": "rollout-0", "event": "death", "reason": "killed"})
    (tmp_path / "events.jsonl").write_bytes(b"".join(json.encode(event) + b"\n" for event in events))
    return local, run


def newest(local: LocalRun) -> dict[str, dict[str, Any]]:
    return {name: reports[-1] for name, reports in local.reports.items()}


def test_the_result(finished: tuple[LocalRun, RunFolder]):
    _, run = finished
    started = run.info.started
    result = outcome.report(run, now=lambda: started + 12.5)
    evaluations = run.lines("eval.jsonl")
    assert result["steps"] == 5
    assert result["accuracy_before"] == evaluations[0]["accuracy"]
    assert result["accuracy_after"] == evaluations[-1]["accuracy"]
    assert (result["first_step_s"], result["wall_s"]) == (2.5, 12.5)
    assert (result["groups_trained"], result["groups_dropped"]) == (20, {})
    assert 0.0 <= result["trainer_wait_share"] <= 1.0
    assert result["bottleneck"] in ("trainer-bound", "rollout-bound", "balanced")
    assert sorted(path.name for path in Path(result["adapter"]).iterdir()) == ["adapter.bin", "canary.json"]
    assert (run.path / "curves.png").read_bytes().startswith(PNG)
    outcome.report(run)  # again: the adapter's folder is there already


def test_the_result_for_people(finished: tuple[LocalRun, RunFolder]):
    _, run = finished
    result: dict[str, Any] = {
        "steps": 5, "accuracy_before": 0.25, "accuracy_after": 0.875, "wall_s": 31.4, "first_step_s": 6.2,
        "restarts": 1, "adapter": "/runs/x/adapter", "groups_trained": 20,
        "groups_dropped": {"stale": 3, "duplicate": 1}, "trainer_wait_share": 0.125, "bottleneck": "balanced",
    }  # fmt: skip
    text = outcome.describe(run, result).splitlines()
    assert text[0] == "held-out accuracy 0.25 → 0.88 in 5 steps, 31 s (first step after 6 s), 1 restarts"
    assert (
        text[1]
        == "groups trained: 20; dropped: 3 stale, 1 duplicate; the trainer waited 12% of its time: balanced"
    )
    assert "  adapter  /runs/x/adapter" in text
    assert text[-1].startswith(f"try it: rolecall sample {run.path} ")
    assert "dropped: none;" in outcome.describe(run, result | {"groups_dropped": {}})


def test_the_progress_line_grows_with_what_is_known(finished: tuple[LocalRun, RunFolder]):
    local, _ = finished
    reports = newest(local)
    assert outcome.progress({}) == ""
    reports["trainer"] |= {
        "perf/step_s": 2.0,
        "perf/rollout_wait_s": 0.5,
        "reward": 0.5,
        "staleness/mean": 1.0,
    }
    reports["evaluator"] = {"step": 4, "accuracy": 0.75, "greedy": 0.5}
    for name in ("rollout-0", "rollout-1"):
        reports[name] = {"lease_wait_s": 1.0, "put_wait_s": 1.0, "sample_s": 2.0}
    assert outcome.progress({"trainer": reports["trainer"]}) == (
        "step 5/5 · reward 0.50 · staleness 1.0 · 2.0 groups/s · trainer waits 25%"
    )
    assert outcome.progress(reports) == (
        "step 5/5 · reward 0.50 · held-out accuracy 0.75 (step 4) · staleness 1.0 · 2.0 groups/s · "
        "trainer waits 25% · rollout waits 50%"
    )
    assert outcome.progress({"evaluator": reports["evaluator"]}) == "held-out accuracy 0.75 (step 4)"


def test_real_reports_make_a_progress_line(finished: tuple[LocalRun, RunFolder]):
    local, _ = finished
    assert outcome.progress(newest(local)).startswith("step 5/5 · reward ")


def test_curves_of_one_step_and_no_evaluation(tmp_path: Path):
    step = {"time": 12.0, "reward": 0.5, "staleness/mean": 0, "staleness/max": 0, "perf/rollout_wait_s": 1.0,
            "perf/step_s": 2.0}  # fmt: skip
    curves.draw(tmp_path / "curves.png", [step], [], [], started=10.0)
    assert (tmp_path / "curves.png").read_bytes().startswith(PNG)


def test_samples_side_by_side(tmp_path: Path):
    config = sync_grpo.Config(steps=1, batch=2, group_size=4, eval_problems=1)
    LocalRun(sync_grpo.build(config), folder=tmp_path).run()
    run = RunFolder(tmp_path)
    values = {"store": "file://", "model": "tiny", "temperature": 1.0, "max_tokens": 40, "lora": {},
              "seed": 0}  # fmt: skip
    run.write_info(RunInfo(id="local", recipe="sync_grpo", config=values, started=0.0, pid=1))
    with pytest.raises(Unrecoverable, match="has no adapter to sample from") as caught:
        outcome.sample(run, "Ann has 3 pens, buys 4 and loses 2. How many pens now?")
    assert caught.value.exit_code == 2
    (tmp_path / "events.jsonl").write_bytes(json.encode({"time": 1.0, "event": "state"}) + b"\n")
    outcome.report(run)
    text = outcome.sample(run, "Ann has 3 pens, buys 4 and loses 2. How many pens now?")
    assert "Ann has 3 pens" in text and "base" in text and "trained" in text
    assert text.count("####") >= outcome.SAMPLES
    assert text == outcome.sample(run, "Ann has 3 pens, buys 4 and loses 2. How many pens now?\n")


def test_samples_are_shown_as_they_are():
    shown = outcome.side_by_side("[b]Why?", [["[/INST] :smile:"], ["[red]4[/red]"]])
    assert all(text in shown for text in ("[b]Why?", "[/INST] :smile:", "[red]4[/red]"))
