"""The runs of a comparison, side by side: which belong together, and where their settings differ."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol, cast

from .charts import Report, Table
from .errors import Unrecoverable
from .runs import RunFolder

__all__ = ["Comparer", "Price", "Ran", "Side", "comparer_of", "labels", "settings_that_differ", "sides_of"]


@dataclass(frozen=True)
class Price:
    """What a second of this machine counts as."""

    unit: str
    per_s: float


@dataclass(frozen=True)
class Ran:
    """One run. settings: by dotted name. path: None if it left no folder. failure: empty if it is whole."""

    recipe: str
    condition: str
    seed: int
    settings: dict[str, Any]
    path: Path | None = None
    failure: str = ""

    @property
    def folder(self) -> RunFolder:
        assert self.path is not None, "it left no folder"
        return RunFolder(self.path)


@dataclass(frozen=True, eq=False)
class Side:
    """One recipe's runs under one condition, which differ in their seeds."""

    label: str
    condition: str
    runs: list[Ran]

    @property
    def whole(self) -> list[Ran]:
        return [ran for ran in self.runs if not ran.failure]


class Comparer(Protocol):
    """What a recipe's `outcome.compare`, a module, knows of its numbers. The settings it gives are as `--set` has them.

    DEFAULTS:   settings for every run of a comparison, if the recipe has them.
    CONDITIONS: under which every recipe is run, each with its settings.
    MUST_MATCH: settings in which runs that are compared should not differ.
    """

    DEFAULTS: dict[str, str]
    CONDITIONS: dict[str, dict[str, str]]
    MUST_MATCH: Sequence[str]

    def budget(self, kind: str, amount: float, settings: dict[str, Any]) -> dict[str, str]: ...
    def complete(self, ran: Ran) -> str: ...
    def report(self, sides: Sequence[Side], *, target: float | None, price: Price) -> Report: ...


def comparer_of(recipe: ModuleType, name: str) -> Comparer:
    """Raises Unrecoverable (exit code 2) if the recipe has none."""
    comparer = getattr(getattr(recipe, "outcome", None), "compare", None)
    if comparer is None:
        raise Unrecoverable(f"recipe {name} has no `outcome.compare` that says what to compare", exit_code=2)
    return cast(Comparer, comparer)


def labels(runs: Sequence[Ran]) -> list[str]:
    """A name for each run: its recipe's, and where several of one recipe differ in more than their seeds, in what."""
    names: list[str] = []
    for ran in runs:
        others = [other.settings for other in runs if other.recipe == ran.recipe]
        keys = [key for key in ran.settings if key not in ("seed", "store")]
        own = [key for key in keys if any(other.get(key) != ran.settings[key] for other in others)]
        names.append(" ".join([ran.recipe, *(f"{key}={ran.settings[key]}" for key in own)]))
    return names


def sides_of(runs: Sequence[Ran]) -> list[Side]:
    """In the order of their first runs."""
    sides: dict[tuple[str, str], Side] = {}
    conditions = {ran.condition for ran in runs}
    named = {
        condition: iter(labels([ran for ran in runs if ran.condition == condition]))
        for condition in conditions
    }
    for ran in runs:
        label = next(named[ran.condition])
        sides.setdefault((label, ran.condition), Side(label, ran.condition, [])).runs.append(ran)
    return list(sides.values())


def settings_that_differ(sides: Sequence[Side], must_match: Sequence[str]) -> tuple[list[Table], list[str]]:
    """A table for each condition, and a sentence for each difference that should not be there."""
    tables: list[Table] = []
    flags: list[str] = []
    by_condition: defaultdict[str, list[Side]] = defaultdict(list)
    for side in sides:
        by_condition[side.condition].append(side)
    for condition, beside in by_condition.items():
        settings = [side.runs[0].settings for side in beside]
        rows: list[list[str]] = []
        for key in dict.fromkeys(key for one in settings for key in one if key not in ("seed", "store")):
            cells = [repr(one[key]) if key in one else "–" for one in settings]
            if len(set(cells)) == 1:
                continue
            rows.append([key, *cells])
            if key in must_match:
                told = ", ".join(f"{cell} for {side.label}" for cell, side in zip(cells, beside, strict=True))
                flags.append(f"{condition}: {key} should be the same: {told}")
        seeds = {side.label: sorted(ran.seed for ran in side.whole) for side in beside}
        if len({tuple(own) for own in seeds.values()}) > 1:
            told = ", ".join(f"{own} for {label}" for label, own in seeds.items())
            flags.append(f"{condition}: the seeds of whole runs should be the same: {told}")
        if rows:
            tables.append(Table(f"settings that differ, {condition}", ["", *seeds], rows))
    return tables, flags
