"""An actor whose fork server is long at importing what it needs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from rolecall import Actor, Graph


class Importer(Actor):
    """The module is the test's: it must be found by PYTHONPATH."""

    preloads: ClassVar[tuple[str, ...]] = ("slow_to_import",)


@dataclass(frozen=True, kw_only=True)
class Config:
    pass


def build(config: Config) -> Graph:
    graph = Graph("importer")
    graph.until(graph.add("importer", Importer))
    return graph
