"""A stream of frames over requests that are dropped, doubled and late."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import msgpack
from rolecall.runtime import line as module
from rolecall.runtime.line import Batch, Done, Frame, Gap, Line


class End:
    """One end, and what was delivered there."""

    def __init__(self) -> None:
        self.got: list[int] = []
        self.line = Line(self.deliver)
        self.heard = 0

    def deliver(self, line: Line, frames: Sequence[Frame]) -> None:
        self.got += [frame.sender for frame in frames if isinstance(frame, Done)]

    def post(self, *numbers: int) -> None:
        for number in numbers:
            self.line.post(Done("a", number, []))

    def take(self, data: bytes) -> None:
        batch = msgpack.decode(data, type=Batch)
        self.line.receive(batch)
        self.heard = max(self.heard, batch.heard)


def test_frames_come_once_and_in_order():
    here, there = End(), End()
    here.post(1, 2)
    first = here.line.after(0, 0.0)
    here.post(3)
    second = here.line.after(0, 0.0)
    for data in (second, first, second):
        there.take(data)
    assert there.got == [1, 2, 3]
    here.take(there.line.after(0, 0.0))
    assert here.heard == 3
    assert msgpack.decode(here.line.after(3, 0.0), type=Batch) == Batch(4, 0, [])
    assert here.line.idle


def test_frames_before_these_are_missing():
    here, there = End(), End()
    here.post(1, 2)
    here.line.after(1, 0.0)
    with pytest.raises(Gap):
        there.take(here.line.after(1, 0.0))
    assert there.got == []


@pytest.mark.parametrize("number", [-1, 3])
def test_more_was_heard_than_was_said(number: int):
    here = End()
    here.post(1, 2)
    with pytest.raises(Gap):
        here.line.after(number, 0.0)


def test_a_batch_is_not_longer_than_it_must_be(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(module, "BATCH_BYTES", 1)
    here, there = End(), End()
    here.post(1, 2, 3)
    for number in range(3):
        there.take(here.line.after(number, 0.0))
        assert there.got == list(range(1, number + 2))


def test_who_waits_is_woken_by_a_frame_and_by_the_end():
    here = End()
    batches: list[Batch] = []

    def wait() -> None:
        batches.append(msgpack.decode(here.line.after(0, 60.0), type=Batch))

    for act, count in ((lambda: here.post(1), 1), (here.line.close, 1)):
        thread = threading.Thread(target=wait)
        thread.start()
        act()
        thread.join(10.0)
        assert not thread.is_alive()
        assert len(batches[-1].frames) == count


def test_nothing_is_delivered_after_the_end():
    here, there = End(), End()
    here.post(1)
    there.line.close()
    there.take(here.line.after(0, 0.0))
    assert there.got == []


@given(st.lists(st.tuples(st.integers(0, 3), st.booleans(), st.integers(0, 5)), max_size=60))
def test_whatever_happens_to_the_requests(events: list[tuple[int, bool, int]]):
    ends = (End(), End())
    under_way: list[tuple[bool, bytes]] = []
    posted = [0, 0]
    for what, which, index in events:
        end = ends[which]
        if what == 0:
            posted[which] += 1
            end.post(posted[which])
        elif what == 1:
            under_way.append((not which, end.line.after(end.heard, 0.0)))
        elif under_way:
            to, data = under_way[index % len(under_way)]
            if what == 2:  # otherwise it comes again
                del under_way[index % len(under_way)]
            with contextlib.suppress(Gap):
                ends[to].take(data)
    for _ in range(2):
        for which in (0, 1):
            ends[1 - which].take(ends[which].line.after(ends[which].heard, 0.0))
    assert [ends[1].got, ends[0].got] == [list(range(1, count + 1)) for count in posted]
