"""A desk that other machines may send items to, behind a proxy."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from msgspec import Struct
from rolecall import Actor, Graph, NotYet, idempotent
from rolecall.runtime.proxy import add_proxy


class Item(Struct, frozen=True, kw_only=True):
    id: int
    scores: list[float]
    text: str = ""


class Desk(Actor):
    """Keeps items by id. Its file outlives it."""

    http: ClassVar[dict[str, str]] = {
        "POST /v1/items": "put",
        "GET /v1/items": "take",
        "POST /v1/items/wanted": "want",
        "POST /v1/broken": "fail",
        "POST /v1/cleared": "clear",
    }
    for_workers: ClassVar[tuple[str, ...]] = ("put", "take", "want", "fail")

    def on_start(self) -> None:
        self._file = self.state_folder / "handled"
        self.items: dict[int, Item] = {}

    @idempotent
    def put(self, item: Item, worker: str = "") -> int:
        """How many there are now."""
        self.items[item.id] = item
        with self._file.open("a") as file:
            file.write(f"{item.id}\n")
        self.report(put=item.id, worker=worker)
        return len(self.items)

    @idempotent
    def take(self, id: int) -> Item:
        if id not in self.items:
            raise NotYet
        return self.items[id]

    @idempotent
    def want(self, id: int) -> Item:
        return self.take(id)

    @idempotent
    def fail(self) -> None:
        raise ValueError("the desk is broken")

    @idempotent
    def clear(self) -> int:
        """Forget all items; how many there were."""
        count = len(self.items)
        self.items.clear()
        return count

    def secret(self) -> Any: ...


@dataclass(frozen=True, kw_only=True)
class Config:
    token_file: str


def build(config: Config) -> Graph:
    graph = Graph("door", max_restarts=20)
    graph.add("desk", Desk)
    token_file = Path(config.token_file)
    add_proxy(graph, host="127.0.0.1", port=0, token_file=token_file, about={"run": "r1", "recipe": "door"})
    return graph
