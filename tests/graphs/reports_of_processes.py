"""Graphs in which what other runtimes were reported to do wrong with processes would happen again."""

from __future__ import annotations

import hashlib
import os
import resource
import signal
import subprocess
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray
from rolecall import Actor, Finished, Graph, Ref


class Teller(Actor):
    """Tells the tally its name `count` times, then asks how often that was heard, and stays."""

    def __init__(self, tally: Ref[Tally], count: int) -> None:
        self.tally, self.count = tally, count

    def step(self) -> float | None:
        for _ in range(self.count):
            self.tally.tell(Tally.add, self.name)
        self.report(heard=self.tally.ask(Tally.of, self.name))
        return None


class Tally(Actor):
    def on_start(self) -> None:
        self.counts = Counter[str]()

    def add(self, name: str) -> None:
        self.counts[name] += 1

    def of(self, name: str) -> int:
        return self.counts[name]


def memory_mb(what: str) -> int:
    """VmHWM, the most this process has held since it was started, or VmSize, what it could hold."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(what)).split()[1]) >> 10


class Slow(Actor):
    """Takes several times longer for a block than it takes to send one."""

    def on_start(self) -> None:
        self.count, self.before_mb = 0, memory_mb("VmHWM")

    def digest(self, block: NDArray[np.int64]) -> None:
        for _ in range(2):
            hashlib.sha256(block.data).digest()
        self.count += 1

    def so_far(self) -> tuple[int, int]:
        """Blocks, and MB this process has grown by."""
        return self.count, memory_mb("VmHWM") - self.before_mb


class Fast(Actor):
    def __init__(self, slow: Ref[Slow], count: int) -> None:
        self.slow, self.count = slow, count

    def step(self) -> float | None:
        before_mb = memory_mb("VmHWM")
        for number in range(self.count):
            self.slow.tell(Slow.digest, np.full(1 << 17, number))
        grown_mb = memory_mb("VmHWM") - before_mb
        handled, slow_grown_mb = self.slow.ask(Slow.so_far)
        self.report(handled=handled, fast_mb=grown_mb, slow_mb=slow_grown_mb)
        raise Finished


class Glutton(Actor):
    """Runs out of memory, as Python says it or as the kernel's OOM killer does."""

    def eat(self, killed: bool) -> int:
        if killed:
            os.kill(os.getpid(), signal.SIGKILL)
        room = (memory_mb("VmSize") + 64) << 20
        resource.setrlimit(resource.RLIMIT_AS, (room, resource.getrlimit(resource.RLIMIT_AS)[1]))
        return len(bytearray(1 << 30))


class Feeder(Actor):
    def __init__(self, glutton: Ref[Glutton], killed: bool) -> None:
        self.glutton, self.killed = glutton, killed

    def step(self) -> float | None:
        self.glutton.ask(Glutton.eat, self.killed)
        raise Finished


class Spawner(Actor):
    """Starts process after process, each of which would outlive it.

    own_session: they lead sessions of their own, and then it waits.
    """

    def __init__(self, own_session: bool) -> None:
        self.own_session, self.count = own_session, 0

    def step(self) -> float | None:
        command = ["/bin/sh", "-c", "sleep 1000 & sleep 1000"]
        subprocess.Popen(command, start_new_session=self.own_session)
        self.count += 1
        (self.context.folder / f"{self.name}-{self.count}").touch()
        self.report(count=self.count)
        return None if self.own_session or self.count == 200 else 0.0


class Importing(Actor):
    """The module is the test's, found by PYTHONPATH; it is imported by the fork server."""

    preloads: ClassVar[tuple[str, ...]] = ("broken_module",)


class ImportingLate(Actor):
    def on_start(self) -> None:
        import broken_module  # type: ignore[import-not-found]  # noqa: F401


class Chatter(Actor):
    """Speaks to the supervisor again and again."""

    def step(self) -> float | None:
        self.report(chatting=True)
        return 0.001


class Prompt(Actor):
    """Leaves word that it has started, and goes on."""

    def step(self) -> float | None:
        (self.context.folder / self.name).touch()
        return None


class Brief(Actor):
    def step(self) -> float | None:
        raise Finished


@dataclass(frozen=True, kw_only=True)
class Config:
    """flag: killed by the kernel; in a session of its own; imported late. size: replicas. count: messages each."""

    scene: str
    max_restarts: int = 5
    flag: bool = False
    size: int = 1
    count: int = 1


def build(config: Config) -> Graph:
    graph = Graph("crowds", max_restarts=config.max_restarts)
    match config.scene:
        case "count":
            teller = graph.add("teller", Teller, graph.add("tally", Tally), config.count)
            graph.place(teller, replicas=config.size)
        case "flood":
            graph.until(graph.add("fast", Fast, graph.add("slow", Slow), config.count))
        case "glutton":
            graph.until(graph.add("feeder", Feeder, graph.add("glutton", Glutton), killed=config.flag))
        case "spawners":
            spawner = graph.add("spawner", Spawner, own_session=config.flag)
            graph.place(spawner, replicas=config.size)
        case "importing":
            graph.add("importing", ImportingLate if config.flag else Importing)
        case "busy":
            graph.add("chatter", Chatter)
            graph.place(graph.add("prompt", Prompt), replicas=config.size)
        case "brief":
            graph.until(graph.add("brief", Brief))
    return graph
