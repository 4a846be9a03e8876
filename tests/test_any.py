"""`Ref.any()`: which of a role's replicas gets a message, and that a role's own name does not say it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from rolecall import RolecallError
from rolecall.runtime.control import Member

from .endpoints import Stage, call, down, gone, stage, up
from .processes import Run

pytestmark = pytest.mark.timeout(60)
NAMES = ["worker-0", "worker-1", "worker-2"]


@pytest.fixture
def here() -> Iterator[Stage]:
    with stage() as here:
        yield here


def say(here: Stage, *kinds: Callable[[str, int, str], Member]) -> None:
    """How each of the three is now."""
    places = zip(kinds, NAMES, range(2, 5), strict=True)
    here.tell(*(kind(name, incarnation, "worker") for kind, name, incarnation in places))


def tell(here: Stage, *counts: int) -> None:
    """So many messages to each, which nobody handles."""
    for name, count in zip(NAMES, counts, strict=True):
        for _ in range(count):
            here.endpoint.tell(name, call())


def picks(here: Stage, count: int = 12) -> dict[str, int]:
    return dict(Counter(here.endpoint.pick("worker") for _ in range(count)))


def test_in_turn_among_equals(here: Stage):
    say(here, up, up, up)
    chosen = [here.endpoint.pick("worker") for _ in range(12)]
    assert all(set(chosen[at : at + 3]) == set(NAMES) for at in range(10))


def test_each_role_has_turns_of_its_own(here: Stage):
    members = [up(f"{role}-{i}", 2 + i + 2 * (role == "b"), role) for role in ("a", "b") for i in range(2)]
    here.tell(*members)
    chosen = Counter(here.endpoint.pick(role) for _ in range(6) for role in ("a", "b"))
    assert chosen == {member.name: 3 for member in members}


def test_the_one_with_the_fewest_messages_to_handle(here: Stage):
    receivers = [here.receiver(name, place + 2) for place, name in enumerate(NAMES)]
    say(here, up, up, up)
    tell(here, 3, 1, 2)
    assert picks(here) == {"worker-1": 12}
    tell(here, 0, 1, 0)
    assert picks(here) == {"worker-1": 6, "worker-2": 6}
    receivers[0].handled(receivers[0].heard(3))
    while here.endpoint._outbox.peers["worker-0"].unhandled:
        here.endpoint.wait(0.1)
    assert picks(here) == {"worker-0": 12}


def starting(name: str, incarnation: int, role: str) -> Member:
    return Member(name, role, incarnation, "starting")


@pytest.mark.parametrize("away", [down, starting, gone])
def test_one_that_is_not_up_only_if_none_is(here: Stage, away: Callable[[str, int, str], Member]):
    say(here, up, up, up)
    tell(here, 0, 4, 5)
    say(here, away, up, up)
    assert picks(here) == {"worker-1": 12}
    say(here, away, away, up)
    assert picks(here) == {"worker-2": 12}


@pytest.mark.parametrize("away", [down, starting])
def test_if_all_are_down_the_one_with_the_fewest_messages(
    here: Stage, away: Callable[[str, int, str], Member]
):
    say(here, up, up, up)
    tell(here, 2, 0, 0)
    say(here, away, away, away)
    assert picks(here) == {"worker-1": 6, "worker-2": 6}


def test_if_all_are_gone_asking_one_says_so(here: Stage):
    say(here, gone, gone, gone)
    with pytest.raises(RolecallError, match="worker-0 died before it began this message: killed by SIGKILL"):
        here.endpoint.ask([here.endpoint.pick("worker")], call(), 60.0)


def test_the_name_of_a_role_with_several_replicas_names_the_ways_out(here: Stage):
    say(here, up, up, up)
    several = r"worker has 3 replicas: use ask_each for all, any\(\) for one"
    with pytest.raises(RolecallError, match=several):
        here.endpoint.ask(["worker"], call(), 60.0)
    with pytest.raises(RolecallError, match=several):
        here.endpoint.ask_soon("worker", call(), 60.0)
    with pytest.raises(RolecallError, match=several):
        here.endpoint.tell("worker", call())
    say(here, gone, gone, up)
    here.endpoint.tell("worker", call())  # one is left
    assert list(here.endpoint._outbox.peers) == ["worker-2"]


@pytest.mark.slow
def test_in_a_run_a_busy_replica_is_left_alone(tmp_path: Path):
    run = Run("pool", tmp_path)
    assert run.go().exit_code == 0
    (result,) = run.reports["boss"]
    assert result["idle"] == dict.fromkeys(NAMES, 4)
    assert result["one_busy"] == {name: 6 for name in NAMES if name != result["busy"]}
