"""Whom one death in a LocalRun takes down, who hears of it, and whom `any` names meanwhile."""

from __future__ import annotations

from pathlib import Path

import pytest
from rolecall import Actor, Down, Finished, Graph, Ref, Strategy
from rolecall.runtime.testing import LocalRun

from .graphs import watch
from .test_local_deaths import SIGKILL, Record, at, once

pytestmark = pytest.mark.timeout(30)


class Link(Actor):
    """Writes down its starts and stops, and what it is told."""

    stop_timeout_s = 5.0

    def __init__(self, record: Record) -> None:
        self.record = record

    def on_start(self) -> None:
        self.record.append(f"+{self.name}")

    def on_stop(self) -> None:
        self.record.append(f"-{self.name}")

    def note(self, number: int) -> None:
        self.record.append(f"{self.name}:{number}")


class Hanging(Link):
    """Asks b when it stops, which is started again only when this one is down."""

    def on_stop(self) -> None:
        Ref[Link]("b").ask(Link.note, 0)
        super().on_stop()


class Head(Actor):
    """Comes first, so it stays when those after it fall. Tells all of them something when b has died."""

    def __init__(self) -> None:
        self.links = [Ref[Link](name) for name in ("b", "c", "d")]
        self.died = False

    def on_start(self) -> None:
        self.links[0].watch()

    def on_down(self, down: Down) -> None:
        self.died = True
        for link in self.links:
            link.tell(Link.note, 1)
            link.tell(Link.note, 2)

    def step(self) -> float | None:
        if not self.died:
            return None
        for link in self.links:
            link.ask(Link.note, 3)
        raise Finished


def chain(
    folder: Path, strategy: Strategy, *, last: type[Link] = Link, subtree: bool = False
) -> tuple[LocalRun, Record]:
    """A head, then b, c and d; b is killed when all are up. Returns the run, over, and what happened from then on."""
    record: Record = []
    graph = Graph("chain", strategy=strategy)
    graph.until(graph.add("head", Head))
    b, c, _ = graph.add("b", Link, record), graph.add("c", Link, record), graph.add("d", last, record)
    if subtree:
        graph.supervise(b, c, strategy=Strategy.ONE_FOR_ALL)
    run = LocalRun(graph, folder=folder, kill=once(lambda: "+d" in record, "b"))
    run.run()
    return run, record[record.index("+d") + 1 :]


@pytest.mark.parametrize(
    ("strategy", "subtree", "events"),
    [
        (Strategy.ONE_FOR_ONE, False, "+b -d -c -b"),
        (Strategy.REST_FOR_ONE, False, "-d -c +b +c +d -d -c -b"),
        (Strategy.ONE_FOR_ONE, True, "-c +b +c -d -c -b"),
    ],
)
def test_those_that_fall_with_it_stop_and_start_in_order_and_their_mail_waits(
    tmp_path: Path, strategy: Strategy, subtree: bool, events: str
):
    run, record = chain(tmp_path, strategy, subtree=subtree)
    assert [event for event in record if ":" not in event] == events.split()
    for name in "bcd":
        notes = [event for event in record if event.startswith(f"{name}:")]
        assert notes == [f"{name}:1", f"{name}:2", f"{name}:3"]
    assert [death.name for death in run.deaths] == ["b"]
    assert run.dead_letters == []
    assert run.now == 0.0


def test_one_that_does_not_stop_in_time_is_killed(tmp_path: Path):
    run, record = chain(tmp_path, Strategy.REST_FOR_ONE, last=Hanging)
    assert [event for event in record if ":" not in event] == ["-c", "+b", "+c", "+d", "-d", "-c", "-b"]
    assert run.now == 5.0
    assert [death.name for death in run.deaths] == ["b"]


# --- watch and any -------------------------------------------------------------------------------------------


def test_a_local_run_watches_alike(tmp_path: Path):
    run = LocalRun(watch.build(watch.Config(finish=True)), folder=tmp_path)
    run.run()
    assert run.reports["watcher"][-1]["down"][2:] == ["", True]


def test_each_incarnation_ends_once_for_its_watcher(tmp_path: Path):
    run = LocalRun(
        watch.build(watch.Config(downs=4)),
        folder=tmp_path,
        kill=lambda run: ["mortal"] if run.reports["watcher"] else [],
    )
    run.run()
    downs = [report["down"] for report in run.reports["watcher"] if "down" in report]
    assert downs == [["mortal", incarnation, SIGKILL, False] for incarnation in (1, 3, 4, 5)]


def test_one_that_was_dead_before_it_was_watched_is_told_at_once(tmp_path: Path):
    graph = watch.build(watch.Config(temporary=True))
    run = LocalRun(graph, folder=tmp_path, kill=at({1: "mortal"}))
    run.run()
    assert run.turns[:2] == ["mortal", "watcher"]
    assert run.reports["watcher"][-1]["down"] == ["mortal", 1, SIGKILL, True]


class Chooser(Actor):
    """Whom `any` names: at once, with two asks on their way to one, and when one is down."""

    def __init__(self, pool: Ref[Link]) -> None:
        self.pool = pool

    def on_start(self) -> None:
        self.pool.watch()
        self.report(at_once=[self.pool.any().name for _ in range(3)])
        for _ in range(2):
            Ref[Link]("pool-1").tell(Link.note, 1)
        self.report(busy=[self.pool.any().name for _ in range(3)])

    def on_down(self, down: Down) -> None:
        self.report(down=[self.pool.any().name for _ in range(3)])
        raise Finished


def test_any_names_the_least_busy_in_turn_and_those_that_are_up_first(tmp_path: Path):
    graph = Graph("pool")
    pool = graph.add("pool", Link, [])
    graph.place(pool, replicas=3)
    graph.until(graph.add("chooser", Chooser, pool))
    run = LocalRun(graph, folder=tmp_path, kill=lambda run: ["pool-2"] if run.reports["chooser"] else [])
    run.run()
    assert run.reports["chooser"] == [
        {"at_once": ["pool-0", "pool-1", "pool-2"]},
        {"busy": ["pool-0", "pool-2", "pool-0"]},
        {"down": ["pool-0", "pool-0", "pool-0"]},
    ]
