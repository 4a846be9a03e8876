"""The logs of a run's roles, read once or followed as they grow.

`logs/` has a file for each actor, to which all of its incarnations append: trainer.log, rollout-0.log, …; what
the fork server says is in forkserver.log.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from .runs import named

__all__ = ["log_names", "read_logs"]

LOOK_EVERY_S = 0.2


def log_names(folder: Path) -> list[str]:
    """Whose logs there are, replicas by their number."""

    def key(name: str) -> tuple[str, int, str]:
        role, _, number = name.partition("-")
        return role, len(number), number

    return sorted((path.stem for path in folder.glob("*.log")), key=key)


def read_logs(
    folder: Path, name: str, *, ended: Callable[[], bool], sleep: Callable[[float], None] = time.sleep
) -> Iterator[str]:
    """Every line of an actor's log, or of the logs of a role's replicas, each behind the replica's name.

    Files that are there are given one after another; then what is new in any of them, and new files, every
    LOOK_EVERY_S, until `ended()` says that nobody writes any more. A line is given when it is whole, the last
    at the end.
    """
    logs: dict[str, _Log] = {}
    while True:
        last = ended()  # asked before reading: what was written before the end is read after it
        for actor in named(name, log_names(folder)):
            if actor not in logs:
                logs[actor] = _Log(folder / f"{actor}.log", "" if actor == name else f"{actor} | ")
        for log in logs.values():
            yield from log.lines(rest=last)
        if last:
            return
        sleep(LOOK_EVERY_S)


class _Log:
    """One file, read from its beginning to wherever it has got to."""

    def __init__(self, path: Path, prefix: str) -> None:
        self._file, self._prefix = path.open("rb"), prefix
        self._begun = b""

    def lines(self, *, rest: bool) -> Iterator[str]:
        """The lines that are new. rest: also a last one that is not whole."""
        if os.fstat(self._file.fileno()).st_size < self._file.tell():
            self._file.seek(0)  # somebody emptied it to have the room
            self._begun = b""
        for piece in self._file:
            self._begun += piece
            if self._begun.endswith(b"\n"):
                yield self._take()
        if rest and self._begun:
            yield self._take()

    def _take(self) -> str:
        line, self._begun = self._begun, b""
        return self._prefix + line.decode(errors="replace").removesuffix("\n")
