"""Where every prompt of a run is, in a file that a kill leaves whole.

The first line of the file is all there was when it was begun, each one after it is what has changed since: a worker
that asks for a prompt costs a line, not a file, however many others there are.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

import msgspec

from ..runtime.files import write_whole

__all__ = ["Heard", "Ledger", "Loan"]

MAX_BYTES = 1 << 20  # of changes, or twice what there is in all, before the file is begun anew


class Loan(msgspec.Struct):
    """A prompt somebody works on, as a part of lease number `lease`.

    version: the newest when it was lent, so that its group will be of this one or a newer one.
    since: on the clock of its owner, who may be another after a restart.
    """

    worker: str
    lease: int
    since: float
    version: int


class Heard(msgspec.Struct, frozen=True):
    """The newest word of a worker: what an older one still asks for would be lost. actor: whether it is one of the
    run's, whose death is told."""

    incarnation: int
    lease: int
    actor: bool = False


class _Change(msgspec.Struct):
    """A line of the file. workers: None: forgotten; lent, back, gone: by prompt."""

    next: int
    leases: int
    step: int
    version: int
    workers: dict[str, Heard | None]
    lent: dict[int, Loan]
    back: list[int]
    gone: list[int]


class Ledger:
    """Below `next` every prompt is on loan, returned, or delivered as a group.

    leases:  how many there have been. step, version: the trainer's newest.
    workers: those that hold prompts, or were heard of in the time of a lease.
    loans, returned: to look at; what changes them are the methods. All is written by `save`, but for who had what was
    returned, which is a hint.
    """

    def __init__(self, file: Path) -> None:
        """What the file says, if there is one."""
        self._file = file
        self.next = self.leases = self.step = 0
        self.version = -1
        self.workers: dict[str, Heard] = {}
        self.loans: dict[int, Loan] = {}
        self.returned: dict[int, str] = {}  # and who had it last; empty if that is not known
        self._held: dict[str, set[int]] = {}
        self._heard_of: set[str] = set()  # these two: what has changed
        self._moved: set[int] = set()
        for line in file.read_bytes().splitlines(keepends=True) if file.exists() else ():
            if line.endswith(b"\n"):  # the last may have been cut off by a kill
                self._apply(msgspec.json.decode(line, type=_Change))
        self._moved.clear()
        self._said = self._numbers
        self._room = 0  # bytes until the file is begun anew

    @property
    def _numbers(self) -> tuple[int, int, int, int]:
        return self.next, self.leases, self.step, self.version

    def held_by(self, worker: str) -> Mapping[int, Loan]:
        """What is lent to it."""
        return {id: self.loans[id] for id in self._held.get(worker, ())}

    def held(self, worker: str) -> int:
        """How many those are."""
        return len(self._held.get(worker, ()))

    def hear(self, worker: str, heard: Heard) -> None:
        self.workers[worker] = heard
        self._heard_of.add(worker)

    def forget(self, worker: str) -> None:
        """It holds nothing."""
        del self.workers[worker]
        self._heard_of.add(worker)

    def lend(self, id: int, loan: Loan) -> None:
        self._take(id)
        self.loans[id] = loan
        self._held.setdefault(loan.worker, set()).add(id)

    def deliver(self, id: int) -> None:
        """Nobody need sample it any more."""
        self._take(id)

    def take_back(self, id: int) -> None:
        """It is to be lent again."""
        last = self.loans[id].worker if id in self.loans else self.returned.get(id, "")
        self._take(id)
        self.returned[id] = last

    def start_afresh(self, next: int) -> None:
        """Whatever was under way: all prompts from this one on are to be lent, and those returned before it."""
        for id in (*self.loans, *(id for id in self.returned if id >= next)):
            self._take(id)
        self.next = next

    def _take(self, id: int) -> None:
        self._moved.add(id)
        self.returned.pop(id, None)
        if (loan := self.loans.pop(id, None)) is not None:
            held = self._held[loan.worker]
            held.remove(id)
            if not held:
                del self._held[loan.worker]

    def save(self) -> None:
        """Before an answer leaves: after a restart it must be known what was lent. Nothing new costs nothing."""
        if not self._heard_of and not self._moved and self._said == self._numbers:
            return
        line = self._line(self._heard_of, self._moved)
        room, self._room = self._room - len(line), 0  # if the disk is full, a part of a line may be there
        if room < 0:
            line = self._line(self.workers, {*self.loans, *self.returned})
            write_whole(self._file, line)
            room = max(MAX_BYTES, 2 * len(line))
        else:
            with self._file.open("ab") as file:
                file.write(line)
        self._room = room
        self._heard_of.clear()
        self._moved.clear()
        self._said = self._numbers

    def _line(self, workers: Iterable[str], ids: Iterable[int]) -> bytes:
        change = _Change(*self._numbers, {name: self.workers.get(name) for name in workers}, {}, [], [])
        for id in ids:
            if id in self.loans:
                change.lent[id] = self.loans[id]
            else:
                (change.back if id in self.returned else change.gone).append(id)
        return msgspec.json.encode(change) + b"\n"

    def _apply(self, change: _Change) -> None:
        self.next, self.leases, self.step, self.version = (
            change.next,
            change.leases,
            change.step,
            change.version,
        )
        for name, heard in change.workers.items():
            if heard is None:
                self.workers.pop(name, None)
            else:
                self.workers[name] = heard
        for id in change.gone:
            self.deliver(id)
        for id in change.back:
            self.take_back(id)
        for id, loan in change.lent.items():
            self.lend(id, loan)
