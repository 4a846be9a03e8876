"""curves.png: reward and accuracy over time, staleness, who waits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

__all__ = ["draw"]

Line = Mapping[str, Any]


def draw(
    path: Path, steps: Sequence[Line], evaluations: Sequence[Line], events: Sequence[Line], *, started: float
) -> None:
    """Draw the lines of metrics.jsonl, eval.jsonl and events.jsonl against seconds since `started`."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 9), layout="constrained")
    learning, stale, waiting = figure.subplots(3, 1, sharex=True)
    at = [step["time"] - started for step in steps]

    learning.plot(at, [step["reward"] for step in steps], color="C0", alpha=0.7, label="reward of the batch")
    seen = [evaluation["time"] - started for evaluation in evaluations]
    for key, style in (("accuracy", "o-"), ("greedy", "s--")):
        name = "held-out accuracy" + (", greedy" if key == "greedy" else "")
        learning.plot(seen, [evaluation[key] for evaluation in evaluations], style, label=name)
    learning.set(ylabel="reward, accuracy", ylim=(0, 1.02))

    mean, most = ([step[f"staleness/{key}"] for step in steps] for key in ("mean", "max"))
    stale.step(at, most, where="post", color="C3", alpha=0.4, label="oldest group")
    stale.step(at, mean, where="post", color="C3", label="mean of the batch")
    stale.set(ylabel="staleness, versions", ylim=(0, None))

    shares = [step["perf/rollout_wait_s"] / max(step["perf/step_s"], 1e-9) for step in steps]
    waiting.plot(at, shares, color="C2", label="trainer waits for groups")
    reports = [event for event in events if event["event"] == "report"]
    rounds = [
        (event["time"] - started, event["values"]) for event in reports if "lease_wait_s" in event["values"]
    ]
    for key, name in (
        ("lease_wait_s", "workers wait to be let ahead"),
        ("put_wait_s", "workers wait for the buffer"),
    ):
        whole = ("lease_wait_s", "sample_s", "put_wait_s")
        share = [values[key] / max(sum(values[part] for part in whole), 1e-9) for _, values in rounds]
        waiting.plot([at for at, _ in rounds], share, ".", alpha=0.6, label=name)
    waiting.set(ylabel="share of time waited", xlabel="seconds since the start", ylim=(-0.02, 1.02))

    for event in events:
        if event["event"] == "death":
            for axis in (learning, stale, waiting):
                axis.axvline(event["time"] - started, color="k", lw=0.8, ls=":")
    for axis in (learning, stale, waiting):
        axis.legend(loc="best", fontsize="small")
        axis.grid(alpha=0.3)
    figure.savefig(path, dpi=110)
