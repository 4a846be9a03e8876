"""Who lives on this machine of a pair and who on the other: their names here and in the run, far actors' inboxes."""

from __future__ import annotations

import re
import select
import socket
from collections.abc import Container, Sequence
from dataclasses import dataclass
from pathlib import Path

from msgspec import msgpack
from msgspec.structs import replace

from .control import NODE_BITS, FarMembers, Member, inbox_path, page_path
from .line import FarMember, Members
from .page import Page, fits, stand_in
from .sockets import Connection, listen

__all__ = ["Directory", "Machine", "Stand"]

THE_RUN = "the run"  # what the run's own machine is called on others


@dataclass(frozen=True)
class Machine:
    """Its name in the run and its number; the run's own has neither."""

    name: str = ""
    number: int = 0


@dataclass(eq=False)
class Stand:
    """A far actor's inbox on this machine."""

    member: Member
    listener: socket.socket


class Directory:
    """For the bridge of `owner` on machine `here` to machine `there`. private: roles of which each has its own;
    elastic: those that the other may run, if not all.

    own: the members of this machine, far: those of the other, by their names here. stands: by file descriptor.
    """

    def __init__(
        self,
        owner: str,
        sockets: Path,
        here: Machine,
        there: Machine,
        private: Container[str],
        elastic: Container[str] | None,
        poller: select.epoll,
        supervisor: Connection,
    ) -> None:
        self._owner, self._sockets, self._here, self._there = owner, sockets, here, there
        self._private, self._elastic, self._poller, self._supervisor = private, elastic, poller, supervisor
        self._prefix = f"{there.name}/" if there.name else ""
        self._node = there.name or THE_RUN
        self.own: dict[str, Member] = {}
        self.far: dict[str, Member] = {}
        self.stands: dict[int, Stand] = {}

    def outward(self, name: str) -> str:
        """What an actor that has this name here is called in the run."""
        if name in self.own or name == self._owner:
            return f"{self._here.name}/{name}" if self._here.name else name
        return name.removeprefix("/")

    def inward(self, name: str) -> str:
        """What an actor that has this name in the run is called here: of two with one name the far one has a slash."""
        if self._here.name and name.startswith(f"{self._here.name}/"):
            return name.removeprefix(f"{self._here.name}/")
        return f"/{name}" if self._here.name and name in self.own else name

    def split(self, members: Sequence[Member]) -> tuple[list[Member], list[Member]]:
        """Those of them that live here, but for the owner, and those of the other machine."""
        own = [member for member in members if not member.node and member.name != self._owner]
        return own, [member for member in members if member.node == self._node]

    def described(self, members: Sequence[Member]) -> Members | None:
        """What the other machine is told of these of this one."""
        told: list[FarMember] = []
        for member in members:
            if member.role in self._private:
                continue
            memories = []
            if member.state != "up":
                memories = Page(page_path(self._sockets, member.name)).memories()
                memories = [one for one in memories if one.sender >> NODE_BITS == self._there.number]
            name = self.outward(member.name)
            told.append(
                FarMember(name, member.role, member.incarnation, member.state, member.reason, memories)
            )
        return Members(told) if told else None

    def check(self, members: Sequence[FarMember]) -> None:
        """Raises ValueError for what the other machine must not tell."""
        for one in members:
            if one.incarnation and one.incarnation >> NODE_BITS != self._there.number:
                raise ValueError(f"{one.name}'s incarnation {one.incarnation} is not of machine {self._node}")
            role = re.escape(one.role)
            if not re.fullmatch(rf"{re.escape(self._prefix)}{role}(-[0-9]{{1,6}})?", one.name, re.ASCII):
                raise ValueError(f"{one.name}, a {one.role}, is not of machine {self._node}")
            if self._elastic is not None and one.role not in self._elastic:
                raise ValueError(f"{one.name}: machines that join run no {one.role}")
            if not fits(one.memories):
                raise ValueError(f"{one.name} remembers more than a page holds")

    def check_sender(self, name: str) -> None:
        """Raises ValueError if an actor of the other machine can't have this name in the run."""
        if not re.fullmatch(rf"{re.escape(self._prefix)}[a-z][a-z0-9_]*(-[0-9]{{1,6}})?", name, re.ASCII):
            raise ValueError(f"sender {name!r} is not of machine {self._node}")

    def meet(self, members: Sequence[FarMember]) -> None:
        """This is what the other machine tells: stand in for them, and let the supervisor know."""
        met: list[Member] = []
        for one in members:
            if one.role in self._private:
                continue
            name = self.inward(one.name)
            member = Member(name, one.role, one.incarnation, one.state, one.reason, self._node)
            if member.state != "up":
                stand_in(page_path(self._sockets, name), one.memories)
            self._stand(member)
            met.append(member)
        self._announce(met)

    def cut(self) -> None:
        """The way to all of them is closed for now."""
        there = [one for one in self.far.values() if one.state not in ("gone", "cut")]
        self._announce([replace(one, state="cut") for one in there])

    def lose(self, reason: str) -> None:
        """All of them are gone with their machine, and what they had begun nobody will ever know."""
        lost = [replace(one, state="gone", reason=reason) for one in self.far.values() if one.state != "gone"]
        for member in lost:
            self._close(member.name)
            path = page_path(self._sockets, member.name)
            stand_in(path, Page(path).memories(), lost=True)
        self._announce(lost)

    def _announce(self, members: Sequence[Member]) -> None:
        if members:
            self.far |= {member.name: member for member in members}
            self._supervisor.send(msgpack.encode(FarMembers(list(members))))

    def _stand(self, member: Member) -> None:
        """Listen where the senders of this incarnation connect."""
        stand = next((one for one in self.stands.values() if one.member.name == member.name), None)
        lives = member.state in ("up", "starting")
        if stand is not None and lives and stand.member.incarnation == member.incarnation:
            return
        self._close(member.name)
        if lives:
            path = inbox_path(self._sockets, member.name, member.incarnation)
            path.unlink(missing_ok=True)  # a bridge that was killed leaves it
            listener = listen(path)
            self.stands[listener.fileno()] = Stand(member, listener)
            self._poller.register(listener, select.EPOLLIN)

    def _close(self, name: str) -> None:
        for fd, stand in list(self.stands.items()):
            if stand.member.name == name:
                del self.stands[fd]
                stand.listener.close()
                inbox_path(self._sockets, name, stand.member.incarnation).unlink(missing_ok=True)
