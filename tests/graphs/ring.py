"""A small ring for the tests of the runtime: a producer with steps, a store with NotYet, a consumer that ends."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from rolecall import Actor, Finished, Graph, NotYet, Ref, Strategy, idempotent


def save(file: Path, numbers: list[int]) -> None:
    """Whole or not at all: a kill may come at any time."""
    file.with_suffix(".new").write_text("\n".join(map(str, numbers)))
    file.with_suffix(".new").rename(file)


class Shelf(Actor):
    """Holds up to `capacity` numbers; keeps them over a restart, as a real buffer does."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity

    def on_start(self) -> None:
        self._file = self.state_folder / "items"
        self.items = [int(line) for line in self._file.read_text().split()] if self._file.exists() else []

    @idempotent
    def put(self, item: int) -> None:
        if item in self.items:
            return
        if len(self.items) >= self.capacity:
            raise NotYet
        self.items.append(item)
        self._save()

    @idempotent
    def take(self, after: int) -> int:
        """The first item above `after`; what is not above it has been taken."""
        self.items = [item for item in self.items if item > after]
        self._save()
        if not self.items:
            raise NotYet
        return min(self.items)

    def _save(self) -> None:
        save(self._file, self.items)


class Producer(Actor):
    def __init__(self, shelf: Ref[Shelf]) -> None:
        self.shelf = shelf

    def on_start(self) -> None:
        self._file = self.state_folder / "next"
        self.next = int(self._file.read_text()) if self._file.exists() else 1

    def step(self) -> float | None:
        self.shelf.ask(Shelf.put, self.next)
        self.next += 1
        save(self._file, [self.next])
        return 0.0


class Consumer(Actor):
    def __init__(self, shelf: Ref[Shelf], count: int) -> None:
        self.shelf, self.count = shelf, count

    def on_start(self) -> None:
        self._file = self.state_folder / "taken"
        self.taken = [int(line) for line in self._file.read_text().split()] if self._file.exists() else []

    def step(self) -> float | None:
        if len(self.taken) == self.count:
            raise Finished
        item = self.shelf.ask(Shelf.take, self.taken[-1] if self.taken else 0)
        self.taken.append(item)
        save(self._file, self.taken)
        self.report(item=item)
        return 0.0


@dataclass(frozen=True, kw_only=True)
class Config:
    capacity: int = 4
    count: int = 200
    strategy: str = "ONE_FOR_ONE"
    max_restarts: int = 5


def build(config: Config) -> Graph:
    graph = Graph("ring", strategy=Strategy[config.strategy], max_restarts=config.max_restarts)
    shelf = graph.add("shelf", Shelf, capacity=config.capacity)
    graph.add("producer", Producer, shelf=shelf)
    consumer = graph.add("consumer", Consumer, shelf=shelf, count=config.count)
    graph.until(consumer)
    return graph
