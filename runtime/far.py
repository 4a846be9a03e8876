"""What is kept for actors of other machines, because the bridges in between (see bridge.py) keep nothing."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from .control import Bridge, Member
from .peer import Replies
from .sockets import Connection, Parcel
from .wire import Header, Kind, seqs_done

if TYPE_CHECKING:
    from .supervisor import Observer

__all__ = ["Abroad", "FarMail", "observe"]

MAX_KEPT = (
    4096  # answers that have not arrived yet; of the oldest the askers hear that they may have been executed
)
MAX_KEPT_BYTES = 256 << 20


class FarMail:
    """Mail that an actor gets through bridges.

    When a bridge dies its senders send again what is not handled, also what lies in the mailbox, is set aside or runs:
    of each message one is kept, and it is answered on the newest way to its sender. An answer is kept until it has
    arrived, because the one that was sent may have been lost with a bridge.
    """

    def __init__(self, replies: Replies) -> None:
        self._replies = replies
        self._lock = threading.Lock()  # messages come in one thread and are handled in another
        self._unhandled: set[tuple[int, int]] = set()  # sender, seq
        self._answers: dict[tuple[int, int], bytes | Parcel] = {}  # the oldest first
        self._size = 0
        self._ways: dict[int, Connection] = {}  # to each sender

    def is_new(self, header: Header, body: Any, caller: Connection) -> bool:
        """Whether this is a message for the mailbox: not a copy of one, nor the word that answers have arrived."""
        sender, key = header.sender, (header.sender, header.seq)
        with self._lock:
            if header.kind is Kind.HEARD:
                for seq in seqs_done(body):
                    self._drop((sender, seq))
                return False
            way = self._ways.get(sender)
            # What is left of an older connection may be read after what came over a newer one.
            if way is None or caller.opened_ns >= way.opened_ns:
                self._ways[sender] = caller
            if key in self._answers:
                self._replies.waiting.append((self._ways[sender], 0, self._answers[key]))
                return False
            new = key not in self._unhandled
            self._unhandled.add(key)
            return new

    def handled(self, header: Header, answer: bytes | Parcel | None) -> Connection:
        """The way back to its sender. answer: what it will be sent, if it has asked."""
        key = header.sender, header.seq
        with self._lock:
            self._unhandled.discard(key)
            if answer is not None:
                self._drop(key)
                self._answers[key] = answer
                self._size += len(answer)
                while len(self._answers) > MAX_KEPT or (
                    self._size > MAX_KEPT_BYTES and len(self._answers) > 1
                ):
                    self._drop(next(iter(self._answers)))
            return self._ways[header.sender]

    def _drop(self, key: tuple[int, int]) -> None:
        self._size -= len(self._answers.pop(key, b""))

    def forget(self, sender: int) -> None:
        """That incarnation is dead."""
        with self._lock:
            for key in [key for key in self._answers if key[0] == sender]:
                self._drop(key)
            if not any(key[0] == sender for key in self._unhandled):
                self._ways.pop(sender, None)


def observe(observer: Observer, members: Sequence[Member]) -> None:
    """Say what has become of these."""
    for member in members:
        observer.on_state(member.name, member.state)
        if member.state == "gone" and member.reason:
            observer.on_death(member.name, member.reason, None)


class Abroad:
    """The actors of other machines, as the bridges on this one tell the supervisor.

    members: by name, in the order in which they were heard of. bridges: of each actor that has some, their names for
    the switchboard.
    """

    def __init__(self) -> None:
        self.members: dict[str, Member] = {}
        self.bridges: dict[str, list[tuple[str, int]]] = {}
        self._owners: dict[str, str] = {}

    def add(self, bridge: Bridge) -> tuple[str, int]:
        """The name and incarnation by which it is known from now on."""
        name = f"{bridge.owner}/{bridge.number}", bridge.incarnation
        self.bridges.setdefault(bridge.owner, []).append(name)
        return name

    def hear(self, bridge: str, members: Sequence[Member]) -> None:
        """These have changed."""
        for member in members:
            self.members[member.name] = member
            self._owners[member.name] = bridge.partition("/")[0]

    def lose(self, owner: str, *, ended: bool) -> list[Member]:
        """The bridges of this actor are gone with its process, for good if it has `ended`; whom that cuts off."""
        self.bridges.pop(owner, None)
        far = [self.members[name] for name, other in self._owners.items() if other == owner]
        state = "gone" if ended else "cut"
        lost = [
            replace(member, state=state, reason="" if ended else member.reason)
            for member in far
            if member.state not in ("gone", state)
        ]
        self.members |= {member.name: member for member in lost}
        return lost
