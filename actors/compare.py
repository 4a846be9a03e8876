"""What `rolecall compare` runs and says of GRPO: a `Comparer`, as runtime/sides.py has it."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ..runtime.charts import Chart, Report, Table
from ..runtime.errors import Unrecoverable
from ..runtime.sides import Price, Ran, Side
from .measures import Curve, Measures, band, reached_s, running_mean

__all__ = ["CONDITIONS", "DEFAULTS", "MUST_MATCH", "budget", "complete", "report"]

# Five workers on two cores: with stragglers they mostly wait, as they would for a GPU. The correction is what clipping
# does for data of one policy, done for that of many: on-policy it changes nothing.
DEFAULTS = {
    "steps": "80", "lr": "5e-4", "rollout_workers": "5", "eval_every": "8", "eval_problems": "128",
    "loss.correction": "tis",
}  # fmt: skip
# The slowest of 16 groups takes about three and a half times the median, and a synchronous step as long; the slowest of
# a run over nine times. A group is waited for when 12 more steps were made without it.
CONDITIONS = {
    "even": {"rollout_delay": "none"},
    "stragglers": {"rollout_delay": "lognormal(0.45,0.7)", "max_staleness": "12"},
}
# Whoever differs in one of these has done other work, or was judged otherwise.
MUST_MATCH = (
    "model", "train_set", "eval_set", "reward", "eval_reward", "eval_problems", "batch", "group_size", "max_tokens",
    "temperature", "steps", "rollout_workers", "rollout_delay", "engine",
)  # fmt: skip
MARGIN = 0.02  # of accuracy, by which the target lies below what the weaker recipe comes to
NO_END = 1_000_000  # steps of a run that the clock ends


def budget(kind: str, amount: float, settings: Mapping[str, Any]) -> dict[str, str]:
    """The settings of a run that may take so much. Raises Unrecoverable (exit code 2) for what can't be counted."""
    match kind:
        case "steps":
            return {"steps": str(int(amount) if amount.is_integer() else amount)}
        case "groups":
            return {"steps": str(max(1, math.ceil(amount / settings["batch"])))}
        case "minutes":
            return {"steps": str(NO_END)}
        case _:
            raise Unrecoverable(f"a budget of {kind!r}: give steps=…, groups=… or minutes=…", exit_code=2)


def complete(ran: Ran) -> str:
    """Why the run of this folder is not whole; empty if it is."""
    measures = Measures.of(ran.folder)
    if len(measures.steps) < measures.planned_steps < NO_END:
        made = f"made {len(measures.steps)} of {measures.planned_steps} steps"
        return ": ".join(filter(None, [made, ran.folder.info.story]))
    return "" if measures.evaluations else "was never evaluated"


def report(sides: Sequence[Side], *, target: float | None, price: Price) -> Report:
    """The table, the curves and the numbers of compare.json; the first recipe is what others are measured by.

    target: held-out accuracy that wall clocks are compared at; None: `MARGIN` below the lowest median of the recipes.
    """
    measured = {side: [Measures.of(ran.folder) for ran in side.whole] for side in sides}
    chosen, why = (target, "given") if target is not None else _lowest(measured)
    parts = {
        condition: {side: measured[side] for side in sides if side.condition == condition}
        for condition in dict.fromkeys(side.condition for side in sides)
    }
    numbers = {condition: _compared(part, chosen) for condition, part in parts.items()}
    last = next(reversed(parts), "")
    values: dict[str, object] = {
        "target": round(chosen, 4),
        "target_is": why,
        "condition": last,
        "accuracy": numbers[last]["accuracy"] if last else {},
        "trainer_wait_share": numbers[last]["trainer_wait_share"] if last else {},
        "wall_ratio": {condition: own["wall_ratio"] for condition, own in numbers.items()},
        "conditions": numbers,
    }
    return Report(
        values=values,
        tables=[_table(condition, own, chosen, price) for condition, own in numbers.items()],
        charts=[chart for condition, part in parts.items() for chart in _charts(condition, part, chosen, price)],
        notes=[
            "Means, and bands from the lowest to the highest of the seeds. Wall clock counts from the start of each "
            "run's command; an evaluation from when its version was trained, and between two evaluations accuracy is "
            f"taken to grow evenly. The target is {why}: {chosen:.3f}. Reward is a running mean of 5 steps. Waiting is "
            "without a run's first step, which waits for everybody's start, and its last, which waits for all that is "
            "still under way.",
        ],
    )  # fmt: skip


def _lowest(measured: Mapping[Side, Sequence[Measures]]) -> tuple[float, str]:
    """A target that most runs of every recipe come to, and how it was found."""
    finals = [[m.final for m in all_of if m.final is not None] for all_of in measured.values()]
    lowest = min((statistics.median(values) for values in finals if values), default=0.0)
    return max(0.0, lowest - MARGIN), f"{MARGIN} below the lowest median of final accuracies"


def _compared(part: Mapping[Side, Sequence[Measures]], target: float) -> dict[str, Any]:
    """One condition's numbers, by recipe."""
    of = {side.label: all_of for side, all_of in part.items()}

    def each(value: Callable[[Measures], Any]) -> dict[str, list[Any]]:
        return {label: [_rounded(value(m)) for m in all_of] for label, all_of in of.items()}

    def mean(value: Callable[[Measures], float | None]) -> dict[str, float | None]:
        return {label: _mean([value(m) for m in all_of]) for label, all_of in of.items()}

    to_target = each(lambda m: reached_s(m, target))
    after_start = each(lambda m: _less(reached_s(m, target), m.steps[0][0] if m.steps else None))
    labels, ratios = list(of), _ratios(to_target)
    return {
        "seeds": {side.label: [ran.seed for ran in side.whole] for side in part},
        "accuracy": each(lambda m: m.final),
        "accuracy_gap": {label: _gap(of[labels[0]], of[label]) for label in labels[1:]},
        "wall_s_to_target": to_target,
        "wall_ratio": ratios[labels[1]] if len(labels) > 1 else None,
        "wall_ratios": ratios,
        "wall_ratios_after_first_step": _ratios(after_start),
        "wall_s": each(lambda m: m.wall_s),
        "first_step_s": each(lambda m: m.steps[0][0] if m.steps else None),
        "trainer_wait_share": mean(lambda m: m.trainer_wait_share),
        "rollout_wait_share": mean(lambda m: m.rollout_wait_share),
        "staleness_mean": mean(lambda m: _mean(m.staleness)),
        "staleness_max": {
            label: max((m.staleness_max for m in all_of), default=0) for label, all_of in of.items()
        },
        "groups_per_s": mean(lambda m: m.groups_per_s),
        "groups_dropped": {label: sum(m.dropped for m in all_of) for label, all_of in of.items()},
        "restarts": {label: sum(m.restarts for m in all_of) for label, all_of in of.items()},
    }  # fmt: skip


def _ratios(times: Mapping[str, Sequence[float | None]]) -> dict[str, float | None]:
    """Of the medians of every recipe but the first to that of the first; None if one of both never got there."""
    medians = {label: _median_reached(own) for label, own in times.items()}
    first, *others = medians
    base = medians[first]
    return {
        label: _rounded(own / base) if base and (own := medians[label]) is not None else None
        for label in others
    }


def _less(value: float | None, other: float | None) -> float | None:
    return None if value is None or other is None else max(0.0, value - other)


def _gap(first: Sequence[Measures], other: Sequence[Measures]) -> dict[str, float | None]:
    """How much more accurate the other is, and two standard errors of that: of seeds, or of problems if one only."""
    finals = [[m.final for m in side if m.final is not None] for side in (first, other)]
    if not all(finals):
        return {"mean": None, "noise": None}
    variance = 0.0
    for values, side in zip(finals, (first, other), strict=True):
        mean = statistics.fmean(values)
        of_one = statistics.variance(values) if len(values) > 1 else mean * (1 - mean) / side[0].problems
        variance += of_one / len(values)
    gap = statistics.fmean(finals[1]) - statistics.fmean(finals[0])
    return {"mean": _rounded(gap), "noise": _rounded(2 * math.sqrt(variance))}


def _median_reached(times: Sequence[float | None]) -> float | None:
    """None if most never got there."""
    median = statistics.median([math.inf if time is None else time for time in times]) if times else math.inf
    return None if math.isinf(median) else median


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return _rounded(statistics.fmean(known)) if known else None


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 4)


def _table(condition: str, numbers: Mapping[str, Any], target: float, price: Price) -> Table:
    columns = [
        "", "accuracy", f"s to {target:.2f}", "÷ first", price.unit, "trainer waits", "rollout waits", "staleness",
        "groups/s", "restarts",
    ]  # fmt: skip
    rows: list[list[str]] = []
    for label, accuracies in numbers["accuracy"].items():
        reached = _median_reached(numbers["wall_s_to_target"][label])
        ratio = 1.0 if not rows else numbers["wall_ratios"][label]
        rows.append(
            [
                label,
                _mean_and_band(accuracies),
                _shown(reached, ".1f"),
                _shown(ratio, ".2f"),
                _shown(None if reached is None else reached * price.per_s, ".4g"),
                _shown(numbers["trainer_wait_share"][label], ".0%"),
                _shown(numbers["rollout_wait_share"][label], ".0%"),
                f"{_shown(numbers['staleness_mean'][label], '.1f')}, at most {numbers['staleness_max'][label]}",
                _shown(numbers["groups_per_s"][label], ".1f"),
                str(numbers["restarts"][label]),
            ]
        )
    return Table(condition, columns, rows)


def _mean_and_band(values: Sequence[float]) -> str:
    if not values:
        return "–"
    spread = f" ({min(values):.2f}–{max(values):.2f})" if len(values) > 1 else ""
    return f"{statistics.fmean(values):.2f}{spread}"


def _shown(value: float | None, form: str) -> str:
    return "–" if value is None else format(value, form)


def _charts(
    condition: str, measured: Mapping[Side, Sequence[Measures]], target: float, price: Price
) -> list[Chart]:
    def chart(
        title: str, x: str, y: str, curve: Callable[[Measures], Curve], level: float | None = None
    ) -> Chart:
        lines = [
            band(side.label, color, [curve(m) for m in all_of])
            for color, (side, all_of) in enumerate(measured.items())
        ]
        return Chart(f"{title}, {condition}", x, y, [line for line in lines if line.points], level)

    def over_time(values: Callable[[Measures], Sequence[float]]) -> Callable[[Measures], Curve]:
        return lambda m: [(at, value) for (at, _), value in zip(m.steps, values(m), strict=True)]

    def accuracy(x: Callable[[float, int], float]) -> Callable[[Measures], Curve]:
        return lambda m: [(x(at, groups), value) for at, groups, value in m.evaluations]

    def reward(x: Callable[[float, int], float]) -> Callable[[Measures], Curve]:
        return lambda m: [
            (x(at, groups), value)
            for (at, groups), value in zip(m.steps, running_mean(m.reward), strict=True)
        ]

    axes: list[tuple[str, Callable[[float, int], float]]] = [
        ("seconds", lambda at, groups: at),
        ("groups trained", lambda at, groups: groups),
        (price.unit, lambda at, groups: at * price.per_s),
    ]
    return [
        *(chart("Held-out accuracy", name, "accuracy", accuracy(x), target) for name, x in axes),
        *(chart("Reward", name, "reward", reward(x)) for name, x in axes),
        chart("Staleness", "seconds", "versions", over_time(lambda m: m.staleness)),
        chart(
            "Trainer waits", "seconds", "share of a step", over_time(lambda m: running_mean(m.trainer_waits))
        ),
    ]
