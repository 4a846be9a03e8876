"""The first asks the middle, which tells the last, which asks the first: nobody waits for himself.

The last gets to it only when the first's deadline has passed.
"""

from __future__ import annotations

from dataclasses import dataclass

from rolecall import Actor, AskTimeout, Finished, Graph, NotYet, Ref

DEADLINE_S = 0.5


class Silent(Actor):
    def never(self) -> None:
        raise NotYet


class Last(Actor):
    def __init__(self, silent: Ref[Silent]) -> None:
        self.silent = silent

    def hold(self) -> None:
        try:
            self.silent.within(DEADLINE_S + 0.1).ask(Silent.never)
        except AskTimeout:
            return

    def ask_back(self, first: Ref[First]) -> None:
        self.report(heard=first.ask(First.hello))


class Middle(Actor):
    def __init__(self, last: Ref[Last]) -> None:
        self.last = last

    def pass_on(self, first: Ref[First]) -> str:
        self.last.tell(Last.hold)
        self.last.tell(Last.ask_back, first)
        return "told"


class First(Actor):
    def __init__(self, middle: Ref[Middle]) -> None:
        self.middle = middle

    def on_start(self) -> None:
        self.greeted = self.asked = False

    def hello(self) -> str:
        self.greeted = True
        return "hello"

    def step(self) -> None:
        if self.greeted:
            raise Finished
        if not self.asked:
            self.asked = True
            self.report(told=self.middle.within(DEADLINE_S).ask(Middle.pass_on, Ref(self.name)))


@dataclass(frozen=True, kw_only=True)
class Config:
    pass


def build(config: Config) -> Graph:
    graph = Graph("chain")
    last = graph.add("last", Last, graph.add("silent", Silent))
    first = graph.add("first", First, graph.add("middle", Middle, last))
    graph.until(first)
    return graph
