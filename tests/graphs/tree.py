"""Three actors, each wired to the one before it; the middle one misbehaves as it is told."""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass
from typing import ClassVar

from rolecall import Actor, Finished, Graph, Ref, Restart, Strategy, Unrecoverable


class Node(Actor):
    stop_timeout_s = 5.0

    def __init__(self, before: Ref[Node] | None = None, *, does: str = "nothing") -> None:
        if does == "raise in constructor":
            raise ValueError("not constructed")
        self.before, self.does = before, does

    def on_start(self) -> None:
        print(f"the last words of {self.context.name}", flush=True)
        self.report(event="start", incarnation=self.context.incarnation)
        if self.does == "raise in on_start":
            raise ValueError("not started")
        if self.does == "exit in on_start":
            os._exit(7)
        if self.does == "give up in on_start":
            raise Unrecoverable("there is no model 'x': check the name", exit_code=2)

    def step(self) -> float | None:
        if self.does == "raise in step":
            raise ValueError("a bad step")
        if self.does == "finish":
            raise Finished
        if self.does == "give up in step":
            raise Unrecoverable("the data ended early")
        if self.does == "hang":
            self.report(event="hang")
            signal.pause()
        return None

    def on_stop(self) -> None:
        self.report(event="stop")


class Impatient(Node):
    """Has a moment to stop."""

    stop_timeout_s = 0.2


class Importer(Node):
    """Its fork server can't import what it asks for."""

    preloads: ClassVar[tuple[str, ...]] = ("rolecall.no_such_module",)


@dataclass(frozen=True, kw_only=True)
class Config:
    strategy: str = "ONE_FOR_ONE"
    max_restarts: int = 5
    within_s: float = 60.0
    does: str = "nothing"
    kind: str = "Node"
    restart: Restart = Restart.TRANSIENT
    until: str = ""
    apart: int | None = None  # so many restarts has a supervisor of their own for b and c


def build(config: Config) -> Graph:
    graph = Graph(
        "tree",
        strategy=Strategy[config.strategy],
        max_restarts=config.max_restarts,
        within_s=config.within_s,
    )
    kind = {"Node": Node, "Impatient": Impatient, "Importer": Importer}[config.kind]
    a = graph.add("a", Node)
    b = graph.add("b", kind, a, does=config.does)
    c = graph.add("c", Node, b)
    graph.place(b, restart=config.restart)
    if config.apart is not None:
        graph.supervise(b, c, strategy=Strategy.ONE_FOR_ALL, max_restarts=config.apart)
    for ref in (a, b, c):
        if ref.name == config.until:
            graph.until(ref)
    return graph
