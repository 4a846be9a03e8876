"""Addresses of actors."""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from rolecall import Actor, Ref, RolecallError, idempotent
from rolecall.runtime.ref import DEFAULT_TIMEOUT_S, Call, bind_transport, only_one

from .fakes import Parked


class Counter(Actor):
    def add(self, n: int, *, twice: bool = False) -> int:
        return n

    @idempotent
    def read(self) -> int:
        return 0


class Recorder:
    """A transport that only writes down what it is given."""

    def __init__(self, members: dict[str, list[str]]) -> None:
        self.members = members
        self.asked: list[tuple[list[str], Call, float]] = []
        self.told: list[tuple[str, Call]] = []

    def ask(self, names: Sequence[str], call: Call, timeout_s: float) -> list[Any]:
        self.asked.append((list(names), call, timeout_s))
        return [f"answer of {name}" for name in names]

    def ask_soon(self, name: str, call: Call, timeout_s: float) -> Parked:
        return Parked(lambda: self.ask([name], call, timeout_s)[0])

    def tell(self, name: str, call: Call) -> None:
        self.told.append((name, call))

    def replicas(self, name: str) -> Sequence[str]:
        return self.members[name]

    def pick(self, name: str) -> str:
        return self.replicas(name)[0]

    def watch(self, name: str) -> None:
        raise NotImplementedError


@pytest.fixture
def transport() -> Iterator[Recorder]:
    recorder = Recorder({"counter": ["counter"], "worker": ["worker-0", "worker-1"]})
    bind_transport(recorder)
    yield recorder
    bind_transport(None)


def test_ask_sends_the_handlers_name_and_its_arguments(transport: Recorder):
    assert Ref[Counter]("counter").ask(Counter.add, 2, twice=True) == "answer of counter"
    assert transport.asked == [(["counter"], Call("add", (2,), {"twice": True}), DEFAULT_TIMEOUT_S)]


def test_the_message_knows_whether_it_may_run_twice(transport: Recorder):
    Ref[Counter]("counter").ask(Counter.read)
    Ref[Counter]("counter").tell(Counter.add, 1)
    assert transport.asked[0][1].idempotent
    assert transport.told == [("counter", Call("add", (1,), {}, idempotent=False))]


def test_within_changes_the_deadline_of_a_copy(transport: Recorder):
    counter = Ref[Counter]("counter")
    counter.within(1.5).ask(Counter.read)
    counter.ask(Counter.read)
    assert [timeout_s for _, _, timeout_s in transport.asked] == [1.5, DEFAULT_TIMEOUT_S]


def test_ask_each_asks_all_replicas_at_once(transport: Recorder):
    answers = Ref[Counter]("worker").ask_each(Counter.read)
    assert answers == ["answer of worker-0", "answer of worker-1"]
    assert [names for names, _, _ in transport.asked] == [["worker-0", "worker-1"]]


def test_one_of_many_must_be_named():
    assert only_one("worker", ["worker-1"]) == "worker-1"
    with pytest.raises(RolecallError, match=r"worker has 2 replicas: use ask_each for all, any\(\) for one"):
        only_one("worker", ["worker-0", "worker-1"])


def test_outside_an_actor_it_says_where_it_works():
    with pytest.raises(RolecallError, match="only inside a running actor"):
        Ref[Counter]("counter").ask(Counter.read)


def test_it_is_a_value():
    assert pickle.loads(pickle.dumps(Ref("counter", 2.0))) == Ref("counter", 2.0)
    assert len({Ref("counter"), Ref("counter"), Ref("other")}) == 2


def test_ask_soon_gives_the_answer_later(transport: Recorder):
    answer = Ref[Counter]("counter", 5.0).ask_soon(Counter.add, 2)
    assert answer.result() == "answer of counter"
    assert transport.asked == [(["counter"], Call("add", (2,), {}), 5.0)]
