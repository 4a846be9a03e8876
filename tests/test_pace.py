"""How many groups are under way: enough for the trainer, and no more."""

from __future__ import annotations

from collections import deque

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rolecall.actors.pace import Pace


def settled(pace: Pace, *, latency: int, steps: int = 60, per_step: int = 4) -> list[int]:
    """What is to spare at each step, if a group takes `latency` steps from its lease on and the trainer never waits."""
    begun, whole, spares = deque[int](), 0, list[int]()
    for _ in range(steps):
        under_way = sum(begun) + whole
        begun.append(max(0, pace.groups - under_way))
        if len(begun) > latency:
            whole += begun.popleft()
        spares.append(whole - per_step)
        pace.heed(spares[-1])
        whole = max(0, whole - per_step)
    return spares


@pytest.mark.parametrize("latency", [1, 2, 5, 11])
def test_it_finds_how_many_the_trainer_needs(latency: int):
    pace = Pace(4, 4 * 20)
    spares = settled(pace, latency=latency)
    assert min(spares[30:]) >= 0  # the trainer lacks nothing
    assert pace.groups <= 4 * (latency + 4)  # nor is much to spare


def test_a_trainer_that_lacks_groups_is_given_as_many_as_may_be(latency: int = 30):
    pace = Pace(4, 4 * 20)
    settled(pace, latency=latency)
    assert pace.groups == 4 * 20


def test_what_is_always_to_spare_is_taken_off_but_for_a_step():
    pace = Pace(4, 40)
    pace.heed(-40)
    assert pace.groups == 40
    for spare in [12, 5, 6, 9, *[20] * 9]:
        assert pace.groups == 40
        pace.heed(spare)
    assert pace.groups == 40 - (9 - 4)  # 5 was while what was under way at the change came round


def test_a_burst_is_no_surplus():
    pace = Pace(4, 40)
    pace.heed(-40)
    for spare in [30] * 5 + [0] + [30] * 6:
        pace.heed(spare)
    assert pace.groups == 40


def test_in_lockstep_there_is_one_pace():
    pace = Pace(4, 4)
    for spare in (-4, 0, 0, 0, -1):
        pace.heed(spare)
        assert pace.groups == 4


@given(st.integers(1, 8), st.integers(1, 10), st.lists(st.integers(-100, 100)))
def test_it_stays_between_two_versions_worth_and_the_most(version: int, times: int, spares: list[int]):
    pace = Pace(version, version * times)
    for spare in spares:
        pace.heed(spare)
        assert min(2, times) * version <= pace.groups <= times * version
