"""An actor's Endpoint in this process; its supervisor and those it sends to are played by the test."""

from __future__ import annotations

import select
import shutil
import socket
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from msgspec import msgpack
from rolecall.runtime.control import Member, Membership, inbox_path, supervisor_path
from rolecall.runtime.endpoint import Endpoint
from rolecall.runtime.ref import Call
from rolecall.runtime.sockets import Connection, listen
from rolecall.runtime.wire import Header, pack_done, unpack_messages


def _readable(end: socket.socket | Connection) -> bool:
    return bool(select.select([end], [], [], 10.0)[0])


def call(method: str = "note", *args: Any) -> Call:
    return Call(method, args, {})


class Receiver:
    """An incarnation of an actor that the endpoint sends to."""

    def __init__(self, sockets: Path, name: str, incarnation: int, poller: select.epoll) -> None:
        self._listener = listen(inbox_path(sockets, name, incarnation))
        self._poller = poller
        self._caller: Connection | None = None

    def heard(self, count: int) -> list[Header]:
        """The next `count` messages."""
        if self._caller is None:
            assert _readable(self._listener)
            self._caller = Connection(self._listener.accept()[0], self._poller)
        heard: list[Header] = []
        while len(heard) < count:
            assert _readable(self._caller), f"only {len(heard)} of {count} messages have come"
            data = self._caller.receive()
            assert data is not None, "the endpoint has hung up"
            heard += [header for header, _, _ in unpack_messages(data)]
        return heard

    def handled(self, headers: list[Header]) -> None:
        assert self._caller is not None
        self._caller.send(pack_done([header.seq for header in headers]))

    def die(self) -> None:
        self._listener.close()
        if self._caller is not None:
            self._caller.close()


class Stage:
    """endpoint: of an actor named caller, which nobody drives but who waits."""

    def __init__(self, sockets: Path, poller: select.epoll) -> None:
        self.sockets, self._poller = sockets, poller
        listener = listen(supervisor_path(sockets))
        self.endpoint = Endpoint("caller", 1, sockets)
        self._supervisor = Connection(listener.accept()[0], poller)
        listener.close()

    def say(self, *members: Member) -> None:
        """The supervisor's word, to be heard by who waits next."""
        self._supervisor.send(msgpack.encode(Membership(list(members))))

    def tell(self, *members: Member) -> None:
        """The supervisor's word, which is heard before this returns."""
        self.say(*members)
        known = self.endpoint._members.by_name
        while any(known.get(member.name) != member for member in members):
            self.endpoint.wait(0.1)

    def heard(self) -> bytes:
        """The next word to the supervisor."""
        assert _readable(self._supervisor)
        word = self._supervisor.receive()
        assert isinstance(word, bytes)
        return word

    def receiver(self, name: str, incarnation: int) -> Receiver:
        return Receiver(self.sockets, name, incarnation, self._poller)


@contextmanager
def stage() -> Iterator[Stage]:
    sockets = Path(tempfile.mkdtemp(prefix="rolecall-", dir="/tmp"))  # a socket's path must be short
    try:
        with select.epoll() as poller:
            yield Stage(sockets, poller)
    finally:
        shutil.rmtree(sockets)


def up(name: str, incarnation: int = 2, role: str = "") -> Member:
    return Member(name, role or name, incarnation, "up")


def down(name: str, incarnation: int = 2, role: str = "") -> Member:
    return Member(name, role or name, incarnation, "down", "killed by SIGKILL")


def gone(name: str, incarnation: int = 2, role: str = "", reason: str = "killed by SIGKILL") -> Member:
    return Member(name, role or name, incarnation, "gone", reason)
