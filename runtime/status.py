"""What `rolecall ps` shows, read from the actors' pages and from /proc: nobody is asked, so nobody need answer."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path

from .child import Child
from .control import ActorStatus, RunStatus

__all__ = ["run_status"]


def run_status(children: Sequence[Child], dead_letters: int) -> RunStatus:
    """Every actor. `children` are in the order of the membership, by which pages count what was sent."""
    now = time.monotonic_ns()
    senders = [child.page for child in children if child.alive]
    actors = []
    for index, child in enumerate(children):
        sent = [page.sent(index) for page in senders]
        oldest = min((since for count, since in sent if count), default=None)
        actors.append(
            ActorStatus(
                name=child.name,
                pid=child.pid if child.alive else 0,
                state="hung" if child.alive and child.hung else child.state,
                incarnation=child.incarnation,
                restarts=child.restarts,
                waiting=sum(count for count, _ in sent),
                oldest_s=None if oldest is None else (now - oldest) / 1e9,
                handling_s=child.page.running_for_s(now) if child.alive else None,
                rss=_resident_bytes(child.pid) if child.alive else 0,
            )
        )
    return RunStatus(actors, dead_letters)


def _resident_bytes(pid: int) -> int:
    """How much memory a process holds (proc(5), field 2 of statm); 0 if it has just ended."""
    try:
        pages = Path(f"/proc/{pid}/statm").read_text().split()[1]
    except (FileNotFoundError, ProcessLookupError):
        return 0
    return int(pages) * os.sysconf("SC_PAGE_SIZE")
