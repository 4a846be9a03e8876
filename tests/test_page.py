"""The page tells the truth about every message, whatever store a kill comes after."""

from __future__ import annotations

import tempfile
from collections import deque
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rolecall.runtime.page import ASIDE, INTERRUPTED, SENDERS, Fate, Page

NOW = 1_000_000_000


class Killed(Exception):
    """Stands for SIGKILL: nothing after it is stored."""


class DyingWords:
    """A page's words, whose owner is killed after `left` more stores (None: it lives)."""

    def __init__(self, words: Any, left: int | None) -> None:
        self.words, self.left = words, left

    def __getitem__(self, index: int) -> int:
        return self.words[index]

    def __setitem__(self, index: int, value: int) -> None:
        if self.left is not None:
            if self.left == 0:
                raise Killed
            self.left -= 1
        self.words[index] = value


def reopened(path: Path) -> Page:
    page = Page(path)
    page.recover()
    return page


def test_a_message_is_new_then_running_then_done(tmp_path: Path):
    page = Page(tmp_path / "page")
    assert page.fate(7, 1) is Fate.NEW
    assert page.running_for_s(NOW) is None
    page.begin(7, 1, NOW)
    assert page.fate(7, 1) is Fate.RUNNING
    assert page.running_for_s(NOW + 500_000_000) == 0.5
    page.done(7, 1)
    assert page.fate(7, 1) is Fate.DONE
    assert page.fate(7, 2) is Fate.NEW
    assert page.fate(8, 1) is Fate.NEW


def test_another_process_sees_the_same(tmp_path: Path):
    page = Page(tmp_path / "page")
    page.begin(7, 1, NOW)
    page.done(7, 1)
    page.begin(7, 2, NOW)
    page.set_aside(7, 2)
    page.begin(9, 4, NOW)
    other = Page(tmp_path / "page")
    fates = [other.fate(*message) for message in ((7, 1), (7, 2), (9, 4))]
    assert fates == [Fate.DONE, Fate.NEW, Fate.RUNNING]


def test_what_was_set_aside_is_not_done_although_later_ones_are(tmp_path: Path):
    page = Page(tmp_path / "page")
    for seq, outcome in ((1, page.set_aside), (2, page.done)):
        page.begin(7, seq, NOW)
        outcome(7, seq)
    page = reopened(tmp_path / "page")
    assert (page.fate(7, 1), page.fate(7, 2)) == (Fate.NEW, Fate.DONE)
    page.begin(7, 1, NOW)
    page.done(7, 1)
    assert page.fate(7, 1) is Fate.DONE


def test_a_message_that_comes_again_does_not_make_later_ones_undone(tmp_path: Path):
    page = Page(tmp_path / "page")
    for seq in (1, 2, 3):
        page.begin(7, seq, NOW)
        page.done(7, seq)
    page.done(7, 1)  # its answer was lost, so it came again, and was refused
    assert page.fate(7, 3) is Fate.DONE


def test_deaths_of_a_message_are_counted(tmp_path: Path):
    for death in (1, 2, 3):
        page = Page(tmp_path / "page")
        page.begin(7, 1, NOW)
        page = reopened(tmp_path / "page")
        assert page.deaths(7, 1) == death
    page = reopened(tmp_path / "page")  # a death between two messages is nobody's
    assert (page.deaths(7, 1), page.deaths(7, 2)) == (3, 0)


def test_a_second_death_does_not_hide_the_first(tmp_path: Path):
    page = Page(tmp_path / "page")
    page.begin(7, 1, NOW)
    page = reopened(tmp_path / "page")
    page.begin(8, 1, NOW)  # another sender's came first after the restart, and killed it as well
    page = reopened(tmp_path / "page")
    assert page.fate(7, 1) is page.fate(8, 1) is Fate.RUNNING
    assert page.deaths(7, 1) == page.deaths(8, 1) == 1


def test_more_deaths_than_it_has_room_for(tmp_path: Path):
    for seq in range(1, 3 * INTERRUPTED, 2):
        page = reopened(tmp_path / "page")
        page.begin(7, seq, NOW)
        page = reopened(tmp_path / "page")
        assert page.fate(7, seq) is Fate.RUNNING
        page.begin(7, seq + 1, NOW)  # its sender was told, and went on
        page.done(7, seq + 1)
        assert page.fate(7, seq) is Fate.DONE


def test_a_dead_sender_leaves_room_for_others(tmp_path: Path):
    page = Page(tmp_path / "page")
    for sender in range(1, SENDERS + 1):
        page.begin(sender, 1, NOW)
        page.done(sender, 1)
    page.begin(9999, 1, NOW)
    with pytest.raises(OverflowError, match=str(SENDERS)):
        page.done(9999, 1)
    page.forget(5)
    page.done(9999, 1)
    assert page.fate(9999, 1) is Fate.DONE
    assert page.fate(6, 1) is Fate.DONE


def test_a_dead_senders_messages_set_aside_leave_room_for_others(tmp_path: Path):
    page = Page(tmp_path / "page")
    for seq in range(1, ASIDE + 1):
        page.begin(7, seq, NOW)
        page.set_aside(7, seq)
    page.begin(8, 1, NOW)
    with pytest.raises(OverflowError, match=str(ASIDE)):
        page.set_aside(8, 1)
    assert page.senders == {7}
    page.forget(7)
    page.set_aside(8, 1)
    assert page.senders == {8}


class Sender:
    """Sends numbered messages, and sends again whatever it has not heard of."""

    def __init__(self, incarnation: int) -> None:
        self.incarnation = incarnation
        self.unheard: deque[int] = deque()
        self.count = 0

    def message(self) -> int:
        self.count += 1
        self.unheard.append(self.count)
        return self.count


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_no_message_is_begun_twice_in_ignorance(data: st.DataObject):
    """A receiver that follows the page, killed after any store, any number of times.

    What was done is known as done; what is begun again was set aside before, or is known to have been running.
    """
    with tempfile.TemporaryDirectory() as folder:
        Receiver(Path(folder) / "page").live(data)


class Receiver:
    def __init__(self, path: Path) -> None:
        self.path = path
        self.senders = [Sender(3), Sender(5)]
        self.begun: set[tuple[int, int]] = set()  # and neither done nor set aside since
        self.ending: set[tuple[int, int]] = set()  # `done` has been called, and may have been killed in it
        self.done: set[tuple[int, int]] = set()

    def live(self, data: st.DataObject) -> None:
        for _ in range(data.draw(st.integers(1, 5), label="lives")):
            page = reopened(self.path)
            # A kill in the middle of recovering: the next incarnation recovers again.
            page._words = DyingWords(page._words, data.draw(st.none() | st.integers(0, 30), label="stores"))  # type: ignore[assignment]
            try:
                self.one_life(page, data)
            except Killed:
                dying = Page(self.path)
                dying._words = DyingWords(dying._words, data.draw(st.integers(0, 6)))  # type: ignore[assignment]
                try:
                    dying.recover()
                except Killed:
                    continue

    def one_life(self, page: Page, data: st.DataObject) -> None:
        mail = [(sender, seq) for sender in self.senders for seq in sender.unheard]
        mail = [mail[i] for i in self._merged(mail, data)]
        for _ in range(data.draw(st.integers(0, 6), label="new messages")):
            sender = data.draw(st.sampled_from(self.senders))
            mail.append((sender, sender.message()))
        aside: list[tuple[Sender, int]] = []
        for sender, seq in mail:
            self.receive(page, sender, seq, aside, data)
        for sender, seq in list(aside):
            aside.remove((sender, seq))
            self.run(page, sender, seq, aside, data)

    def _merged(self, mail: list[tuple[Sender, int]], data: st.DataObject) -> list[int]:
        """Any order in which each sender's own order is kept."""
        order = data.draw(st.permutations(range(len(mail))))
        by_sender = {
            sender: iter([i for i in range(len(mail)) if mail[i][0] is sender]) for sender in self.senders
        }
        return [next(by_sender[mail[i][0]]) for i in order]

    def receive(self, page: Page, sender: Sender, seq: int, aside: list[Any], data: st.DataObject) -> None:
        message = sender.incarnation, seq
        fate = page.fate(*message)
        if message in self.done:
            assert fate is Fate.DONE
        if message in self.begun:
            assert fate is not Fate.NEW
        if fate is Fate.DONE:
            assert message in self.ending
        if fate is Fate.NEW:
            self.run(page, sender, seq, aside, data)
        elif fate is Fate.DONE or seq % 2:  # the odd ones are not idempotent: they are refused
            assert message in self.begun | self.done
            self.ending.add(message)
            page.done(*message)
            self.finished(sender, seq, data)
        else:
            assert page.deaths(*message) >= 1
            self.run(page, sender, seq, aside, data)

    def run(self, page: Page, sender: Sender, seq: int, aside: list[Any], data: st.DataObject) -> None:
        message = sender.incarnation, seq
        page.begin(*message, NOW)
        self.begun.add(message)
        if data.draw(st.booleans(), label="NotYet"):
            page.set_aside(*message)
            self.begun.discard(message)
            aside.append((sender, seq))
        else:
            self.ending.add(message)
            page.done(*message)
            self.finished(sender, seq, data)

    def finished(self, sender: Sender, seq: int, data: st.DataObject) -> None:
        self.begun.discard((sender.incarnation, seq))
        self.done.add((sender.incarnation, seq))
        if data.draw(st.booleans(), label="its sender hears"):
            sender.unheard.remove(seq)
