"""Objects under keys, with compare-and-swap: the interface, and folders that keep to it (s3.py: buckets)."""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO, Protocol, TypeVar

import msgspec

from .errors import RolecallError, Unrecoverable

__all__ = [
    "WAY_OUT_OF_DAMAGE",
    "Conflict",
    "FolderObjects",
    "Missing",
    "Objects",
    "StoreError",
    "check_key",
    "decoded",
    "locked",
    "prove",
    "read",
    "write",
    "write_into",
]

T = TypeVar("T")

WAY_OUT_OF_DAMAGE = (
    "publish a newer version or, in a checkpoint, delete manifest.json to resume from an older one"
)
_PIECE = 1 << 20  # bytes; writing 64 MB at once took seven times as long as in pieces of this size
_SEGMENT = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]*")


class StoreError(RolecallError):
    """The store cannot do what was asked of it."""


class Conflict(StoreError):
    """A conditional put lost: the object exists (`if_absent`) or is not the one expected (`if_match`)."""


class Missing(StoreError):
    """There is no such object."""


class Objects(Protocol):
    """Whole objects under keys like "policy/v000042/manifest.json" (see `check_key`).

    An etag is an opaque string that changes whenever the object's bytes do. Every method may raise StoreError
    (with the key and the place, after retries) or Unrecoverable (no such bucket, credentials refused).
    """

    @property
    def place(self) -> str:
        """Where the objects are, for messages."""
        ...

    def put(self, key: str, data: bytes, *, if_absent: bool = False, if_match: str | None = None) -> str:
        """Write the object, durably and all at once, and return its etag.

        With `if_absent` or `if_match` (an etag) only if nobody else has written it; else Conflict.
        """
        ...

    def get(self, key: str, *, unless: str | None = None) -> tuple[bytes, str] | None:
        """The object and its etag, or None when its etag is still `unless`; Missing if there is none."""
        ...

    def stream(self, key: str, size: int) -> Iterator[bytes]:
        """The object's bytes from first to last, in pieces, fetched ahead; Missing if there is none.

        size: what its manifest has, in bytes. Nothing here checks that the object has it, or that it was not
        changed meanwhile: whoever has its SHA-256 does.
        """
        ...

    def list(self, prefix: str) -> list[str]:
        """Every key that begins with `prefix`, sorted."""
        ...

    def delete(self, key: str) -> None:
        """Remove the object; it is fine if there is none."""
        ...

    def probe(self) -> None:
        """Raise Unrecoverable (exit code 2) if this place won't do, within ten seconds."""
        ...


def check_key(key: str) -> str:
    """Return the key, or raise ValueError if a part of it is empty, hidden, `..` or not of [A-Za-z0-9._-]."""
    if not all(_SEGMENT.fullmatch(segment) for segment in key.split("/")):
        raise ValueError(f"bad object key {key!r}: use parts of [A-Za-z0-9._-] that do not begin with a dot")
    return key


def read(objects: Objects, key: str) -> tuple[bytes, str]:
    """The object and its etag, unconditionally; Missing if there is none."""
    found = objects.get(key)
    assert found is not None, "only a conditional get can find nothing new"
    return found


def decoded(objects: Objects, key: str, kind: type[T], *, unless: str | None = None) -> tuple[T, str] | None:
    """The JSON object as a `kind`, and its etag, or None as `get` has it; StoreError if it is none, twice."""
    problem = ""
    for _ in range(2):
        found = objects.get(key, unless=unless)
        if found is None:
            return None
        try:
            return msgspec.json.decode(found[0], type=kind), found[1]
        except msgspec.DecodeError as error:
            problem = f"expected the JSON of a {kind.__name__}, found {found[0][:40]!r} ({error})"
    raise StoreError(
        f"{key} in {objects.place} is damaged: {problem}, twice; put back an older version of the object if the "
        f"bucket keeps them, {WAY_OUT_OF_DAMAGE}"
    )


def write(path: Path, data: bytes, *, sync: bool = False) -> None:
    """Create the file; with `sync`, its bytes are on the disk when this returns."""
    with path.open("xb") as file:
        write_into(file, data)
        if sync:
            file.flush()
            os.fsync(file.fileno())


def write_into(file: BinaryIO, data: bytes) -> None:
    for start in range(0, len(data), _PIECE):
        file.write(memoryview(data)[start : start + _PIECE])


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold the lock file at `path`, alone among the threads and processes of this machine."""
    with path.open("ab") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def prove(objects: Objects) -> None:
    """Try each method on one object; Unrecoverable (exit code 2) unless conditional puts can lose."""
    key = f"probe-{secrets.token_hex(8)}"
    try:
        objects.put(key, b"first", if_absent=True)
        refused = _conflicts(objects, key, if_absent=True), _conflicts(objects, key, if_match=f'"{"0" * 32}"')
        objects.get(key)
        objects.list(key)
        objects.delete(key)
        with suppress(Missing):
            objects.get(key)  # S3 answers 403 here to whoever may not list the bucket
    except StoreError as error:
        raise Unrecoverable(f"the store cannot be used: {error}", exit_code=2) from error
    if not all(refused):
        raise Unrecoverable(
            f"{objects.place} ignores conditional writes, without which two trainers could publish at once: "
            "use file:// or an S3 server that honours If-None-Match and If-Match on PutObject",
            exit_code=2,
        )


def _conflicts(objects: Objects, key: str, *, if_absent: bool = False, if_match: str | None = None) -> bool:
    try:
        objects.put(key, b"second", if_absent=if_absent, if_match=if_match)
    except Conflict:
        return True
    return False


class FolderObjects:
    """Objects as files below `root`; an etag is the SHA-256 of the content.

    Written aside, synced and moved into place, so a reader sees all of an object or none. Whatever changes
    the folder holds one lock, so compare-and-swap is atomic between the processes of one machine.
    """

    def __init__(self, root: Path) -> None:
        self.root = root

    @property
    def place(self) -> str:
        return f"folder {self.root}"

    def put(self, key: str, data: bytes, *, if_absent: bool = False, if_match: str | None = None) -> str:
        path = self.root / check_key(key)
        with self._named(key), self._alone(), self._staged(data) as staged:
            if if_match is not None and (not path.is_file() or _sha256(path.read_bytes()) != if_match):
                raise Conflict(f"{key} in {self.place} is not the object that was expected")
            path.parent.mkdir(parents=True, exist_ok=True)
            if if_absent:
                try:
                    path.hardlink_to(staged)
                except FileExistsError:
                    raise Conflict(f"{key} in {self.place} exists already") from None
            else:
                staged.replace(path)
            self._sync(path.parent)
        return _sha256(data)

    def get(self, key: str, *, unless: str | None = None) -> tuple[bytes, str] | None:
        with self._named(key):
            try:
                data = (self.root / check_key(key)).read_bytes()
            except (FileNotFoundError, IsADirectoryError, NotADirectoryError):
                raise Missing(f"there is no {key} in {self.place}") from None
        etag = _sha256(data)
        return None if etag == unless else (data, etag)

    def stream(self, key: str, size: int) -> Iterator[bytes]:
        with self._named(key):
            try:
                with (self.root / check_key(key)).open("rb") as file:
                    while piece := file.read(_PIECE):
                        yield piece
            except (FileNotFoundError, IsADirectoryError, NotADirectoryError):
                raise Missing(f"there is no {key} in {self.place}") from None

    def list(self, prefix: str) -> list[str]:
        base = self.root.joinpath(*prefix.split("/")[:-1])
        with self._named(prefix), self._alone():
            files = [path for path in base.rglob("*") if path.is_file()]
        keys = [path.relative_to(self.root).as_posix() for path in files]
        return sorted(key for key in keys if key.startswith(prefix) and not key.startswith("."))

    def delete(self, key: str) -> None:
        path = self.root / check_key(key)
        with self._named(key), self._alone():
            path.unlink(missing_ok=True)
            for folder in path.parents:
                if folder == self.root or not folder.is_dir() or any(folder.iterdir()):
                    break
                folder.rmdir()

    def probe(self) -> None:
        prove(self)

    @contextmanager
    def _named(self, key: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            reason = f"{error.strerror or error}: check its permissions and the space left"
            raise StoreError(f"{key} in {self.place}: {reason}") from error

    @contextmanager
    def _alone(self) -> Iterator[None]:
        self.root.mkdir(parents=True, exist_ok=True)
        with locked(self.root / ".lock"):
            yield

    @contextmanager
    def _staged(self, data: bytes) -> Iterator[Path]:
        staged = self.root / ".upload"
        staged.unlink(missing_ok=True)  # whoever left it died, perhaps after linking it: never write into it
        try:
            write(staged, data, sync=True)
            yield staged
        finally:
            staged.unlink(missing_ok=True)

    def _sync(self, folder: Path) -> None:
        """Make the names up to the root survive a power cut, not only the bytes."""
        for parent in (folder, *folder.parents):
            descriptor = os.open(parent, os.O_RDONLY | os.O_DIRECTORY)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
            if parent == self.root:
                break


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
