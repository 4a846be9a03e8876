"""One actor as its supervisor keeps it, over all its incarnations, and what a death leaves behind."""

from __future__ import annotations

import os
import random
import signal
import time
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path

from .graph import Role

__all__ = ["Child", "Leftovers", "RestartBudget", "describe_exit", "tail"]

MAX_BACKOFF_S = 30.0
OUTPUT_TAIL_LINES = 50
OUTPUT_TAIL_BYTES = 64 << 10


@dataclass(eq=False)
class Child:
    """One actor over all its incarnations.

    state: waiting (to be started, not before `not_before`), spawning, starting, up, stopping (killed at
    `kill_at`), done (finished or stopped), gone (died and stays dead).
    """

    role: Role
    position: int
    name: str
    state: str = "waiting"
    not_before: float = 0.0
    kill_at: float = 0.0
    incarnation: int = 0
    pid: int = 0
    pidfd: int = -1
    restarts: int = 0
    doomed: bool = False  # another's death takes it down; it is started again afterwards
    reason: str = ""

    @property
    def alive(self) -> bool:
        return self.pidfd >= 0

    def adopt(self, pid: int) -> None:
        self.pid, self.pidfd, self.state = pid, os.pidfd_open(pid), "starting"

    def kill(self) -> None:
        if self.alive:
            signal.pidfd_send_signal(self.pidfd, signal.SIGKILL)

    def reap(self) -> int:
        """Its wait status, once it is dead."""
        _, status = os.waitpid(self.pid, 0)
        os.close(self.pidfd)
        self.pidfd = -1
        return status


@dataclass
class RestartBudget:
    """How many deaths a run survives (OTP's intensity and period), and the wait after each."""

    max_restarts: int
    within_s: float
    rng: random.Random
    _deaths: deque[float] = field(default_factory=deque)

    def spend(self, now: float) -> tuple[int, float | None]:
        """The deaths within the period, and the seconds to wait before the restart; None: they are too many.

        The first restart is at once; then waits double, with full jitter.
        """
        self._deaths.append(now)
        while self._deaths[0] <= now - self.within_s:
            self._deaths.popleft()
        count = len(self._deaths)
        if count > self.max_restarts:
            return count, None
        return count, 0.0 if count == 1 else self.rng.uniform(0.0, min(MAX_BACKOFF_S, 0.1 * 2.0**count))


class Leftovers:
    """Process groups whose leader is dead: kills who is left of them, and lets no zombie stay."""

    def __init__(self) -> None:
        self._groups: set[int] = set()

    def add(self, group: int) -> None:
        self._groups.add(group)
        self._signal(group, signal.SIGKILL)

    def reap(self, timeout_s: float = 0.0) -> None:
        """Orphans of dead actors became our children. Waits up to `timeout_s` for all of them to be gone."""
        until = time.monotonic() + timeout_s
        while True:
            for group in list(self._groups):
                try:
                    while os.waitpid(-group, os.WNOHANG)[0]:
                        pass
                except ChildProcessError:
                    self._signal(group, 0)
            if not self._groups or time.monotonic() >= until:
                return
            time.sleep(0.001)  # they are killed, and end as fast as the kernel lets them

    def _signal(self, group: int, number: int) -> None:
        try:
            os.killpg(group, number)
        except (ProcessLookupError, PermissionError):  # nobody is left, or the number is somebody else's now
            self._groups.discard(group)


def describe_exit(status: int) -> str:
    """A wait status in words."""
    if os.WIFSIGNALED(status):
        return f"killed by {signal.Signals(os.WTERMSIG(status)).name}"
    return f"exited with code {os.waitstatus_to_exitcode(status)}"


def tail(log: Path) -> str:
    """The last lines of a log, indented, after a line that names it; empty if there are none."""
    if not log.exists():
        return ""
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - OUTPUT_TAIL_BYTES))
        lines = file.read().decode(errors="replace").splitlines()[-OUTPUT_TAIL_LINES:]
    return "".join(f"\n    {line}" for line in [f" The end of {log}:", *lines]) if lines else ""
