"""Watchers: a mortal that is killed, or finishes; who hears of it."""

from __future__ import annotations

from dataclasses import dataclass

from rolecall import Actor, Down, Finished, Graph, Ref, Restart


class Mortal(Actor):
    def pid(self) -> int:
        import os

        return os.getpid()

    def finish(self) -> None:
        raise Finished


class Watcher(Actor):
    """Reports whose ends it hears of; ends when it has heard of `downs`."""

    def __init__(self, mortal: Ref[Mortal], *, downs: int) -> None:
        self.mortal, self.downs = mortal, downs

    def on_start(self) -> None:
        self.heard = 0
        self.mortal.watch()
        self.mortal.watch()  # once is enough, twice is not more
        self.report(incarnation=self.context.incarnation)

    def on_down(self, down: Down) -> None:
        self.heard += 1
        self.report(
            down=[down.name, down.incarnation, down.reason, down.final], mine=self.context.incarnation
        )
        if self.heard == self.downs:
            raise Finished


class Finisher(Actor):
    """Lets one of the mortals finish."""

    def __init__(self, mortal: Ref[Mortal]) -> None:
        self.mortal = mortal

    def step(self) -> float | None:
        self.mortal.any().tell(Mortal.finish)
        raise Finished


@dataclass(frozen=True, kw_only=True)
class Config:
    replicas: int = 1
    downs: int = 1
    temporary: bool = False
    finish: bool = False
    late: bool = False  # the watcher comes last


def build(config: Config) -> Graph:
    graph = Graph("watch", max_restarts=100)
    mortal = graph.add("mortal", Mortal)
    restart = Restart.TEMPORARY if config.temporary else Restart.TRANSIENT
    graph.place(mortal, replicas=config.replicas, restart=restart)
    if config.finish:
        graph.add("finisher", Finisher, mortal=mortal)
    graph.until(graph.add("watcher", Watcher, mortal=mortal, downs=config.downs))
    return graph
