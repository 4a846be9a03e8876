"""One writer: whoever took an older epoch stops, wherever it is, and nothing half written is seen."""

from __future__ import annotations

import pickle
import tempfile
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rolecall.runtime.objects import FolderObjects, Objects, StoreError
from rolecall.runtime.store import Fenced, PolicyStore

from .stores import Hook, Killed, adapter, contents, dying_at, opened


def test_a_newer_epoch_fences_the_older_off(store: PolicyStore):
    old = store.take_epoch()
    store.publish(adapter("v1"), version=1, step=1, epoch=old)
    new = store.take_epoch()
    assert (old, new) == (1, 2)
    with pytest.raises(Fenced, match=r"another trainer has started on run 'r' \(epoch 2\)") as caught:
        store.publish(adapter("v2"), version=2, step=2, epoch=old)
    assert isinstance(pickle.loads(pickle.dumps(caught.value)), Fenced)
    with pytest.raises(Fenced):
        store.save_checkpoint({"state": b""}, step=2, epoch=old)
    store.publish(adapter("other v2"), version=2, step=2, epoch=new)
    assert contents(store.fetch(2)) == adapter("other v2")


def test_an_epoch_has_to_be_taken(store: PolicyStore):
    with pytest.raises(StoreError, match=r"has not reached epoch 1: take_epoch"):
        store.publish(adapter("v1"), version=1, step=1, epoch=1)


@pytest.mark.parametrize("request_number", range(6))  # HEAD, two files, the manifest, HEAD and its swap
def test_a_trainer_overtaken_at_any_request_stops(objects: Objects, tmp_path: Path, request_number: int):
    """A new trainer starts, and publishes the same version, between two requests of the old one."""
    new, is_due = opened(objects, tmp_path), dying_at(request_number)
    epochs, lock = [new.take_epoch()], threading.Lock()

    def overtake(method: str, key: str) -> None:
        with lock:
            try:
                is_due(method, key)
            except Killed:
                if len(epochs) == 1:
                    epochs.append(new.take_epoch())
                    new.publish(adapter("new"), version=1, step=1, epoch=epochs[1])

    with pytest.raises(Fenced):
        opened(objects, tmp_path, overtake).publish(adapter("old"), version=1, step=1, epoch=epochs[0])
    head = new.head()
    assert head is not None
    assert (head.version, head.epoch) == (1, 2)
    assert contents(new.fetch(1)) == adapter("new")


def test_a_leftover_is_written_over_only_as_it_was_seen(objects: Objects, tmp_path: Path):
    """Between the old trainer's look at a dead one's upload and its write, a new trainer publishes there."""
    key = "policy/v000001/adapter_model.safetensors"
    objects.put(key, b"left by a dead trainer")
    new, writes = opened(objects, tmp_path), Counter[str]()
    old_epoch = new.take_epoch()

    def overtake(method: str, asked: str) -> None:
        writes[method + asked] += 1
        if asked == key and writes["put" + key] == 2:
            new.publish(adapter("new"), version=1, step=1, epoch=new.take_epoch())

    with pytest.raises(Fenced):
        opened(objects, tmp_path, overtake).publish(adapter("old"), version=1, step=1, epoch=old_epoch)
    assert writes["put" + key] == 2
    assert contents(new.fetch(1)) == adapter("new")


class Turns:
    """Two threads that ask a store by turns, as `order` has it: deterministic interleavings of their requests."""

    def __init__(self, order: list[int]) -> None:
        self.order, self.active, self.changed = order, {0, 1}, threading.Condition()

    def hook(self, who: int) -> Hook:
        def before(method: str, key: str) -> None:
            with self.changed:
                self.changed.wait_for(lambda: not self.order or self.order[0] == who or len(self.active) < 2)
                del self.order[:1]
                self.changed.notify_all()

        return before

    def finished(self, who: int) -> None:
        with self.changed:
            self.active.discard(who)
            self.changed.notify_all()


@settings(deadline=None, max_examples=40)
@given(order=st.lists(st.sampled_from([0, 1]), max_size=30))
def test_two_trainers_never_both_publish_a_version(order: list[int]):
    with tempfile.TemporaryDirectory() as folder:
        objects, turns = FolderObjects(Path(folder) / "objects"), Turns(list(order))

        def train(who: int) -> int | str:
            store = opened(objects, Path(folder), turns.hook(who))
            try:
                epoch = store.take_epoch()
                return store.publish(adapter(str(who)), version=0, step=0, epoch=epoch).epoch
            except StoreError as error:
                return str(error)
            except Fenced as error:
                return str(error)
            finally:
                turns.finished(who)

        with ThreadPoolExecutor(2) as pool:
            outcomes = list(pool.map(train, range(2)))
        reader = opened(objects, Path(folder))
        head = reader.head()
        assert head is not None
        [winner] = [who for who, outcome in enumerate(outcomes) if outcome == head.epoch]
        assert contents(reader.fetch(0)) == adapter(str(winner))
        assert "another trainer" in str(outcomes[1 - winner]) or "is at version 0" in str(
            outcomes[1 - winner]
        )


@pytest.mark.parametrize("request_number", range(6))
def test_a_half_uploaded_version_is_invisible_and_written_over(
    objects: Objects, tmp_path: Path, request_number: int
):
    trainer, reader = opened(objects, tmp_path), opened(objects, tmp_path / "elsewhere")
    first = trainer.publish(adapter("v0"), version=0, step=0, epoch=trainer.take_epoch())
    with pytest.raises(Killed):
        dying = opened(objects, tmp_path, dying_at(request_number))
        dying.publish(adapter("lost"), version=1, step=1, epoch=1)
    assert reader.head() == first
    again = trainer.publish(adapter("v1"), version=1, step=1, epoch=trainer.take_epoch())
    assert reader.head() == again
    assert contents(reader.fetch(1)) == adapter("v1")
