"""An actor whose waits overlap: it asks first, does what lets the answers come, and then waits."""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass

from rolecall import Actor, ActorDied, Answer, AskTimeout, Finished, Graph, NotYet, Ref


class Gate(Actor):
    def on_start(self) -> None:
        self.is_open = False

    def pass_through(self, number: int) -> int:
        if not self.is_open:
            raise NotYet
        return number

    def look(self) -> bool:
        return self.is_open

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


class Patient(Actor):
    """Goes on after it has asked, and is called when there is an answer; two that it wants at once are no news."""

    def __init__(self, gate: Ref[Gate]) -> None:
        self.gate = gate

    def on_start(self) -> None:
        self.steps = 0

    def step(self) -> float | None:
        self.steps += 1
        if self.steps == 1:
            self.gate.ask(Gate.look)
            self.gate.ask_soon(Gate.look).result()
            self.answer = self.gate.ask_soon(Gate.pass_through, 7)
            return 3600.0
        if self.answer.done:
            self.report(passed=self.answer.result(), steps=self.steps)
            raise Finished
        return 3600.0


class Impatient(Actor):
    """Asks for what nobody will answer in time, goes on, and is told."""

    def __init__(self, gate: Ref[Gate]) -> None:
        self.gate = gate.within(1.5)

    def on_start(self) -> None:
        self.answer: Answer[int] | None = None

    def step(self) -> float | None:
        if self.answer is None:
            self.answer = self.gate.ask_soon(Gate.pass_through, 7)
            return None
        assert self.answer.done
        try:
            self.answer.result()
        except AskTimeout as error:
            self.report(late=str(error))
        raise Finished


class Stepless(Actor):
    """Only messages make it ask, and it never looks at the answers."""

    def __init__(self, gate: Ref[Gate]) -> None:
        self.gate = gate

    def poke(self) -> None:
        self.gate.ask_soon(Gate.look)


class Poker(Actor):
    def __init__(self, stepless: Ref[Stepless]) -> None:
        self.stepless = stepless

    def step(self) -> float | None:
        for _ in range(3):
            self.stepless.ask(Stepless.poke)
        raise Finished


class Opener(Actor):
    """Lets a while pass first, in which nobody has anything to do."""

    def __init__(self, gate: Ref[Gate]) -> None:
        self.gate = gate

    def on_start(self) -> None:
        self.waited = False

    def step(self) -> float | None:
        if self.waited:
            self.gate.ask(Gate.open)
            return None
        self.waited = True
        return 0.3


@dataclass(frozen=True, kw_only=True)
class Config:
    kill: bool = False
    busy: bool = False
    patient: bool = False
    impatient: bool = False
    stepless: bool = False


def build(config: Config) -> Graph:
    graph = Graph("soon")
    if config.busy:
        gate = graph.add("gate", Marking)
        graph.until(graph.add("busy", Busy, gate=gate))
    elif config.impatient:
        graph.until(graph.add("impatient", Impatient, gate=graph.add("gate", Gate)))
    elif config.stepless:
        stepless = graph.add("stepless", Stepless, gate=graph.add("gate", Gate))
        graph.until(graph.add("poker", Poker, stepless=stepless))
    elif config.patient:
        gate = graph.add("gate", Gate)
        graph.add("opener", Opener, gate=gate)
        graph.until(graph.add("patient", Patient, gate=gate))
    else:
        gate = graph.add("gate", Gate)
        graph.until(graph.add("walker", Walker, gate=gate, kill=config.kill))
    return graph
