"""A page of shared memory in which an actor notes what it has begun and what it has done.

Each note is one 8-byte store (under a microsecond) and survives SIGKILL, so the actor's next incarnation
knows for every message that is sent again whether it was done, was running, or never began.

    word 0-2   sender and seq of the message that is running, and when it began (CLOCK_MONOTONIC, ns)
    word 3-5   sender and seq of the message that was running at the last death, and how often it was
    then       SENDERS pairs (sender, highest seq done or set aside)
    then       ASIDE pairs (sender, seq) of messages set aside by NotYet: not done although below the highest

The order of the stores matters: a kill between any two of them leaves a page that tells the truth.
"""

from __future__ import annotations

import mmap
import os
from enum import Enum
from pathlib import Path

__all__ = ["Fate", "Page"]

SENDERS, ASIDE = 512, 4096
_RUNNING, _DIED, _SENDERS = 0, 3, 6
_ASIDE = _SENDERS + 2 * SENDERS
_WORDS = _ASIDE + 2 * ASIDE


class Fate(Enum):
    """What became of a message in earlier incarnations."""

    NEW = "never began"
    RUNNING = "was running when its actor died"
    DONE = "was done"


class Page:
    """One actor's page, backed by a file so that the next incarnation and the supervisor can open it."""

    def __init__(self, path: Path) -> None:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            os.ftruncate(fd, 8 * _WORDS)
            self._words = memoryview(mmap.mmap(fd, 8 * _WORDS)).cast("Q")
        finally:
            os.close(fd)
        words = self._words
        self._slots = {words[i]: i for i in range(_SENDERS, _ASIDE, 2) if words[i]}
        self._aside = {(words[i], words[i + 1]): i for i in range(_ASIDE, _WORDS, 2) if words[i + 1]}
        self._free = [i for i in range(_WORDS - 2, _ASIDE - 2, -2) if not words[i + 1]]

    def begin(self, sender: int, seq: int, now_ns: int) -> None:
        words = self._words
        words[_RUNNING] = sender
        words[_RUNNING + 2] = now_ns
        words[_RUNNING + 1] = seq

    def done(self, sender: int, seq: int) -> None:
        at = self._aside.pop((sender, seq), None)
        if at is None:
            self._raise(sender, seq)
        else:
            self._words[at + 1] = 0
            self._free.append(at)
        self._words[_RUNNING + 1] = 0

    def set_aside(self, sender: int, seq: int) -> None:
        """The handler raised NotYet: the message has changed nothing and will be tried again."""
        if (sender, seq) not in self._aside:
            if not self._free:
                raise OverflowError(f"more than {ASIDE} messages wait for this actor's state to change")
            at = self._aside[sender, seq] = self._free.pop()
            self._words[at] = sender
            self._words[at + 1] = seq
            self._raise(sender, seq)
        self._words[_RUNNING + 1] = 0

    def recover(self) -> None:
        """Called once by a new incarnation: what was running is now what was running at a death."""
        words = self._words
        sender, seq = words[_RUNNING], words[_RUNNING + 1]
        if seq and self.fate(sender, seq) is not Fate.DONE:
            again = (words[_DIED], words[_DIED + 1]) == (sender, seq)
            count = words[_DIED + 2] + 1 if again else 1
            words[_DIED], words[_DIED + 1], words[_DIED + 2] = sender, seq, count
        words[_RUNNING + 1] = 0

    def fate(self, sender: int, seq: int) -> Fate:
        words = self._words
        slot = self._slots.get(sender)
        if slot is not None and seq <= words[slot + 1] and (sender, seq) not in self._aside:
            return Fate.DONE
        for at in (_RUNNING, _DIED):
            if (words[at], words[at + 1]) == (sender, seq):
                return Fate.RUNNING
        return Fate.NEW

    def deaths(self, sender: int, seq: int) -> int:
        """How many incarnations in a row died while this message was running."""
        words = self._words
        return words[_DIED + 2] if (words[_DIED], words[_DIED + 1]) == (sender, seq) else 0

    def running_for_s(self, now_ns: int) -> float | None:
        """Seconds since the running message began, None if none is running."""
        return (now_ns - self._words[_RUNNING + 2]) / 1e9 if self._words[_RUNNING + 1] else None

    def forget(self, sender: int) -> None:
        """That incarnation is dead and will send nothing again."""
        slot = self._slots.pop(sender, None)
        if slot is not None:
            self._words[slot] = 0
            self._words[slot + 1] = 0

    def _raise(self, sender: int, seq: int) -> None:
        slot = self._slots.get(sender)
        if slot is None:
            used = set(self._slots.values())
            slot = next((i for i in range(_SENDERS, _ASIDE, 2) if i not in used), None)
            if slot is None:
                raise OverflowError(f"more than {SENDERS} actors have sent to this one")
            self._words[slot + 1] = 0
            self._words[slot] = sender
            self._slots[sender] = slot
        self._words[slot + 1] = seq
