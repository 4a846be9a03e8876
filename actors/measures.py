"""What a GRPO run's folder says in numbers, and what several runs say together."""

from __future__ import annotations

import statistics
from bisect import bisect_right
from collections.abc import Sequence

from msgspec import Struct

from ..runtime.charts import Line
from ..runtime.runs import RunFolder

__all__ = ["Measures", "band", "bottleneck", "reached_s", "rollout_wait_share", "running_mean"]

Curve = list[tuple[float, float]]

POINTS = 80  # of a curve over several runs


class Measures(Struct, frozen=True, kw_only=True):
    """One run. Times are in seconds since its command was started, so that they include everybody's start.

    evaluations: (seconds, groups trained until then, accuracy). One counts from when its version was trained,
                 not from when the evaluator came to it.
    steps:       (seconds, groups trained until then) of each optimizer step; reward, staleness, trainer_waits (a
                 share of the step's time) belong to them.
    trainer_wait_share: of all steps together but the first, which waits for everybody's start, and the last, which
                 waits for all that is still under way.
    rollout_wait_share: of all workers together; None if they report nothing, as they do when the trainer asks them.
    """

    planned_steps: int
    problems: int
    evaluations: list[tuple[float, int, float]]
    steps: list[tuple[float, int]]
    reward: list[float]
    staleness: list[float]
    trainer_waits: list[float]
    staleness_max: int
    trainer_wait_share: float
    rollout_wait_share: float | None
    restarts: int
    dropped: int

    @classmethod
    def of(cls, run: RunFolder) -> Measures:
        """From the files of a run that has ended, however it did."""
        started, config = run.info.started, run.info.config
        lines = run.lines("metrics.jsonl")
        at: dict[int, tuple[float, int]] = {0: (0.0, 0)}
        for line in lines:
            at[line["step"]] = (line["time"] - started, at[line["step"] - 1][1] + len(line["groups"]))
        evaluations = [
            (
                line["time"] - started if line["step"] == 0 else at[line["step"]][0],
                at[line["step"]][1],
                line["accuracy"],
            )
            for line in run.lines("eval.jsonl")
            if line["step"] in at
        ]
        between = lines[1:-1]
        worked = sum(line["perf/step_s"] for line in between)
        waited = sum(line["perf/rollout_wait_s"] for line in between)
        events = run.lines("events.jsonl")
        return cls(
            planned_steps=config["steps"],
            problems=config["eval_problems"],
            evaluations=evaluations,
            steps=[at[line["step"]] for line in lines],
            reward=[line["reward"] for line in lines],
            staleness=[line["staleness/mean"] for line in lines],
            trainer_waits=[line["perf/rollout_wait_s"] / max(line["perf/step_s"], 1e-9) for line in lines],
            staleness_max=max((line["staleness/max"] for line in lines), default=0),
            trainer_wait_share=waited / worked if worked else 0.0,
            rollout_wait_share=rollout_wait_share([e["values"] for e in events if e["event"] == "report"]),
            restarts=sum(e["event"] == "death" and e["restart_in_s"] is not None for e in events),
            dropped=sum(lines[-1]["dropped"].values()) if lines else 0,
        )

    @property
    def final(self) -> float | None:
        """Accuracy at the last evaluation."""
        return self.evaluations[-1][2] if self.evaluations else None

    @property
    def wall_s(self) -> float:
        """Until the last optimizer step."""
        return self.steps[-1][0] if self.steps else 0.0

    @property
    def groups_per_s(self) -> float:
        """Trained, from the end of the first step on."""
        if len(self.steps) < 2:
            return 0.0
        (first_s, first), (last_s, last) = self.steps[0], self.steps[-1]
        return (last - first) / max(last_s - first_s, 1e-9)


def rollout_wait_share(reports: Sequence[dict[str, float]]) -> float | None:
    """The share of their time that the workers waited, by what they reported of it; None if they did not."""
    rounds = [values for values in reports if "lease_wait_s" in values]
    waited = sum(values["lease_wait_s"] + values["put_wait_s"] for values in rounds)
    whole = waited + sum(values["sample_s"] for values in rounds)
    return waited / whole if whole else None


def bottleneck(trainer_waits: float, workers_wait: float) -> str:
    """Who is waited for: "trainer-bound", "rollout-bound" or "balanced". Both are shares of their time."""
    if trainer_waits > workers_wait + 0.1:
        return "rollout-bound"
    return "trainer-bound" if workers_wait > trainer_waits + 0.1 else "balanced"


def reached_s(measures: Measures, target: float) -> float | None:
    """When accuracy reached `target`: between two evaluations as if it had grown evenly; None: it never did."""
    before: tuple[float, float] | None = None
    for at, _, accuracy in measures.evaluations:
        if accuracy >= target:
            if before is None:
                return at
            return before[0] + (at - before[0]) * (target - before[1]) / (accuracy - before[1])
        before = at, accuracy
    return None


def running_mean(values: Sequence[float], count: int = 5) -> list[float]:
    """Of each value and those before it, `count` together."""
    return [statistics.fmean(values[max(0, at + 1 - count) : at + 1]) for at in range(len(values))]


def band(label: str, color: int, curves: Sequence[Curve]) -> Line:
    """Mean, lowest and highest of several runs' curves, as far as all of them go."""
    curves = [curve for curve in curves if curve]
    if not curves:
        return Line(label, [], color)
    first, last = max(curve[0][0] for curve in curves), min(curve[-1][0] for curve in curves)
    points: list[tuple[float, float, float, float]] = []
    for place in range(POINTS + 1 if last > first else 1):
        x = first + (last - first) * place / POINTS
        values = [_value_at(curve, x) for curve in curves]
        points.append((x, statistics.fmean(values), min(values), max(values)))
    return Line(label, points, color)


def _value_at(curve: Curve, x: float) -> float:
    """Between its points as if it went straight, outside of them as at the nearest."""
    place = bisect_right(curve, x, key=lambda point: point[0])
    if place in (0, len(curve)):
        return curve[0 if place == 0 else -1][1]
    (x0, y0), (x1, y1) = curve[place - 1], curve[place]
    return y0 + (y1 - y0) * (x - x0) / (x1 - x0)
