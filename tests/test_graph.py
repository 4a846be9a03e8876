"""A run as data."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest
from rolecall import Actor, Graph, Ref, Restart, Strategy


class Store(Actor):
    http: ClassVar[dict[str, str]] = {"POST /v1/items": "put"}
    for_workers: ClassVar[tuple[str, ...]] = ("put",)

    def put(self, item: int) -> None: ...


class Scorer(Actor):
    def score(self, item: int) -> int:
        return item


class Worker(Actor):
    def __init__(self, store: Ref[Store], scorer: Ref[Scorer], *, size: int = 1) -> None:
        self.store, self.scorer, self.size = store, scorer, size


def ring() -> tuple[Graph, Ref[Worker]]:
    graph = Graph("ring", strategy=Strategy.REST_FOR_ONE, max_restarts=7, within_s=9.0)
    store = graph.add("store", Store)
    scorer = graph.add("scorer", Scorer)
    worker = graph.add("worker", Worker, store, scorer=scorer, size=3)
    return graph, worker


def test_roles_keep_the_order_in_which_they_were_added():
    graph, worker = ring()
    assert [role.name for role in graph] == ["store", "scorer", "worker"]
    assert worker == Ref("worker")
    assert "worker" in graph
    assert "trainer" not in graph
    assert graph["worker"].actor is Worker
    assert graph["worker"].kwargs == {"scorer": Ref("scorer"), "size": 3}


def test_wires_are_known_by_argument_however_they_were_given():
    graph, _ = ring()
    assert graph["worker"].wires == {"store": "store", "scorer": "scorer"}
    assert graph["store"].wires == {}


def test_place_says_how_a_role_runs():
    graph, worker = ring()
    assert graph["worker"].members == ["worker"]
    graph.place(worker, replicas=3, elastic=True, restart=Restart.TEMPORARY)
    role = graph["worker"]
    assert role.members == ["worker-0", "worker-1", "worker-2"]
    assert (role.elastic, role.restart) == (True, Restart.TEMPORARY)
    with pytest.raises(ValueError, match="worker needs at least one replica, not 0"):
        graph.place(worker, replicas=0)


@pytest.mark.parametrize("name", ["", "Trainer", "1st", "a-b", "a" * 40, "a/b"])
def test_a_name_that_cannot_be(name: str):
    with pytest.raises(ValueError, match="role name"):
        Graph("ring").add(name, Store)


def test_a_name_used_twice():
    graph, _ = ring()
    with pytest.raises(ValueError, match="ring has a role 'store' already"):
        graph.add("store", Store)


def test_a_wire_to_nowhere():
    with pytest.raises(ValueError, match="worker is wired to 'store', which is not in graph other"):
        Graph("other").add("worker", Worker, Ref("store"), Ref("scorer"))


def test_arguments_are_checked_when_the_graph_is_built():
    graph, _ = ring()
    wrong: Any = Worker
    with pytest.raises(
        ValueError, match="second can't be made: Worker: missing a required argument: 'scorer'"
    ):
        graph.add("second", wrong, Ref("store"))
    with pytest.raises(ValueError, match="unexpected keyword argument 'sise'"):
        graph.add("second", wrong, Ref("store"), Ref("scorer"), sise=3)


def test_until_collects_who_ends_the_run():
    graph, worker = ring()
    graph.until(worker)
    graph.until(Ref("store"))
    assert graph.ends_with == ["worker", "store"]


def test_a_machine_that_joins_runs_the_elastic_roles_and_what_only_they_can_reach():
    graph, worker = ring()
    graph.place(worker, replicas=2, elastic=True)
    part = Graph("joined")
    graph.add_part_for_joining(part, 5)
    assert [role.name for role in part] == ["scorer", "worker"]
    assert part["worker"].replicas == 5
    assert part["scorer"].replicas == 1
    assert graph["worker"].replicas == 2


def test_what_a_machine_that_joins_may_send():
    """What the roles it reaches list, and nothing to those of which it has its own or to which it is not wired."""
    graph, worker = ring()
    assert graph.open_to_workers() == {}
    graph.place(worker, elastic=True)
    assert graph.open_to_workers() == {"store": ("put",)}


def test_a_supervisor_of_their_own_keeps_the_order_of_its_roles():
    graph, worker = ring()
    graph.supervise(worker, Ref("scorer"), strategy=Strategy.ONE_FOR_ALL, max_restarts=3, within_s=30.0)
    [subtree] = graph.subtrees
    assert subtree.roles == ("scorer", "worker")
    assert subtree.name == "subtree scorer+worker"
    assert (subtree.strategy, subtree.max_restarts, subtree.within_s) == (Strategy.ONE_FOR_ALL, 3, 30.0)


def test_a_role_has_one_supervisor_and_must_be_there():
    graph, worker = ring()
    with pytest.raises(ValueError, match="'trainer' is not in graph ring: add it before it is supervised"):
        graph.supervise(worker, Ref("trainer"))
    with pytest.raises(ValueError, match="worker has a supervisor of its own already"):
        graph.supervise(worker, worker)
    with pytest.raises(ValueError, match="graph ring: a supervisor needs at least one role"):
        graph.supervise()
    graph.supervise(worker)
    with pytest.raises(ValueError, match="worker has a supervisor of its own already"):
        graph.supervise(Ref("scorer"), worker)
    assert [subtree.roles for subtree in graph.subtrees] == [("worker",)]


def test_a_machine_that_joins_keeps_the_supervisors_of_what_it_runs():
    graph, worker = ring()
    graph.place(worker, elastic=True)
    graph.supervise(Ref("store"))
    graph.supervise(Ref("scorer"), worker, max_restarts=9)
    part, other_part = Graph("joined"), Graph("joined")
    graph.add_part_for_joining(part, 1)
    assert [subtree.roles for subtree in part.subtrees] == [("scorer", "worker")]
    other, worker = ring()
    other.place(worker, elastic=True)
    other.supervise(Ref("store"), worker, max_restarts=9)
    other.add_part_for_joining(other_part, 1)
    [subtree] = other_part.subtrees
    assert (subtree.roles, subtree.max_restarts) == (("worker",), 9)
