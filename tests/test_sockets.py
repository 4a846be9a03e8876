"""Connections between two processes of one machine, seen from both ends."""

from __future__ import annotations

import os
import resource
import select
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rolecall.runtime.sockets import MAX_DATAGRAM, Connection, Parcel, allow_descriptors, connect, listen


@pytest.fixture
def poller() -> Iterator[select.epoll]:
    with select.epoll() as poller:
        yield poller


def pair(poller: select.epoll) -> tuple[Connection, Connection]:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    return Connection(ours, poller), Connection(theirs, poller)


def everything(receiver: Connection, sender: Connection) -> list[bytes]:
    """What comes until nothing is on its way, while the sender goes on as there is room."""
    heard = []
    while True:
        data = receiver.receive()
        if data is not None:
            heard.append(bytes(data))
        elif sender.backlog:
            sender.flush()
        else:
            return heard


@given(st.lists(st.integers(2, 3 * MAX_DATAGRAM), max_size=30))
@settings(deadline=None)
def test_datagrams_of_all_sizes_come_whole_and_in_order(sizes: list[int]):
    with select.epoll() as poller:
        sender, receiver = pair(poller)
        sent = [bytes([number]) * size for number, size in enumerate(sizes)]
        for data in sent:
            sender.send(data)
        assert everything(receiver, sender) == sent
        sender.close()
        receiver.close()


def test_what_the_kernel_has_no_room_for_waits_in_order(poller: select.epoll):
    sender, receiver = pair(poller)
    sent = [number.to_bytes(4, "big") * 10_000 for number in range(300)]
    for data in sent:
        sender.send(data)
    assert sender.backlog
    (ready,) = [event for fd, event in poller.poll(0) if fd == receiver.fileno()]
    assert ready & select.EPOLLIN
    assert everything(receiver, sender) == sent
    assert not poller.poll(0), "output is no more waited for"


def test_the_end_comes_after_the_last_words(poller: select.epoll):
    sender, receiver = pair(poller)
    sender.send(b"last words")
    sender.close()
    assert receiver.receive() == b"last words"
    assert not receiver.ended
    assert receiver.receive() is None
    assert receiver.ended


@given(said=st.integers(0, 20), read_before=st.integers(0, 20), unread=st.integers(0, 3), told_after=st.integers(0, 3))
def test_last_words_are_all_heard_also_of_one_that_left_mail_unread(
    said: int, read_before: int, unread: int, told_after: int
):
    with select.epoll() as poller:
        sender, receiver = pair(poller)
        for _ in range(unread):
            receiver.send(b"never read")
        words = [b"%d." % number for number in range(said)]
        for word in words:
            sender.send(word)
        heard = [bytes(word) for _ in range(min(read_before, said)) if (word := receiver.receive()) is not None]
        sender.close()
        for _ in range(told_after):
            receiver.send(b"too late")
        while (word := receiver.receive()) is not None:
            heard.append(bytes(word))
        assert heard == words
        assert receiver.ended
        receiver.close()


def test_sending_to_one_that_ended_is_not_an_error(poller: select.epoll):
    sender, receiver = pair(poller)
    receiver.close()
    sender.send(b"to nobody")
    assert not sender.backlog
    sender.receive()
    assert sender.ended
    sender.send(b"to nobody")
    sender.close()
    sender.send(b"to nobody")


def test_a_parcel_is_mapped_by_each_receiver_as_its_own(poller: select.epoll):
    sender, receiver = pair(poller)
    parcel = Parcel([b"abc", memoryview(b"defg")])
    assert len(parcel) == 7
    sender.send(parcel)
    sender.send(parcel)
    first, second = receiver.receive(), receiver.receive()
    assert isinstance(first, memoryview) and isinstance(second, memoryview)
    first[0] = ord("x")
    assert (bytes(first), bytes(second)) == (b"xbcdefg", b"abcdefg")


def test_no_descriptor_stays_open(poller: select.epoll):
    before = len(os.listdir("/proc/self/fd"))
    sender, receiver = pair(poller)
    for _ in range(50):
        sender.send(bytes(MAX_DATAGRAM + 1))
        assert receiver.receive() is not None
    sender.send(bytes(MAX_DATAGRAM + 1))  # and one that nobody receives
    sender.close()
    receiver.close()
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_listener_gives_what_was_sent_before_it_looked(poller: select.epoll, tmp_path: Path):
    os.chdir(tmp_path)  # a path of a socket must be short
    path = Path("inbox")
    listener = listen(path)
    caller = Connection(connect(path), poller)
    caller.send(b"hello")
    caller.close()
    inbox = Connection(listener.accept()[0], poller)
    assert inbox.receive() == b"hello"
    listener.close()
    with pytest.raises(ConnectionRefusedError):
        connect(path)
    with pytest.raises(FileNotFoundError):
        connect(Path("nobody"))


def test_a_process_may_open_as_many_files_as_the_system_lets_it():
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, hard - 1), hard))
    try:
        allow_descriptors()
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (hard, hard)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_receiver_without_a_free_descriptor_says_so(poller: select.epoll):
    sender, receiver = pair(poller)
    sender.send(bytes(MAX_DATAGRAM + 1))
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = max(int(fd) for fd in os.listdir("/proc/self/fd"))
    resource.setrlimit(resource.RLIMIT_NOFILE, (most + 1, hard))
    taken: list[int] = []
    try:
        with pytest.raises(OSError, match="Too many open files"):
            while True:
                taken.append(os.open("/dev/null", os.O_RDONLY))
        with pytest.raises(OSError, match="raise the limit"):
            receiver.receive()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for fd in taken:
            os.close(fd)
