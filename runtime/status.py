"""What `rolecall ps` shows, read from the actors' pages and from /proc: nobody is asked, so nobody need answer."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path

from .child import Child
from .control import ActorStatus, Member, RunStatus
from .page import RECEIVERS

__all__ = ["run_status"]


def run_status(children: Sequence[Child], far: Sequence[Member], dead_letters: int) -> RunStatus:
    """Every actor, also those of other machines. `children` and then `far` are in the order of the membership, by
    which pages count what was sent."""
    now = time.monotonic_ns()
    senders = [child.page for child in children if child.alive]

    def waiting(place: int) -> tuple[int, float | None]:
        """How many messages wait for it on this machine, and for how many seconds the oldest does."""
        sent = [page.sent(place) for page in senders] if place < RECEIVERS else []
        oldest = min((since for count, since in sent if count), default=None)
        return sum(count for count, _ in sent), None if oldest is None else (now - oldest) / 1e9

    actors: list[ActorStatus] = []
    for place, child in enumerate(children):
        count, oldest_s = waiting(place)
        actors.append(
            ActorStatus(
                name=child.name,
                pid=child.pid if child.alive else 0,
                state="hung" if child.alive and child.hung else child.state,
                incarnation=child.incarnation,
                restarts=child.restarts,
                waiting=count,
                oldest_s=oldest_s,
                handling_s=child.page.running_for_s(now) if child.alive else None,
                rss=_resident_bytes(child.pid) if child.alive else 0,
            )
        )
    for place, member in enumerate(far, len(children)):
        # What it handles and holds, only its own machine knows.
        count, oldest_s = waiting(place)
        status = ActorStatus(member.name, 0, member.state, member.incarnation, 0, count, oldest_s, None, 0)
        actors.append(status)
    return RunStatus(actors, dead_letters)


def _resident_bytes(pid: int) -> int:
    """How much memory a process holds (proc(5), field 2 of statm); 0 if it has just ended."""
    try:
        pages = Path(f"/proc/{pid}/statm").read_text().split()[1]
    except (FileNotFoundError, ProcessLookupError):
        return 0
    return int(pages) * os.sysconf("SC_PAGE_SIZE")
