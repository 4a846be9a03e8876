"""What rented machines cost, by the platform's own price list."""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ..errors import Unrecoverable

__all__ = ["PORT_USD_PER_HOUR", "Flavor", "Rented", "cost_usd", "estimate", "flavor_named", "usd_per_hour"]

# What the price list does not have: a job that exposes ports, however many. From Hugging Face's "Pricing and
# Billing" of Jobs (https://huggingface.co/docs/hub/jobs-pricing), read in November 2026.
PORT_USD_PER_HOUR = 0.01

_AN_HOUR_HAS = {"second": 3600, "minute": 60, "hour": 1}


@dataclass(frozen=True)
class Flavor:
    """A kind of machine. gpus: how many it has."""

    usd_per_hour: float
    gpus: int


@dataclass(frozen=True)
class Rented:
    """`count` machines of one flavor; usd_per_hour: each."""

    role: str
    count: int
    flavor: str
    usd_per_hour: float

    @property
    def all_usd_per_hour(self) -> float:
        return self.count * self.usd_per_hour


def usd_per_hour(unit_cost_usd: float, unit: str) -> float:
    """A price list's entry as dollars an hour. Raises Unrecoverable for a unit that is none of time's."""
    if unit not in _AN_HOUR_HAS:
        raise Unrecoverable(
            f"the platform prices by the {unit!r}, which this version of rolecall can't add up: install a newer one",
            exit_code=2,
        )
    return unit_cost_usd * _AN_HOUR_HAS[unit]


def flavor_named(name: str, flavors: Mapping[str, Flavor]) -> Flavor:
    """Raises Unrecoverable (exit code 2) that says what there is."""
    if name not in flavors:
        close = difflib.get_close_matches(name, flavors, n=1)
        hint = f"; did you mean {close[0]!r}?" if close else "."
        raise Unrecoverable(
            f"there is no hardware {name!r}{hint} There is: {', '.join(sorted(flavors))}", exit_code=2
        )
    return flavors[name]


def cost_usd(running_s: float, price: float) -> float:
    """Of one machine at `price` dollars an hour; minutes that have begun count whole, as they are billed."""
    return math.ceil(running_s / 60) * price / 60


def estimate(rented: Sequence[Rented], timeout_s: int) -> str:
    """A line for each, and what all of it costs an hour, and at most."""
    total = sum(each.all_usd_per_hour for each in rented)
    lines = [
        f"{each.role:<13}{each.count:>3} × {each.flavor:<16}{each.all_usd_per_hour:>9.2f} $/h"
        for each in rented
    ]
    hours = timeout_s / 3600
    return "\n".join(
        [*lines, f"together {total:.2f} $ an hour, {total * hours:.2f} $ if it takes all {hours:.3g} h"]
    )
