"""A page of shared memory in which an actor notes what it has begun and what it has done.

Each note is one 8-byte store (under a microsecond) and survives SIGKILL, so the actor's next incarnation
knows for every message that is sent again whether it was done, was running, or never began.

    word 0-3   the message that is running: sender, seq, when it began (CLOCK_MONOTONIC, ns), which try it is
    word 4     until when what runs now may run (CLOCK_MONOTONIC, ns); 0: as long as it takes
    word 5     1: this page stands in for one that is lost with its machine, and anything may have begun
    then       INTERRUPTED triples (sender, seq, tries) of messages that were running at a death
    then       SENDERS pairs (sender, highest seq done or set aside)
    then       ASIDE pairs (sender, seq) of messages set aside by NotYet: not done although below the highest
    then       RECEIVERS pairs (messages, when the oldest was sent) that this actor has sent to each actor, in the
               order of the membership, and that wait there

An entry counts once its seq is not 0, and that is stored last: a kill between any two stores leaves a page
that tells the truth. A sender's messages are begun in the order of their seq.
"""

from __future__ import annotations

import mmap
import os
from array import array
from collections.abc import Sequence
from enum import Enum
from pathlib import Path
from typing import Annotated

from msgspec import Meta, Struct

__all__ = ["RECEIVERS", "SENDERS", "Fate", "Memory", "Page", "fits", "stand_in"]

INTERRUPTED, SENDERS, ASIDE, RECEIVERS = 64, 512, 4096, 512
_SENDER, _SEQ, _SINCE, _TRY = range(4)
_UNTIL, _LOST = 4, 5
_INTERRUPTED = 6
_SENDERS = _INTERRUPTED + 3 * INTERRUPTED


class Memory(Struct, frozen=True, array_like=True):
    """What a page remembers of one sender's messages, by seq (see `Page`)."""

    sender: Annotated[int, Meta(ge=0, lt=2**62)]
    highest: Annotated[int, Meta(ge=0, lt=2**62)]
    aside: list[Annotated[int, Meta(gt=0, lt=2**62)]]
    interrupted: list[Annotated[int, Meta(gt=0, lt=2**62)]]


class Fate(Enum):
    """What became of a message in earlier incarnations."""

    NEW = "never began"
    RUNNING = "was running when its actor died"
    DONE = "was done"


class Page:
    """One actor's page, backed by a file so that the next incarnation, senders and the supervisor can open it.

    times: how many times SENDERS and ASIDE there is room for, the same whenever this page is opened; more than once
    only where more actors share a process than a machine would run.
    """

    def __init__(self, path: Path, times: int = 1) -> None:
        self._aside_at = _SENDERS + 2 * SENDERS * times
        self._receivers_at = self._aside_at + 2 * ASIDE * times
        self._end = self._receivers_at + 2 * RECEIVERS
        self._room = f"{SENDERS * times} actors", f"{ASIDE * times} messages"
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            os.ftruncate(fd, 8 * self._end)
            self._words = memoryview(mmap.mmap(fd, 8 * self._end)).cast("Q")
        finally:
            os.close(fd)
        words = self._words.tolist()  # one by one from the file they would take five times as long
        self._slots = {words[i]: i for i in range(_SENDERS, self._aside_at, 2) if words[i]}
        self._interrupted = _entries(words, range(_INTERRUPTED, _SENDERS, 3))
        self._aside = _entries(words, range(self._aside_at, self._receivers_at, 2))
        places, taken = range(self._receivers_at - 2, self._aside_at - 2, -2), {*self._aside.values()}
        self._free = [i for i in places if i not in taken] if taken else [*places]

    def close(self) -> None:
        """Give its memory and its file descriptor back; it can't be used any more."""
        self._words.release()

    def is_new(self, sender: int, seq: int) -> bool:
        """Whether this message certainly never began: `fate` tells more of the others."""
        slot = self._slots.get(sender)
        if slot is not None and seq <= self._words[slot + 1]:
            return False
        return not self._interrupted or (sender, seq) not in self._interrupted

    def begin(self, sender: int, seq: int, now_ns: int) -> None:
        words = self._words
        words[_SENDER] = sender
        words[_SINCE] = now_ns
        words[_TRY] = self.deaths(sender, seq) + 1 if self._interrupted else 1
        words[_SEQ] = seq

    def done(self, sender: int, seq: int) -> None:
        words = self._words
        slot = self._slots.get(sender) or self._new_slot(sender)
        # A message that comes again is older than what its sender has had done since: the mark never falls.
        if seq > words[slot + 1]:
            words[slot + 1] = seq
        if self._aside or self._interrupted:
            self._strike(sender, seq)
        words[_SEQ] = 0

    def _strike(self, sender: int, seq: int) -> None:
        at = self._aside.pop((sender, seq), None)
        if at is not None:
            self._words[at + 1] = 0
            self._free.append(at)
        at = self._interrupted.pop((sender, seq), None)
        if at is not None:
            self._words[at + 1] = 0

    def set_aside(self, sender: int, seq: int) -> None:
        """The handler raised NotYet: the message has changed nothing and will be tried again."""
        if (sender, seq) not in self._aside:
            if not self._free:
                raise OverflowError(f"more than {self._room[1]} wait for this actor's state to change")
            at = self._aside[sender, seq] = self._free.pop()
            self._words[at] = sender
            self._words[at + 1] = seq
            slot = self._slots.get(sender) or self._new_slot(sender)
            self._words[slot + 1] = max(seq, self._words[slot + 1])
        self._words[_SEQ] = 0

    def recover(self) -> None:
        """Called once by a new incarnation: what was running is now what was running at a death."""
        words = self._words
        sender, seq = words[_SENDER], words[_SEQ]
        if seq:
            at = self._interrupted.get((sender, seq))
            if at is None:
                at = self._place_for_interrupted()
                words[at + 1] = 0
                words[at] = sender
            words[at + 2] = words[_TRY]
            words[at + 1] = seq
            self._interrupted[sender, seq] = at
        words[_SEQ] = words[_UNTIL] = 0
        for at in range(self._receivers_at, self._end):
            words[at] = 0  # what the last incarnation sent, it waits for no more

    def _place_for_interrupted(self) -> int:
        for at in range(_INTERRUPTED, _SENDERS, 3):
            if not self._words[at + 1]:
                return at
        for message, at in self._interrupted.items():
            if self.fate(*message) is Fate.DONE:  # its sender has been told, and has gone on
                del self._interrupted[message]
                return at
        raise OverflowError(
            f"{INTERRUPTED} messages were interrupted by this actor's deaths and none came again"
        )

    def fate(self, sender: int, seq: int) -> Fate:
        slot = self._slots.get(sender)
        if slot is not None and seq <= self._words[slot + 1] and (sender, seq) not in self._aside:
            return Fate.DONE
        running = (self._words[_SENDER], self._words[_SEQ]) == (sender, seq)
        if running or self._words[_LOST] or (sender, seq) in self._interrupted:
            return Fate.RUNNING
        return Fate.NEW

    def deaths(self, sender: int, seq: int) -> int:
        """How many incarnations died while this message was running."""
        at = self._interrupted.get((sender, seq))
        return 0 if at is None else self._words[at + 2]

    def running_for_s(self, now_ns: int) -> float | None:
        """Seconds since the running message began, None if none is running."""
        return (now_ns - self._words[_SINCE]) / 1e9 if self._words[_SEQ] else None

    def limit(self, until_ns: int) -> None:
        """What runs now may run until then; 0: as long as it takes."""
        self._words[_UNTIL] = until_ns

    def overdue_s(self, now_ns: int) -> float | None:
        """Seconds that what runs now is over its limit; None: it is not, or has none."""
        until = self._words[_UNTIL]
        return (now_ns - until) / 1e9 if 0 < until < now_ns else None

    def note_sent(self, receiver: int, messages: int, oldest_ns: int) -> None:
        """What waits with this receiver, by its place in the membership, and when the oldest of it was sent."""
        at = self._receivers_at + 2 * receiver
        self._words[at] = messages
        self._words[at + 1] = oldest_ns

    def sent(self, receiver: int) -> tuple[int, int]:
        """As `note_sent` left it."""
        at = self._receivers_at + 2 * receiver
        return self._words[at], self._words[at + 1]

    @property
    def senders(self) -> set[int]:
        """Whose messages this page remembers."""
        return {*self._slots, *(sender for sender, _ in (*self._aside, *self._interrupted))}

    def memories(self) -> list[Memory]:
        """All it remembers, for whoever stands in for its actor on another machine."""
        running = (self._words[_SENDER], self._words[_SEQ])
        interrupted = {*self._interrupted, *([running] if running[1] else [])}
        return [
            Memory(
                sender,
                self._words[self._slots[sender] + 1] if sender in self._slots else 0,
                [seq for other, seq in self._aside if other == sender],
                [seq for other, seq in interrupted if other == sender],
            )
            for sender in {*self.senders, *(sender for sender, _ in interrupted)}
        ]

    def _learn(self, memory: Memory) -> None:
        for seq in memory.aside:
            self.set_aside(memory.sender, seq)
        for seq in memory.interrupted:
            at = self._interrupted[memory.sender, seq] = self._place_for_interrupted()
            self._words[at : at + 3] = memoryview(array("Q", (memory.sender, seq, 1)))
        if memory.highest:
            slot = self._slots.get(memory.sender) or self._new_slot(memory.sender)
            self._words[slot + 1] = memory.highest

    def forget(self, sender: int) -> None:
        """That incarnation is dead and will send nothing again."""
        for entries in (self._aside, self._interrupted):
            for message in [message for message in entries if message[0] == sender]:
                at = entries.pop(message)
                self._words[at + 1] = 0
                if entries is self._aside:
                    self._free.append(at)
        slot = self._slots.pop(sender, None)
        if slot is not None:
            self._words[slot] = 0
            self._words[slot + 1] = 0

    def _new_slot(self, sender: int) -> int:
        used = set(self._slots.values())
        slot = next((i for i in range(_SENDERS, self._aside_at, 2) if i not in used), None)
        if slot is None:
            raise OverflowError(f"more than {self._room[0]} have sent to this one")
        self._words[slot + 1] = 0
        self._words[slot] = sender
        self._slots[sender] = slot
        return slot


def fits(memories: Sequence[Memory]) -> bool:
    """Whether a page has room for them: one that was kept by a page has."""
    aside = sum(len(memory.aside) for memory in memories)
    return aside <= ASIDE and sum(len(memory.interrupted) for memory in memories) <= INTERRUPTED


def stand_in(path: Path, memories: Sequence[Memory], *, lost: bool = False) -> None:
    """Put a page at `path` that says the same as one on another machine, or as one that was lost with it."""
    aside = path.with_name(f"{path.name}.new")
    aside.unlink(missing_ok=True)
    page = Page(aside)
    page._words[_LOST] = int(lost)
    for memory in memories:
        page._learn(memory)
    aside.replace(path)


def _entries(words: Sequence[int], places: range) -> dict[tuple[int, int], int]:
    if not any(words[places.start : places.stop]):
        return {}  # as it mostly is
    return {(words[i], words[i + 1]): i for i in places if words[i + 1]}
