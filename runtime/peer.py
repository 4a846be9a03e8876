"""What one process remembers of the messages it has sent: whom to, which are not handled yet, who waits."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import zmq

from .wire import Kind, decode_body, pack_done

__all__ = ["Heard", "Outgoing", "Peer", "Pending", "Replies"]

MAX_UNHANDLED = 1024  # messages one sender may have with one receiver before it waits
MAX_UNHANDLED_BYTES = 256 << 20


@dataclass(eq=False, slots=True)
class Pending:
    """An ask that waits for its answer. `wait` waits until it is done, or settles it with AskTimeout."""

    name: str
    deadline: float
    wait: Callable[[Pending], None]
    seq: int = 0
    kind: Kind = Kind.ASK
    body: Any = None
    buffers: Sequence[Any] = ()
    error: Exception | None = None
    done: bool = False

    def result(self) -> Any:
        """The answer, opened in the thread that wanted it. Raises what the handler raised, or why there is none."""
        if not self.done:
            self.wait(self)
        if self.error is not None:
            raise self.error
        value = decode_body(self.body, self.buffers)
        if self.kind is Kind.ERROR:
            raise value
        return value

    def fail(self, error: Exception) -> None:
        self.error, self.done = error, True


@dataclass(frozen=True)
class Heard:
    """An answer that was there at once."""

    value: Any
    done: bool = True

    def result(self) -> Any:
        return self.value


@dataclass(eq=False, slots=True)
class Outgoing:
    """A message its receiver has not handled yet. `method` is the handler's name, `pending` None for a tell."""

    seq: int
    method: str
    idempotent: bool
    record: bytes
    buffers: list[Any]
    pending: Pending | None

    @property
    def size(self) -> int:
        return len(self.record) + sum(memoryview(buffer).nbytes for buffer in self.buffers)


@dataclass(eq=False, slots=True)
class Peer:
    """An actor this process sends to. `socket` is None while the actor is not up.

    unhandled: what it has not handled, by seq; unsent: those of them it was not sent yet.
    """

    name: str
    socket: zmq.Socket[bytes] | None = None
    incarnation: int = 0
    unhandled: dict[int, Outgoing] = field(default_factory=dict)
    unsent: list[Outgoing] = field(default_factory=list)
    size: int = 0

    def add(self, message: Outgoing) -> None:
        self.unhandled[message.seq] = message
        self.unsent.append(message)
        self.size += message.size

    def remove(self, seq: int) -> Outgoing | None:
        message = self.unhandled.pop(seq, None)
        if message is not None:
            self.size -= message.size
        return message

    @property
    def full(self) -> bool:
        return len(self.unhandled) >= MAX_UNHANDLED or self.size >= MAX_UNHANDLED_BYTES

    def transmit(self, messages: Sequence[Outgoing]) -> None:
        """Send these in order; small ones together. The socket must be there."""
        assert self.socket is not None
        small: list[bytes] = []
        for message in messages:
            if not message.buffers:
                small.append(message.record)
                continue
            if small:
                self.socket.send(b"".join(small))
                small = []
            self.socket.send_multipart([message.record, *message.buffers], copy=False)
        if small:
            self.socket.send(b"".join(small))


class Replies:
    """Answers that wait to be sent. Added to by the thread that handles messages, sent by the one that drives."""

    def __init__(self) -> None:
        self._waiting: deque[tuple[bytes, int, bytes, Sequence[Any]]] = deque()  # route, seq, record, buffers

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, route: bytes, record: bytes, buffers: Sequence[Any]) -> None:
        self._waiting.append((route, 0, record, buffers))

    def add_done(self, route: bytes, seq: int) -> None:
        """A tell was handled; all of one sender's are told in one record."""
        self._waiting.append((route, seq, b"", ()))

    def datagrams(self) -> Iterator[list[Any]]:
        """What to send, each as route and frames; small ones of one sender together. Leaves nothing."""
        if not self._waiting:
            return
        records: dict[bytes, list[bytes]] = {}
        done: dict[bytes, list[int]] = {}
        while self._waiting:
            route, seq, record, buffers = self._waiting.popleft()
            if buffers:
                yield [route, record, *buffers]
            elif record:
                records.setdefault(route, []).append(record)
            else:
                done.setdefault(route, []).append(seq)
        for route, seqs in done.items():
            records.setdefault(route, []).append(pack_done(seqs))
        for route, batch in records.items():
            yield [route, b"".join(batch)]
