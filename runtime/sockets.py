"""Connections between processes of one machine: whole datagrams, in order, until one of the two ends.

Unix sockets of type SEQPACKET in a directory that only this user may enter. What is large goes beside: it is
written once into memory that has a file descriptor, the datagram carries the descriptor, and the receiver maps
that memory, as its own copy-on-write.
"""

from __future__ import annotations

import array
import contextlib
import errno
import mmap
import os
import resource
import select
import socket
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any

__all__ = ["MAX_DATAGRAM", "Connection", "Parcel", "allow_descriptors", "connect", "listen"]

MAX_DATAGRAM = 64 << 10  # bytes; what is larger goes beside
_SEND_BUFFER = 1 << 20  # bytes the kernel keeps for a receiver that is busy, if it lets us
_BESIDE = b"\0"  # a datagram that is only there to carry a descriptor: no record has one byte
_ANCILLARY = socket.CMSG_SPACE(4)
_FULL = {errno.EAGAIN, errno.ETOOMANYREFS}
_ENDED = {errno.EPIPE, errno.ECONNRESET, errno.ENOTCONN, errno.ECONNREFUSED, errno.ENOENT}


class Parcel:
    """Bytes in memory that another process can map. They live as long as this object or a map of them."""

    def __init__(self, chunks: Sequence[bytes | memoryview]) -> None:
        self.fd = os.memfd_create("rolecall")
        self.size = 0
        for chunk in chunks:
            view = memoryview(chunk).cast("B")
            while view:
                written = os.write(self.fd, view)  # not more than 2 GB at once
                self.size += written
                view = view[written:]

    def __len__(self) -> int:
        return self.size

    def __del__(self) -> None:
        if hasattr(self, "fd"):
            os.close(self.fd)


class Connection:
    """One end of a connection. Sends and receives without waiting; `backlog` is what the kernel had no room for.

    Registered with `poller` for input, and for output while there is a backlog. `ended`: the other end is gone,
    and everything it had said has been received; what is sent now is lost. `refused`: something that was sent is
    lost, because the other end is gone. `opened_ns`: when this one began (CLOCK_MONOTONIC).
    """

    def __init__(self, connected: socket.socket, poller: select.epoll) -> None:
        connected.setblocking(False)
        connected.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER)
        self._socket, self._poller = connected, poller
        self.opened_ns = time.monotonic_ns()
        self.backlog: deque[bytes | Parcel] = deque()
        self.ended = self.refused = False
        poller.register(connected, select.EPOLLIN)

    def fileno(self) -> int:
        return self._socket.fileno()

    def send(self, datagram: bytes | Parcel) -> None:
        """After what was sent before it."""
        if self.ended:
            return
        if isinstance(datagram, bytes) and len(datagram) > MAX_DATAGRAM:
            datagram = Parcel([datagram])
        if self.backlog or not self._try(datagram):
            self.backlog.append(datagram)
            if len(self.backlog) == 1:
                self._poller.modify(self._socket, select.EPOLLIN | select.EPOLLOUT)

    def flush(self) -> None:
        """Send what the kernel has room for now."""
        while self.backlog and self._try(self.backlog[0]):
            self.backlog.popleft()
        if not self.backlog and not self.ended:
            self._poller.modify(self._socket, select.EPOLLIN)

    def _try(self, datagram: bytes | Parcel) -> bool:
        """Whether it need not be tried again."""
        try:
            if isinstance(datagram, bytes):
                self._socket.send(datagram)
            else:
                descriptor = array.array("i", [datagram.fd])
                self._socket.sendmsg([_BESIDE], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, descriptor)])
        except OSError as error:
            if error.errno in _FULL:
                if error.errno == errno.ETOOMANYREFS:
                    time.sleep(0.001)  # nothing says when there will be room: ask again, but not at once
                return False
            if error.errno not in _ENDED:
                raise
            self.refused = True
        return True

    def receive(self) -> bytes | memoryview | None:
        """The next datagram. None: there is none now, or, if `ended`, there will be none."""
        if self.ended:
            return None
        try:
            data, ancillary, flags, _ = self._receive()
        except BlockingIOError:
            return None
        if flags & socket.MSG_CTRUNC:
            raise OSError(
                errno.EMFILE, "too many open files to receive a large message: raise the limit (ulimit -n)"
            )
        if ancillary:
            return _open_parcel(array.array("i", ancillary[0][2])[0])
        if not data:
            self.ended = True
            return None
        return data

    def _receive(self) -> tuple[bytes, list[tuple[int, int, bytes]], int, Any]:
        try:
            return self._socket.recvmsg(MAX_DATAGRAM, _ANCILLARY, socket.MSG_CMSG_CLOEXEC)
        except ConnectionResetError:
            # The other end closed without having read all that was sent to it. The kernel says so once, before
            # what the other end itself had said, and that is still to be received.
            return self._socket.recvmsg(MAX_DATAGRAM, _ANCILLARY, socket.MSG_CMSG_CLOEXEC)

    def take_no_more(self) -> None:
        """What the other end has sent can be received, and what it sends now it knows to be lost."""
        with contextlib.suppress(OSError):  # it is gone
            self._socket.shutdown(socket.SHUT_RD)

    def close(self) -> None:
        if self._socket.fileno() >= 0:
            self._poller.unregister(self._socket)
            self._socket.close()
        self.ended = True
        self.backlog.clear()


def _open_parcel(fd: int) -> memoryview:
    try:
        size = os.fstat(fd).st_size
        return memoryview(mmap.mmap(fd, size, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE))
    finally:
        os.close(fd)


def allow_descriptors() -> None:
    """Let this process open as many files as it may: each large message on its way is one, each client another."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def listen(path: Path) -> socket.socket:
    """A socket that others connect to at `path`."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(str(path))
    listener.listen(4096)
    listener.setblocking(False)
    return listener


def connect(path: Path) -> socket.socket:
    """A connection to whoever listens at `path`. Raises ConnectionRefusedError or FileNotFoundError: nobody."""
    connected = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        connected.connect(str(path))
    except BaseException:
        connected.close()
        raise
    return connected
