"""One that reports all it has to say and dies of it, a few times; or one that reports as fast as it can for ever."""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass

from rolecall import Actor, Finished, Graph


class Talker(Actor):
    def __init__(self, words: int, deaths: int) -> None:
        self.words, self.deaths = words, deaths

    def step(self) -> None:
        for word in range(self.words):
            self.report(word=word)
        died = self.state_folder / "died"
        with died.open("a") as file:
            file.write("x")
        if len(died.read_text()) <= self.deaths:
            os.kill(os.getpid(), signal.SIGKILL)
        raise Finished


class Flooder(Actor):
    def step(self) -> float:
        for word in range(100):
            self.report(word=word)
        return 0.0


class Idle(Actor):
    pass


@dataclass(frozen=True, kw_only=True)
class Config:
    words: int = 0
    deaths: int = 0


def build(config: Config) -> Graph:
    graph = Graph("flood")
    if config.words:
        graph.until(graph.add("talker", Talker, words=config.words, deaths=config.deaths))
    else:
        graph.add("flooder", Flooder)
        graph.add("idle", Idle)
    return graph
