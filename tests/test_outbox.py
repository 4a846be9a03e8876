"""What a sender does with its messages when their receiver dies, comes back, or is gone for good."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest
from rolecall import ActorDied, ActorStopped, RolecallError
from rolecall.runtime import peer

from .commands import until
from .endpoints import Stage, call, down, gone, stage, up

pytestmark = pytest.mark.timeout(60)
HOUR_S = 3600.0


@pytest.fixture
def here() -> Iterator[Stage]:
    with stage() as here:
        yield here


def letters(here: Stage, count: int) -> list[tuple[str, str, str]]:
    """The dead letters, once there are so many."""
    while len(here.endpoint.dead_letters) < count:
        here.endpoint.wait(0.1)
    return here.endpoint.dead_letters


def test_what_is_not_handled_goes_to_the_next_incarnation_in_order(here: Stage):
    first = here.receiver("target", 2)
    here.tell(up("target", 2))
    for number in range(5):
        here.endpoint.tell("target", call("note", number))
    heard = first.heard(5)
    first.handled(heard[:2])
    first.die()  # what it said last still counts
    here.tell(down("target", 2))
    second = here.receiver("target", 3)
    here.tell(up("target", 3))
    assert [header.seq for header in second.heard(3)] == [header.seq for header in heard[2:]]


def test_what_was_told_to_one_that_is_gone_is_a_dead_letter_each(here: Stage):
    here.tell(up("target"))
    for _ in range(3):
        here.endpoint.tell("target", call())
    here.tell(gone("target"))
    here.endpoint.tell("target", call("late"))
    methods = ["note", "note", "note", "late"]
    assert letters(here, 4) == [("target", method, "killed by SIGKILL") for method in methods]


# A wait that nothing ends takes POLL_S, a second: so many of them can't be an accident.
TIMES, PATIENCE_S = 20, 10.0


@pytest.mark.parametrize(("reason", "error"), [("killed by SIGKILL", ActorDied), ("", ActorStopped)])
def test_an_ask_to_one_that_is_gone_fails_at_once(here: Stage, reason: str, error: type[RolecallError]):
    here.tell(gone("target", reason=reason))
    began = time.monotonic()
    for _ in range(TIMES):
        with pytest.raises(error, match=reason or "target has stopped"):
            here.endpoint.ask(["target"], call(), HOUR_S)
        with pytest.raises(error):
            here.endpoint.ask_soon("target", call(), HOUR_S).result()
    assert time.monotonic() - began < PATIENCE_S


def test_an_ask_to_one_that_is_gone_fails_at_once_also_if_its_mailbox_is_full(
    here: Stage, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(peer, "MAX_UNHANDLED_BYTES", 1000)
    here.tell(gone("target"))
    began = time.monotonic()
    for _ in range(TIMES):
        here.endpoint.tell("target", call("note", bytes(2000)))
        with pytest.raises(ActorDied):
            here.endpoint.ask(["target"], call(), HOUR_S)
    assert time.monotonic() - began < PATIENCE_S
    assert letters(here, TIMES) == [("target", "note", "killed by SIGKILL")] * TIMES


def test_a_sender_that_waits_for_room_goes_on_when_its_receiver_is_gone(here: Stage):
    here.tell(up("target"))
    for _ in range(peer.MAX_UNHANDLED):
        here.endpoint.tell("target", call())
    here.say(gone("target"))
    with pytest.raises(ActorDied):
        here.endpoint.ask(["target"], call(), HOUR_S)
    assert letters(here, peer.MAX_UNHANDLED) == [("target", "note", "killed by SIGKILL")] * peer.MAX_UNHANDLED


# --- settling --------------------------------------------------------------------------------------------


def test_settling_waits_for_nothing_when_all_is_handled_or_only_asked(here: Stage):
    receiver = here.receiver("target", 2)
    here.tell(up("target"))
    here.endpoint.tell("target", call())
    here.endpoint.ask_soon("target", call(), HOUR_S)
    receiver.handled(receiver.heard(2)[:1])
    here.endpoint.settle(HOUR_S)
    assert here.endpoint.dead_letters == []


def test_what_has_not_settled_in_time_is_a_dead_letter_and_asks_are_none(here: Stage):
    here.tell(up("target"), up("other"))
    here.endpoint.tell("target", call("one"))
    here.endpoint.ask_soon("target", call("two"), HOUR_S)
    here.endpoint.tell("other", call("three"))
    here.endpoint.settle(0.0)
    reason = "caller ended before it heard that this was handled"
    assert here.endpoint.dead_letters == [("target", "one", reason), ("other", "three", reason)]


def test_what_an_actor_says_to_its_supervisor_has_left_it_when_it_goes_on(here: Stage):
    """Otherwise a kill could take a dead letter with it, and a flood of reports would fill the memory."""
    words, left = [b"%d." % number + bytes(1000) for number in range(4000)], []

    def talk() -> None:
        for word in words:
            here.endpoint.to_supervisor(word)
            left.append(len(here.endpoint._supervisor.backlog))

    talking = threading.Thread(target=talk)
    talking.start()
    until(lambda: here.endpoint._supervisor.backlog)  # the kernel has no room
    heard = [here.heard() for _ in words]
    talking.join()
    assert not any(left)
    assert heard == words
