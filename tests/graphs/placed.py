"""Roles that say which interpreter they run in, one of them placed in another."""

from __future__ import annotations

import sys
from dataclasses import dataclass

from rolecall import Actor, Finished, Graph, Ref


class Local(Actor):
    def on_start(self) -> None:
        self.report(prefix=sys.prefix)

    def double(self, number: int) -> int:
        return 2 * number


class Asker(Actor):
    def __init__(self, there: Ref[Local]) -> None:
        self.there = there

    def step(self) -> None:
        self.report(doubled=self.there.ask(Local.double, 21))
        raise Finished


@dataclass(frozen=True, kw_only=True)
class Config:
    python: str


def build(config: Config) -> Graph:
    graph = Graph("placed")
    graph.add("here", Local)
    there = graph.add("there", Local)
    graph.place(there, python=config.python)
    graph.until(graph.add("asker", Asker, there))
    return graph
