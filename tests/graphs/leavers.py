"""Actors with children of their own, to see what is left of them when somebody dies."""

from __future__ import annotations

import os
import signal
import subprocess
from dataclasses import dataclass
from pathlib import Path

from rolecall import Actor, Finished, Graph, Ref


class Parent(Actor):
    """Starts a process that would outlive it, then says in the pipe that it is there."""

    def __init__(self, pipe: str, does: str) -> None:
        self.pipe, self.does = pipe, does

    def on_start(self) -> None:
        (self.state_folder / "pid").write_text(str(os.getpid()))
        shell = subprocess.Popen(["/bin/sh", "-c", "sleep 1000 & echo started; wait"], stdout=subprocess.PIPE)
        assert shell.stdout is not None
        shell.stdout.readline()

    def step(self) -> float | None:
        self.report(here=True)
        Path(self.pipe).open("w").write("here\n")  # noqa: SIM115  waits for the reader
        if self.does == "finish":
            raise Finished
        if self.does == "hang":
            signal.pause()
        return None

    def on_stop(self) -> None:
        (self.state_folder / "stopped").touch()


class Idle(Actor):
    stop_timeout_s = 60.0

    def __init__(self, parent: Ref[Parent]) -> None:
        self.parent = parent

    def on_start(self) -> None:
        (self.state_folder / "pid").write_text(str(os.getpid()))


class Fresh(Parent):
    """In an interpreter of its own."""

    fork_safe = False


class Wanderer(Parent):
    """Its other children leave its session: one leads its own, one is a daemon whose parent has ended."""

    def on_start(self) -> None:
        super().on_start()
        subprocess.Popen(["/bin/sleep", "1000"], start_new_session=True)
        subprocess.run(["/bin/sh", "-c", "sleep 1000 &"], start_new_session=True, check=True)


class Stubborn(Parent):
    """Takes a minute to stop."""

    stop_timeout_s = 60.0


@dataclass(frozen=True, kw_only=True)
class Config:
    pipe: str
    does: str = "nothing"


def build(config: Config) -> Graph:
    graph = Graph("leavers")
    kind = {"hang": Stubborn, "be fresh": Fresh, "wander": Wanderer}.get(config.does, Parent)
    parent = graph.add("parent", kind, pipe=config.pipe, does=config.does)
    graph.add("idle", Idle, parent)
    graph.until(parent)
    return graph
