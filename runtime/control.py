"""What a supervisor, its actors and the command line say to each other, and where they meet.

All of it is small and data only (msgpack); messages between actors never come this way.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from msgspec import Struct

__all__ = [
    "NODE_BITS",
    "ActorStatus",
    "Bridge",
    "DeadLetter",
    "Ending",
    "FarMembers",
    "FromActor",
    "FromBridge",
    "FromCommand",
    "Hello",
    "ListActors",
    "Member",
    "Membership",
    "Ready",
    "Report",
    "RestartRole",
    "Restarting",
    "RunStatus",
    "Stop",
    "StopRun",
    "ToActor",
    "by_role",
    "ending_path",
    "inbox_path",
    "page_path",
    "spec_path",
    "supervisor_path",
]


NODE_BITS = 40
"""An incarnation's upper bits are the number of its machine: 0 for the run's own, others never used twice in a run."""


class Member(Struct, frozen=True):
    """One actor as the supervisor sees it.

    state: up (send), starting (this incarnation is not ready: keep the mail), down (this incarnation is dead, or
    none was ever started: keep the mail), cut (it is on another machine, and the way there is closed for now: keep
    the mail, and send it again when it is up), gone (dead for good: fail the mail).
    reason: why the last incarnation died; empty if it finished or was stopped.
    node: the name of the other machine that it is on; empty if it is on this one.
    """

    name: str
    role: str
    incarnation: int
    state: str
    reason: str = ""
    node: str = ""


class Membership(Struct, frozen=True, tag="members"):
    """Those that have changed; everybody, when one has said hello. The first time in the order of the graph."""

    members: list[Member]


def by_role(members: list[Member]) -> dict[str, list[str]]:
    """The members of each role that are not gone; if all are, the first, so that asking it says so."""
    there: dict[str, list[str]] = {}
    for member in members:
        if member.state != "gone":
            there.setdefault(member.role, []).append(member.name)
    for member in members:
        there.setdefault(member.role, [member.name])
    return there


class Stop(Struct, frozen=True, tag="stop"):
    """Finish the current message, run on_stop, exit. again: it will be started again, so its mail waits."""

    again: bool = False


class Ready(Struct, frozen=True, tag="ready"):
    """on_start has returned: messages are handled from now on."""


class Hello(Struct, frozen=True, tag="hello"):
    """The first word of an actor's process, which wants to know who lives where."""

    name: str
    incarnation: int


class Bridge(Struct, frozen=True, tag="bridge"):
    """The first word of a bridge, in the process of `owner`, which stands in for the actors of machine `number`."""

    owner: str
    incarnation: int
    number: int


class FarMembers(Struct, frozen=True, tag="far"):
    """A bridge's word: these members of another machine have changed."""

    members: list[Member]


class Report(Struct, frozen=True, tag="report"):
    """Values for whoever watches the run."""

    values: dict[str, Any]


class DeadLetter(Struct, frozen=True, tag="dead_letter"):
    """A message nobody will handle."""

    receiver: str
    method: str
    reason: str


class ListActors(Struct, frozen=True, tag="ps"):
    """`rolecall ps` asks for the actors."""


class StopRun(Struct, frozen=True, tag="stop_run"):
    """`rolecall stop` asks for an orderly end."""


class RestartRole(Struct, frozen=True, tag="restart"):
    """`rolecall restart` asks for an orderly stop and a new start of a role or of one of its replicas."""

    name: str


class ActorStatus(Struct, frozen=True):
    """A line of `rolecall ps`.

    waiting:    messages other actors have sent it that it has not handled.
    oldest_s:   how long the first of them has been waiting.
    handling_s: how long its current message has been running.
    rss:        bytes of memory its process holds.
    """

    name: str
    pid: int
    state: str
    incarnation: int
    restarts: int
    waiting: int
    oldest_s: float | None
    handling_s: float | None
    rss: int


class RunStatus(Struct, frozen=True):
    """What `rolecall ps` shows."""

    actors: list[ActorStatus]
    dead_letters: int


class Restarting(Struct, frozen=True):
    """The answer to RestartRole: who is restarted. None: there is no such role, or the run is ending."""

    names: list[str]


class Ending(Struct, frozen=True):
    """Why a process ended by itself, left in a file for its supervisor.

    kind: finished, stopped, unrecoverable, crashed; killed, if it left none.
    """

    kind: str
    reason: str = ""
    exit_code: int = 0


ToActor = Membership | Stop
FromActor = Ready | Hello | Report | DeadLetter
FromCommand = ListActors | StopRun | RestartRole
FromBridge = Bridge | FarMembers | DeadLetter


def supervisor_path(sockets: Path) -> Path:
    return sockets / "supervisor"


def inbox_path(sockets: Path, name: str, incarnation: int) -> Path:
    return sockets / f"{_file(name)}.{incarnation}"


def page_path(sockets: Path, name: str) -> Path:
    return sockets / f"{_file(name)}.page"


def _file(name: str) -> str:
    return name.replace("/", "+")  # the name of an actor on another machine begins with the machine's


def spec_path(sockets: Path, name: str, incarnation: int) -> Path:
    return sockets / f"{name}.{incarnation}.spec"


def ending_path(sockets: Path, name: str, incarnation: int) -> Path:
    return sockets / f"{name}.{incarnation}.ending"
