"""What a death leaves behind: processes that an actor has started and that outlive it."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from pathlib import Path

__all__ = ["MARK", "Leftovers", "kill_marked"]

MARK = "ROLECALL_RUN"  # in the environment of every process of a run: its folder of sockets


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


def kill_marked(sockets: Path, timeout_s: float) -> None:
    """Kill every process of a run but this one, also those that lead sessions of their own, until none is left.

    Who started with another environment cannot be told from a stranger.
    """
    mark = f"{MARK}={sockets}".encode()
    until = time.monotonic() + timeout_s
    while found := [pid for pid in _processes() if pid != os.getpid() and mark in _environment(pid)]:
        for pid in found:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        if time.monotonic() > until:
            return
        time.sleep(0.001)  # they end as fast as the kernel lets them, and may have started others


def _processes() -> list[int]:
    return [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdecimal()]


def _environment(pid: int) -> list[bytes]:
    """What it was started with; nothing of one that has ended, or is somebody else's."""
    try:
        return Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return []
