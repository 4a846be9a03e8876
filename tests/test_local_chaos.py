"""Whatever dies when in a LocalRun: no message is lost or doubled, no group is, and it happens alike twice."""

from __future__ import annotations

import random
import tempfile
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rolecall import Actor, ActorDied, Finished, Graph, NotYet, Ref, idempotent
from rolecall.runtime.ref import Answer
from rolecall.runtime.testing import LocalRun

from .fakes import fake_ring
from .test_recipes import check_ledger, final_digest

pytestmark = pytest.mark.timeout(120)

Record = list[tuple[Any, ...]]  # what happened, in order
Message = tuple[int, int]  # its sender's incarnation, and its number there
MORTALS = ("sink-0", "sink-1", "mortal")
MESSAGES, BATCH = 20, 5


class Pause(Actor):
    @idempotent
    def nothing(self) -> None:
        pass


class Sink(Actor):
    """Writes down what begins and ends here. Each handler waits in its middle, so that it may die there."""

    def __init__(self, record: Record, pause: Ref[Pause]) -> None:
        self.record, self.pause = record, pause

    def on_start(self) -> None:
        self.state = 0

    def step(self) -> float | None:
        self.state += 1
        return 1.0

    def once(self, message: Message) -> None:
        self.record.append(("begin", message, self.name))
        self.pause.ask(Pause.nothing)
        self.record.append(("end", message))
        self.state += 1

    @idempotent
    def again(self, message: Message) -> None:
        self.once(message)

    def later(self, message: Message) -> None:
        if self.state % 3:
            raise NotYet
        self.once(message)


class Sender(Actor):
    """Asks and tells any of the sinks numbered messages, several at a time; writes down how each ends."""

    stop_timeout_s = (
        10_000.0  # half of which it has to settle what it told, through all waits before restarts
    )

    def __init__(self, record: Record, sinks: Ref[Sink], seed: int) -> None:
        self.record, self.sinks, self.seed = record, sinks, seed

    def on_start(self) -> None:
        self.rng = random.Random(f"{self.seed} {self.context.incarnation}")
        self.sent = 0

    def step(self) -> float | None:
        if self.sent == MESSAGES:
            raise Finished
        for message, answer in [self._send() for _ in range(BATCH)]:
            if answer is not None:
                try:
                    answer.result()
                    self.record.append(("answered", message))
                except ActorDied as error:
                    self.record.append(("died" if error.maybe_executed else "unbegun", message))
        return 0.0

    def _send(self) -> tuple[Message, Answer[None] | None]:
        self.sent += 1
        message = (self.context.incarnation, self.sent)
        handler = self.rng.choice([Sink.once, Sink.again, Sink.later])
        asks = self.rng.random() < 0.5
        self.record.append(("ask" if asks else "tell", message, handler.__name__))
        if asks:
            return message, self.sinks.any().ask_soon(handler, message)
        self.sinks.any().tell(handler, message)
        return message, None


def play(folder: Path, seed: int, whom: list[str], rate: float) -> tuple[LocalRun, Record]:
    """A run in which these die with that probability between any two turns, up to 30 times."""
    record: Record = []
    rng = random.Random(seed)
    graph = Graph("chaos", max_restarts=1000)
    pause = graph.add("pause", Pause)
    sinks = graph.add("sink", Sink, record, pause)
    graph.place(sinks, replicas=2)
    graph.until(*(graph.add(name, Sender, record, sinks, seed) for name in ("steady", "mortal")))

    def kill(run: LocalRun) -> list[str]:
        return [rng.choice(whom)] if len(run.deaths) < 30 and rng.random() < rate else []

    run = LocalRun(graph, folder=folder, kill=kill)
    run.run()
    return run, record


def judge(run: LocalRun, record: Record) -> None:
    happened: dict[Message, Counter[str]] = defaultdict(Counter)
    order: dict[tuple[int, str], list[int]] = defaultdict(list)  # of first beginnings, by sender and receiver
    for event, message, *more in record:
        if event == "begin" and not happened[message]["begin"] and not happened[message]["later"]:
            order[message[0], more[0]].append(message[1])
        happened[message].update([event, *more])
    survivors = {run.actor(name).context.incarnation for name in ("steady", "mortal")}
    missing: dict[bool, Counter[str]] = {True: Counter(), False: Counter()}  # of survivors, and of others
    for (sender, number), events in happened.items():
        what = (sender, number, events)
        (handler,) = {"once", "again", "later"} & set(events)
        outcome = {"answered", "died", "unbegun"} & set(events)
        assert events["end"] <= 1, what
        assert events["begin"] <= (2 if handler == "again" else 1), what
        if events["tell"]:
            assert not outcome
            missing[sender in survivors][handler] += not events["end"]
        else:
            assert len(outcome) == 1 or (not outcome and sender not in survivors), what
            if "answered" in outcome:
                assert events["end"] == 1, what
            if "died" in outcome:
                assert events["begin"] and not events["end"], what
            assert "unbegun" not in outcome, what  # nobody is gone for good
    dead_letters = Counter(method for _, method, _ in run.dead_letters)
    assert all(reason for _, _, reason in run.dead_letters)
    assert missing[True] <= dead_letters <= missing[True] + missing[False]
    assert all(numbers == sorted(numbers) for numbers in order.values()), order


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    whom=st.lists(st.sampled_from(MORTALS), min_size=1, unique=True),
    rate=st.sampled_from([0.01, 0.05, 0.2]),
)
def test_every_message_is_handled_once_or_somebody_is_told(seed: int, whom: list[str], rate: float):
    with tempfile.TemporaryDirectory() as folder:
        run, record = play(Path(folder) / "first", seed, whom, rate)
        judge(run, record)
        again, same_record = play(Path(folder) / "second", seed, whom, rate)
    assert (run.turns, run.deaths, record) == (again.turns, again.deaths, same_record)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("max_staleness", [0, 2])
def test_every_group_is_trained_once_whoever_dies(tmp_path: Path, max_staleness: int, seed: int):
    graph = fake_ring(steps=6, batch=4, max_staleness=max_staleness)
    graph.max_restarts = 1000
    rng, names = random.Random(seed), [name for role in graph for name in role.members]
    disturbed = LocalRun(
        graph, folder=tmp_path, kill=lambda run: [rng.choice(names)] if rng.random() < 0.05 else []
    )
    disturbed.run()
    assert len(disturbed.deaths) >= 5
    check_ledger(tmp_path, steps=6, batch=4, max_staleness=max_staleness)
    assert disturbed.dead_letters == []
    if max_staleness == 0:  # the same groups under the same weights
        LocalRun(fake_ring(steps=6, batch=4, max_staleness=0), folder=tmp_path / "quiet").run()
        assert final_digest(tmp_path) == final_digest(tmp_path / "quiet")
