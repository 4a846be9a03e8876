"""One actor's process as its supervisor keeps it."""

from __future__ import annotations

import contextlib
import os
import signal
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from msgspec import json
from msgspec.structs import replace

from .control import Ending, Member, ending_path, inbox_path, page_path, spec_path
from .page import Page
from .process import STACKS_SIGNAL
from .tree import Slot

__all__ = ["Child", "describe_exit", "tail"]

# What others are told of each state of a child (see Slot and Member).
STATES = {
    "waiting": "down",
    "spawning": "starting",
    "starting": "starting",
    "up": "up",
    "stopping": "up",
    "done": "gone",
    "gone": "gone",
}
OUTPUT_TAIL_LINES = 50
OUTPUT_TAIL_BYTES = 64 << 10


@dataclass(eq=False, kw_only=True)
class Child(Slot):
    """One actor over all its incarnations: its place in the tree, and the process it is now.

    kill_at: until when it may take to stop, or to write down its stacks. hung: why it counts as hung.
    """

    sockets: Path
    incarnation: int = 0
    pid: int = 0
    pidfd: int = -1
    kill_at: float = 0.0
    hung: str = ""

    @property
    def alive(self) -> bool:
        return self.pidfd >= 0

    @property
    def member(self) -> Member:
        """What others are told of it."""
        return Member(self.name, self.role.name, self.incarnation, STATES[self.state], self.reason)

    @property
    def environment(self) -> dict[str, str]:
        """The variables that it has for itself."""
        if not self.role.gpus:
            return {}
        return {"CUDA_VISIBLE_DEVICES": self.role.gpus[self.role.members.index(self.name)]}

    def adopt(self, pid: int) -> None:
        self.pid, self.pidfd, self.hung = pid, os.pidfd_open(pid), ""
        if self.state == "spawning":  # otherwise it was up before the fork server's word was read
            self.state = "starting"

    def kill(self) -> None:
        self._signal(signal.SIGKILL)

    def dump_stacks(self) -> None:
        """Let it write the stacks of its threads into its log, also if it is frozen (see `run_actor`)."""
        self._signal(STACKS_SIGNAL)
        self._signal(signal.SIGCONT)

    def _signal(self, number: signal.Signals) -> None:
        if self.alive:
            with contextlib.suppress(ProcessLookupError):  # it has ended, and is about to be reaped
                signal.pidfd_send_signal(self.pidfd, number)

    @cached_property
    def page(self) -> Page:
        """What it notes, in all its incarnations."""
        return Page(page_path(self.sockets, self.name))

    def reap(self) -> Ending:
        """How it ended, once it is dead: as it said itself, or killed, and of what."""
        _, status = os.waitpid(self.pid, 0)
        os.close(self.pidfd)
        self.pidfd = -1
        self.page.limit(0)  # its next incarnation has begun nothing yet
        spec_path(self.sockets, self.name, self.incarnation).unlink(missing_ok=True)
        path = ending_path(self.sockets, self.name, self.incarnation)
        ending = json.decode(path.read_bytes(), type=Ending) if path.exists() else Ending("killed")
        for left in (path, inbox_path(self.sockets, self.name, self.incarnation)):
            left.unlink(missing_ok=True)
        return replace(ending, reason=ending.reason or self.hung or describe_exit(status))


def describe_exit(status: int) -> str:
    """A wait status in words."""
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        known = number in {one.value for one in signal.Signals}  # most real-time signals have no name
        return f"killed by {signal.Signals(number).name if known else f'signal {number}'}"
    return f"exited with code {os.waitstatus_to_exitcode(status)}"


def tail(log: Path) -> str:
    """The last lines of a log, indented, after a line that names it; empty if there are none."""
    if not log.exists():
        return ""
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - OUTPUT_TAIL_BYTES))
        lines = file.read().decode(errors="replace").splitlines()[-OUTPUT_TAIL_LINES:]
    return "".join(f"\n    {line}" for line in [f" The end of {log}:", *lines]) if lines else ""
