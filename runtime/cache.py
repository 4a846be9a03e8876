"""Downloaded versions on this machine's disk, each downloaded once however many processes want it."""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

from .objects import check_key, locked, write

__all__ = ["Cache", "Files", "described"]

Files = dict[str, tuple[str, int]]  # name -> (SHA-256 in hex, size in bytes)

_KEPT = 8


def described(files: Mapping[str, bytes]) -> Files:
    """SHA-256 and size of each file, by name; ValueError for a name with anything but [A-Za-z0-9._-]."""
    for name in files:
        if "/" in check_key(name):
            raise ValueError(f"bad file name {name!r}: use [A-Za-z0-9._-]")
    return {name: (hashlib.sha256(files[name]).hexdigest(), len(files[name])) for name in sorted(files)}


class Cache:
    """Sub-folders of checked files; the newest few by name stay, and the one asked for last."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def folder(self, name: str, files: Files, download: Callable[[], Mapping[str, bytes]]) -> Path:
        """The folder `name` with exactly `files` in it, from `download` if it is not here or was damaged.

        download: gives files that match `files`; called under a lock, so by one process at a time.
        """
        folder = self.root / name
        before = _identity(folder)
        if before is not None and _intact(folder, files):
            return folder
        self.root.mkdir(parents=True, exist_ok=True)
        with locked(self.root / ".lock"):
            if _identity(folder) == before:  # else someone has put it there while we waited
                self._fill(folder, download())
                self._evict(besides=folder)
        return folder

    def _fill(self, folder: Path, files: Mapping[str, bytes]) -> None:
        aside = self.root / ".partial"  # the lock is ours, so whoever left it died
        if aside.exists():
            shutil.rmtree(aside)
        aside.mkdir()
        for name, data in files.items():
            write(aside / name, data)
        if folder.exists():
            shutil.rmtree(folder)
        aside.rename(folder)

    def _evict(self, *, besides: Path) -> None:
        cached = sorted(self.root.glob("v*"), key=lambda folder: (len(folder.name), folder.name))
        for folder in cached[:-_KEPT]:
            if folder != besides:
                shutil.rmtree(folder)


def _intact(folder: Path, files: Files) -> bool:
    """Hashed at every use: written without a sync, a file may not have survived a power cut."""
    found: Files = {}
    try:
        for path in folder.iterdir():
            with path.open("rb") as file:
                found[path.name] = hashlib.file_digest(file, "sha256").hexdigest(), path.stat().st_size
    except FileNotFoundError:  # evicted meanwhile
        return False
    return found == files


def _identity(folder: Path) -> int | None:
    try:
        return folder.stat().st_ino
    except FileNotFoundError:
        return None
