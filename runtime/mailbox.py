"""The messages an actor has not handled yet, in the order it will handle them."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from math import inf
from typing import Any

from msgspec import Struct

from .wire import Header

__all__ = ["Incoming", "Mailbox"]


class Incoming(Struct, eq=False, gc=False):
    """A message that has arrived; body and buffers are not yet decoded; `route` leads back to its sender."""

    header: Header
    body: Any
    buffers: Sequence[Any]
    route: Any = None
    number: int = 0  # of those set aside, in the order of arrival
    until: Callable[[], bool] | None = None  # what it waits for, while it is set aside


class Mailbox:
    """First come, first served, but for messages set aside by NotYet.

    Those are tried again, oldest first, each time another message or a step may have changed the actor's
    state, if what they wait for may have come; the others overtake them meanwhile.
    """

    def __init__(self) -> None:
        self._arrived: deque[Incoming] = deque()
        # By what they wait for, oldest first.
        self._aside: defaultdict[Callable[[], bool] | None, list[Incoming]] = defaultdict(list)
        self._retry: deque[Incoming] = deque()
        self._count = 0
        self._deadline = inf  # none of what was set aside has an earlier one

    def __len__(self) -> int:
        return len(self._arrived) + sum(map(len, self._aside.values()))

    @property
    def ready(self) -> bool:
        """Whether `next` would give a message."""
        return bool(self._arrived or self._retry)

    def put(self, message: Incoming) -> None:
        self._arrived.append(message)

    def next(self) -> Incoming | None:
        """The message to handle now; None if there is none, or all wait for a change."""
        if self._retry:
            message = self._retry.popleft()
            self._take_out(message)
            return message
        return self._arrived.popleft() if self._arrived else None

    def set_aside(self, message: Incoming, until: Callable[[], bool] | None = None) -> None:
        """until: as in NotYet."""
        if not message.number:  # it is the first time, and whoever was set aside before had come before
            self._count += 1
            message.number = self._count
        message.until = until
        if message.header.deadline:
            self._deadline = min(self._deadline, message.header.deadline)
        insort(self._aside[until], message, key=_number)

    def drop_late(self, now: float) -> list[Incoming]:
        """Take out what was set aside and is past its deadline: nobody waits for it any more."""
        if now <= self._deadline:
            return []
        late = [one for one in self._oldest_first(self._aside.values()) if _is_late(one, now)]
        for message in late:
            self._take_out(message)
        if late:
            self._retry = deque(message for message in self._retry if not _is_late(message, now))
        waiting = chain.from_iterable(self._aside.values())
        self._deadline = min((one.header.deadline or inf for one in waiting), default=inf)
        return late

    def changed(self) -> None:
        """The actor's state may have changed: what was set aside deserves another try."""
        if self._aside:
            due = [messages for until, messages in self._aside.items() if until is None or until()]
            self._retry = deque(due[0] if len(due) == 1 else self._oldest_first(due))

    def drain(self) -> list[Incoming]:
        """Take everything out, for an actor that stops."""
        messages = [*self._oldest_first(self._aside.values()), *self._arrived]
        self._aside.clear()
        self._arrived.clear()
        self._retry.clear()
        return messages

    def _take_out(self, message: Incoming) -> None:
        waiting = self._aside[message.until]
        del waiting[bisect_left(waiting, message.number, key=_number)]
        if not waiting:
            del self._aside[message.until]

    @staticmethod
    def _oldest_first(waiting: Iterable[list[Incoming]]) -> list[Incoming]:
        return sorted(chain.from_iterable(waiting), key=_number)


def _number(message: Incoming) -> int:
    return message.number


def _is_late(message: Incoming, now: float) -> bool:
    return 0.0 < message.header.deadline < now
