"""A ledger and a driver on the run's machine, workers on machines that join: messages both ways."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from rolecall import Actor, ActorDied, ActorStopped, Graph, Ref
from rolecall.runtime.actor import Down
from rolecall.runtime.proxy import add_proxy


class Ledger(Actor):
    """Writes down what it handles."""

    http: ClassVar[dict[str, str]] = {"POST /v1/notes": "note", "GET /v1/who": "who"}
    for_workers: ClassVar[tuple[str, ...]] = ("note", "ask", "who")

    def on_start(self) -> None:
        self._file = (self.state_folder / "notes").open("a")
        self.notes = 0

    def note(self, sender: str, number: int) -> None:
        self._write(sender, number)

    def ask(self, sender: str, number: int) -> int:
        self._write(sender, number)
        return number

    def who(self) -> str:
        return self.sender

    def seen(self) -> int:
        return self.notes

    def _write(self, sender: str, number: int) -> None:
        self.notes += 1
        self._file.write(f"{sender} {number}\n")
        self._file.flush()


class Worker(Actor):
    """Tells and asks the ledger one number after the other, and hears numbers from the driver."""

    def __init__(self, *, ledger: Ref[Ledger]) -> None:
        self.ledger = ledger

    def on_start(self) -> None:
        self.sent = self.heard = 0
        name = f"{self.context.node}/{self.name}"
        assert self.ledger.ask(Ledger.who) == name
        self.me = f"{name}.{self.context.incarnation}"

    def step(self) -> float | None:
        self.sent += 1
        if self.sent % 5:
            self.ledger.tell(Ledger.note, self.me, self.sent)
        else:
            answer = self.ledger.ask(Ledger.ask, self.me, self.sent)
            assert answer == self.sent
        return 0.002

    def hear(self, number: int) -> None:
        self.heard += 1
        assert number == self.heard, f"{number} came after {self.heard - 1}"

    def echo(self, number: int) -> tuple[str, int]:
        return self.me, number


class Driver(Actor):
    """Tells and asks one worker of each machine that has joined."""

    def __init__(self, *, ledger: Ref[Ledger], workers: Ref[Worker]) -> None:
        self.ledger, self.workers = ledger, workers

    def on_start(self) -> None:
        self.workers.watch()
        self.echoes = 0

    def on_down(self, down: Down) -> None:
        self.report(down=down.name, incarnation=down.incarnation, reason=down.reason, final=down.final)

    def step(self) -> float | None:
        if not self.ledger.ask(Ledger.seen):
            return 0.05  # nobody has joined
        try:
            for name, number in self.workers.within(30.0).ask_each(Worker.echo, self.echoes):
                assert number == self.echoes
                self.report(echo=number, of=name)
            self.echoes += 1
        except ActorDied as error:
            self.report(died=error.reason, maybe_executed=error.maybe_executed)
        except ActorStopped:
            self.report(left=True)  # the worker, or this one is about to
        return 0.02


@dataclass(frozen=True, kw_only=True)
class Config:
    token_file: str = ""
    lease_s: float = 30.0
    tls: str = ""


def _two_files(text: str) -> tuple[Path, Path] | None:
    first, comma, second = text.partition(",")
    return (Path(first), Path(second)) if comma else None


def build(config: Config) -> Graph:
    graph = Graph("far", max_restarts=20)
    ledger = graph.add("ledger", Ledger)
    worker = graph.add("worker", Worker, ledger=ledger)
    graph.place(worker, replicas=0, elastic=True)
    graph.add("driver", Driver, ledger=ledger, workers=worker)
    if config.token_file:
        add_proxy(
            graph,
            host="127.0.0.1",
            port=0,
            token_file=Path(config.token_file),
            about={},
            lease_s=config.lease_s,
            tls=_two_files(config.tls),
        )
    return graph
