"""The order in which messages are handled."""

from __future__ import annotations

from collections import deque
from pathlib import Path
from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from rolecall import Actor, NotYet, idempotent
from rolecall.runtime.actor import Down
from rolecall.runtime.mailbox import Incoming, Mailbox
from rolecall.runtime.page import ASIDE, Page
from rolecall.runtime.peer import Answers
from rolecall.runtime.process import Life, Spec
from rolecall.runtime.wire import Header, Kind, encode_body


def message(seq: int, sender: int = 1, deadline: float = 0.0) -> Incoming:
    return Incoming(Header(Kind.TELL, seq, sender, deadline, (), "note"), b"", [])


def test_first_come_first_served():
    mailbox = Mailbox()
    messages = [message(seq) for seq in range(5)]
    for one in messages:
        mailbox.put(one)
    assert len(mailbox) == 5
    assert [mailbox.next() for _ in range(6)] == [*messages, None]


def test_what_is_set_aside_waits_for_a_change_and_is_overtaken():
    mailbox = Mailbox()
    first, second = message(1), message(2)
    mailbox.put(first)
    mailbox.put(second)
    assert mailbox.next() is first
    mailbox.set_aside(first)
    assert mailbox.ready
    assert mailbox.next() is second
    assert not mailbox.ready
    assert mailbox.next() is None
    mailbox.changed()
    assert mailbox.ready
    assert mailbox.next() is first
    assert mailbox.next() is None
    assert len(mailbox) == 0


def test_what_waits_for_a_condition_is_tried_only_when_it_may_have_come():
    """However many wait for the same one, it is looked at once for each change."""
    mailbox, room, looks = Mailbox(), False, 0

    def until() -> bool:
        nonlocal looks
        looks += 1
        return room

    messages = [message(seq) for seq in range(1, 6)]
    for one in messages:
        mailbox.put(one)
    for one, condition in zip(messages, [until, None, until, until, None], strict=True):
        assert mailbox.next() is one
        mailbox.set_aside(one, condition)
    mailbox.changed()
    assert [mailbox.next() for _ in range(3)] == [messages[1], messages[4], None]
    assert looks == 1 and len(mailbox) == 3
    room = True
    mailbox.changed()
    assert mailbox.next() is messages[0]
    mailbox.set_aside(messages[0], until)
    assert [mailbox.next() for _ in range(3)] == [messages[2], messages[3], None]
    assert looks == 2 and mailbox.drain() == [messages[0]]


def test_what_waits_for_a_condition_is_late_all_the_same():
    mailbox = Mailbox()
    for seq, deadline in ((1, 5.0), (2, 0.0), (3, 1.0)):
        mailbox.put(message(seq, deadline=deadline))
    for condition in (lambda: False, None, lambda: True):
        one = mailbox.next()
        assert one is not None
        mailbox.set_aside(one, condition)
    assert [late.header.seq for late in mailbox.drop_late(6.0)] == [1, 3]
    mailbox.changed()
    one = mailbox.next()
    assert one is not None and one.header.seq == 2


def test_what_was_set_aside_goes_before_what_arrives():
    mailbox = Mailbox()
    first, second = message(1), message(2)
    mailbox.put(first)
    mailbox.next()
    mailbox.set_aside(first)
    mailbox.put(second)
    mailbox.changed()
    assert [mailbox.next(), mailbox.next()] == [first, second]


def test_a_change_in_the_middle_of_the_retries_starts_again_with_the_oldest():
    mailbox = Mailbox()
    messages = [message(seq) for seq in range(3)]
    for one in messages:
        mailbox.put(one)
    for one in messages:
        assert mailbox.next() is one
        mailbox.set_aside(one)
    mailbox.changed()
    assert mailbox.next() is messages[0]
    mailbox.set_aside(messages[0])
    assert mailbox.next() is messages[1]  # this one is handled, and changes the state
    mailbox.changed()
    assert [mailbox.next(), mailbox.next()] == [messages[0], messages[2]]


def test_what_was_set_aside_is_dropped_after_its_deadline():
    mailbox = Mailbox()
    first, patient, late, new = message(1, deadline=5.0), message(2), message(3, deadline=4.0), message(4)
    for one in (first, patient, late):
        mailbox.put(one)
        mailbox.next()
        mailbox.set_aside(one)
    mailbox.changed()
    mailbox.put(new)
    assert mailbox.drop_late(4.0) == []
    assert mailbox.drop_late(4.5) == [late]
    assert mailbox.drop_late(9.0) == [first]
    assert len(mailbox) == 2
    assert [mailbox.next(), mailbox.next(), mailbox.next()] == [patient, new, None]


class Full(Actor):
    @idempotent
    def put(self) -> None:
        raise NotYet


class Support:
    """What a Full lives on: each second brings asks that nobody waits for 5 s later, more in all than a page has
    room for."""

    def __init__(self, folder: Path) -> None:
        self.mailbox, self.page = Mailbox(), Page(folder / "page")
        self.chain: tuple[str, ...] = ()
        self.deadline = float("inf")
        self.stopping = self.again = False
        self.downs: deque[Down] = deque()
        self.answers = Answers()
        self.dead_letters: list[tuple[str, str, str]] = []
        self.seq, self.time, self.most = 0, 100.0, 0

    def wait_for_stop(self, timeout_s: float) -> None: ...

    def now(self) -> float:
        return self.time

    def now_ns(self) -> int:
        return int(self.time * 1e9)

    def expire(self, now: float) -> None:
        pass

    def wait(self, timeout_s: float | None) -> None:
        self.most = max(self.most, len(self.mailbox))
        self.time += 1.0
        body = encode_body(((), {}))
        for _ in range(100):
            self.seq += 1
            self.mailbox.put(Incoming(Header(Kind.ASK, self.seq, 1, self.time + 5.0, (), "put"), *body))
        self.stopping = self.seq > ASIDE + 500

    def breathe(self) -> None: ...

    def handled(self, message: Incoming) -> None: ...

    def answer(self, message: Incoming, kind: Kind, value: Any) -> None: ...

    def to_supervisor(self, frame: bytes) -> None: ...

    def settle(self, timeout_s: float) -> None: ...


def test_asks_that_timed_out_do_not_fill_the_page(tmp_path: Path):
    support = Support(tmp_path)
    spec = Spec("full", 2, tmp_path, tmp_path, "", "r", "", Full, (), {})
    assert Life(spec, support).live().kind == "stopped"
    assert support.most <= 700


def test_drain_takes_everything_once():
    mailbox = Mailbox()
    messages = [message(seq) for seq in range(3)]
    for one in messages:
        mailbox.put(one)
    mailbox.next()
    mailbox.set_aside(messages[0])
    mailbox.changed()
    assert mailbox.drain() == messages
    assert (mailbox.next(), len(mailbox), mailbox.ready) == (None, 0, False)


@given(st.lists(st.sampled_from(["put", "handle", "not yet", "changed"]), max_size=60))
def test_nothing_is_lost_and_each_kind_keeps_its_order(actions: list[str]):
    mailbox = Mailbox()
    count = 0
    waiting: list[int] = []  # not handled yet, in the order of arrival
    aside: set[int] = set()
    tried_since_change: set[int] = set()
    for action in actions:
        if action == "put":
            count += 1
            mailbox.put(message(count))
            waiting.append(count)
        elif action == "changed":
            mailbox.changed()
            tried_since_change.clear()
        else:
            one = mailbox.next()
            candidates = [seq for seq in waiting if seq in aside and seq not in tried_since_change]
            candidates += [seq for seq in waiting if seq not in aside]
            assert (one.header.seq if one else None) == (candidates[0] if candidates else None)
            if one is None:
                continue
            seq = one.header.seq
            if action == "handle":
                waiting.remove(seq)
                aside.discard(seq)
            else:
                mailbox.set_aside(one)
                aside.add(seq)
                tried_since_change.add(seq)
        assert len(mailbox) == len(waiting)
    assert [one.header.seq for one in mailbox.drain()] == sorted(aside) + [
        s for s in waiting if s not in aside
    ]
