"""An actor whose waits overlap: it asks first, does what lets the answers come, and then waits."""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass

from rolecall import Actor, ActorDied, Finished, Graph, NotYet, Ref


class Gate(Actor):
    def on_start(self) -> None:
        self.is_open = False

    def pass_through(self, number: int) -> int:
        if not self.is_open:
            raise NotYet
        return number

    def open(self) -> None:
        self.is_open = True

    def die(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def fail(self) -> None:
        raise ValueError("no")


class Walker(Actor):
    def __init__(self, gate: Ref[Gate], kill: bool) -> None:
        self.gate, self.kill = gate, kill

    def step(self) -> float | None:
        early = [self.gate.ask_soon(Gate.pass_through, number) for number in range(5)]
        assert not any(answer.done for answer in early)
        if self.kill:
            dying = self.gate.ask_soon(Gate.die)
            try:
                dying.result()
            except ActorDied as error:
                self.report(died=error.maybe_executed)
        failing = self.gate.ask_soon(Gate.fail)
        self.gate.ask(Gate.open)
        self.report(passed=[answer.result() for answer in early], again=early[0].result())
        try:
            failing.result()
        except ValueError as error:
            self.report(failed=str(error))
        raise Finished


class Busy(Actor):
    """Tells, and then computes: what it told must not wait for the end of that."""

    def __init__(self, gate: Ref[Gate]) -> None:
        self.gate = gate

    def step(self) -> float | None:
        marker = self.context.folder / "opened"
        self.gate.tell(Gate.open)
        while not marker.exists():  # never back in the runtime meanwhile
            sum(range(1000))
        raise Finished


class Marking(Gate):
    def open(self) -> None:
        (self.context.folder / "opened").touch()


@dataclass(frozen=True, kw_only=True)
class Config:
    kill: bool = False
    busy: bool = False


def build(config: Config) -> Graph:
    graph = Graph("soon")
    if config.busy:
        gate = graph.add("gate", Marking)
        graph.until(graph.add("busy", Busy, gate=gate))
    else:
        gate = graph.add("gate", Gate)
        graph.until(graph.add("walker", Walker, gate=gate, kill=config.kill))
    return graph
