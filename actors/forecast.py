"""`rolecall profile`, `simulate` and `plan` for GRPO recipes: files in, tables or JSON out."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from ..runtime import Graph
from ..runtime.errors import Unrecoverable
from ..runtime.files import write_whole
from ..runtime.runs import RunFolder
from .profile import Line, Measure, Profile, measure

if TYPE_CHECKING:
    from .simulation import Prediction

__all__ = ["plan", "profile", "simulate"]

T = TypeVar("T")


def profile(run: RunFolder, file: Path) -> str:
    """Measure a finished run, write the profile into `file`; what it says, for people."""
    found = measure(run)
    write_whole(file, msgspec.json.format(msgspec.json.encode(found), indent=1) + b"\n")
    return f"{_describe(found)}\n{file}"


def simulate(graph: Graph, file: Path, *, seed: int, lost_per_h: float, away_s: float, as_json: bool) -> str:
    """What a run of `graph` would come to where things take the time that the profile in `file` says."""
    from . import simulation

    began = time.monotonic()
    found = simulation.simulate(graph, _read(file, Profile), seed=seed, lost_per_h=lost_per_h, away_s=away_s)
    if as_json:
        return msgspec.json.encode(found).decode()
    return f"{describe(found)}\n({time.monotonic() - began:.1f} s to simulate)"


def plan(
    recipes: Mapping[str, Any], file: Path | None, prices: Path | None, *, groups: int, as_json: bool
) -> str:
    """What it costs to train on so many groups, by recipe and by who rents out the machines."""
    from . import plan as plans

    profile_file = file or plans.PUBLISHED / "grpo_8b.json"
    costs = plans.Plan(
        recipes,
        _read(profile_file, Profile),
        _read(prices or plans.PUBLISHED / "prices.json", plans.Prices),
        groups,
    ).made()
    if as_json:
        return msgspec.json.encode(costs).decode()
    return plans.describe(costs)


def _read(file: Path, kind: type[T]) -> T:
    try:
        return msgspec.json.decode(file.read_bytes(), type=kind)
    except OSError as error:
        raise Unrecoverable(f"can't read {file}: {error.strerror}", exit_code=2) from error
    except msgspec.DecodeError as error:
        raise Unrecoverable(
            f"{file} is no {kind.__name__.lower()} ({error}): make one with `rolecall profile`, or mend it",
            exit_code=2,
        ) from error


def _describe(profile: Profile) -> str:
    rows = [profile.about]
    for name in profile.__struct_fields__:
        value = getattr(profile, name)
        if isinstance(value, Measure):
            low, high = value.draw(0.1), value.draw(0.9)
            rows.append(
                f"{name:<9}{value.mean:>10.4g} {value.unit}, a tenth below {low:.4g}, a tenth above {high:.4g}"
            )
        elif isinstance(value, Line):
            rows.append(f"{name:<9}{value.fixed:>10.4g} + {value.each:.4g} · n  {value.unit}")
    return "\n".join(rows)


def describe(found: Prediction) -> str:
    """For people."""
    dropped = ", ".join(f"{count} {reason}" for reason, count in found.dropped.items()) or "none"
    rows = [
        f"{found.steps} steps with {found.workers} workers: {found.wall_s / 3600:.2f} h "
        f"(first step after {found.first_step_s:.0f} s of waiting and work), {found.bottleneck}",
        f"{found.groups_per_s:.3g} groups/s, {found.tokens_per_s:.4g} tokens/s trained; "
        f"{found.groups_trained} groups trained, dropped: {dropped}",
        f"staleness {found.staleness_mean:.2f} on average, {found.staleness_max} at most; "
        f"the trainer waits {found.trainer_wait_share:.0%}; machines lost: {found.lost}",
        "GPU-hours: " + ", ".join(f"{role} {hours:.2f}" for role, hours in found.gpu_h.items()),
    ]
    return "\n".join([*rows, *(_shares(role, shares) for role, shares in found.shares.items())])


def _shares(role: str, shares: Mapping[str, float]) -> str:
    ordered: Sequence[tuple[str, float]] = sorted(shares.items(), key=lambda item: -item[1])
    return f"{role:<8} " + ", ".join(f"{what} {share:.0%}" for what, share in ordered if share >= 0.005)
