"""Who waits for whom when actors are restarted, and that nobody waits for a stranger."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rolecall import Strategy
from rolecall.runtime.tree import Slot, Tree

from .trees import Longest, Play, pool, ring


def test_those_taken_down_together_start_again_in_order():
    play = Play(ring(Strategy.ONE_FOR_ALL)[0])
    play.slow = ["a", "worker-1"]
    assert play.restarts("c") == "-d -worker-0 -worker-1 -b -a +a"
    assert play.ready("a") == "+b +worker-0 +worker-1"
    assert play.ready("worker-1") == "+c +d"


def test_those_taken_down_together_start_when_all_of_them_are_down():
    play = Play(ring(Strategy.ONE_FOR_ALL)[0])
    play.die("c")
    while going := play.tree.to_stop():
        assert play.tree.to_start(60.0) == []
        play.tree.ended(going[0], "", 0.0)
    assert [slot.name for slot in play.tree.to_start(60.0)] == ["a"]


def hold_back_off(play: Play) -> None:
    play.die("b")
    play.slots["b"].not_before = 1e6


def hold_loading(play: Play) -> None:
    play.slow = ["b"]
    play.die("b")
    play.settle()


def hold_forking(play: Play) -> None:
    play.die("b")
    play.slots["b"].state = "spawning"


def hold_stopping(play: Play) -> None:
    play.tree.restart("b", play.now)
    play.slots["b"].state = "stopping"


HOLDS = [hold_back_off, hold_loading, hold_forking, hold_stopping]


@pytest.mark.parametrize("hold", HOLDS)
@pytest.mark.parametrize("apart", [False, True])
def test_a_restart_waits_for_nobody_it_did_not_fall_with(hold: Callable[[Play], None], apart: bool):
    graph, (_, _, worker, _, _) = ring(max_restarts=100)
    if apart:
        graph.supervise(worker)
    play = Play(graph)
    hold(play)
    for name in ("c", "worker-0", "worker-1", "d"):
        play.die(name)
        due = play.slots[name].not_before
        assert [slot.name for slot in play.tree.to_start(due)] == [name]
        play.slots[name].state = "up"
    assert play.slots["b"].state != "up"


@pytest.mark.parametrize("hold", HOLDS)
def test_a_restart_by_request_waits_for_nobody(hold: Callable[[Play], None]):
    play = Play(ring(max_restarts=100)[0])
    hold(play)
    play.tree.restart("worker", play.now)
    for name in ("worker-0", "worker-1"):
        play.tree.ended(play.slots[name], "", play.now)
    assert [slot.name for slot in play.tree.to_start(play.now)] == ["worker-0", "worker-1"]


@pytest.mark.parametrize("request_too", [False, True])
def test_the_first_start_stays_in_order_although_somebody_dies_before_it_is_ready(request_too: bool):
    play = Play(ring()[0], slow="b")
    assert play.settle() == ""
    play.die("b")
    assert play.settle() == "+b"
    play.die("a")  # it was ready: its restart is no part of the first start
    if request_too:
        play.tree.restart("d", play.now)
    assert play.settle() == ""
    play.now += 1.0
    assert play.settle() == "+a"
    assert play.ready("b") == "+worker-0 +worker-1 +c +d"


def test_a_subtree_that_dies_as_a_whole_starts_again_in_order_and_holds_nobody_up():
    play = pool()
    play.slow = ["b"]
    for _ in range(2):
        assert play.restarts("worker-0") == "+worker-0"
        play.now -= 60.0
    assert play.restarts("worker-0") == "-worker-1 -b +b"
    assert play.restarts("c") == "+c"
    assert play.ready("b") == "+worker-0 +worker-1"


def test_who_fell_with_two_starts_after_both():
    play = Play(ring(Strategy.REST_FOR_ONE)[0])
    play.slow = ["worker-0", "worker-1"]
    play.die("worker-0")
    assert play.restarts("worker-1") == "-d -c +worker-0 +worker-1"
    assert play.ready("worker-1") == ""
    assert play.ready("worker-0") == "+c +d"


def test_who_fell_with_a_subtree_waits_for_it_also_when_it_falls_once_more_by_itself():
    play = pool(Strategy.REST_FOR_ONE, Strategy.ONE_FOR_ALL)
    play.slow = ["worker-0"]
    assert play.restarts("a") == "-d -c -worker-0 -worker-1 -b +a +b +worker-0 +worker-1"
    assert play.restarts("b") == "-worker-0 -worker-1 +b +worker-0 +worker-1"
    assert play.ready("worker-0") == "+c +d"


def test_a_subtree_that_falls_in_the_first_start_is_still_waited_for():
    play = pool(own=Strategy.ONE_FOR_ALL, slow="worker-0")
    assert play.restarts("b") == "-worker-0 -worker-1 +b +worker-0 +worker-1"
    assert play.ready("worker-0") == "+c +d"


@pytest.mark.parametrize("slow", ["a", "b"])
def test_a_restart_by_request_does_not_overtake_the_first_start(slow: str):
    play = Play(ring()[0], slow=slow)
    before = play.settle()
    play.tree.restart(slow, play.now)
    play.tree.restart("d", play.now)
    assert (before, play.settle()) == ("", f"-{slow} +{slow}")
    play.slow = []
    assert play.ready(slow).endswith("+c +d")


def test_a_restart_by_request_does_not_overtake_those_it_fell_with():
    play = Play(ring(Strategy.ONE_FOR_ALL)[0])
    play.die("b")
    [going] = play.tree.to_stop()
    play.tree.ended(going, "", play.now)
    play.tree.restart("d", play.now)
    assert play.settle() == "-c -worker-0 -worker-1 -a +a +b +worker-0 +worker-1 +c +d"


MOVES = st.lists(
    st.tuples(
        st.sampled_from(["ready", "ready", "die", "stop", "restart", "wait"]),
        st.sampled_from(["a", "b", "worker-0", "worker-1", "c", "d"]),
    ),
    max_size=60,
)


class Random:
    """A tree whose actors get ready, die, stop and are restarted by request at any time; from the start of the run
    on, or once it has started."""

    def __init__(self, strategy: Strategy, own: Strategy | None, started: bool) -> None:
        graph, (_, b, worker, _, _) = ring(strategy, max_restarts=1000)
        if own is not None:
            graph.supervise(worker, b, strategy=own, max_restarts=2)
        slots = [Slot(role, place, name) for place, role in enumerate(graph) for name in role.members]
        self.tree, self.now = Tree(graph, slots, Longest()), 0.0
        self.slots = {slot.name: slot for slot in slots}
        self.ready: set[str] = set()  # who ever was
        if started:
            for slot in slots:
                self.ready.add(slot.name)
                slot.state = "up"

    def move(self, kind: str, name: str) -> None:
        slot = self.slots[name]
        if kind == "ready" and slot.state == "starting":
            slot.state = "up"
            self.ready.add(name)
        elif (kind == "die" and slot.running) or (kind == "stop" and slot in self.tree.to_stop()):
            self.tree.ended(slot, "x", self.now)
        elif kind == "restart":
            self.tree.restart(name, self.now)
        elif kind == "wait":
            self.now += 20.0

    def start(self) -> list[Slot]:
        coming = self.tree.to_start(self.now)
        for slot in coming:
            slot.state = "starting"
        return coming

    def before(self, slot: Slot) -> list[Slot]:
        return [other for other in self.slots.values() if other.position < slot.position]


@settings(deadline=None)
@given(st.sampled_from(Strategy), st.sampled_from([None, *Strategy]), st.booleans(), MOVES)
def test_whatever_happens_the_first_start_is_in_order_and_at_last_everybody_is_up(
    strategy: Strategy, own: Strategy | None, started: bool, moves: list[tuple[str, str]]
):
    play = Random(strategy, own, started)
    for move in moves:
        play.move(*move)
        for slot in play.start():
            assert not slot.doomed
            assert slot.name in play.ready or {other.name for other in play.before(slot)} <= play.ready
    for _ in range(100):
        for slot in play.tree.to_stop():
            play.move("stop", slot.name)
        play.now += 60.0
        play.start()
        for name in play.slots:
            play.move("ready", name)
    assert {slot.state for slot in play.slots.values()} == {"up"}


@settings(deadline=None)
@given(st.booleans(), MOVES)
def test_under_one_for_one_whoever_was_ready_once_is_restarted_when_its_time_has_come(
    started: bool, moves: list[tuple[str, str]]
):
    play = Random(Strategy.ONE_FOR_ONE, None, started)
    for move in moves:
        play.move(*move)
        play.start()
        waiting = [
            slot for slot in play.slots.values() if slot.state == "waiting" and slot.name in play.ready
        ]
        assert all(slot.not_before > play.now for slot in waiting)


@settings(deadline=None)
@given(st.sampled_from([Strategy.ONE_FOR_ALL, Strategy.REST_FOR_ONE]), st.booleans(), MOVES)
def test_whoever_falls_with_those_before_it_starts_after_them(
    strategy: Strategy, started: bool, moves: list[tuple[str, str]]
):
    play = Random(strategy, None, started)
    for kind, name in moves:
        play.move("die" if kind == "restart" else kind, name)
        for slot in play.start():
            assert {other.state for other in play.before(slot)} <= {"up"}
            assert not any(other.doomed for other in play.slots.values())
