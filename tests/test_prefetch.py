"""Versions fetched ahead."""

from __future__ import annotations

import logging
import threading
from collections.abc import Collection
from pathlib import Path

import pytest
from rolecall.actors.prefetch import Prefetch
from rolecall.runtime.cache import Cache
from rolecall.runtime.objects import FolderObjects
from rolecall.runtime.store import PolicyStore, PolicyVersion, Store, StoreError


class Noted(PolicyStore):
    """A store that says when it was looked at, what was fetched, and, as long as `wrong` is set, that it is down."""

    def __init__(self, folder: Path) -> None:
        super().__init__(FolderObjects(folder / "store"), cache=Cache(folder / "cache"), run="run")
        self.wrong = ""
        self.fetched: list[int] = []
        self.looked = threading.Semaphore(0)

    def head(self) -> PolicyVersion | None:
        if self.wrong:
            raise StoreError(self.wrong)
        found = super().head()
        self.looked.release()
        return found

    def fetch(self, version: int, *, keep: Collection[int] = ()) -> Path:
        folder = super().fetch(version, keep=keep)
        self.fetched.append(version)
        return folder


def publish(store: PolicyStore, version: int, epoch: int) -> None:
    store.publish({"adapter.bin": b"%d" % version}, version=version, step=version, epoch=epoch)


def test_a_version_is_in_the_cache_before_it_is_asked_for(tmp_path: Path):
    far = Store(f"file://{tmp_path / 'far'}")
    trainer = far.open("run", tmp_path / "trainer")
    epoch = trainer.take_epoch()
    prefetch = Prefetch(far.open("run", tmp_path / "worker"))
    prefetch.look()  # nothing is published yet
    publish(trainer, 0, epoch)
    prefetch.look()
    [cached] = (tmp_path / "worker" / "cache").glob("v*")
    cached_at = (cached / "adapter.bin").stat().st_ino
    folder = far.open("run", tmp_path / "worker").fetch(0)
    assert folder == cached and (folder / "adapter.bin").stat().st_ino == cached_at  # not fetched again


def test_each_version_is_fetched_once(tmp_path: Path):
    store = Noted(tmp_path)
    epoch, prefetch = store.take_epoch(), Prefetch(store)
    for version in (0, 1, 3):
        publish(store, version, epoch)
        prefetch.look()
        prefetch.look()
    assert store.fetched == [0, 1, 3]


def test_what_is_wrong_with_the_store_is_said_once_and_mends(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    store = Noted(tmp_path)
    publish(store, 0, store.take_epoch())
    prefetch = Prefetch(store)
    store.wrong = "the bucket is away"
    with caplog.at_level(logging.WARNING, "rolecall"):
        prefetch.look()
        prefetch.look()
    assert caplog.messages == ["no version could be fetched ahead: the bucket is away"]
    store.wrong = ""
    prefetch.look()
    assert store.fetched == [0]


def test_its_thread_looks_until_it_is_stopped(tmp_path: Path):
    store = Noted(tmp_path)
    publish(store, 0, store.take_epoch())
    prefetch = Prefetch(store, every_s=0.001)
    prefetch.start()
    for _ in range(3):
        assert store.looked.acquire(timeout=30)
    prefetch.stop(timeout_s=30)
    assert store.fetched == [0]
    assert "prefetch" not in {thread.name for thread in threading.enumerate()}
