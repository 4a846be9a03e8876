"""Several senders write numbered lines into one ledger, which dies in every possible way meanwhile."""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass

from rolecall import Actor, ActorDied, Finished, Graph, NotYet, Ref, idempotent


class Ledger(Actor):
    """mortal: it kills itself before it writes some lines, and after others.

    hunts: so many incarnations offer themselves to be killed: each says so and goes on, for 20 more lines.
    """

    def __init__(self, mortal: bool, hunts: int) -> None:
        self.mortal, self.hunts = mortal, hunts

    def on_start(self) -> None:
        self._lines = (self.state_folder / "lines").open("a", buffering=1)
        self.count = 0
        starts = self.state_folder / "starts"
        with starts.open("a") as file:
            file.write("x")
        self.hunted = len(starts.read_text()) <= self.hunts

    def note(self, sender: str, number: int) -> None:
        self._write(sender, number)

    @idempotent
    def keep(self, sender: str, number: int) -> None:
        self._write(sender, number)

    @idempotent
    def wait_for_more(self, count: int) -> None:
        """Until `count` more lines have been written, since this incarnation began."""
        if self.count < count:
            raise NotYet

    def _write(self, sender: str, number: int) -> None:
        self._die_once(sender, number, when=30)
        if self.hunted and self.count == 25:
            self.report(hunted=True)
        if self.hunted and self.count == 45:
            signal.pause()
        self._lines.write(f"{sender} {number}\n")
        self.count += 1
        self._die_once(sender, number, when=60)

    def _die_once(self, sender: str, number: int, when: int) -> None:
        if not self.mortal or number % 90 != when:
            return
        marker = self.state_folder / f"{sender}-{number}"
        if not marker.exists():
            marker.touch()
            os.kill(os.getpid(), signal.SIGKILL)


class Sender(Actor):
    """Tells numbers from 1 up, and asks every seventh; the last one it asks in any case."""

    def __init__(self, ledger: Ref[Ledger], count: int, repeatable: bool) -> None:
        self.ledger, self.count = ledger, count
        self.message = Ledger.keep if repeatable else Ledger.note
        self.number = 0
        self.died = 0

    def step(self) -> float | None:
        if self.number == self.count:
            self.ledger.ask(Ledger.wait_for_more, 0)  # all that was told before has been handled now
            self.report(died=self.died)
            raise Finished
        self.number += 1
        if self.number % 7:
            self.ledger.tell(self.message, self.name, self.number)
        else:
            try:
                self.ledger.ask(self.message, self.name, self.number)
            except ActorDied:
                self.died += 1
        return 0.0


@dataclass(frozen=True, kw_only=True)
class Config:
    repeatable: bool = False
    mortal: bool = False
    hunts: int = 0
    senders: int = 3
    count: int = 200


def build(config: Config) -> Graph:
    graph = Graph("mail", max_restarts=1000)
    ledger = graph.add("ledger", Ledger, mortal=config.mortal, hunts=config.hunts)
    sender = graph.add("sender", Sender, ledger, count=config.count, repeatable=config.repeatable)
    graph.place(sender, replicas=config.senders)
    graph.until(sender)
    return graph
