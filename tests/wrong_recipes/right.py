"""A recipe without a mistake, and messages as they should be: the checker finds nothing here."""

from __future__ import annotations

from rolecall import Actor, Graph, Ref


class Shelf(Actor):
    def __init__(self, capacity: int) -> None:
        self.capacity = capacity

    def put(self, item: int) -> None: ...

    def take(self, *, after: int) -> int:
        return after


class Scorer(Actor):
    def score(self, item: int) -> float:
        return float(item)


class Worker(Actor):
    def __init__(self, *, shelf: Ref[Shelf], scorer: Ref[Scorer] | None = None) -> None:
        self.shelf, self.scorer = shelf, scorer

    def step(self) -> float | None:
        item: int = self.shelf.within(2.0).ask(Shelf.take, after=3)
        self.shelf.tell(Shelf.put, item)
        scores: list[float] = self.scorer.ask_each(Scorer.score, item) if self.scorer else []
        return max(scores)


def build() -> Graph:
    graph = Graph("right")
    shelf = graph.add("shelf", Shelf, capacity=4)
    worker = graph.add("worker", Worker, shelf=shelf)
    graph.place(worker, replicas=2)
    graph.until(worker)
    return graph
