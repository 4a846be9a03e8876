"""Templated word problems with a checkable answer, in GSM8K's form.

    Ann has 12 pens, buys 7, loses 4 and finds 9. How many pens now?
    → 12+7=19 / 19-4=15 / 15+9=24 / #### 24

A problem starts with 3 to 12 things; two to five events add or take 1 to 6 of them, and the total stays in
0 to 24. The base model was trained on this very text: a changed comma here is a changed task.

Hard problems have four or five events, most of them gains, and totals up to 29: sums that the base model has not
learned.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Set
from functools import lru_cache

from msgspec import Struct

__all__ = [
    "HARD",
    "HELD_OUT",
    "PLAIN",
    "Kind",
    "Problem",
    "held_out",
    "held_out_texts",
    "problem",
    "problems",
    "training",
]

HELD_OUT = 1024
"""How many problems no training may see."""

# Chosen so that the shipped base model was trained on none of them either (a test replays its training).
_HELD_OUT_SEED = 1_000_013
_NAMES = ["Ann", "Ben", "Eva", "Leo", "Mia", "Tom"]
_THINGS = ["pens", "cards", "books", "coins", "shells", "apples"]
_GAINS = ["buys", "finds", "wins", "gets"]
_LOSSES = ["loses", "sells", "drops", "gives away"]
_MOST_AT_FIRST, _MOST_AN_EVENT = 12, 6


class Kind(Struct, frozen=True, kw_only=True):
    """What problems are like.

    fewest, most:  events. losses: how likely each is one, if there is a choice.
    most_ever:     things there may be.
    """

    fewest: int = 2
    most: int = 5
    losses: float = 0.5
    most_ever: int = 24


PLAIN = Kind()
HARD = Kind(fewest=4, losses=0.1, most_ever=29)


class Problem(Struct, frozen=True):
    """One problem.

    text:   the question, its newline included.
    worked: the whole solution: a line for each event, then `#### answer`.
    answer: the number.
    """

    text: str
    worked: str
    answer: str

    @property
    def direct(self) -> str:
        """The answer alone, as the base model often gives it: wrong most of the time, for want of working."""
        return f"#### {self.answer}"


def problem(rng: random.Random, kind: Kind = PLAIN) -> Problem:
    """Draw one problem."""
    thing = rng.choice(_THINGS)
    total = rng.randint(3, _MOST_AT_FIRST)
    start = f"{rng.choice(_NAMES)} has {total} {thing}"
    events, lines = [], []
    for _ in range(rng.randint(kind.fewest, kind.most)):
        count = rng.randint(1, _MOST_AN_EVENT)
        if total + count > kind.most_ever or (rng.random() < kind.losses and total >= count):
            events.append(f"{rng.choice(_LOSSES)} {count}")
            lines.append(f"{total}-{count}={total - count}\n")
            total -= count
        else:
            events.append(f"{rng.choice(_GAINS)} {count}")
            lines.append(f"{total}+{count}={total + count}\n")
            total += count
    middle = "".join(f", {event}" for event in events[:-1])
    text = f"{start}{middle} and {events[-1]}. How many {thing} now?\n"
    return Problem(text, "".join(lines) + f"#### {total}", str(total))


def problems(seed: int, kind: Kind = PLAIN, *, avoid: Set[str] = frozenset()) -> Iterator[Problem]:
    """An endless sequence of problems; those whose text is in `avoid` are passed over."""
    rng = random.Random(seed)
    while True:
        drawn = problem(rng, kind)
        if drawn.text not in avoid:
            yield drawn


@lru_cache
def _all_held_out(kind: Kind) -> tuple[Problem, ...]:
    distinct: dict[str, Problem] = {}
    for drawn in problems(_HELD_OUT_SEED, kind):
        distinct.setdefault(drawn.text, drawn)
        if len(distinct) == HELD_OUT:
            break
    return tuple(distinct.values())


def held_out(count: int, kind: Kind = PLAIN) -> list[Problem]:
    """The first `count` of the problems kept for evaluation: always the same, each once.

    Raises ValueError for more than there are.
    """
    if not 0 <= count <= HELD_OUT:
        raise ValueError(f"{count} held-out problems were asked for; there are {HELD_OUT}: ask for fewer")
    return list(_all_held_out(kind)[:count])


@lru_cache
def held_out_texts(kind: Kind = PLAIN) -> frozenset[str]:
    """The texts no training may see."""
    return frozenset(kept.text for kept in _all_held_out(kind))


def training(seed: int, kind: Kind = PLAIN) -> Iterator[Problem]:
    """An endless sequence of problems to train on, each checked against the held-out ones."""
    return problems(seed, kind, avoid=held_out_texts(kind))
