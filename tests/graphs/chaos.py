"""Senders of numbered messages, and receivers; any of them may be killed at any moment.

    steady ×2, mortal ×2  ── ask, ask_soon, ask_each, tell ──▶  lone, pool ×3

Everybody writes down what it does: a file for each incarnation, one `os.write` for each line, so that all a kill can
cut off is the last line. A line is words and, last, CLOCK_MONOTONIC in ns:

    of a sender     ask|tell <number> <receiver> <method>     before the call
                    end <number> <outcome>                    answered, died, unbegun (ActorDied by maybe_executed),
                                                              told, wrong, or the name of another exception
    of a receiver   begin|aside|end|corrupt <sender> <number> <method>       within the handler: first, NotYet, last

A sender here is one incarnation, "<name>.<incarnation>", and counts from 1. When the file `over` is in the run's
folder the senders settle what they have sent, and finish.
"""

from __future__ import annotations

import os
import random
import subprocess
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from rolecall import Actor, ActorDied, ActorStopped, Finished, Graph, NotYet, Ref, RolecallError, idempotent

ASK_S = 30.0  # far longer than any undisturbed answer takes: an AskTimeout is an ask that got lost
POOL = 3
FLOODS = 0.02  # of all steps
MB = 1 << 20
TURN_S = 0.005


class Record:
    """What one incarnation of an actor does."""

    def __init__(self, actor: Actor) -> None:
        folder = actor.state_folder / "records"
        folder.mkdir(exist_ok=True)
        path = folder / str(actor.context.incarnation)
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC)

    def write(self, *words: object) -> None:
        os.write(self._fd, f"{' '.join(map(str, words))} {time.monotonic_ns()}\n".encode())


class Receiver(Actor):
    """Its handlers differ in whether they are idempotent and whether they raise NotYet for a while.

    A dead letter names only the method. So senders that die have messages of their own: what is lost of them must
    not be mistaken for what is lost of those that live.
    """

    def on_start(self) -> None:
        self._record = Record(self)
        self._turns = 0
        self._aside: dict[tuple[str, int], int] = {}  # the turn in which each was first set aside
        self._work = threading.Event()
        self._grandchild = subprocess.Popen(["sleep", "3600"])

    def step(self) -> float | None:
        self._turns += 1
        return TURN_S

    def note(self, sender: str, number: int, work_s: float, load: Any) -> Any:
        return self._handle("note", sender, number, work_s, load)

    def wait(self, sender: str, number: int, work_s: float, load: Any) -> Any:
        return self._handle("wait", sender, number, work_s, load, not_yet=self._is_early(sender, number))

    def mortal_note(self, sender: str, number: int, work_s: float, load: Any) -> Any:
        return self._handle("mortal_note", sender, number, work_s, load)

    def mortal_wait(self, sender: str, number: int, work_s: float, load: Any) -> Any:
        return self._handle(
            "mortal_wait", sender, number, work_s, load, not_yet=self._is_early(sender, number)
        )

    @idempotent
    def keep(self, sender: str, number: int, work_s: float, load: Any) -> Any:
        return self._handle("keep", sender, number, work_s, load)

    @idempotent
    def keep_waiting(self, sender: str, number: int, work_s: float, load: Any) -> Any:
        return self._handle(
            "keep_waiting", sender, number, work_s, load, not_yet=self._is_early(sender, number)
        )

    @idempotent
    def settle(self, sender: str, number: int) -> Any:
        """Until all that this sender has sent before was handled."""
        waits = any(other == sender and earlier < number for other, earlier in self._aside)
        return self._handle("settle", sender, number, 0.0, None, not_yet=waits)

    def _is_early(self, sender: str, number: int) -> bool:
        """Whether this incarnation has not done enough else since this message first came."""
        return self._turns < self._aside.setdefault((sender, number), self._turns) + 2

    def _handle(
        self, method: str, sender: str, number: int, work_s: float, load: Any, not_yet: bool = False
    ) -> Any:
        """Returns the load, or else the number."""
        self._record.write("begin", sender, number, method)
        if not_yet:
            self._record.write("aside", sender, number, method)
            raise NotYet
        self._aside.pop((sender, number), None)
        if load is not None and not is_load(load, number):
            self._record.write("corrupt", sender, number, method)
        if work_s:
            self._work.wait(work_s)
        self._turns += 1
        self._record.write("end", sender, number, method)
        return number if load is None else load


def a_load(number: int, megabytes: int) -> np.ndarray:
    return np.full(megabytes * MB, number % 251, np.uint8)


def is_load(load: Any, number: int) -> bool:
    """Whether this is what `a_load(number, …)` made; reads one byte of every page."""
    return isinstance(load, np.ndarray) and load.size > 0 and bool((load[::4096] == number % 251).all())


class Sender(Actor):
    """Sends whatever its seed says, until the run is over."""

    def __init__(self, lone: Ref[Receiver], pool: Ref[Receiver], seed: int, mortal: bool) -> None:
        self.lone, self.pool, self.seed, self.mortal = lone.within(ASK_S), pool.within(ASK_S), seed, mortal

    def on_start(self) -> None:
        self.me = f"{self.name}.{self.context.incarnation}"
        self._record = Record(self)
        self._rng = random.Random(f"{self.seed} {self.me}")
        self._number = 0
        self._receivers = [self.lone, *(Ref[Receiver](f"{self.pool.name}-{i}", ASK_S) for i in range(POOL))]
        self._soon: list[tuple[int, int, Callable[[], Any]]] = []  # number, megabytes, the answer's result
        self._grandchild = subprocess.Popen(["sleep", "3600"])
        once, again = Receiver.note, Receiver.wait
        if self.mortal:
            once, again = Receiver.mortal_note, Receiver.mortal_wait
        self._messages = [once, Receiver.keep, again, Receiver.keep_waiting]

    def step(self) -> float | None:
        if (self.context.folder / "over").exists():
            self._collect()
            for receiver in self._receivers:
                number = self._next([receiver.name], "ask", "settle")
                self._end(number, 0, lambda to=receiver, n=number: to.ask(Receiver.settle, self.me, n))
            raise Finished
        if self._rng.random() < FLOODS:
            self._flood()
        for _ in range(self._rng.randrange(1, 20)):
            self._send()
        if len(self._soon) > 20 or self._rng.random() < 0.3:
            self._collect()
        return self._rng.choice([0.0, TURN_S])

    def _send(self) -> None:
        rng = self._rng
        how = rng.choices(["tell", "ask", "ask_soon", "ask_each"], [50, 20, 25, 5])[0]
        message = rng.choices(self._messages, [40, 40, 10, 10])[0]
        work_s = rng.expovariate(70.0) if rng.random() < 0.25 else 0.0
        megabytes = rng.randrange(1, 5) if rng.random() < 0.03 else 0
        receiver = self.pool if how == "ask_each" else rng.choice(self._receivers)
        names = [f"{self.pool.name}-{i}" for i in range(POOL)] if how == "ask_each" else [receiver.name]
        number = self._next(names, "tell" if how == "tell" else "ask", message.__name__)
        load = a_load(number, megabytes) if megabytes else None
        if how == "tell":
            self._tell(number, receiver, message, work_s, load)
        elif how == "ask":
            self._end(number, megabytes, lambda: receiver.ask(message, self.me, number, work_s, load))
        elif how == "ask_soon":
            answer = receiver.ask_soon(message, self.me, number, work_s, load)
            self._soon.append((number, megabytes, answer.result))
        else:
            self._end(number, megabytes, lambda: receiver.ask_each(message, self.me, number, work_s, load))

    def _flood(self) -> None:
        """More than its receiver's mailbox or a socket's buffer holds, also while the receiver is stopped."""
        receiver = self._rng.choice(self._receivers)
        for _ in range(self._rng.randrange(100, 1500)):
            message = self._rng.choice(self._messages[:2])
            number = self._next([receiver.name], "tell", message.__name__)
            load = a_load(number, 1) if self._rng.random() < 0.02 else None
            self._tell(number, receiver, message, 0.0, load)

    def _tell(self, number: int, receiver: Ref[Receiver], message: Any, work_s: float, load: Any) -> None:
        receiver.tell(message, self.me, number, work_s, load)
        self._record.write("end", number, "told")

    def _next(self, receivers: list[str], how: str, method: str) -> int:
        self._number += 1
        for receiver in receivers:
            self._record.write(how, self._number, receiver, method)
        return self._number

    def _collect(self) -> None:
        soon, self._soon = self._soon, []
        for number, megabytes, result in soon:
            self._end(number, megabytes, result)

    def _end(self, number: int, megabytes: int, result: Callable[[], Any]) -> None:
        try:
            answer = result()
        except ActorDied as error:
            outcome = "died" if error.maybe_executed else "unbegun"
        except ActorStopped:
            self._record.write("end", number, "ActorStopped")
            raise
        except RolecallError as error:
            outcome = type(error).__name__
        else:
            answers = answer if isinstance(answer, list) else [answer]
            right = all(is_load(one, number) if megabytes else one == number for one in answers)
            outcome = "answered" if right else "wrong"
        self._record.write("end", number, outcome)


@dataclass(frozen=True, kw_only=True)
class Config:
    seed: int = 0


def build(config: Config) -> Graph:
    # Deaths count within 1 s only: what is tested is not the back-off.
    graph = Graph("chaos", max_restarts=1000, within_s=1.0)
    lone = graph.add("lone", Receiver)
    pool = graph.add("pool", Receiver)
    steady = graph.add("steady", Sender, lone, pool, seed=config.seed, mortal=False)
    mortal = graph.add("mortal", Sender, lone, pool, seed=config.seed, mortal=True)
    graph.place(pool, replicas=POOL)
    graph.place(steady, replicas=2)
    graph.place(mortal, replicas=2)
    graph.until(steady, mortal)
    return graph
