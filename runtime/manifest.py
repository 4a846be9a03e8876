"""What a manifest says of the files beside it, in a version and in a checkpoint."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from typing import TypeVar

import msgspec

from .objects import WAY_OUT_OF_DAMAGE, Objects, StoreError, check_key, decoded

__all__ = ["Checkpoint", "Files", "PolicyVersion", "check_names", "described", "digest_of", "read_manifest"]

Files = dict[str, tuple[str, int]]  # name -> (SHA-256 in hex, size in bytes)


class PolicyVersion(msgspec.Struct, frozen=True, kw_only=True):
    """One published adapter, for ever the same.

    version: its number, from 0, growing.
    step:    optimizer steps taken to reach it.
    epoch:   which start of the trainer wrote it.
    time:    when its upload began, in seconds since 1970 by the trainer's clock; 0 if nobody said.
    digest:  SHA-256, in hex, of what `LC_ALL=C sha256sum *` prints in a folder of its files:
             "<SHA-256 in hex>  <name>\\n" for each file, sorted by name.
    files:   name -> (SHA-256 in hex, size in bytes).
    nonce:   makes the manifests of two writers differ even when their adapters are equal.
    """

    version: int
    step: int
    epoch: int
    digest: str
    files: Files
    nonce: str
    time: float = 0.0


class Checkpoint(msgspec.Struct, frozen=True, kw_only=True):
    """version: HEAD's when it was saved, which stays in the store as long as the checkpoint; None: none yet."""

    step: int
    epoch: int
    version: int | None = None
    files: Files


Kind = TypeVar("Kind", PolicyVersion, Checkpoint)


def check_names(names: Iterable[str]) -> None:
    """Raise ValueError for a name with anything but [A-Za-z0-9._-], and for the store's own manifest.json."""
    for name in names:
        if "/" in check_key(name):
            raise ValueError(f"bad file name {name!r}: use [A-Za-z0-9._-]")
        if name == "manifest.json":
            raise ValueError("a file cannot be called manifest.json: the store's own has that name")


def described(files: Mapping[str, bytes]) -> Files:
    """SHA-256 and size of each file, by name."""
    return {name: (hashlib.sha256(files[name]).hexdigest(), len(files[name])) for name in sorted(files)}


def digest_of(files: Files) -> str:
    """The digest of a `PolicyVersion` with these files."""
    lines = "".join(f"{files[name][0]}  {name}\n" for name in sorted(files))
    return hashlib.sha256(lines.encode()).hexdigest()


def read_manifest(objects: Objects, folder: str, kind: type[Kind]) -> Kind:
    """The folder's manifest; Missing if there is none.

    StoreError if it is damaged, or a name in it could lead out of the folder it is fetched to: it may come
    from anyone who can write to the bucket.
    """
    key = f"{folder}/manifest.json"
    found = decoded(objects, key, kind)
    assert found is not None, "only a conditional get can find nothing new"
    manifest = found[0]
    try:
        check_names(manifest.files)
        if isinstance(manifest, PolicyVersion) and manifest.digest != digest_of(manifest.files):
            expected = digest_of(manifest.files)
            raise ValueError(f"expected digest {expected} for its files, found {manifest.digest}")
    except ValueError as error:
        raise StoreError(f"{key} in {objects.place} is damaged: {error}; {WAY_OUT_OF_DAMAGE}") from error
    return manifest
