"""A boss that gives work to any of three workers, one of which it keeps busy for a while."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from rolecall import Actor, Finished, Graph, NotYet, Ref


class Worker(Actor):
    def on_start(self) -> None:
        self.released = False

    def work(self) -> str:
        return self.name

    def hold(self) -> None:
        """Is not handled before `release`."""
        if not self.released:
            raise NotYet

    def release(self) -> None:
        self.released = True


class Boss(Actor):
    def __init__(self, workers: Ref[Worker]) -> None:
        self.workers = workers

    def step(self) -> None:
        idle = self.work()
        busy = self.workers.any()
        busy.tell(Worker.hold)
        one_busy = self.work()
        busy.tell(Worker.release)
        self.report(idle=idle, busy=busy.name, one_busy=one_busy)
        raise Finished

    def work(self) -> dict[str, int]:
        """How often each was chosen."""
        return dict(Counter(self.workers.any().ask(Worker.work) for _ in range(12)))


@dataclass(frozen=True, kw_only=True)
class Config:
    pass


def build(config: Config) -> Graph:
    graph = Graph("pool")
    workers = graph.add("worker", Worker)
    graph.place(workers, replicas=3)
    graph.until(graph.add("boss", Boss, workers))
    return graph
