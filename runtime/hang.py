"""Which processes hang: over the limit of what they run, or frozen by a signal that nobody took back."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from .child import Child
from .forkserver import ForkServer
from .page import Page

__all__ = ["HangWatch"]

LOOK_S = 1.0  # between two looks
STACKS_TIMEOUT_S = 1.0  # how long a process that hangs has to write down its stacks


class HangWatch:
    """Looks at the processes of a run about once a second.

    frozen_s: how long one may be stopped (SIGSTOP) before it counts as hung. A debugger may stop it for as long
    as it likes. All times are CLOCK_MONOTONIC, as a Page's are.
    """

    def __init__(self, frozen_s: float) -> None:
        self.frozen_s = frozen_s
        self.next_look = 0.0
        self._frozen: dict[int, float] = {}  # since when, by pid

    def look(self, children: Iterable[Child], forks: ForkServer | None, now: float) -> None:
        """Find those that hang, and kill them when they have had time to write down their stacks."""
        if now < self.next_look:
            return
        self.next_look = now + min(LOOK_S, self.frozen_s / 2)
        for child in children:
            if child.alive and child.hung and now >= child.kill_at:
                child.kill()
            elif child.state in ("starting", "up") and not child.hung:
                child.hung = self.why(child.pid, child.page, now)
                if child.hung:
                    child.kill_at = now + STACKS_TIMEOUT_S
                    child.dump_stacks()
        if forks is not None and not forks.hung:
            forks.hung = self.why(forks.pid, None, now)
            if forks.hung:
                forks.kill()

    def why(self, pid: int, page: Page | None, now: float) -> str:
        """Why this process counts as hung; empty if it does not. page: an actor's."""
        overdue_s = page.overdue_s(int(now * 1e9)) if page is not None else None
        if overdue_s is not None:
            return f"hung: {overdue_s:.1f} s over its max_run_s"
        if not _is_stopped(pid):
            self._frozen.pop(pid, None)
            return ""
        frozen_s = now - self._frozen.setdefault(pid, now)
        return f"hung: frozen by SIGSTOP for {frozen_s:.1f} s" if frozen_s >= self.frozen_s else ""

    def forget(self, pid: int) -> None:
        """It has ended: the number may soon be another's."""
        self._frozen.pop(pid, None)


def _is_stopped(pid: int) -> bool:
    """State T of proc(5); a tracing stop is t."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"
    except (FileNotFoundError, ProcessLookupError):
        return False  # it has just been reaped
