"""An actor that hangs in its first incarnation, where and how it is told; a ticker that says that time passes."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass

from rolecall import Actor, ActorDied, Finished, Graph, Ref
from rolecall.runtime.actor import max_run_s

LIMIT_S = 0.5


class Target(Actor):
    def __init__(self, does: str) -> None:
        self.does = does

    def hang_once(self, where: str) -> None:
        """For ever, but only in the run's first incarnation."""
        marker = self.state_folder / "hung"
        if self.does == where and not marker.exists():
            marker.touch()
            threading.Event().wait()

    def on_start(self) -> None:
        self.hang_once("on_start without a limit")

    @max_run_s(LIMIT_S)
    def limited(self) -> str:
        self.hang_once("handler")
        return "limited"

    @max_run_s(LIMIT_S)
    def count_in_c(self) -> str:
        """No other thread of this process runs meanwhile, and no handler of signals written in Python."""
        marker = self.state_folder / "hung"
        if not marker.exists():
            marker.touch()
            sum(range(10**15))
        return "counted"

    def long(self) -> str:
        """Computes, without a limit, until the test says that it is enough."""
        self.report(long=True)
        enough = self.state_folder / "enough"
        began = time.monotonic()
        while not enough.exists() or time.monotonic() - began < 2 * LIMIT_S:
            pass
        return "long"


class SlowStarter(Target):
    @max_run_s(LIMIT_S)
    def on_start(self) -> None:
        self.hang_once("on_start")


class Stepper(Target):
    @max_run_s(LIMIT_S)
    def step(self) -> float | None:
        self.hang_once("step")
        return None


class Ticker(Actor):
    def step(self) -> float:
        self.report(tick=True)
        return 0.01


class Caller(Actor):
    """Asks the messages it was given, one after the other, and each again if its target died of it."""

    def __init__(self, target: Ref[Target], asks: str) -> None:
        self.target, self.asks = target, asks.split()

    def step(self) -> None:
        results = []
        for name in self.asks:
            message = getattr(Target, name)
            try:
                results.append(self.target.ask(message))
            except ActorDied as error:
                results += [str(error), self.target.ask(message)]
        self.report(results=results)
        raise Finished


@dataclass(frozen=True, kw_only=True)
class Config:
    does: str = "nothing"
    kind: str = "Target"
    asks: str = "limited"
    max_restarts: int = 5


def build(config: Config) -> Graph:
    graph = Graph("hang", max_restarts=config.max_restarts)
    graph.add("ticker", Ticker)
    kind = {"Target": Target, "SlowStarter": SlowStarter, "Stepper": Stepper}[config.kind]
    target = graph.add("target", kind, does=config.does)
    graph.until(graph.add("caller", Caller, target, asks=config.asks))
    return graph
