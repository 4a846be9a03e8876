"""The next version fetched while the engine samples, so that a swap waits for no network."""

from __future__ import annotations

import logging
import threading
from collections.abc import Collection
from pathlib import Path

from ..runtime.errors import Unrecoverable
from ..runtime.store import PolicyStore, PolicyVersion, StoreError

__all__ = ["Prefetch"]

log = logging.getLogger("rolecall")


class Prefetch:
    """A thread that puts every version into this machine's cache soon after it is published.

    every_s: seconds between two looks, each a conditional GET.

    keep:  versions whose folders must stay when the next is fetched (see `PolicyStore.fetch`).
    ready: the newest version that is here, and its folder, checked.

    What is wrong with the store is a line in the log here. Whoever can't go on without a version fetches it himself,
    and meets it as his own error.
    """

    def __init__(self, store: PolicyStore, *, every_s: float = 1.0) -> None:
        self._store, self._every_s = store, every_s
        self.keep: Collection[int] = ()
        self.ready: tuple[PolicyVersion, Path] | None = None
        self._said = ""
        self._stopping = False
        self._wake = threading.Event()
        self._thread = threading.Thread(target=self._run, name="prefetch", daemon=True)

    @property
    def newest(self) -> int:
        """The number of the newest version that is here, −1 if none is."""
        return -1 if self.ready is None else self.ready[0].version

    def start(self) -> None:
        self._thread.start()

    def stop(self, timeout_s: float = 1.0) -> None:
        """End the thread. One in the middle of a transfer is left behind: it ends with its process."""
        self._stopping = True
        self._wake.set()
        self._thread.join(timeout_s)

    def hurry(self) -> None:
        """Look at once: there is a version that is not here."""
        self._wake.set()

    def look(self) -> None:
        """Fetch the newest version, if there is one that was not fetched yet."""
        try:
            head = self._store.head()
            if head is not None and head.version > self.newest:
                self.ready = head, self._store.fetch(head.version, keep={*self.keep, self.newest})
                self._said = ""
        except (StoreError, Unrecoverable) as error:
            if str(error) != self._said:
                log.warning("no version could be fetched ahead: %s", error)
                self._said = str(error)

    def _run(self) -> None:
        while True:
            self._wake.wait(self._every_s)
            self._wake.clear()
            if self._stopping:
                return
            self.look()
