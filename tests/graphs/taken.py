"""A ledger that is taken down with mail waiting, by its neighbour's death or by request; its sender lives on."""

from __future__ import annotations

from dataclasses import dataclass

from rolecall import Actor, ActorStopped, Finished, Graph, NotYet, Ref, Strategy

NUMBERS = 100


class Idle(Actor):
    def never(self) -> None:
        raise NotYet


class Ledger(Actor):
    def __init__(self, idle: Ref[Idle]) -> None:
        self.idle = idle

    def hold(self) -> None:
        """Runs until this actor is asked to stop."""
        self.report(holding=True)
        try:
            self.idle.ask(Idle.never)
        except ActorStopped:
            self._write("held")

    def note(self, number: int) -> None:
        self._write(str(number))

    def _write(self, line: str) -> None:
        with (self.state_folder / "lines").open("a") as file:
            file.write(f"{line} {self.context.incarnation}\n")

    def lines(self) -> list[list[str]]:
        return [line.split() for line in (self.state_folder / "lines").read_text().splitlines()]


class Sender(Actor):
    """Added before the ledger, so that REST_FOR_ONE leaves it alone."""

    def step(self) -> None:
        ledger: Ref[Ledger] = Ref("ledger")
        ledger.tell(Ledger.hold)
        for number in range(NUMBERS):
            ledger.tell(Ledger.note, number)
        self.report(sent=True)
        self.report(lines=ledger.ask(Ledger.lines))
        raise Finished


@dataclass(frozen=True, kw_only=True)
class Config:
    strategy: str = "ONE_FOR_ONE"
    subtree: bool = False


def build(config: Config) -> Graph:
    strategy = Strategy[config.strategy]
    graph = Graph("taken", strategy=Strategy.ONE_FOR_ONE if config.subtree else strategy)
    idle = graph.add("idle", Idle)
    sender = graph.add("sender", Sender)
    victim = graph.add("victim", Idle)
    ledger = graph.add("ledger", Ledger, idle)
    if config.subtree:
        graph.supervise(victim, ledger, strategy=strategy)
    graph.until(sender)
    return graph
