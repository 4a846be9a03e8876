"""A Tree whose actors are played by the test."""

from __future__ import annotations

import random

from rolecall import Actor, Graph, Ref, Strategy
from rolecall.runtime.tree import Slot, Tree, Verdict


class Longest(random.Random):
    def uniform(self, a: float, b: float) -> float:
        return b


class Play:
    """Drives a tree whose actors start and stop as soon as they are asked to. events: "+b" started, "-b" stopped.

    slow: those who are not ready as soon as they have started, but when they are said to be.
    """

    def __init__(self, graph: Graph, slow: str = "") -> None:
        slots = [Slot(role, place, name) for place, role in enumerate(graph) for name in role.members]
        self.tree = Tree(graph, slots, Longest())
        self.slots = {slot.name: slot for slot in slots}
        self.slow = slow.split()
        self.now = 0.0
        self.settle()

    def settle(self) -> str:
        events: list[str] = []
        while True:
            if going := self.tree.to_stop():
                for slot in going:
                    assert self.tree.ended(slot, "exited with code 0", self.now) == Verdict()
                    events.append(f"-{slot.name}")
            elif coming := self.tree.to_start(self.now):
                for slot in coming:
                    slot.state = "starting" if slot.name in self.slow else "up"
                    events.append(f"+{slot.name}")
            else:
                return " ".join(events)

    def die(self, name: str, reason: str = "killed by SIGKILL") -> Verdict:
        return self.tree.ended(self.slots[name], reason, self.now)

    def ready(self, name: str) -> str:
        """What follows when one of the slow is ready."""
        self.slots[name].state = "up"
        return self.settle()

    def restarts(self, name: str) -> str:
        """What follows from a death, once all waits are over."""
        self.die(name)
        self.now += 60.0
        return self.settle()


def ring(strategy: Strategy = Strategy.ONE_FOR_ONE, **limits: float) -> tuple[Graph, list[Ref[Actor]]]:
    """a, b, two workers, c, d"""
    graph = Graph("ring", strategy=strategy, **limits)  # type: ignore[arg-type]
    refs = [graph.add(name, Actor) for name in ("a", "b", "worker", "c", "d")]
    graph.place(refs[2], replicas=2)
    return graph, refs


def pool(
    strategy: Strategy = Strategy.ONE_FOR_ONE, own: Strategy = Strategy.ONE_FOR_ONE, slow: str = ""
) -> Play:
    """b and the workers have a supervisor of their own, which restarts twice."""
    graph, (_, b, worker, _, _) = ring(strategy)
    graph.supervise(worker, b, strategy=own, max_restarts=2, within_s=60.0)
    return Play(graph, slow)
