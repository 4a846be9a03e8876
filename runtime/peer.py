"""What one process remembers of the messages it has sent: whom to, which are not handled yet, who waits."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any

import zmq

from .wire import Kind

__all__ = ["Outgoing", "Peer", "Pending"]

MAX_UNHANDLED = 1024  # messages one sender may have with one receiver before it waits
MAX_UNHANDLED_BYTES = 256 << 20


@dataclass(eq=False)
class Pending:
    """An ask that waits for its answer."""

    name: str
    deadline: float
    answer: tuple[Kind, list[Any]] | None = None
    error: Exception | None = None
    done: bool = False

    def settle(self, answer: tuple[Kind, list[Any]] | None = None, error: Exception | None = None) -> None:
        self.answer, self.error, self.done = answer, error, True


@dataclass(eq=False)
class Outgoing:
    """A message its receiver has not handled yet. `method` is the handler's name, `pending` None for a tell."""

    seq: int
    method: str
    idempotent: bool
    frames: list[Any]
    size: int
    pending: Pending | None


@dataclass(eq=False)
class Peer:
    """An actor this process sends to. `socket` is None while the actor is not up."""

    name: str
    socket: zmq.Socket[bytes] | None = None
    incarnation: int = 0
    unhandled: OrderedDict[int, Outgoing] = field(default_factory=OrderedDict)
    size: int = 0

    def add(self, message: Outgoing) -> None:
        self.unhandled[message.seq] = message
        self.size += message.size

    def remove(self, seq: int) -> Outgoing | None:
        message = self.unhandled.pop(seq, None)
        if message is not None:
            self.size -= message.size
        return message

    @property
    def full(self) -> bool:
        return len(self.unhandled) >= MAX_UNHANDLED or self.size >= MAX_UNHANDLED_BYTES
