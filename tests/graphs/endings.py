"""A sender that ends, by itself or not, while its receiver still has to handle what it was told."""

from __future__ import annotations

import signal
from dataclasses import dataclass

from rolecall import Actor, Finished, Graph, Ref, Strategy, idempotent

NOTES = 10


class Target(Actor):
    stop_timeout_s = 0.2

    @idempotent
    def hold(self) -> None:
        """The first incarnation does not return."""
        held = self.state_folder / "held"
        if not held.exists():
            held.touch()
            self.report(holding=True)
            signal.pause()

    def note(self, number: int) -> None:
        self.report(noted=number, incarnation=self.context.incarnation)


class Idle(Actor):
    """Its death takes the sender down, by REST_FOR_ONE among the two."""


class Sender(Actor):
    """Patient: waits for half a minute when it ends."""

    stop_timeout_s = 60.0

    def __init__(self, target: Ref[Target], finishes: bool) -> None:
        self.target, self.finishes = target, finishes

    def step(self) -> None:
        sent = self.state_folder / "sent"
        if sent.exists():
            return
        self.target.tell(Target.hold)
        for number in range(NOTES):
            self.target.tell(Target.note, number)
        sent.touch()
        if self.finishes:
            raise Finished
        self.report(sent=True)

    def on_stop(self) -> None:
        self.report(ending=True)


class Hasty(Sender):
    """Waits for a second."""

    stop_timeout_s = 2.0


@dataclass(frozen=True, kw_only=True)
class Config:
    finishes: bool = False
    hasty: bool = False


def build(config: Config) -> Graph:
    graph = Graph("endings")
    target = graph.add("target", Target)
    idle = graph.add("idle", Idle)
    sender = graph.add("sender", Hasty if config.hasty else Sender, target, finishes=config.finishes)
    graph.supervise(idle, sender, strategy=Strategy.REST_FOR_ONE)
    return graph
