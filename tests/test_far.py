"""What is kept for actors of other machines: one copy of each message, answers until they have arrived, fates."""

from __future__ import annotations

import select
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rolecall.runtime import far
from rolecall.runtime.control import NODE_BITS, Bridge, Member, inbox_path
from rolecall.runtime.far import Abroad
from rolecall.runtime.page import Fate, Page, stand_in
from rolecall.runtime.sockets import Connection, connect
from rolecall.runtime.wire import (
    Kind,
    decode_body,
    encode_call,
    pack_heard,
    pack_label,
    pack_message,
    seqs_done,
    unpack_replies,
)

from .endpoints import Stage, call, stage

FAR = (1 << NODE_BITS) + 3  # an incarnation of machine 1


@pytest.fixture
def here() -> Iterator[Stage]:
    with stage() as opened:
        yield opened


class Way:
    """A connection of a bridge to the stage's actor, for mail of one far sender."""

    def __init__(self, here: Stage) -> None:
        self.here = here
        self._poller = select.epoll()
        self.connection = Connection(connect(inbox_path(here.sockets, "caller", 1)), self._poller)

    def ask(self, *seqs: int) -> None:
        for seq in seqs:
            self._send(Kind.ASK, seq)

    def tell(self, *seqs: int) -> None:
        for seq in seqs:
            self._send(Kind.TELL, seq)

    def _send(self, kind: Kind, seq: int) -> None:
        label = pack_label(("far",), "note")
        self.connection.send(pack_message(kind, seq, FAR, 0.0, label, *encode_call((seq,), {})))

    def heard(self, *seqs: int) -> None:
        self.connection.send(pack_heard(FAR, seqs))

    def replies(self) -> list[tuple[Kind, int]]:
        """Of each reply kind and seq; what is answered is the seq, too."""
        replies: list[tuple[Kind, int]] = []
        while (data := self.connection.receive()) is not None:
            for kind, seq, body, buffers in unpack_replies(data):
                if kind is Kind.DONE:
                    replies += [(kind, done) for done in seqs_done(body)]
                else:
                    assert decode_body(body, buffers) == seq
                    replies.append((kind, seq))
        return replies


def let_in(here: Stage) -> None:
    for _ in range(5):  # to accept and to read, of each connection
        here.endpoint.wait(0.0)


def handle(here: Stage) -> list[int]:
    """The seqs of what there is to handle, all of which is handled."""
    let_in(here)
    handled: list[int] = []
    while (message := here.endpoint.mailbox.next()) is not None:
        handled.append(message.header.seq)
        if message.header.kind is Kind.ASK:
            here.endpoint.answer(message, Kind.ANSWER, message.header.seq)
        else:
            here.endpoint.handled(message)
    here.endpoint.wait(0.0)
    return handled


def test_of_a_message_that_comes_again_one_is_kept_and_answered_on_the_newest_way(here: Stage):
    old = Way(here)
    old.ask(1, 2)
    let_in(here)
    new = Way(here)
    new.ask(1, 2, 3)
    new.tell(4)
    old.ask(3)  # was still under way
    assert handle(here) == [1, 2, 3, 4]
    assert old.replies() == []
    assert sorted(new.replies()) == [*((Kind.ANSWER, seq) for seq in (1, 2, 3)), (Kind.DONE, 4)]


def test_a_message_that_comes_again_while_it_runs(here: Stage):
    first = Way(here)
    first.ask(1)
    let_in(here)
    running = here.endpoint.mailbox.next()
    assert running is not None
    again = Way(here)
    again.ask(1)
    let_in(here)
    assert here.endpoint.mailbox.next() is None
    here.endpoint.answer(running, Kind.ANSWER, 1)
    here.endpoint.wait(0.0)
    assert (first.replies(), again.replies()) == ([], [(Kind.ANSWER, 1)])


def test_an_answer_is_given_again_until_it_has_arrived(here: Stage):
    way = Way(here)
    way.ask(1, 2)
    assert handle(here) == [1, 2]
    for _ in range(2):
        way = Way(here)
        way.ask(1, 2)
        assert handle(here) == []
        assert sorted(way.replies()) == [(Kind.ANSWER, 1), (Kind.ANSWER, 2)]
    way.heard(1)
    way.ask(2, 1)
    assert handle(here) == [1]  # its page says that it was done
    assert (Kind.ANSWER, 2) in way.replies()


def test_only_so_many_answers_are_kept(here: Stage, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(far, "MAX_KEPT", 2)
    way = Way(here)
    way.ask(1, 2, 3)
    assert handle(here) == [1, 2, 3]
    way.ask(1, 2, 3)
    assert handle(here) == [1]


def test_only_so_many_bytes_of_answers_are_kept(here: Stage, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(far, "MAX_KEPT_BYTES", 1)
    way = Way(here)
    way.ask(1, 2)
    handle(here)
    way.ask(2)
    assert handle(here) == []  # the newest is kept, however large
    way.ask(1)
    assert handle(here) == [1]


def test_a_dead_far_sender_is_remembered_until_its_mail_cannot_come_any_more(here: Stage):
    senders = [(1 << NODE_BITS) + number for number in range(1, 100)]
    for sender in senders:
        here.endpoint.page.done(sender, 1)
    here.tell(Member("x", "x", 50, "up"), Member("gpu/a", "a", senders[-1], "up", node="gpu"))
    here.endpoint.wait(0.0)
    left = here.endpoint.page.senders
    assert left == set(senders[-65:])  # the living one, and the last of the dead


def test_what_is_cut_off_and_up_again_is_sent_everything_that_is_unhandled(here: Stage):
    far_one = Member("gpu/a", "a", FAR, "up", node="gpu")
    here.tell(far_one)
    first = here.receiver("gpu/a", FAR)
    for number in range(3):
        here.endpoint.tell("a", call("note", number))
    here.endpoint.wait(0.0)
    heard = first.heard(3)
    first.handled(heard[:1])
    first.die()
    inbox_path(here.sockets, "gpu/a", FAR).unlink()
    here.tell(Member("gpu/a", "a", FAR, "cut", node="gpu"))
    second = here.receiver("gpu/a", FAR)
    here.tell(far_one)
    assert [header.seq for header in second.heard(2)] == [2, 3]


def test_the_bridges_word_and_its_end():
    abroad = Abroad()
    name = abroad.add(Bridge("proxy", 7, 1))
    abroad.hear(
        name[0], [Member("gpu/a", "a", FAR, "up", node="gpu"), Member("gpu/b", "b", 0, "gone", node="gpu")]
    )
    assert abroad.bridges == {"proxy": [("proxy/1", 7)]}
    assert abroad.lose("link", ended=False) == []
    assert [(member.name, member.state) for member in abroad.lose("proxy", ended=False)] == [("gpu/a", "cut")]
    assert abroad.bridges == {}
    assert abroad.lose("proxy", ended=False) == []
    assert [(member.name, member.state) for member in abroad.lose("proxy", ended=True)] == [("gpu/a", "gone")]


events = st.lists(
    st.tuples(st.sampled_from(["done", "aside", "begin"]), st.integers(1, 3), st.integers(1, 9)), max_size=20
)


@given(events=events, dies=st.booleans())
def test_a_page_that_stands_in_says_the_same(
    tmp_path_factory: pytest.TempPathFactory, events: list, dies: bool
):
    folder = tmp_path_factory.mktemp("pages")
    page = Page(folder / "original")
    for event, sender, seq in events:
        if event == "begin":
            page.begin(sender, seq, 1)
        elif event == "done":
            page.done(sender, seq)
        else:
            page.set_aside(sender, seq)
    if dies:
        page.recover()
    path = folder / "copy"
    stand_in(path, [])
    stand_in(path, page.memories())
    copy = Page(path)
    fates = {(s, q): page.fate(s, q) for s in range(1, 5) for q in range(1, 11)}
    assert {key: copy.fate(*key) for key in fates} == fates


def test_what_a_lost_machine_was_sent_may_have_begun(tmp_path: Path):
    page = Page(tmp_path / "original")
    page.done(1, 5)
    stand_in(tmp_path / "copy", page.memories(), lost=True)
    copy = Page(tmp_path / "copy")
    assert [copy.fate(1, 5), copy.fate(1, 6), copy.fate(2, 1)] == [Fate.DONE, Fate.RUNNING, Fate.RUNNING]
