"""A whole graph in one process, in a fixed order, in virtual time."""

from __future__ import annotations

import gc
import threading
from pathlib import Path
from typing import Any

import pytest
from rolecall import Actor, ActorStopped, DeadlockError, Finished, Graph, NotYet, Ref
from rolecall.runtime.baton import Strand
from rolecall.runtime.recipe import configure, load_recipe
from rolecall.runtime.testing import LocalRun, spend, virtual_clock

from .fakes import fake_ring
from .processes import GRAPHS

pytestmark = pytest.mark.timeout(30)


def ring(folder: Path, **settings: Any) -> LocalRun:
    module = load_recipe(str(GRAPHS / "ring.py"))
    config = configure(module, "ring", [f"{key}={value}" for key, value in settings.items()])
    run = LocalRun(module.build(config), folder=folder)
    run.run()
    return run


def test_a_ring_turns(tmp_path: Path):
    run = ring(tmp_path, count=30)
    assert [report["item"] for report in run.reports["consumer"]] == list(range(1, 31))
    assert run.dead_letters == []


def test_the_same_turns_twice(tmp_path: Path):
    first, second = ring(tmp_path / "a", count=20), ring(tmp_path / "b", count=20)
    assert first.turns == second.turns
    assert first.reports == second.reports
    assert {"shelf", "producer", "consumer"} == set(first.turns)


def test_a_full_shelf_blocks_its_producer(tmp_path: Path):
    run = ring(tmp_path, count=12, capacity=2)
    made = (tmp_path / "state" / "producer" / "next").read_text()
    assert int(made) <= 12 + 2 + 2  # taken, on the shelf, and the one it waits with
    assert len(run.reports["consumer"]) == 12


def test_a_run_goes_on_from_what_its_actors_kept(tmp_path: Path):
    ring(tmp_path, count=10)
    run = ring(tmp_path, count=25)
    assert [report["item"] for report in run.reports["consumer"]] == list(range(11, 26))


def test_a_run_gives_its_file_descriptors_back_when_it_ends(tmp_path: Path):
    """Not at the next collection of garbage, of which a simulation of a thousand actors may make little."""
    gc.disable()
    try:
        ring(tmp_path / "first")
        before = len(list(Path("/proc/self/fd").iterdir()))
        for number in range(3):
            ring(tmp_path / str(number))
        assert len(list(Path("/proc/self/fd").iterdir())) == before
    finally:
        gc.enable()


class Clock(Actor):
    """Steps every hour, `hours` times."""

    def __init__(self, hours: int) -> None:
        self.hours = hours

    def step(self) -> float | None:
        if self.hours == 0:
            raise Finished
        self.hours -= 1
        self.report(hours=self.hours)
        return 3600.0


def test_time_is_virtual(tmp_path: Path):
    graph = Graph("clock")
    graph.until(graph.add("clock", Clock, hours=48))
    run = LocalRun(graph, folder=tmp_path)
    run.run()
    assert run.now == 48 * 3600.0
    assert len(run.reports["clock"]) == 48


class Gate(Actor):
    def __init__(self) -> None:
        self.opened: set[str] = set()
        self.passed: list[str] = []

    def open(self, key: str) -> None:
        self.opened.add(key)

    def go_through(self, key: str) -> None:
        if key not in self.opened:
            raise NotYet
        self.passed.append(key)

    def fail(self) -> None:
        raise ValueError("the gate is broken")

    def count(self) -> int:
        return len(self.passed)


class Visitor(Actor):
    """Does what its script says, then it has finished."""

    def __init__(self, gate: Ref[Gate], script: str) -> None:
        self.gate, self.script = gate, script

    def step(self) -> float | None:
        getattr(self, self.script)()
        raise Finished

    def overtakes(self) -> None:
        self.gate.tell(Gate.go_through, "b")
        self.gate.tell(Gate.go_through, "a")
        self.gate.tell(Gate.open, "a")
        self.gate.tell(Gate.open, "b")
        self.report(passed=self.gate.ask(Gate.count))

    def waits_for_ever(self) -> None:
        self.gate.ask(Gate.go_through, "never")

    def waits_a_while(self) -> None:
        self.gate.within(5.0).ask(Gate.go_through, "never")

    def breaks_it(self) -> None:
        self.gate.ask(Gate.fail)

    def is_told(self) -> None:
        try:
            self.gate.ask(Gate.fail)
        except ValueError as error:
            self.report(text=str(error), notes=error.__notes__[0])

    def breaks_it_by_telling(self) -> None:
        self.gate.tell(Gate.fail)
        self.gate.ask(Gate.count)


def visit(folder: Path, script: str) -> LocalRun:
    graph = Graph("visit")
    gate = graph.add("gate", Gate)
    graph.until(graph.add("visitor", Visitor, gate=gate, script=script))
    return LocalRun(graph, folder=folder)


def test_not_yet_is_overtaken_and_tried_again(tmp_path: Path):
    run = visit(tmp_path, "overtakes")
    run.run()
    gate = run.actor("gate")
    assert isinstance(gate, Gate)
    assert gate.passed == ["a", "b"]
    assert run.reports["visitor"] == [{"passed": 2}]


@pytest.mark.parametrize("script", ["waits_for_ever", "waits_a_while"])
def test_a_deadlock_is_named(tmp_path: Path, script: str):
    with pytest.raises(
        DeadlockError, match=r"nobody can go on: gate waits for a message; visitor waits for gate\.go_through"
    ):
        visit(tmp_path, script).run()


def test_an_actors_exception_surfaces(tmp_path: Path):
    with pytest.raises(ValueError, match="the gate is broken"):
        visit(tmp_path, "breaks_it").run()


def test_a_handlers_exception_goes_to_its_asker_with_a_note(tmp_path: Path):
    run = visit(tmp_path, "is_told")
    run.run()
    assert run.reports["visitor"][0]["text"] == "the gate is broken"
    assert "(in gate.fail)" in run.reports["visitor"][0]["notes"]


def test_a_told_handlers_exception_ends_the_run(tmp_path: Path):
    with pytest.raises(ValueError, match="the gate is broken"):
        visit(tmp_path, "breaks_it_by_telling").run()


def test_a_run_that_failed_leaves_no_stack_behind(tmp_path: Path):
    """One that still waited would be unwound some day by whoever collects garbage then."""
    with pytest.raises(DeadlockError):
        visit(tmp_path, "waits_for_ever").run()
    assert [
        one for one in gc.get_objects() if isinstance(one, Strand) and one
    ] == []  # true while it is under way


def test_a_run_is_the_same_in_any_thread(tmp_path: Path):
    runs = [ring(tmp_path / "main", count=10)]
    thread = threading.Thread(target=lambda: runs.append(ring(tmp_path / "another", count=10)))
    thread.start()
    thread.join(timeout=20.0)
    first, second = runs
    assert first.turns == second.turns


class Loop(Actor):
    def __init__(self, others: list[Ref[Loop]], first: bool = False) -> None:
        self.others, self.first = others, first

    def step(self) -> float | None:
        if self.first:
            self.others[0].ask(Loop.pass_on, [Ref("a")])
        return None

    def pass_on(self, path: list[Ref[Loop]]) -> None:
        path[0].ask(Loop.pass_on, path[1:])


def test_a_circle_of_asks_is_named(tmp_path: Path):
    graph = Graph("circle")
    b = graph.add("b", Loop, [])
    a = graph.add("a", Loop, [b], first=True)
    graph.until(a)
    with pytest.raises(DeadlockError, match="a → b → a"):
        LocalRun(graph, folder=tmp_path).run()


class Keeper(Actor):
    """Is told goodbye by its guests, which stop before it."""

    def on_start(self) -> None:
        self.goodbyes: list[str] = []

    def goodbye(self, name: str) -> None:
        self.goodbyes.append(name)

    def finish(self) -> None:
        raise Finished


class Guest(Actor):
    def __init__(self, keeper: Ref[Keeper], last: bool) -> None:
        self.keeper, self.last = keeper, last

    def step(self) -> float | None:
        if self.last:
            raise Finished
        return None

    def on_stop(self) -> None:
        self.keeper.ask(Keeper.goodbye, self.name)


def test_on_stop_may_still_ask_those_that_stop_later(tmp_path: Path):
    graph = Graph("inn")
    keeper = graph.add("keeper", Keeper)
    graph.add("first", Guest, keeper, last=False)
    graph.add("second", Guest, keeper, last=False)
    graph.until(graph.add("third", Guest, keeper, last=True))
    run = LocalRun(graph, folder=tmp_path)
    run.run()
    inn = run.actor("keeper")
    assert isinstance(inn, Keeper)
    assert inn.goodbyes == ["third", "second", "first"]


class Closer(Actor):
    def __init__(self, keeper: Ref[Keeper]) -> None:
        self.keeper = keeper

    def step(self) -> float | None:
        for _ in range(2):  # the one that finishes it, and one that comes too late
            try:
                self.keeper.ask(Keeper.finish)
            except ActorStopped as error:
                self.report(text=str(error))
        self.keeper.tell(Keeper.goodbye, self.name)
        raise Finished


def test_who_asks_an_actor_that_has_finished_is_told(tmp_path: Path):
    graph = Graph("closing")
    keeper = graph.add("keeper", Keeper)
    graph.until(graph.add("closer", Closer, keeper))
    run = LocalRun(graph, folder=tmp_path)
    run.run()
    assert run.reports["closer"] == [{"text": "keeper has stopped"}] * 2
    assert run.dead_letters == [("keeper", "goodbye", "stopped")]


class Ender(Actor):
    """Leaves its asker without an answer, and has finished a second later."""

    def on_start(self) -> None:
        self.asked = False

    def wait_for_nothing(self) -> None:
        self.asked = True
        raise NotYet

    def step(self) -> float | None:
        if self.asked:
            raise Finished
        return 1.0


class Waiter(Actor):
    def __init__(self, ender: Ref[Ender]) -> None:
        self.ender = ender

    def step(self) -> float | None:
        self.ender.ask(Ender.wait_for_nothing)
        return 0.0

    def on_stop(self) -> None:
        self.report(stopped=True)


@pytest.mark.parametrize("ends", [True, False])
def test_who_waits_for_an_actor_that_has_finished_stops_with_the_run_or_dies_of_it(
    tmp_path: Path, ends: bool
):
    graph = Graph("ending")
    ender = graph.add("ender", Ender)
    waiter = graph.add("waiter", Waiter, ender)
    graph.until(ender if ends else waiter)
    run = LocalRun(graph, folder=tmp_path)
    if ends:
        run.run()
        assert run.reports["waiter"] == [{"stopped": True}]
    else:
        with pytest.raises(ActorStopped, match="ender has stopped"):
            run.run()


class Host(Actor):
    """Writes down who has sent what."""

    def on_start(self) -> None:
        self.heard: list[tuple[str, str]] = [("on_start", self.sender)]

    def told(self) -> None:
        self.heard.append(("told", self.sender))

    def asked(self) -> str:
        self.heard.append(("asked", self.sender))
        return self.sender

    def asked_by(self, guest: Ref[Teller]) -> tuple[str, str]:
        return guest.ask(Teller.who), self.sender

    def step(self) -> float | None:
        self.heard.append(("step", self.sender))
        return None


class Teller(Actor):
    def __init__(self, host: Ref[Host], other: Ref[Teller] | None = None) -> None:
        self.host, self.other = host, other

    def who(self) -> str:
        return self.sender

    def step(self) -> float | None:
        self.host.tell(Host.told)
        self.report(names=[self.host.ask(Host.asked)])
        if self.other is None:
            return None
        self.report(names=self.host.ask(Host.asked_by, self.other))
        raise Finished


def test_a_handler_knows_who_has_sent_its_message(tmp_path: Path):
    graph = Graph("party")
    host = graph.add("host", Host)
    first = graph.add("first", Teller, host)
    graph.until(graph.add("second", Teller, host, first))
    run = LocalRun(graph, folder=tmp_path)
    run.run()
    assert run.reports["first"] == [{"names": ["first"]}]
    assert run.reports["second"] == [{"names": ["second"]}, {"names": ["host", "second"]}]
    at_home = run.actor("host")
    assert isinstance(at_home, Host)
    heard = {("on_start", ""), ("step", ""), ("told", "first"), ("asked", "first"), ("told", "second"),
             ("asked", "second")}  # fmt: skip
    assert set(at_home.heard) == heard


def test_who_hands_over_to_whom_is_what_rounds_would_come_to(tmp_path: Path):
    """Where somebody may be killed between two turns, each is chosen by going round; otherwise not, to be faster."""
    runs: list[LocalRun] = []
    for staleness in (2, None):
        for kill in (None, lambda run: []):
            graph = fake_ring(steps=4, batch=4, max_staleness=staleness)
            runs.append(LocalRun(graph, folder=tmp_path / str(len(runs)), kill=kill))
    for run in runs:
        run.run()
    assert runs[0].turns == runs[1].turns and runs[2].turns == runs[3].turns
    assert runs[0].reports.keys() == runs[1].reports.keys()


class Busy(Actor):
    """Its step takes 3 s, in which it hears nothing."""

    def on_start(self) -> None:
        self.heard: list[float] = []

    def hello(self) -> None:
        self.heard.append(virtual_clock())

    def step(self) -> float | None:
        if virtual_clock() >= 9.0:
            raise Finished
        spend(3.0)
        return 0.0


class Greeter(Actor):
    def __init__(self, *, busy: Ref[Busy]) -> None:
        self.busy = busy

    def step(self) -> float | None:
        self.busy.tell(Busy.hello)
        return 2.0


def test_who_spends_time_is_busy_while_others_go_on(tmp_path: Path):
    graph = Graph("busy")
    busy = graph.add("busy", Busy)
    graph.add("greeter", Greeter, busy=busy)
    graph.until(busy)
    run = LocalRun(graph, folder=tmp_path)
    run.run()
    assert run.now == 9.0
    actor = run.actor("busy")
    assert isinstance(actor, Busy) and actor.heard == [3.0, 3.0, 6.0, 6.0, 9.0]
