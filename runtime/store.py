"""Policy versions and checkpoints: one writer, immutable versions, everyone pulls.

    <url>/<run>/policy/v000042/adapter_model.safetensors   written first
                              /adapter_config.json
                              /manifest.json                written last: it is complete
                policy/HEAD                                 and now published; the only key that changes
                checkpoints/step-000200/e3/...              by epoch, so no two trainers share a key
                                          /manifest.json    written last, too

A trainer takes the next epoch when it starts. Every change of HEAD is a compare-and-swap that checks the
epoch, so whoever took an older one is fenced off.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar
from urllib.parse import urlsplit

import msgspec

from .cache import Cache, Files, described
from .errors import Unrecoverable
from .fence import HEAD, Fence, Fenced, Head, nonce
from .objects import Conflict, FolderObjects, Missing, Objects, StoreError, check_key, read

__all__ = ["Fenced", "PolicyStore", "PolicyVersion", "Store", "StoreError"]

T = TypeVar("T")

_TRANSFERS = 4  # files of one version that travel at once
_BUCKET = re.compile(r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]")
_POLICY = re.compile(r"policy/v(\d+)/.+")
_CHECKPOINT = re.compile(r"(checkpoints/step-(\d+)/e(\d+))/.+")


class PolicyVersion(msgspec.Struct, frozen=True, kw_only=True):
    """One published adapter, for ever the same.

    version: its number, from 0, growing.
    step:    optimizer steps taken to reach it.
    epoch:   which start of the trainer wrote it.
    digest:  SHA-256, in hex, of what `LC_ALL=C sha256sum *` prints in a folder of its files:
             "<SHA-256 in hex>  <name>\\n" for each file, sorted by name.
    files:   name -> (SHA-256 in hex, size in bytes).
    final:   no version follows it.
    nonce:   makes the manifests of two writers differ even when their adapters are equal.
    """

    version: int
    step: int
    epoch: int
    digest: str
    files: Files
    final: bool = False
    nonce: str


class _Checkpoint(msgspec.Struct, frozen=True, kw_only=True):
    step: int
    epoch: int
    files: Files


@dataclass(frozen=True)
class Store:
    """Where versions live: "s3://bucket/prefix", "file:///folder", or "file://" for the run's own folder.

    Unrecoverable (exit code 2) for any other URL. Credentials never belong in it: S3 takes them from the
    standard AWS environment variables and configuration files.
    """

    url: str = "file://"

    def __post_init__(self) -> None:
        problem = _problem_with(self.url)
        if problem:
            forms = "s3://bucket/prefix, file:///folder, or file:// for the run's own folder"
            raise Unrecoverable(f"{problem}: a store is {forms}", exit_code=2)

    def open(self, run: str, folder: Path) -> PolicyStore:
        """The store of one run, seen from this machine.

        run:    the run's id, of [A-Za-z0-9._-].
        folder: the run's folder on this machine; versions are cached in its cache/.
        """
        if "/" in check_key(run):
            raise ValueError(f"bad run id {run!r}: use [A-Za-z0-9._-]")
        where = urlsplit(self.url)
        objects: Objects
        if where.scheme == "s3":
            from .s3 import S3Objects

            prefix = where.path.strip("/")
            objects = S3Objects(where.netloc, f"{prefix}/{run}/" if prefix else f"{run}/")
        else:
            objects = FolderObjects(Path(where.path) / run if where.path else folder / "store" / run)
        return PolicyStore(objects, cache=Cache(folder / "cache"), run=run)


def _problem_with(url: str) -> str | None:
    try:
        where = urlsplit(url)
    except ValueError as error:
        return f"the store's URL cannot be read ({error})"
    if "@" in (where.netloc if where.scheme == "file" else url) or where.query or where.fragment:
        # The URL may hold a secret: don't repeat it.
        return "a store's URL has no user, password, query or fragment"
    if where.scheme == "s3":
        if not _BUCKET.fullmatch(where.netloc):
            return f"{url!r} names no valid bucket"
        try:
            check_key(where.path.strip("/") or "none")
        except ValueError as error:
            return f"{url!r} has a {error}"
        return None
    if where.scheme == "file" and not where.netloc and where.path[:1] in ("", "/"):
        return None
    return f"{url!r} is not a place for a store"


class PolicyStore:
    """What one run keeps in its store. Safe to use from several threads; made by `Store.open`.

    Every method may raise StoreError, or Unrecoverable for a bucket or credentials that cannot work.
    """

    def __init__(self, objects: Objects, *, cache: Cache, run: str) -> None:
        self._objects, self._cache, self._run = objects, cache, run
        self._fence = Fence(objects, run)
        self._seen: tuple[str, PolicyVersion | None] | None = None  # HEAD's etag, and what it pointed to

    def probe(self) -> None:
        """Raise Unrecoverable (exit code 2, with the way out) if the store won't do, within ten seconds."""
        self._objects.probe()

    def take_epoch(self) -> int:
        """Begin to write: take the next epoch, from 1 up. Whoever took an earlier one can publish no more."""
        return self._fence.take_epoch()

    def publish(
        self, files: Mapping[str, bytes], *, version: int, step: int, epoch: int, final: bool = False
    ) -> PolicyVersion:
        """Publish one version: its files, then its manifest, then HEAD.

        Fenced if a newer epoch has been taken; StoreError if `version` is not greater than HEAD's.
        """
        self._fence.check(epoch, version)
        parts = _parts(files)
        policy = PolicyVersion(
            version=version,
            step=step,
            epoch=epoch,
            digest=_digest(parts),
            files=parts,
            final=final,
            nonce=nonce(),
        )
        folder = _folder_of(version)
        try:
            _in_parallel(lambda name: self._claim(f"{folder}/{name}", files[name], epoch, version), files)
            self._claim(f"{folder}/manifest.json", msgspec.json.encode(policy), epoch, version)
        except Conflict:
            self._fence.check(epoch, version)  # most likely a newer trainer came between: say so
            raise
        self._fence.advance(version, epoch)
        return policy

    def head(self) -> PolicyVersion | None:
        """The newest published version, or None before the first; one conditional GET if nothing is new."""
        seen = self._seen
        try:
            found = self._objects.get(HEAD, unless=seen[0] if seen else None)
        except Missing:
            return None
        if found is None:
            assert seen is not None
            return seen[1]
        version = msgspec.json.decode(found[0], type=Head).version
        policy = None if version is None else self.policy(version)
        self._seen = found[1], policy
        return policy

    def policy(self, version: int) -> PolicyVersion:
        """What was published as this version; StoreError if there is none (never published, or collected)."""
        seen = self._seen
        if seen and seen[1] and seen[1].version == version:
            return seen[1]
        try:
            data, _ = read(self._objects, f"{_folder_of(version)}/manifest.json")
        except Missing as error:
            reason = "it was never published, or collected since"
            raise StoreError(f"run {self._run!r} has no version {version}: {reason} ({error})") from error
        return msgspec.json.decode(data, type=PolicyVersion)

    def fetch(self, version: int) -> Path:
        """A local folder with the version's files, each checked against its SHA-256.

        Those who fetch one version on one machine share one download; the newest few stay in the cache.
        """
        policy = self.policy(version)
        remote = _folder_of(version)
        # The digest in the name: a folder cached from a store that was since emptied is another folder.
        local = f"v{version:06d}-{policy.digest[:12]}"
        return self._cache.folder(local, policy.files, lambda: self._download(remote, policy.files))

    def save_checkpoint(self, files: Mapping[str, bytes], *, step: int, epoch: int) -> None:
        """Keep what a resume at `step` needs; it exists once all of it is there. Fenced as `publish` is."""
        self._fence.check(epoch)
        folder = f"checkpoints/step-{step:06d}/e{epoch}"
        manifest = msgspec.json.encode(_Checkpoint(step=step, epoch=epoch, files=_parts(files)))
        with suppress(Missing):
            read(self._objects, f"{folder}/manifest.json")
            raise StoreError(f"run {self._run!r} has saved step {step} already: a checkpoint never changes")
        _in_parallel(lambda name: self._objects.put(f"{folder}/{name}", files[name]), files)
        self._fence.check(epoch)
        self._objects.put(f"{folder}/manifest.json", manifest)

    def latest_checkpoint(self) -> tuple[int, dict[str, bytes]] | None:
        """Step and files of the newest complete checkpoint, digests checked, or None. Lists the store.

        Newest is the latest epoch's last step: what a trainer saved after it was overtaken doesn't count.
        """
        complete = _complete(self._checkpoints())
        if not complete:
            return None
        data, _ = read(self._objects, f"{complete[-1]}/manifest.json")
        checkpoint = msgspec.json.decode(data, type=_Checkpoint)
        return checkpoint.step, self._download(complete[-1], checkpoint.files)

    def collect(self, *, keep: int, keep_checkpoints: int = 2) -> None:
        """Delete versions more than `keep` behind HEAD's, and checkpoints but the newest `keep_checkpoints`.

        Version 0 stays: it is what a run is measured against. Uploads that were never finished go with the
        versions or checkpoints of their age. Lists the store.
        """
        if keep < 0 or keep_checkpoints < 1:
            raise ValueError(
                f"cannot keep {keep} versions and {keep_checkpoints} checkpoints: at least 0 and 1"
            )
        head = self._fence.read()
        if head and head.version is not None:
            found = [(key, _POLICY.fullmatch(key)) for key in self._objects.list("policy/")]
            self._delete(key for key, at in found if at and 0 < int(at[1]) < head.version - keep)
        checkpoints = self._checkpoints()
        folders, kept = list(checkpoints), _complete(checkpoints)[-keep_checkpoints:]
        for folder in folders[: folders.index(kept[-1])] if kept else ():
            if folder not in kept:
                self._delete(checkpoints[folder])

    def _checkpoints(self) -> dict[str, list[str]]:
        """The keys of each checkpoint by its folder, oldest first."""
        found: dict[tuple[int, int, str], list[str]] = {}
        for key in self._objects.list("checkpoints/"):
            if at := _CHECKPOINT.fullmatch(key):
                found.setdefault((int(at[3]), int(at[2]), at[1]), []).append(key)
        return {folder: found[epoch, step, folder] for epoch, step, folder in sorted(found)}

    def _delete(self, keys: Iterable[str]) -> None:
        """Manifests first: what is half deleted must not look complete."""
        for key in sorted(keys, key=lambda key: not key.endswith("/manifest.json")):
            self._objects.delete(key)

    def _claim(self, key: str, data: bytes, epoch: int, version: int) -> None:
        """Write a part of an unpublished version, over what an upload that died may have left there."""
        try:
            self._objects.put(key, data, if_absent=True)
        except Conflict:
            # The etag first, the fence after it: a newer trainer that writes here changes one or the other.
            found, etag = read(self._objects, key)
            self._fence.check(epoch, version)
            if found != data:
                self._objects.put(key, data, if_match=etag)

    def _download(self, folder: str, files: Files) -> dict[str, bytes]:
        names = list(files)
        parts = _in_parallel(lambda name: self._read_checked(f"{folder}/{name}", files[name][0]), names)
        return dict(zip(names, parts, strict=True))

    def _read_checked(self, key: str, sha256: str) -> bytes:
        found = ""
        for _ in range(2):
            try:
                data, _ = read(self._objects, key)
                found = hashlib.sha256(data).hexdigest()
            except Missing:
                found = "no object"
            else:
                if found == sha256:
                    return data
        raise StoreError(
            f"{key} in {self._objects.place} is damaged: expected SHA-256 {sha256}, found {found}, twice; "
            "publish a newer version or, in a checkpoint, delete manifest.json to resume from an older one"
        )


def _complete(checkpoints: Mapping[str, list[str]]) -> list[str]:
    return [folder for folder, keys in checkpoints.items() if f"{folder}/manifest.json" in keys]


def _folder_of(version: int) -> str:
    return f"policy/v{version:06d}"


def _parts(files: Mapping[str, bytes]) -> Files:
    if "manifest.json" in files:
        raise ValueError("a file cannot be called manifest.json: the store's own has that name")
    return described(files)


def _digest(files: Files) -> str:
    lines = "".join(f"{files[name][0]}  {name}\n" for name in sorted(files))
    return hashlib.sha256(lines.encode()).hexdigest()


def _in_parallel(work: Callable[[str], T], names: Iterable[str]) -> list[T]:
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(_TRANSFERS) as pool:
        return list(pool.map(work, names))
