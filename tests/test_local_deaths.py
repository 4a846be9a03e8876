"""Deaths in a LocalRun: what follows is what follows in a run of processes, and the same each time."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
from rolecall import (
    Actor,
    ActorDied,
    AskTimeout,
    DeadlockError,
    Finished,
    Graph,
    NotYet,
    Ref,
    Restart,
    RolecallError,
    idempotent,
)
from rolecall.runtime.page import SENDERS
from rolecall.runtime.testing import Killed, LocalRun
from rolecall.runtime.tree import Death

pytestmark = pytest.mark.timeout(60)

SIGKILL = "killed by SIGKILL"
Record = list[Any]  # what happened, in order; all actors of a test share one
DIED_HANDLING = "desk died while it handled {}, or before its answer was sent"


def at(turns: dict[int, str]) -> Callable[[LocalRun], Iterable[str]]:
    """Kill whom before which turn."""
    return lambda run: [turns[len(run.turns)]] if len(run.turns) in turns else []


def once(when: Callable[[], bool], *names: str) -> Callable[[LocalRun], Iterable[str]]:
    """Kill these before the first turn at which that holds."""
    waiting = list(names)

    def kill(run: LocalRun) -> Iterable[str]:
        dying = list(waiting) if when() else []
        del waiting[: len(dying)]
        return dying

    return kill


class Desk(Actor):
    """Writes down what it is told. `deadly`: the numbers it dies of, each as often as it is in there.

    All its incarnations share both lists: nothing is copied in a LocalRun.
    """

    def __init__(self, record: Record, deadly: list[int]) -> None:
        self.record, self.deadly = record, deadly

    def on_start(self) -> None:
        self.record.append(("start", self.context.incarnation))
        self.handled: list[int] = []

    def on_stop(self) -> None:
        self.record.append("stop")

    def take(self, number: int) -> int:
        if number in self.deadly:
            self.deadly.remove(number)
            raise Killed
        self.record.append(number)
        self.handled.append(number)
        return number

    @idempotent
    def take_again(self, number: int) -> int:
        return self.take(number)

    def take_after(self, number: int, other: int) -> int:
        if other not in self.handled:
            raise NotYet
        return self.take(number)

    def nothing(self) -> None:
        pass


class Clerk(Actor):
    """Does what its script says with its desk, then it has finished."""

    def __init__(self, desk: Ref[Desk], record: Record, script: Callable[[Clerk], None]) -> None:
        self.desk, self.record, self.script = desk, record, script

    def step(self) -> float | None:
        self.script(self)
        raise Finished


def office(
    folder: Path,
    script: Callable[[Clerk], None],
    *,
    deadly: Iterable[int] = (),
    actor: type[Desk] = Desk,
    restart: Restart = Restart.TRANSIENT,
    max_restarts: int = 5,
    **options: Any,
) -> tuple[LocalRun, Record]:
    """A desk and its clerk."""
    record: Record = []
    graph = Graph("office", max_restarts=max_restarts)
    desk = graph.add("desk", actor, record, list(deadly))
    graph.place(desk, restart=restart)
    graph.until(graph.add("clerk", Clerk, desk, record, script))
    return LocalRun(graph, folder=folder, **options), record


# --- one death -----------------------------------------------------------------------------------------------


def test_mail_waits_for_the_next_incarnation_and_is_handled_in_order_once(tmp_path: Path):
    def script(clerk: Clerk) -> None:
        for number in range(6):
            clerk.desk.tell(Desk.take, number)
        clerk.desk.ask(Desk.nothing)

    record: Record
    run, record = office(tmp_path, script, kill=once(lambda: 2 in record, "desk"))
    run.run()
    assert record == [("start", 1), 0, 1, 2, ("start", 3), 3, 4, 5, "stop"]
    assert run.deaths == [Death("desk", SIGKILL, 0.0)]
    assert run.dead_letters == []


def attempt(message: Callable[..., Any], number: int) -> Callable[[Clerk], None]:
    """Ask, and write down how it ends."""

    def script(clerk: Clerk) -> None:
        try:
            clerk.record.append(clerk.desk.ask(message, number))
        except ActorDied as error:
            clerk.record.append((error.reason, error.maybe_executed))

    return script


@pytest.mark.parametrize(
    ("message", "deaths", "outcome"),
    [
        (Desk.take, 1, [(SIGKILL, True), ("start", 3)]),
        (Desk.take_again, 1, [("start", 3), 7, 7]),
        (Desk.take_again, 2, [("start", 3), ("start", 4), ("take_again killed desk 2 times", True)]),
    ],
)
def test_an_ask_that_kills(tmp_path: Path, message: Callable[..., Any], deaths: int, outcome: Record):
    run, record = office(tmp_path, attempt(message, 7), deadly=[7] * deaths)
    run.run()
    assert record[1:-1] == outcome
    assert run.dead_letters == []


@pytest.mark.parametrize(
    ("message", "deaths", "outcome", "dead_letters"),
    [
        (Desk.take, 1, [("start", 3)], [("desk", "take", DIED_HANDLING.format("take"))]),
        (Desk.take_again, 1, [("start", 3), 7], []),
        (Desk.take_again, 2, [("start", 3), ("start", 4)],
         [("desk", "take_again", "take_again killed desk 2 times")]),
    ],
)  # fmt: skip
def test_a_tell_that_kills(
    tmp_path: Path,
    message: Callable[..., Any],
    deaths: int,
    outcome: Record,
    dead_letters: list[tuple[str, str, str]],
):
    def script(clerk: Clerk) -> None:
        clerk.desk.tell(message, 7)

    run, record = office(tmp_path, script, deadly=[7] * deaths)
    run.run()
    assert record[1:-1] == outcome
    assert run.dead_letters == dead_letters


def test_what_notyet_keeps_survives(tmp_path: Path):
    def script(clerk: Clerk) -> None:
        second = clerk.desk.ask_soon(Desk.take_after, 2, 1)
        clerk.desk.ask(Desk.nothing)  # by then it was set aside
        clerk.desk.tell(Desk.take, 0)
        clerk.desk.tell(Desk.take, 1)
        clerk.record.append(("answer", second.result()))

    run, record = office(tmp_path, script, deadly=[0])
    run.run()
    assert record == [("start", 1), ("start", 3), 1, 2, ("answer", 2), "stop"]


class Stubborn(Desk):
    """Will not die."""

    def take(self, number: int) -> int:
        try:
            return super().take(number)
        except BaseException:  # noqa: BLE001
            return number
        finally:
            self.deadly.clear()


class Loud(Desk):
    """Has last words."""

    def take(self, number: int) -> int:
        try:
            return super().take(number)
        finally:
            self.report(taken=number)


@pytest.mark.parametrize("actor", [Stubborn, Loud])
def test_whoever_dies_does_nothing_more_whatever_it_catches(tmp_path: Path, actor: type[Desk]):
    def script(clerk: Clerk) -> None:
        clerk.desk.tell(Desk.take, 1)
        clerk.desk.tell(Desk.take, 2)

    run, record = office(tmp_path, script, deadly=[1], actor=actor)
    run.run()
    assert record == [("start", 1), ("start", 3), 2, "stop"]
    assert run.dead_letters == [("desk", "take", DIED_HANDLING.format("take"))]
    assert run.reports["desk"] == ([{"taken": 2}] if actor is Loud else [])


def test_one_killed_while_it_waits_is_unwound_and_its_ask_is_handled_for_nobody(tmp_path: Path):
    def script(clerk: Clerk) -> None:
        if clerk.context.incarnation == 2:
            try:
                clerk.desk.ask(Desk.take_after, 2, 1)
            finally:
                clerk.record.append("unwound")
                clerk.desk.tell(Desk.take, 99)
        clerk.desk.tell(Desk.take, 1)
        clerk.desk.ask(Desk.nothing)

    run, record = office(tmp_path, script, kill=at({4: "clerk"}))
    run.run()
    assert run.turns[:4] == ["desk", "clerk", "clerk", "desk"]
    assert record == [("start", 1), "unwound", 1, 2, "stop"]
    assert [death.name for death in run.deaths] == ["clerk"]


def test_what_the_dead_have_sent_is_handled_unless_its_receiver_dies_too(tmp_path: Path):
    def script(clerk: Clerk) -> None:
        if clerk.context.incarnation > 2:
            clerk.desk.ask(Desk.nothing)
            return
        for number in (1, 2, 3):
            clerk.desk.tell(Desk.take, number)
        raise Killed

    record: Record
    run, record = office(tmp_path, script, kill=once(lambda: 2 in record, "desk"))
    run.run()
    assert record == [("start", 1), 1, 2, ("start", 4), "stop"]
    assert [death.name for death in run.deaths] == ["clerk", "desk"]
    assert run.dead_letters == []  # nobody is left who could say so


def test_more_senders_may_die_than_a_page_remembers(tmp_path: Path):
    def script(clerk: Clerk) -> None:
        clerk.desk.tell(Desk.take, clerk.context.incarnation)
        clerk.desk.ask(Desk.nothing)
        if clerk.context.incarnation < SENDERS + 10:
            raise Killed

    run, record = office(tmp_path, script, max_restarts=1000)
    run.run()
    assert record == [("start", 1), *range(2, SENDERS + 11), "stop"]


class Late(Desk):
    def on_start(self) -> None:
        super().on_start()
        if self.deadly:
            self.deadly.pop()
            raise Killed


def test_a_death_before_ready_counts_and_mail_waits_meanwhile(tmp_path: Path):
    run, record = office(tmp_path, attempt(Desk.take, 5), deadly=[0, 0], actor=Late)
    run.run()
    assert record == [("start", 1), ("start", 2), ("start", 3), 5, 5, "stop"]
    assert [death.name for death in run.deaths] == ["desk", "desk"]


# --- who is gone for good ------------------------------------------------------------------------------------


def test_asks_and_tells_to_one_that_is_gone(tmp_path: Path):
    def script(clerk: Clerk) -> None:
        clerk.desk.tell(Desk.take, 1)
        clerk.desk.tell(Desk.take, 2)
        for _ in range(2):  # one that was waiting, and one that comes too late
            attempt(Desk.take, 3)(clerk)
        clerk.desk.tell(Desk.take, 4)

    run, record = office(tmp_path, script, deadly=[1], restart=Restart.TEMPORARY)
    run.run()
    assert record == [("start", 1), (SIGKILL, False), (SIGKILL, False)]
    assert run.dead_letters == [("desk", "take", SIGKILL)] * 3
    assert run.deaths == [Death("desk", SIGKILL, None)]


def test_an_exception_of_its_own_still_ends_the_run(tmp_path: Path):
    def script(clerk: Clerk) -> None:
        raise ValueError("the clerk is ill")

    run, _ = office(tmp_path, script)
    with pytest.raises(ValueError, match="the clerk is ill"):
        run.run()


def test_too_many_deaths_end_the_run_with_their_story(tmp_path: Path):
    def script(clerk: Clerk) -> None:
        for _ in range(4):
            clerk.desk.tell(Desk.take, 7)

    run, record = office(tmp_path, script, deadly=[7] * 9, max_restarts=2)
    story = "desk died: killed by SIGKILL. That was death 3 within 60 s and 2 restarts are allowed"
    with pytest.raises(RolecallError, match=story):
        run.run()
    assert [death.restart_in_s is None for death in run.deaths] == [False, False, True]
    assert len(record) == 3


def test_restarts_wait_longer_and_longer_in_virtual_time(tmp_path: Path):
    class Longest(random.Random):
        def uniform(self, a: float, b: float) -> float:
            return b

    def script(clerk: Clerk) -> None:
        for _ in range(4):
            clerk.desk.tell(Desk.take, 7)
        clerk.desk.ask(Desk.nothing)

    run, _ = office(tmp_path, script, deadly=[7] * 4, rng=Longest())
    run.run()
    assert [death.restart_in_s for death in run.deaths] == pytest.approx([0.0, 0.4, 0.8, 1.6])
    assert run.now == pytest.approx(2.8)


def test_a_deadline_passes_while_a_restart_is_waited_for(tmp_path: Path):
    def script(clerk: Clerk) -> None:
        for _ in range(4):
            clerk.desk.tell(Desk.take, 7)
        with pytest.raises(AskTimeout, match="no answer from desk within the deadline"):
            clerk.desk.within(1e-6).ask(Desk.nothing)

    run, _ = office(tmp_path, script, deadly=[7] * 4)
    run.run()
    assert len(run.deaths) == 4


def test_a_deadlock_after_a_death_is_named(tmp_path: Path):
    def script(clerk: Clerk) -> None:
        clerk.desk.tell(Desk.take, 7)
        clerk.desk.ask(Desk.take_after, 2, 1)

    run, _ = office(tmp_path, script, deadly=[7])
    with pytest.raises(DeadlockError, match=r"clerk waits for desk\.take_after"):
        run.run()
