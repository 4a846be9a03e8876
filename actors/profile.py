"""What a run's parts take, measured from its own records: what a simulation of other runs is made of.

    profile = measure(run)        metrics.jsonl, events.jsonl ─▶ distributions, each with its unit and where it is from
    profile.tokens.draw(0.5)      the median

No means alone: who waits for the slowest of many waits for a tail.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

import msgspec

from ..runtime.errors import Unrecoverable
from ..runtime.runs import RunFolder

__all__ = ["Line", "Measure", "Profile", "measure", "quantiles", "uniform"]

POINTS = 21  # of a distribution that are kept: every twentieth part of it


class Measure(msgspec.Struct, frozen=True, kw_only=True):
    """A distribution, as its quantiles at even distances from the least to the largest.

    source: where they are from: a file of the run, or a publication.
    """

    unit: str
    source: str
    quantiles: list[float]

    def draw(self, u: float) -> float:
        """The quantile at `u`, 0 ≤ u < 1, linear between two."""
        at = u * (len(self.quantiles) - 1)
        low = int(at)
        high = min(low + 1, len(self.quantiles) - 1)
        return self.quantiles[low] + (at - low) * (self.quantiles[high] - self.quantiles[low])

    @property
    def mean(self) -> float:
        """Of what `draw` gives."""
        values = self.quantiles
        if len(values) == 1:
            return values[0]
        return (sum(values) - (values[0] + values[-1]) / 2) / (len(values) - 1)


class Line(msgspec.Struct, frozen=True, kw_only=True):
    """Something that takes (fixed + each × n) · ratio, with a ratio that is drawn from `ratios`."""

    unit: str
    source: str
    fixed: float
    each: float
    ratios: list[float]

    def at(self, n: float, u: float = -1.0) -> float:
        """For n, and the ratio that is drawn at `u`; without one the mean ratio."""
        ratios = Measure(unit="", source="", quantiles=self.ratios)
        return (self.fixed + self.each * n) * (ratios.mean if u < 0 else ratios.draw(u))


class Profile(msgspec.Struct, frozen=True, kw_only=True):
    """tokens: of a completion. sample: seconds of one step of an engine, by completions under way.

    train: seconds of an optimizer step, by the completions' tokens in its batch. publish: of a version and its
    checkpoint. apply: of a worker's swap. score: of one group. start, restart: until a process is ready.
    dropped: groups dropped for each one trained, by reason; what a simulation is to find, not what it is told.
    """

    about: str
    tokens: Measure
    sample: Line
    train: Line
    publish: Measure
    apply: Measure
    score: Measure
    start: Measure
    restart: Measure
    dropped: dict[str, float] = {}


def uniform(key: str) -> float:
    """Between 0 and 1, the same for the same key."""
    return int.from_bytes(hashlib.blake2b(key.encode(), digest_size=7).digest()) / 2**56


def quantiles(values: Iterable[float]) -> list[float]:
    """At most POINTS of them."""
    ordered = sorted(values)
    if len(ordered) <= 1:
        return ordered
    whole = Measure(unit="", source="", quantiles=ordered)
    return [float(f"{whole.draw(at / (POINTS - 1)):.6g}") for at in range(POINTS)]


def measure(run: RunFolder) -> Profile:
    """The profile of a finished run. Raises Unrecoverable (exit code 2) if its records don't have what it takes."""
    steps, events = run.lines("metrics.jsonl"), run.lines("events.jsonl")
    reports = [event for event in events if event["event"] == "report"]
    workers = [event for event in reports if "engine_steps" in event["values"]]
    if len(steps) < 3 or not workers:
        raise Unrecoverable(
            f"run {run.path.name} has {len(steps)} optimizer steps and {len(workers)} reports of workers, too few to "
            "measure: give one that has made at least 3 steps, with a rollout worker of this release",
            exit_code=2,
        )
    lengths = [length for event in workers for length in event["values"]["lengths"]]
    scores = [took for event in reports for took in event["values"].get("score_s", ())]
    later = steps[1:]  # the first waits for everybody to start, and warms up
    sequences = run.info.config["group_size"]
    trained = [step["completions/mean_length"] * len(step["groups"]) * sequences for step in later]
    starts, restarts = _starts(events, run.info.started)
    total = sum(len(step["groups"]) for step in steps)
    return Profile(
        about=f"run {run.path.name} of {run.info.recipe}, {len(steps)} steps",
        tokens=_measure("tokens", "lengths in the reports of rollout workers", lengths),
        sample=_fit(
            "s per engine step, by completions under way",
            "time between a worker's reports without waits and swaps ÷ engine_steps",
            _engine_steps(workers),
            grows=False,
        ),
        train=_fit(
            "s per optimizer step, by completion tokens in its batch",
            "perf/fwd_bwd_s in metrics.jsonl, without the first step",
            [(tokens, step["perf/fwd_bwd_s"], 1.0) for tokens, step in zip(trained, later, strict=True)],
            grows=True,
        ),
        publish=_measure("s", "perf/publish_s in metrics.jsonl", [step["perf/publish_s"] for step in later]),
        apply=_measure("s", "load_s in the reports of rollout workers", list(_swaps(workers))),
        score=_measure("s per group", "score_s in the reports of the reward", scores),
        start=_measure("s", 'the first state "up" of each role after that before it, events.jsonl', starts),
        restart=_measure("s", 'a death until the next state "up", events.jsonl', restarts or starts),
        dropped={reason: count / total for reason, count in steps[-1]["dropped"].items()},
    )


def _measure(unit: str, source: str, values: Sequence[float]) -> Measure:
    return Measure(
        unit=unit, source=f"{source} ({len(values)} of them)", quantiles=quantiles(values) or [0.0]
    )


def _by_actor(events: Iterable[Mapping[str, Any]]) -> dict[str, list[Mapping[str, Any]]]:
    actors: dict[str, list[Mapping[str, Any]]] = defaultdict(list)
    for event in events:
        actors[event["actor"]].append(event)
    return actors


def _swaps(workers: Iterable[Mapping[str, Any]]) -> Iterator[float]:
    """The load_s of each version that a worker sampled under."""
    for events in _by_actor(workers).values():
        version = -1
        for event in events:
            if event["values"]["version"] != version:
                version = event["values"]["version"]
                yield event["values"]["load_s"]


def _engine_steps(workers: Iterable[Mapping[str, Any]]) -> list[tuple[float, float, float]]:
    """(completions under way, seconds a step, steps) between two reports of a worker."""
    found = []
    for events in _by_actor(workers).values():
        for before, event in pairwise(events):
            values = event["values"]
            busy = event["time"] - before["time"] - values["lease_wait_s"] - values["put_wait_s"]
            if values["version"] != before["values"]["version"]:
                busy -= values["load_s"]
            if values["engine_steps"] > 0:
                took = max(busy, values["sample_s"]) / values["engine_steps"]
                found.append((values["sequences"], took, float(values["engine_steps"])))
    return found


def _starts(events: Iterable[Mapping[str, Any]], started: float) -> tuple[list[float], list[float]]:
    starts, restarts, last = [], [], started
    down: dict[str, float] = {}
    for event in events:
        actor = event["actor"]
        if event["event"] == "death":
            down[actor] = event["time"]
        elif event["event"] == "state" and event["state"] == "up":
            if actor in down:
                restarts.append(event["time"] - down.pop(actor))
            else:
                starts.append(event["time"] - last)
                last = event["time"]
    return starts, restarts


def _fit(unit: str, source: str, points: Sequence[tuple[float, float, float]], *, grows: bool) -> Line:
    """Weighted least squares through (x, y, weight), with neither the start nor the slope below 0.

    Where x explains less than half of y's variance, which tells little of a slope, y is taken to be in proportion to x
    if it `grows`, and the same for all x if not.
    """
    weight = sum(w for _, _, w in points)
    mean_x = sum(x * w for x, _, w in points) / weight
    mean_y = sum(y * w for _, y, w in points) / weight
    var_x = sum(w * (x - mean_x) ** 2 for x, _, w in points) / weight
    var_y = sum(w * (y - mean_y) ** 2 for _, y, w in points) / weight
    both = sum(w * (x - mean_x) * (y - mean_y) for x, y, w in points) / weight
    each = mean_y / mean_x if grows else 0.0
    if both > 0 and both**2 > 0.5 * var_x * var_y:
        each = min(both / var_x, mean_y / mean_x)
    fixed = mean_y - each * mean_x
    ratios = quantiles(y / (fixed + each * x) for x, y, _ in points)
    spread = Measure(unit="", source="", quantiles=ratios)
    ratios = [ratio / spread.mean for ratio in ratios]  # so that the line is what it takes on average
    return Line(unit=unit, source=f"{source} ({len(points)} of them)", fixed=fixed, each=each, ratios=ratios)
