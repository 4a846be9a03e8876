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
import io
import re
import threading
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, TypeVar
from urllib.parse import urlsplit

import msgspec

from .cache import Cache
from .errors import Unrecoverable
from .fence import HEAD, Fence, Fenced, Head, nonce
from .manifest import Checkpoint, Files, PolicyVersion, check_names, described, digest_of, read_manifest
from .objects import (
    WAY_OUT_OF_DAMAGE,
    Conflict,
    FolderObjects,
    Missing,
    Objects,
    StoreError,
    check_key,
    decoded,
    read,
    write_into,
)

__all__ = ["Fenced", "PolicyStore", "PolicyVersion", "Store", "StoreError"]

T = TypeVar("T")

_TRANSFERS = 4  # files of one version that travel at once
_BUCKET = re.compile(r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]")
_POLICY = re.compile(r"policy/v(\d+)/.+")
_CHECKPOINT = re.compile(r"(checkpoints/step-(\d+)/e(\d+))/.+")


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
        self._leases: dict[int, BinaryIO] = {}  # of the versions that this store keeps on the disk
        self._leasing = threading.Lock()
        self._epoch: int | None = None  # the last that this store took
        self._listed = False  # since it took that
        self._keys: set[str] = set()  # what is there: listed or written, and not deleted since
        self._unsure: set[str] = set()  # what may be there or not: its request has no answer, or failed

    def probe(self) -> None:
        """Raise Unrecoverable (exit code 2, with the way out) if the store won't do, within ten seconds."""
        self._objects.probe()

    def take_epoch(self) -> int:
        """Begin to write: take the next epoch, from 1 up. Whoever took an earlier one can publish no more."""
        self._epoch, self._listed = self._fence.take_epoch(), False
        return self._epoch

    def publish(
        self, files: Mapping[str, bytes], *, version: int, step: int, epoch: int, time: float = 0.0
    ) -> PolicyVersion:
        """Publish one version: its files, then its manifest, then HEAD.

        Fenced if a newer epoch has been taken; StoreError if `version` is not greater than HEAD's.
        """
        check_names(files)
        self._fence.check(epoch, version)
        folder = _folder_of(version)
        try:
            parts = self._upload(folder, files, epoch, version)
            policy = PolicyVersion(
                version=version,
                step=step,
                epoch=epoch,
                digest=digest_of(parts),
                time=time,
                files=parts,
                nonce=nonce(),
            )
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
            found = decoded(self._objects, HEAD, Head, unless=seen[0] if seen else None)
        except Missing:
            return None
        if found is None:
            assert seen is not None
            return seen[1]
        head, etag = found
        policy = None if head.version is None else self.policy(head.version)
        self._seen = etag, policy
        return policy

    def policy(self, version: int) -> PolicyVersion:
        """What was published as this version; StoreError if there is none (never published, or collected)."""
        seen = self._seen
        if seen and seen[1] and seen[1].version == version:
            return seen[1]
        return self._published(version)

    def _published(self, version: int) -> PolicyVersion:
        try:
            policy = read_manifest(self._objects, _folder_of(version), PolicyVersion)
        except Missing as error:
            reason = "it was never published, or collected since"
            raise StoreError(f"run {self._run!r} has no version {version}: {reason} ({error})") from error
        if policy.version != version:
            where = f"{_folder_of(version)}/manifest.json in {self._objects.place}"
            raise StoreError(f"{where} is damaged: it is version {policy.version}'s; publish a newer version")
        return policy

    def fetch(self, version: int, *, keep: Collection[int] = ()) -> Path:
        """A local folder with the version's files, each checked against its SHA-256.

        Those who fetch one version on one machine share one download. The folder stays on the disk until
        this store's next `fetch`, and longer while that and later ones name the version in `keep`: an engine
        that reads a folder again names every version that it may still be asked for.
        """
        policy = self.policy(version)
        remote = _folder_of(version)

        def download(folder: Path) -> None:
            try:
                _in_parallel(lambda name: self._fetch(remote, name, policy.files, folder), policy.files)
            except StoreError:
                self._published(version)  # collected while it was fetched? Then that is the reason.
                raise

        # The digest in the name: a folder cached from a store that was since emptied is another folder.
        folder, lease = self._cache.folder(f"v{version:06d}-{policy.digest[:12]}", policy.files, download)
        with self._leasing:
            ended = [self._leases.pop(held) for held in list(self._leases) if held not in keep]
            ended += [self._leases.pop(version)] if version in self._leases else []
            self._leases[version] = lease
        for each in ended:
            each.close()
        return folder

    def save_checkpoint(self, files: Mapping[str, bytes], *, step: int, epoch: int) -> None:
        """Keep what a resume at `step` needs; it exists once all of it is there. Fenced as `publish` is."""
        check_names(files)
        version = self._fence.check(epoch).version
        folder = f"checkpoints/step-{step:06d}/e{epoch}"
        with suppress(Missing):
            read(self._objects, f"{folder}/manifest.json")
            raise StoreError(f"run {self._run!r} has saved step {step} already: a checkpoint never changes")
        _in_parallel(lambda name: self._put(f"{folder}/{name}", files[name]), files)
        manifest = Checkpoint(step=step, epoch=epoch, version=version, files=described(files))
        self._fence.check(epoch)
        self._put(f"{folder}/manifest.json", msgspec.json.encode(manifest))

    def latest_checkpoint(self) -> tuple[int, dict[str, bytes]] | None:
        """Step and files of the newest complete checkpoint, digests checked, or None. Lists the store.

        Newest is the latest epoch's last step: what a trainer saved after it was overtaken doesn't count.
        """
        complete = _complete(_checkpoints(self._objects.list("checkpoints/")))
        if not complete:
            return None
        checkpoint = read_manifest(self._objects, complete[-1], Checkpoint)

        def download(name: str) -> bytes:
            into = io.BytesIO()
            self._receive(f"{complete[-1]}/{name}", *checkpoint.files[name], into)
            return into.getvalue()

        parts = _in_parallel(download, checkpoint.files)
        return checkpoint.step, dict(zip(checkpoint.files, parts, strict=True))

    def collect(self, *, keep: int, keep_checkpoints: int = 2) -> None:
        """Delete versions more than `keep` behind HEAD's, and checkpoints but the newest `keep_checkpoints`.

        Version 0 stays: it is what a run is measured against; so do the versions of the checkpoints that
        stay. Uploads that were never finished go with the versions or checkpoints of their age.

        Lists the store once an epoch, and again after a request that failed: nobody else writes meanwhile. A
        store that took no epoch lists it each time. Fenced, with nothing deleted, if a newer epoch was taken.
        """
        if keep < 0 or keep_checkpoints < 1:
            raise ValueError(
                f"cannot keep {keep} versions and {keep_checkpoints} checkpoints: at least 0 and 1"
            )
        # HEAD before the keys: a newer trainer takes its epoch before it writes, so none of its keys is missed.
        head = self._fence.read() if self._epoch is None else self._fence.check(self._epoch)
        keys = self._find_keys()
        checkpoints = _checkpoints(keys)
        folders, kept = list(checkpoints), _complete(checkpoints)[-keep_checkpoints:]
        for folder in folders[: folders.index(kept[-1])] if kept else ():
            if folder not in kept:
                self._delete(checkpoints[folder])
        if head and head.version is not None:
            manifests = [read_manifest(self._objects, folder, Checkpoint) for folder in kept]
            needed = {0, *(manifest.version for manifest in manifests)}
            found = [(key, _POLICY.fullmatch(key)) for key in keys]
            old = [(key, int(at[1])) for key, at in found if at and int(at[1]) < head.version - keep]
            self._delete(key for key, version in old if version not in needed)

    def _find_keys(self) -> list[str]:
        """Every key, sorted: from memory, unless that may be wrong."""
        if self._epoch is None:
            return self._objects.list("")
        if self._unsure or not self._listed:
            unsure = set(self._unsure)
            self._keys.clear()  # before it lists: what another thread writes meanwhile stays
            self._keys.update(self._objects.list(""))
            self._unsure -= unsure
            self._listed = True
        return sorted(self._keys)

    def _delete(self, keys: Iterable[str]) -> None:
        """Manifests first: what is half deleted must not look complete."""
        manifests, others = [], []
        for key in keys:
            (manifests if key.endswith("/manifest.json") else others).append(key)
        for each in (manifests, others):
            _in_parallel(self._delete_one, each)

    def _delete_one(self, key: str) -> None:
        self._unsure.add(key)
        self._objects.delete(key)
        self._keys.discard(key)
        self._unsure.discard(key)

    def _put(self, key: str, data: bytes, *, if_absent: bool = False, if_match: str | None = None) -> None:
        self._unsure.add(key)
        self._objects.put(key, data, if_absent=if_absent, if_match=if_match)
        self._keys.add(key)
        self._unsure.discard(key)

    def _upload(self, folder: str, files: Mapping[str, bytes], epoch: int, version: int) -> Files:
        from concurrent.futures import ThreadPoolExecutor

        with ThreadPoolExecutor(_TRANSFERS) as pool:
            uploads = [
                pool.submit(self._claim, f"{folder}/{name}", data, epoch, version)
                for name, data in files.items()
            ]
            parts = described(files)  # hashed while they travel
            for upload in uploads:
                upload.result()
        return parts

    def _claim(self, key: str, data: bytes, epoch: int, version: int) -> None:
        """Write a part of an unpublished version, over what an upload that died may have left there."""
        try:
            self._put(key, data, if_absent=True)
        except Conflict:
            # The etag first, the fence after it: a newer trainer that writes here changes one or the other.
            found, etag = read(self._objects, key)
            self._fence.check(epoch, version)
            if found != data:
                self._put(key, data, if_match=etag)

    def _fetch(self, remote: str, name: str, files: Files, folder: Path) -> None:
        with (folder / name).open("xb") as file:
            self._receive(f"{remote}/{name}", *files[name], file)

    def _receive(self, key: str, sha256: str, size: int, into: BinaryIO) -> None:
        """Write the object to a file, and check it on the way."""
        found = ""
        for _ in range(2):
            into.seek(0)
            into.truncate()
            digest = hashlib.sha256()
            try:
                for piece in self._objects.stream(key, size):
                    digest.update(piece)
                    write_into(into, piece)
            except Missing:
                found = "no object"
            else:
                found = digest.hexdigest()
                if found == sha256:
                    return
        raise StoreError(
            f"{key} in {self._objects.place} is damaged: expected SHA-256 {sha256}, found {found}, twice; "
            f"{WAY_OUT_OF_DAMAGE}"
        )


def _checkpoints(keys: Iterable[str]) -> dict[str, list[str]]:
    """The keys of each checkpoint by its folder, oldest first."""
    found: dict[tuple[int, int, str], list[str]] = {}
    for key in keys:
        if at := _CHECKPOINT.fullmatch(key):
            found.setdefault((int(at[3]), int(at[2]), at[1]), []).append(key)
    return {folder: found[epoch, step, folder] for epoch, step, folder in sorted(found)}


def _complete(checkpoints: Mapping[str, list[str]]) -> list[str]:
    return [folder for folder, keys in checkpoints.items() if f"{folder}/manifest.json" in keys]


def _folder_of(version: int) -> str:
    return f"policy/v{version:06d}"


def _in_parallel(work: Callable[[str], T], names: Iterable[str]) -> list[T]:
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(_TRANSFERS) as pool:
        return list(pool.map(work, names))
