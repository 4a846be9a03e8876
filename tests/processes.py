"""Running a graph of tests/graphs in real processes, under a supervisor in this one."""

from __future__ import annotations

import os
import random
import select
import signal
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rolecall.runtime.recipe import configure, load_recipe
from rolecall.runtime.supervisor import Outcome, Supervisor

GRAPHS = Path(__file__).parent / "graphs"


class NoBackoff(random.Random):
    """Full jitter that always draws the shortest wait."""

    def uniform(self, a: float, b: float) -> float:
        return a


@dataclass
class Run:
    """A run of tests/graphs/<name>.py, and the observer that remembers all of it.

    act: called with each event as (run, kind, name, value); a test acts on the run from there, at a moment
    that is the same each time. kind: "report" (value: the dict), "state", "death" (the reason), "dead letter"
    (the method).
    """

    name: str
    folder: Path
    settings: dict[str, Any] = field(default_factory=dict)
    act: Callable[[Run, str, str, Any], None] = lambda run, kind, name, value: None
    rng: random.Random = field(default_factory=NoBackoff)

    def __post_init__(self) -> None:
        self.reports: dict[str, list[dict[str, Any]]] = defaultdict(list)
        self.states: list[tuple[str, str]] = []
        self.deaths: list[tuple[str, str]] = []
        self.delays: list[float | None] = []
        self.dead_letters: list[tuple[str, str, str]] = []
        recipe = str(GRAPHS / f"{self.name}.py")
        module = load_recipe(recipe)
        config = configure(module, self.name, [f"{key}={value}" for key, value in self.settings.items()])
        self.graph = module.build(config)
        self.supervisor = Supervisor(self.graph, "run", self.folder, recipe, self, rng=self.rng)

    def go(self) -> Outcome:
        return self.supervisor.run()

    def pid(self, name: str) -> int:
        return next(child.pid for child in self.supervisor.children if child.name == name)

    def kill(self, name: str) -> None:
        os.kill(self.pid(name), signal.SIGKILL)

    def ups(self) -> list[str]:
        """Who came up, in order."""
        return [name for name, state in self.states if state == "up"]

    def on_report(self, name: str, values: dict[str, Any]) -> None:
        self.reports[name].append(values)
        self.act(self, "report", name, values)

    def on_state(self, name: str, state: str) -> None:
        self.states.append((name, state))
        self.act(self, "state", name, state)

    def on_death(self, name: str, reason: str, restart_in_s: float | None) -> None:
        self.deaths.append((name, reason))
        self.delays.append(restart_in_s)
        self.act(self, "death", name, reason)

    def on_dead_letter(self, receiver: str, method: str, reason: str) -> None:
        self.dead_letters.append((receiver, method, reason))
        self.act(self, "dead letter", receiver, method)


def wait_for_ends(pids: Iterable[int], timeout_s: float) -> list[int]:
    """Wait until these processes have ended, for `timeout_s` in all; those that have not."""
    left = dict[int, int]()
    for pid in pids:
        try:
            left[os.pidfd_open(pid)] = pid
        except ProcessLookupError:
            continue  # ended already
    poller = select.epoll()
    for fd in left:
        poller.register(fd, select.EPOLLIN)
    deadline = select_deadline(timeout_s)
    while left:
        events = poller.poll(max(0.0, deadline()))
        if not events:
            break
        for fd, _ in events:
            os.close(fd)
            del left[fd]
    remaining = list(left.values())
    for fd in left:
        os.close(fd)
    poller.close()
    return remaining


def select_deadline(timeout_s: float) -> Callable[[], float]:
    """A function that gives how many seconds of `timeout_s` are left."""
    import time

    until = time.monotonic() + timeout_s
    return lambda: until - time.monotonic()
