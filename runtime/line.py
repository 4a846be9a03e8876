"""A stream of frames between two bridges that survives whatever happens to the requests that carry it.

Each end numbers its frames from 1 and keeps them until the other has said how far it is. So a request that is cut,
doubled or late loses and repeats nothing, as long as both bridges live. When one is restarted there is a new line.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Annotated

from msgspec import Meta, Raw, Struct, msgpack

from .page import SENDERS, Memory

__all__ = ["Answered", "Batch", "Done", "FarMember", "Frame", "Gap", "Heard", "Line", "Mail", "Members"]

BATCH_BYTES = 4 << 20  # of frames that travel together; one frame may be larger


# What any page and any header have room for: nothing that another machine says may kill a bridge.
Word = Annotated[int, Meta(ge=0, lt=2**62)]
Name = Annotated[str, Meta(max_length=200)]


class FarMember(Struct, frozen=True, array_like=True):
    """As `Member`, by its name in the run; memories: what its page says of messages from the other machine."""

    name: Name
    role: Name
    incarnation: Word
    state: Annotated[str, Meta(pattern="^(up|starting|down|gone)$")]
    reason: str
    memories: Annotated[list[Memory], Meta(max_length=SENDERS)]


class Members(Struct, frozen=True, array_like=True, tag="members"):
    """These actors of my machine have changed; all of them, first."""

    members: list[FarMember]


class Mail(Struct, frozen=True, array_like=True, tag="mail"):
    """A message for this incarnation of `receiver`. Other fields as in `Header`; left_s: until the deadline, 0: none.
    chain: by their names in the run. body: as the codec has it."""

    receiver: Name
    incarnation: Word
    ask: bool
    seq: Word
    sender: Word
    left_s: Annotated[float, Meta(ge=0.0, le=1e9)]
    chain: Annotated[tuple[Name, ...], Meta(max_length=64)]
    method: Name
    body: bytes


class Answered(Struct, frozen=True, array_like=True, tag="answer"):
    """The answer to the ask `seq`, or if `failed` an exception, as the codec has them."""

    receiver: Name
    sender: Word
    seq: Word
    method: Name
    failed: bool
    body: bytes


class Done(Struct, frozen=True, array_like=True, tag="done"):
    """These tells were handled."""

    receiver: Name
    sender: Word
    seqs: list[Word]


class Heard(Struct, frozen=True, array_like=True, tag="heard"):
    """The answers to these asks have arrived."""

    receiver: Name
    sender: Word
    seqs: list[Word]


Frame = Members | Mail | Answered | Done | Heard


class Batch(Struct, frozen=True, array_like=True):
    """first: the number of the first frame. heard: how many of the other's frames have come."""

    first: Word
    heard: Word
    frames: list[Frame]


class _Outgoing(Struct, frozen=True, array_like=True):
    """A Batch whose frames are encoded already."""

    first: int
    heard: int
    frames: list[Raw]


class Gap(Exception):
    """Frames before these are missing, or more have been heard than were sent: this is not the same line."""


class Line:
    """One end. `deliver` gets the other's frames, in order and each once, in the thread that called `receive`."""

    def __init__(self, deliver: Callable[[Line, Sequence[Frame]], None]) -> None:
        self._deliver = deliver
        self._kept: deque[bytes] = deque()
        self._first = 1  # the number of the first that is kept
        self._heard = 0
        self._sending = threading.Condition()
        self._receiving = threading.Lock()
        self.closed = False

    @property
    def heard(self) -> int:
        """How many frames have come."""
        return self._heard

    @property
    def idle(self) -> bool:
        """Whether the other end has everything."""
        return not self._kept

    def post(self, frame: Frame) -> None:
        with self._sending:
            self._kept.append(msgpack.encode(frame))
            self._sending.notify_all()

    def after(self, number: int, wait_s: float | None) -> bytes:
        """A batch of the frames after this number, which the other end has heard; waits until there are some, or the
        line is closed. wait_s: None: a batch without frames. Raises Gap if not so many were posted."""
        with self._sending:
            if not 0 <= number < self._first + len(self._kept):
                raise Gap
            while self._first <= number:
                self._kept.popleft()
                self._first += 1
            frames: list[Raw] = []
            size = 0
            if wait_s is not None:
                self._sending.wait_for(lambda: self._kept or self.closed, wait_s)
            for frame in self._kept if wait_s is not None else ():
                size += len(frame)
                if frames and size > BATCH_BYTES:
                    break
                frames.append(Raw(frame))
            return msgpack.encode(_Outgoing(self._first, self._heard, frames))

    def receive(self, batch: Batch) -> None:
        """Deliver what is new of it. Raises Gap if frames before it are missing."""
        with self._receiving:
            new = batch.frames[max(0, self._heard + 1 - batch.first) :]
            if not new or self.closed:
                return
            if not 0 < batch.first <= self._heard + 1:
                raise Gap
            self._deliver(self, new)
            self._heard += len(new)

    def close(self) -> None:
        """Whoever waits for frames waits no longer, and nothing is delivered any more."""
        with self._sending:
            self.closed = True
            self._sending.notify_all()
