"""The supervisor's connections: with its actors, and with commands that ask about the run."""

from __future__ import annotations

import select
from collections.abc import Iterator
from pathlib import Path
from weakref import WeakKeyDictionary

from .control import supervisor_path
from .sockets import Connection, listen

__all__ = ["Switchboard"]

TURN = 64  # datagrams of one caller at a time, so that nobody talks the others down


class Switchboard:
    """Where everybody of a run reaches its supervisor.

    `poll` lets in what they say; `heard` gives it. Other file descriptors can be waited for beside them.
    """

    def __init__(self, sockets: Path) -> None:
        self._listener = listen(supervisor_path(sockets))
        self._poller = select.epoll()
        self._poller.register(self._listener, select.EPOLLIN)
        self._callers: dict[int, Connection] = {}
        self._actors: dict[tuple[str, int], Connection] = {}  # by name and incarnation
        # Last words may be read after a death, so these are kept as long as anybody speaks of the connection.
        self._who = WeakKeyDictionary[Connection, tuple[str, int]]()
        self._heard: list[tuple[Connection, bytes | memoryview]] = []

    def add(self, fd: int) -> None:
        """Wait for this one, too, until it is closed."""
        self._poller.register(fd, select.EPOLLIN)

    def poll(self, timeout_s: float) -> set[int]:
        """Wait until somebody says something or one of the others is ready; those of the others that are."""
        others = set[int]()
        for fd, event in self._poller.poll(timeout_s):
            if fd == self._listener.fileno():
                self._accept()
            elif fd in self._callers:
                self._hear(self._callers[fd], event)
            else:
                others.add(fd)
        return others

    def heard(self) -> Iterator[tuple[Connection, bytes | memoryview]]:
        """What was said, and by whom. Leaves nothing."""
        heard, self._heard = self._heard, []
        yield from heard

    def introduce(self, caller: Connection, name: str, incarnation: int) -> None:
        """This is that actor."""
        self._actors[name, incarnation] = caller
        self._who[caller] = name, incarnation

    def actor(self, caller: Connection) -> tuple[str, int]:
        """Name and incarnation of who is at the other end, which has said hello."""
        return self._who[caller]

    def send(self, name: str, incarnation: int, frame: bytes) -> None:
        """Nothing happens if it has not said hello yet, and hears everything when it does, or has just died."""
        if (connection := self._actors.get((name, incarnation))) is not None:
            connection.send(frame)

    def close(self) -> None:
        for caller in list(self._callers.values()):
            caller.flush()
            caller.close()
        self._listener.close()
        self._poller.close()

    def _accept(self) -> None:
        while True:
            try:
                connected, _ = self._listener.accept()
            except BlockingIOError:
                return
            caller = Connection(connected, self._poller)
            self._callers[caller.fileno()] = caller
            self._hear(caller, select.EPOLLIN)

    def _hear(self, caller: Connection, event: int) -> None:
        if event & select.EPOLLOUT:
            caller.flush()
        for _ in range(TURN):
            if (data := caller.receive()) is None:
                break
            self._heard.append((caller, data))
        if caller.ended:
            del self._callers[caller.fileno()]
            caller.close()

    def forget(self, name: str, incarnation: int) -> None:
        """It is dead: `heard` gives what is left of what it said."""
        self._accept()  # it may have said its first word and its last since anybody looked
        caller = self._actors.pop((name, incarnation), None)
        while caller is not None and (data := caller.receive()) is not None:
            self._heard.append((caller, data))
