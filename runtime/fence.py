"""HEAD: which version is published, and which start of the trainer may publish the next."""

from __future__ import annotations

import secrets
from collections.abc import Callable

import msgspec

from .errors import Unrecoverable
from .objects import Conflict, Missing, Objects, StoreError, decoded

__all__ = ["HEAD", "Fence", "Fenced", "Head", "nonce"]

HEAD = "policy/HEAD"


class Fenced(Unrecoverable):
    """Another trainer has taken a newer epoch of this run, so this one must stop."""

    def __reduce__(self) -> tuple[object, ...]:
        return Fenced, (str(self),)


class Head(msgspec.Struct, frozen=True, kw_only=True):
    """What HEAD holds. By the nonce a writer knows its own write when the answer to it was lost."""

    version: int | None
    epoch: int
    nonce: str


class Fence:
    """HEAD and its rule: each change is a compare-and-swap, by the trainer that took the newest epoch."""

    def __init__(self, objects: Objects, run: str) -> None:
        self._objects, self._run = objects, run

    def read(self) -> Head | None:
        found = self._read()
        return found[0] if found else None

    def take_epoch(self) -> int:
        """Take the next epoch, from 1 up; from now on whoever took an earlier one is Fenced."""

        def next_epoch(head: Head | None) -> Head:
            if head is None:
                return Head(version=None, epoch=1, nonce=nonce())
            return Head(version=head.version, epoch=head.epoch + 1, nonce=nonce())

        return self._move(next_epoch).epoch

    def advance(self, version: int, epoch: int) -> None:
        """Publish the version; Fenced or StoreError as `check` has it."""

        def published(head: Head | None) -> Head:
            self._check(head, epoch, version)
            return Head(version=version, epoch=epoch, nonce=nonce())

        self._move(published)

    def check(self, epoch: int, version: int | None = None) -> Head:
        """HEAD; Fenced if a newer epoch was taken, StoreError if `version` is not greater than HEAD's."""
        return self._check(self.read(), epoch, version)

    def _check(self, head: Head | None, epoch: int, version: int | None) -> Head:
        if head is None or head.epoch < epoch:
            raise StoreError(
                f"run {self._run!r} has not reached epoch {epoch}: take_epoch() gives the next one"
            )
        if head.epoch > epoch:
            raise Fenced(
                f"another trainer has started on run {self._run!r} (epoch {head.epoch}) since this one did "
                f"(epoch {epoch}), so this one stops: let one trainer write a run, or start another run"
            )
        if version is not None and head.version is not None and version <= head.version:
            raise StoreError(
                f"run {self._run!r} is at version {head.version}: the next is greater, not {version}"
            )
        return head

    def _read(self) -> tuple[Head, str] | None:
        try:
            return decoded(self._objects, HEAD, Head)
        except Missing:
            return None

    def _move(self, moved: Callable[[Head | None], Head]) -> Head:
        for _ in range(100):  # each race lost was won by another writer
            found = self._read()
            head = moved(found[0] if found else None)
            data = msgspec.json.encode(head)
            try:
                if found:
                    self._objects.put(HEAD, data, if_match=found[1])
                else:
                    self._objects.put(HEAD, data, if_absent=True)
            except Conflict:
                continue
            return head
        raise StoreError(f"{HEAD} in {self._objects.place} changed at every try: stop the other writers")


def nonce() -> str:
    """Never seeded: two runs of one seed must still tell their own writes apart."""
    return secrets.token_hex(8)
