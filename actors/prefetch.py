"""The next version fetched while the engine samples, so that a swap waits for no network."""

from __future__ import annotations

import logging
import threading

from ..runtime.errors import Unrecoverable
from ..runtime.store import PolicyStore, StoreError

__all__ = ["Prefetch"]

log = logging.getLogger("rolecall")


class Prefetch:
    """A thread that puts every version into this machine's cache soon after it is published.

    store:   one of its own, for a store lets go of a version's folder when it fetches the next.
    every_s: seconds between two looks, each a conditional GET.

    It changes nothing but the cache. Whoever swaps fetches all the same, and so meets what is wrong with the store
    then, as its own error; here it is a line in the log.
    """

    def __init__(self, store: PolicyStore, *, every_s: float = 1.0) -> None:
        self._store, self._every_s = store, every_s
        self.newest = -1  # in the cache
        self._said = ""
        self._stopping = False
        self._wake = threading.Event()
        self._thread = threading.Thread(target=self._run, name="prefetch", daemon=True)

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
                self._store.fetch(head.version)
                self.newest = head.version
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
