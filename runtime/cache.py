"""Downloaded versions on this machine's disk, each downloaded once however many processes want it."""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import BinaryIO

from .manifest import Files
from .objects import StoreError, locked

__all__ = ["Cache"]

_KEPT = 8


class Cache:
    """Sub-folders of checked files, shared by the processes of one machine.

    The newest few by name stay, and those that someone holds: a lease is a shared lock that ends with its
    process, however that ends, and a folder goes only under the exclusive lock.
    """

    def __init__(self, root: Path) -> None:
        self.root = root

    def folder(self, name: str, files: Files, download: Callable[[Path], object]) -> tuple[Path, BinaryIO]:
        """The folder `name` with exactly `files` in it, and a lease: it stays until that is closed.

        download: puts files that match `files` into the folder it is given, when they are not here or were
        damaged; called under a lock, so by one process at a time.
        Raises StoreError when the disk won't take them.
        """
        folder = self.root / name
        try:
            self.root.mkdir(parents=True, exist_ok=True)
            with ExitStack() as failed:
                lease = failed.enter_context(self._lease(name))
                before = _identity(folder)
                if before is None or not _intact(folder, files):
                    with locked(self.root / ".lock"):
                        if _identity(folder) == before:  # else someone has put it there while we waited
                            self._fill(folder, download)
                            self._evict()
                failed.pop_all()
        except OSError as error:
            reason = f"{error.strerror or error}: check its permissions and the space left"
            raise StoreError(f"{name} cannot be kept in {self.root}: {reason}") from error
        return folder, lease

    def _lease(self, name: str) -> BinaryIO:
        path = self._lease_path(name)
        while True:
            lease = path.open("a+b")
            fcntl.flock(lease, fcntl.LOCK_SH)
            if _identity(path) == os.fstat(lease.fileno()).st_ino:
                return lease
            lease.close()  # evicted, lease and all, while we waited for the lock

    def _lease_path(self, name: str) -> Path:
        """Beside the folder, not in it: whoever copies the folder wants an adapter, not our bookkeeping."""
        return self.root / f".{name}.lease"

    def _fill(self, folder: Path, download: Callable[[Path], object]) -> None:
        aside = self.root / ".partial"  # the lock is ours, so whoever left it died
        if aside.exists():
            shutil.rmtree(aside)
        aside.mkdir()
        download(aside)
        if folder.exists():
            shutil.rmtree(folder)
        aside.rename(folder)

    def _evict(self) -> None:
        cached = sorted(self.root.glob("v*"), key=lambda folder: (len(folder.name), folder.name))
        for folder in cached[:-_KEPT]:
            path = self._lease_path(folder.name)
            with path.open("a+b") as lease:
                try:
                    fcntl.flock(lease, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    continue
                shutil.rmtree(folder)
                path.unlink()


def _intact(folder: Path, files: Files) -> bool:
    """Hashed at every use: written without a sync, a file may not have survived a power cut."""
    found: Files = {}
    try:
        for path in folder.iterdir():
            with path.open("rb") as file:
                found[path.name] = hashlib.file_digest(file, "sha256").hexdigest(), path.stat().st_size
    except FileNotFoundError:  # damaged, and replaced meanwhile
        return False
    return found == files


def _identity(path: Path) -> int | None:
    try:
        return path.stat().st_ino
    except FileNotFoundError:
        return None
