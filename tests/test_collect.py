"""Checkpoints, and what is deleted when: nothing that anyone may still need."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rolecall.runtime.objects import FolderObjects, Objects, StoreError
from rolecall.runtime.store import Fenced, PolicyStore

from .stores import Killed, adapter, contents, dying_at, opened


def test_a_checkpoint_comes_back_whole(store: PolicyStore):
    assert store.latest_checkpoint() is None
    epoch = store.take_epoch()
    for step in (9, 10):
        store.save_checkpoint({"adapter": bytes([step]), "optimizer": b"m, v"}, step=step, epoch=epoch)
    assert store.latest_checkpoint() == (10, {"adapter": b"\n", "optimizer": b"m, v"})
    with pytest.raises(StoreError, match="has saved step 10 already"):
        store.save_checkpoint({"adapter": b""}, step=10, epoch=epoch)


def test_a_half_saved_checkpoint_does_not_count(objects: Objects, tmp_path: Path):
    trainer = opened(objects, tmp_path)
    epoch = trainer.take_epoch()
    trainer.save_checkpoint({"a": b"1", "b": b"1"}, step=1, epoch=epoch)
    for request in range(6):  # HEAD, the manifest, two files, HEAD, the manifest
        with pytest.raises(Killed):
            opened(objects, tmp_path, dying_at(request)).save_checkpoint(
                {"a": b"2", "b": b"2"}, step=2, epoch=1
            )
        assert trainer.latest_checkpoint() == (1, {"a": b"1", "b": b"1"})
    trainer.save_checkpoint({"a": b"3", "b": b"3"}, step=2, epoch=epoch)
    assert trainer.latest_checkpoint() == (2, {"a": b"3", "b": b"3"})


def test_a_checkpoint_saved_after_its_trainer_was_overtaken_does_not_count(objects: Objects, tmp_path: Path):
    new = opened(objects, tmp_path)
    old_epoch = new.take_epoch()

    def overtake(method: str, key: str) -> None:
        if method == "put" and key.endswith("manifest.json"):
            new.save_checkpoint({"by": b"new"}, step=250, epoch=new.take_epoch())

    opened(objects, tmp_path, overtake).save_checkpoint({"by": b"old"}, step=300, epoch=old_epoch)
    assert new.latest_checkpoint() == (250, {"by": b"new"})


def test_a_damaged_checkpoint_is_named(store: PolicyStore, objects: Objects):
    store.save_checkpoint({"a": b"1"}, step=1, epoch=store.take_epoch())
    objects.put("checkpoints/step-000001/e1/a", b"damaged")
    with pytest.raises(StoreError, match=r"checkpoints/step-000001/e1/a in .* expected SHA-256"):
        store.latest_checkpoint()


def test_collect_keeps_what_is_needed(objects: Objects, tmp_path: Path):
    trainer = opened(objects, tmp_path)
    trainer.collect(keep=0)
    epoch = trainer.take_epoch()
    trainer.collect(keep=0)
    for version in range(6):
        trainer.publish(adapter(str(version)), version=version, step=version, epoch=epoch)
    objects.put("policy/v000002/left-by-an-upload-that-died", b"")
    objects.put("policy/v000006/on-its-way", b"")
    for step in (10, 20, 30, 40):
        trainer.save_checkpoint({"a": b""}, step=step, epoch=epoch)
    objects.put("checkpoints/step-000035/e1/died", b"")
    objects.put("checkpoints/step-000050/e1/on-its-way", b"")
    trainer = opened(objects, tmp_path)  # the next start
    trainer.take_epoch()
    trainer.collect(keep=2, keep_checkpoints=2)
    assert {key.split("/")[1] for key in objects.list("policy/v")} == {
        "v000000",
        "v000003",
        "v000004",
        "v000005",
        "v000006",
    }
    assert {key.split("/")[1] for key in objects.list("checkpoints/")} == {
        "step-000030",
        "step-000040",
        "step-000050",
    }
    with pytest.raises(StoreError, match="has no version 2"):
        opened(objects, tmp_path / "elsewhere").fetch(2)
    trainer.collect(keep=0, keep_checkpoints=1)
    assert contents(trainer.fetch(5)) == adapter("5")
    assert trainer.latest_checkpoint() == (40, {"a": b""})


def test_collect_keeps_the_versions_of_checkpoints(store: PolicyStore, objects: Objects):
    epoch = store.take_epoch()
    store.save_checkpoint({"a": b""}, step=0, epoch=epoch)
    for version in range(6):
        store.publish(adapter(str(version)), version=version, step=version, epoch=epoch)
        if version % 2:
            store.save_checkpoint({"a": b""}, step=version, epoch=epoch)
    store.collect(keep=0, keep_checkpoints=3)
    assert {key.split("/")[1] for key in objects.list("policy/v")} == {
        "v000000",
        "v000001",
        "v000003",
        "v000005",
    }
    store.collect(keep=0, keep_checkpoints=1)
    assert {key.split("/")[1] for key in objects.list("policy/v")} == {"v000000", "v000005"}


@pytest.mark.parametrize(("keep", "keep_checkpoints"), [(-1, 2), (0, 0)])
def test_collect_never_takes_the_newest(store: PolicyStore, keep: int, keep_checkpoints: int):
    with pytest.raises(ValueError, match="at least 0 and 1"):
        store.collect(keep=keep, keep_checkpoints=keep_checkpoints)


class Watched:
    """A hook that notes what is listed and deleted, and fails requests of `failing`, a method and a key's end."""

    def __init__(self) -> None:
        self.listed: list[str] = []
        self.deleted: list[str] = []
        self.failing: tuple[str, str] | None = None

    def before(self, method: str, key: str) -> None:
        if self.failing and method == self.failing[0] and key.endswith(self.failing[1]):
            raise StoreError(f"no answer to {method} {key}")
        if method == "list":
            self.listed.append(key)
        if method == "delete":
            self.deleted.append(key)


def a_run(trainer: PolicyStore, epoch: int, first: int, last: int) -> None:
    """Versions `first` to `last`: a checkpoint every third, and a collection after each."""
    for version in range(first, last + 1):
        if version % 3 == 0:
            trainer.save_checkpoint({"a": b"", "b": b""}, step=version, epoch=epoch)
        trainer.publish(adapter(str(version)), version=version, step=version, epoch=epoch)
        trainer.collect(keep=2)


def test_a_run_lists_the_store_once(objects: Objects, tmp_path: Path):
    watched = Watched()
    trainer = opened(objects, tmp_path, watched.before)
    a_run(trainer, trainer.take_epoch(), 0, 20)
    assert watched.listed == [""]
    assert len(watched.deleted) == len(set(watched.deleted))
    # Checkpoints at 15 and 18 were saved under versions 14 and 17.
    assert objects.list("policy/v") == [
        f"policy/v{version:06d}/{name}"
        for version in (0, 14, 17, 18, 19, 20)
        for name in ("adapter_config.json", "adapter_model.safetensors", "manifest.json")
    ]
    assert objects.list("checkpoints/") == [
        f"checkpoints/step-{step:06d}/e1/{name}" for step in (15, 18) for name in ("a", "b", "manifest.json")
    ]


def test_what_an_upload_that_died_left_goes_at_the_next_start(objects: Objects, tmp_path: Path):
    old = opened(objects, tmp_path)
    epoch = old.take_epoch()
    a_run(old, epoch, 0, 4)
    with pytest.raises(Killed):
        opened(objects, tmp_path, dying_at(4)).publish({"x": b"", "y": b""}, version=5, step=5, epoch=epoch)
    with pytest.raises(Killed):
        opened(objects, tmp_path, dying_at(4)).save_checkpoint({"a": b"", "z": b""}, step=5, epoch=epoch)
    left = {"policy/v000005/x", "policy/v000005/y", "checkpoints/step-000005/e1/z"}
    assert left < set(objects.list(""))

    watched = Watched()
    new = opened(objects, tmp_path, watched.before)
    a_run(new, new.take_epoch(), 5, 12)
    assert watched.listed == [""]
    assert not left & set(objects.list(""))
    assert not [key for key in objects.list("checkpoints/") if "/e1/" in key]


def test_an_overtaken_trainer_deletes_nothing(objects: Objects, tmp_path: Path):
    """What it remembers says that version 4 can go: it does not know the checkpoint that needs it."""
    watched = Watched()
    old = opened(objects, tmp_path, watched.before)
    a_run(old, old.take_epoch(), 0, 4)
    new = opened(objects, tmp_path)
    epoch = new.take_epoch()
    new.save_checkpoint({"a": b""}, step=4, epoch=epoch)
    for version in range(5, 10):
        new.publish(adapter(str(version)), version=version, step=version, epoch=epoch)
    before, watched.deleted = objects.list(""), []
    with pytest.raises(Fenced, match=r"another trainer has started on run 'r' \(epoch 2\)"):
        old.collect(keep=0)
    assert watched.deleted == [] and objects.list("") == before
    new.collect(keep=0)
    assert {key.split("/")[1] for key in objects.list("policy/v")} == {
        "v000000",
        "v000002",
        "v000004",
        "v000009",
    }


@pytest.mark.parametrize("failing", [("put", "manifest.json"), ("put", "b"), ("delete", "manifest.json")])
def test_after_a_request_that_failed_it_looks_again(
    objects: Objects, tmp_path: Path, failing: tuple[str, str]
):
    """Whether it was carried out is not known."""
    watched = Watched()
    trainer = opened(objects, tmp_path, watched.before)
    epoch = trainer.take_epoch()
    a_run(trainer, epoch, 0, 9)
    watched.failing = failing
    with pytest.raises(StoreError, match="no answer"):
        if failing[0] == "put":
            trainer.save_checkpoint({"a": b"", "b": b""}, step=10, epoch=epoch)
        else:
            trainer.collect(keep=0)
    watched.failing = None
    trainer.collect(keep=2)
    a_run(trainer, epoch, 11, 30)
    assert watched.listed == ["", ""]
    assert {key.split("/")[1] for key in objects.list("checkpoints/")} == {"step-000027", "step-000030"}


def test_who_writes_again_after_another_did_forgets_what_was_there(objects: Objects, tmp_path: Path):
    watched = Watched()
    first, second = opened(objects, tmp_path, watched.before), opened(objects, tmp_path)
    a_run(first, first.take_epoch(), 0, 9)
    a_run(second, second.take_epoch(), 10, 15)  # deletes the checkpoints of steps 6 and 9
    first.take_epoch()
    first.collect(keep=0, keep_checkpoints=4)
    assert watched.listed == ["", ""]
    assert {key[8:14] for key in objects.list("policy/v")} == {"000000", "000011", "000014", "000015"}


def test_who_took_no_epoch_lists_each_time(objects: Objects, tmp_path: Path):
    """It does not know what the trainer writes meanwhile."""
    trainer, watched = opened(objects, tmp_path), Watched()
    other = opened(objects, tmp_path, watched.before)
    epoch = trainer.take_epoch()
    for version in range(4):
        trainer.publish(adapter(str(version)), version=version, step=version, epoch=epoch)
        other.collect(keep=0)
        assert {key[8:14] for key in objects.list("policy/v")} == {"000000", f"{version:06d}"}
    assert watched.listed == [""] * 4


ACTIONS = st.one_of(
    st.tuples(st.just("publish"), st.integers(1, 3)),
    st.tuples(st.just("die while publishing"), st.integers(0, 6)),
    st.tuples(st.just("restart"), st.just(0)),
    st.tuples(st.just("collect"), st.integers(0, 3)),
)


@settings(deadline=None, max_examples=40)
@given(actions=st.lists(ACTIONS, max_size=12))
def test_whatever_happens_published_versions_stay_whole(actions: list[tuple[str, int]]):
    with tempfile.TemporaryDirectory() as folder:
        objects = FolderObjects(Path(folder) / "objects")
        trainer, reader = opened(objects, Path(folder)), opened(objects, Path(folder) / "elsewhere")
        epoch, newest = trainer.take_epoch(), -1
        published: dict[int, dict[str, bytes]] = {}
        for number, (action, count) in enumerate(actions):
            files = adapter(f"action {number}")
            if action == "publish":
                newest += count
                trainer.publish(files, version=newest, step=newest, epoch=epoch)
                published[newest] = files
            elif action == "die while publishing":
                dying = opened(objects, Path(folder), dying_at(min(count, 5)))
                with pytest.raises(Killed):
                    dying.publish(files, version=newest + 1, step=0, epoch=epoch)
                epoch = trainer.take_epoch()
            elif action == "restart":
                epoch = trainer.take_epoch()
            else:
                trainer.collect(keep=count)
                published = {
                    version: files
                    for version, files in published.items()
                    if version == 0 or version >= newest - count
                }
                kept = {int(key[8:14]) for key in objects.list("policy/v")}
                assert all(version >= newest - count for version in kept - {0})
            head = reader.head()
            assert (head.version if head else -1) == newest
            for version, files in published.items():
                assert contents(reader.fetch(version)) == files
