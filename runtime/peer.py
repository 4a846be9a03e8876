"""What one process remembers of the messages it has sent: whom to, which are not handled yet, who waits."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from msgspec import Struct

from .sockets import MAX_DATAGRAM, Connection, Parcel
from .wire import Kind, decode_body, pack_done

__all__ = ["Answers", "Outgoing", "Peer", "Pending", "Replies", "together"]

MAX_UNHANDLED = 1024  # messages one sender may have with one receiver before it waits
MAX_UNHANDLED_BYTES = 256 << 20
MAX_PARCELS = 128


@dataclass(eq=False, slots=True)
class Pending:
    """An ask that waits for its answer. `wait` waits until it is done, or settles it with AskTimeout.

    answers: where it is added once it is done, if its asker has gone on. wanted: whether its result was asked for.
    """

    name: str
    deadline: float
    wait: Callable[[Pending], None]
    seq: int = 0
    kind: Kind = Kind.ASK
    body: Any = None
    buffers: Sequence[Any] = ()
    error: Exception | None = None
    done: bool = False
    answers: Answers | None = None
    wanted: bool = False

    def result(self) -> Any:
        """The answer, opened in the thread that wanted it. Raises what the handler raised, or why there is none."""
        self.wanted = True
        if not self.done:
            self.wait(self)
        if self.error is not None:
            raise self.error
        value = decode_body(self.body, self.buffers)
        if self.kind is Kind.ERROR:
            raise value
        return value

    def answer(self, kind: Kind, body: Any, buffers: Sequence[Any]) -> None:
        self.kind, self.body, self.buffers = kind, body, buffers
        self._settle()

    def fail(self, error: Exception) -> None:
        self.error = error
        self._settle()

    def _settle(self) -> None:
        self.done = True
        if self.answers is not None:
            self.answers.waiting.discard(self)
            self.answers.append(self)


class Answers(deque["Pending"]):
    """What came for an actor that had gone on after `ask_soon`: its step need wait no longer.

    waiting: asks whose answers are still to come.
    """

    def __init__(self) -> None:
        super().__init__()
        self.waiting = set[Pending]()

    def late(self, now: float) -> list[Pending]:
        """Those that are waiting past their deadline: their time is over even if nobody looks."""
        return [pending for pending in list(self.waiting) if now >= pending.deadline]

    def take(self) -> bool:
        """Whether any of them is news to it. Leaves none."""
        news = False
        while self:
            news |= not self.popleft().wanted
        return news


class Outgoing(Struct, eq=False, gc=False):
    """A message its receiver has not handled yet. `method` is the handler's name, `pending` None for a tell,
    `at_ns` when it was sent (CLOCK_MONOTONIC)."""

    seq: int
    method: str
    idempotent: bool
    record: bytes | Parcel
    pending: Pending | None
    at_ns: int


@dataclass(eq=False, slots=True)
class Peer:
    """An actor this process sends to. `connection` is None while the actor is not up.

    place: its place in the membership, -1 as long as it is in none.
    unhandled: what it has not handled, by seq; unsent: those of them it was not sent yet.
    size: bytes of what it has not handled; parcels: how many of those messages are one, with a descriptor each.
    """

    name: str
    connection: Connection | None = None
    incarnation: int = 0
    place: int = -1
    unhandled: dict[int, Outgoing] = field(default_factory=dict)
    unsent: list[Outgoing] = field(default_factory=list)
    size: int = 0
    parcels: int = 0

    def add(self, message: Outgoing) -> None:
        self.unhandled[message.seq] = message
        self.unsent.append(message)
        self.size += len(message.record)
        self.parcels += isinstance(message.record, Parcel)

    def remove(self, seq: int) -> Outgoing | None:
        message = self.unhandled.pop(seq, None)
        if message is not None:
            self.size -= len(message.record)
            self.parcels -= isinstance(message.record, Parcel)
        return message

    def strike(self, seqs: Iterable[int]) -> None:
        """These tells were handled."""
        for seq in seqs:
            self.remove(seq)

    @property
    def full(self) -> bool:
        return (
            len(self.unhandled) >= MAX_UNHANDLED
            or self.size >= MAX_UNHANDLED_BYTES
            or self.parcels >= MAX_PARCELS
        )

    @property
    def oldest_ns(self) -> int:
        """When the oldest message that it has not handled was sent; 0: there is none."""
        return next((message.at_ns for message in self.unhandled.values()), 0)


def together(records: Sequence[bytes | Parcel]) -> Iterator[bytes | Parcel]:
    """The same records in the same order, as few datagrams."""
    small: list[bytes] = []
    size = 0
    for record in records:
        if small and (isinstance(record, Parcel) or size + len(record) > MAX_DATAGRAM):
            yield b"".join(small)
            small, size = [], 0
        if isinstance(record, Parcel):
            yield record
        else:
            small.append(record)
            size += len(record)
    if small:
        yield b"".join(small)


class Replies:
    """Answers that wait to be sent. Added to by the thread that handles messages, sent by the one that drives.

    waiting: whom to, the seq of a tell that was handled, or the record of an answer.
    """

    def __init__(self) -> None:
        self.waiting: deque[tuple[Connection, int, bytes | Parcel]] = deque()

    def __len__(self) -> int:
        return len(self.waiting)

    def take(self) -> dict[Connection, list[bytes | Parcel]]:
        """What to send to whom. Leaves nothing."""
        records: dict[Connection, list[bytes | Parcel]] = {}
        done: dict[Connection, list[int]] = {}
        while self.waiting:
            route, seq, record = self.waiting.popleft()
            if seq:
                done.setdefault(route, []).append(seq)
            else:
                records.setdefault(route, []).append(record)
        for route, seqs in done.items():
            records.setdefault(route, []).append(pack_done(seqs))
        return records
