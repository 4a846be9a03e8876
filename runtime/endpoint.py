"""One process's sockets: an inbox others send to, and one socket for each actor it sends to.

Peer to peer: the supervisor only says who lives where. A sender keeps every message until it hears that it
was handled; when the receiver dies the rest is sent again, in order, to its next incarnation, whose Page
tells what was done before. So a message is handled exactly once for all kills in between, or its sender is
told that it may have been.

There is no I/O thread: libzmq moves the bytes in the background, and whoever waits (for a message, or for an
answer) drives the sockets meanwhile. Several threads may wait; one of them drives for all.
"""

from __future__ import annotations

import math
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import zmq
from msgspec import msgpack

from .control import Member, Stop, ToActor, inbox_path, page_path, quiet_socket
from .errors import ActorDied, ActorStopped, AskTimeout, DeadlockError, RolecallError
from .mailbox import Incoming, Mailbox
from .page import Fate, Page
from .peer import Outgoing, Peer, Pending
from .ref import Call
from .remote import RemoteActor
from .wire import Header, Kind, decode_body, decode_header, encode_body, encode_header

__all__ = ["Endpoint"]

TELL_TIMEOUT_S = 300.0  # how long a tell waits for room in the receiver's mailbox
POLL_S = 1.0  # how long a wait sleeps at most before it looks at its deadline
_from_supervisor = msgpack.Decoder(ToActor)


class Endpoint:
    """The Transport of an actor's process, and its inbox."""

    def __init__(
        self, name: str, incarnation: int, sockets: Path, remotes: dict[str, RemoteActor] | None = None
    ) -> None:
        self.name, self.incarnation, self.sockets = name, incarnation, sockets
        self.remotes = remotes or {}
        self.mailbox = Mailbox()
        self.page = Page(page_path(sockets, name))
        self.page.recover()
        self.chain: tuple[str, ...] = ()  # who waits for the message being handled
        self.deadline = float("inf")  # and until when
        self.stopping = False
        self.dead_letters: list[tuple[str, str, str]] = []  # receiver, method, reason
        self._seq = 0
        self._members: dict[str, Member] = {}
        self._peers: dict[str, Peer] = {}
        self._outbox: deque[Callable[[], None]] = deque()  # only the thread that drives touches a socket
        self._turn = threading.Condition()
        self._driver: int | None = None  # the thread that drives the sockets now
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._zmq = zmq.Context()
        self._inbox = quiet_socket(self._zmq, zmq.ROUTER)
        self._inbox.bind(inbox_path(sockets, name, incarnation))
        self._supervisor = quiet_socket(self._zmq, zmq.DEALER)
        self._supervisor.setsockopt(zmq.IDENTITY, f"{name}.{incarnation}".encode())
        self._supervisor.connect(f"ipc://{sockets}/supervisor")
        self._poller = zmq.Poller()
        for source in (self._inbox, self._supervisor, self._wake):
            self._poller.register(source, zmq.POLLIN)

    def now(self) -> float:
        """CLOCK_MONOTONIC seconds, which all processes of a machine share."""
        return time.monotonic()

    # --- sending -----------------------------------------------------------------------------------------

    def replicas(self, name: str) -> Sequence[str]:
        deadline = min(self.now() + TELL_TIMEOUT_S, self.deadline)
        while not self._members and self.now() < deadline:  # a role's replicas are known with the first word
            self._raise_if_stopping()
            self._drive(POLL_S)
        members = [member for member in self._members.values() if member.role == name]
        there = [member.name for member in members if member.state != "gone"]
        return there or [member.name for member in members[:1]] or [name]

    def ask(self, names: Sequence[str], call: Call, timeout_s: float) -> list[Any]:
        deadline = min(time.monotonic() + timeout_s, self.deadline)
        if any(name in self.remotes for name in names):
            return [self.remotes[name].ask(call, deadline, self._between) for name in names]
        pendings = [Pending(name, deadline) for name in names]
        for pending in pendings:
            self._post(pending.name, call, pending)
        for pending in pendings:
            self._wait(pending)
        return [self._open(pending) for pending in pendings]

    def _open(self, pending: Pending) -> Any:
        if pending.error is not None:
            raise pending.error
        assert pending.answer is not None
        kind, frames = pending.answer
        value = decode_body(frames)
        if kind is Kind.ERROR:
            raise value
        return value

    def tell(self, name: str, call: Call) -> None:
        if name in self.remotes:
            self.remotes[name].ask(call, time.monotonic() + TELL_TIMEOUT_S, self._between)
        else:
            self._post(name, call)

    def _between(self) -> None:
        """Called between two tries of a request to another machine: hear the supervisor meanwhile."""
        self._drive(0.0)
        self._raise_if_stopping()

    def _post(self, name: str, call: Call, pending: Pending | None = None) -> None:
        chain = (*self.chain, self.name)
        if pending is not None and name in chain:
            raise DeadlockError.of(chain, name, call.method)
        peer = self._peers.setdefault(name, Peer(name))
        deadline = time.monotonic() + TELL_TIMEOUT_S if pending is None else pending.deadline
        self._wait_for_room(peer, deadline)
        body = encode_body((call.method, call.args, call.kwargs))
        kind, until = (Kind.TELL, 0.0) if pending is None else (Kind.ASK, deadline)
        with self._turn:  # messages leave in the order of their seq, whichever thread they come from
            self._seq += 1
            header = Header(kind, self._seq, self.incarnation, until, chain, call.method)
            frames = [encode_header(header), *body]
            size = sum(memoryview(frame).nbytes for frame in frames)
            message = Outgoing(self._seq, call.method, call.idempotent, frames, size, pending)
            self._outbox.append(partial(self._send_to, peer, message))
        self._drive(0.0)

    def _send(self, action: Callable[[], None]) -> None:
        self._outbox.append(action)
        self._drive(0.0)

    def _wait_for_room(self, peer: Peer, deadline: float) -> None:
        while peer.full:
            if time.monotonic() > deadline:
                raise AskTimeout(
                    f"{peer.name} has {len(peer.unhandled)} messages to handle and takes no more"
                )
            self._raise_if_stopping()
            self._drive(POLL_S)

    def _wait(self, pending: Pending) -> None:
        while not pending.done:
            self._raise_if_stopping()
            left = pending.deadline - time.monotonic()
            if left <= 0:
                pending.settle(error=AskTimeout(f"no answer from {pending.name} within the deadline"))
                self._send(partial(self._abandon, pending))
                return
            self._drive(min(left, POLL_S), pending)

    def _raise_if_stopping(self) -> None:
        if self.stopping:
            raise ActorStopped(f"{self.name} is being stopped")

    def _abandon(self, pending: Pending) -> None:
        peer = self._peers[pending.name]
        for seq in [seq for seq, message in peer.unhandled.items() if message.pending is pending]:
            peer.remove(seq)

    # --- driving the sockets -----------------------------------------------------------------------------

    def wait(self, timeout_s: float | None) -> None:
        """Let messages in until there is one to handle, the supervisor says stop, or the time is over."""
        self._drive(POLL_S if timeout_s is None else max(0.0, min(timeout_s, POLL_S)))

    def _drive(self, timeout_s: float, pending: Pending | None = None) -> None:
        """Move messages for up to `timeout_s`, or until another thread that drives has settled `pending`."""
        with self._turn:
            if self._driver is not None:
                if self._outbox:  # the driver sleeps in its poll: let it send what we posted
                    os.eventfd_write(self._wake, 1)
                if timeout_s and not (pending and pending.done):
                    self._turn.wait(timeout_s)
                return
            if pending and pending.done:
                return
            self._driver = threading.get_ident()
        try:
            self._turn_over(timeout_s)
        finally:
            with self._turn:
                self._flush()  # what others posted too late for the poll to see
                self._driver = None
                self._turn.notify_all()

    def _turn_over(self, timeout_s: float) -> None:
        self._flush()
        ready = dict(self._poller.poll(math.ceil(timeout_s * 1000)))
        if self._wake in ready:
            os.eventfd_read(self._wake)
            self._flush()
        if self._supervisor in ready:
            self._hear_supervisor()
        for peer in list(self._peers.values()):
            if peer.socket in ready:
                self._hear_answers(peer)
        if self._inbox in ready:
            self._hear_mail()

    def _flush(self) -> None:
        while self._outbox:
            self._outbox.popleft()()

    def _send_to(self, peer: Peer, message: Outgoing) -> None:
        peer.add(message)
        member = self._members.get(peer.name)
        if member is not None and member.state == "gone":
            self._fail(peer, member)
        elif member is not None and member.state == "up":
            self._connect(peer, member)
            assert peer.socket is not None
            peer.socket.send_multipart(message.frames, copy=False)

    def _connect(self, peer: Peer, member: Member) -> None:
        if peer.incarnation == member.incarnation and peer.socket is not None:
            return
        self._disconnect(peer)
        peer.incarnation = member.incarnation
        peer.socket = quiet_socket(self._zmq, zmq.DEALER)
        peer.socket.setsockopt(zmq.IDENTITY, b"%d" % self.incarnation)
        peer.socket.connect(inbox_path(self.sockets, peer.name, member.incarnation))
        self._poller.register(peer.socket, zmq.POLLIN)

    def _disconnect(self, peer: Peer) -> None:
        if peer.socket is not None:
            self._hear_answers(peer)  # what it said last still counts
            self._poller.unregister(peer.socket)
            peer.socket.close()
            peer.socket = None

    def _hear_answers(self, peer: Peer) -> None:
        while peer.socket is not None and peer.socket.poll(0):
            head, *body = peer.socket.recv_multipart(copy=False)
            header = decode_header(head.bytes)
            message = peer.remove(header.seq)
            if message is None or message.pending is None:
                continue
            message.pending.settle((header.kind, [frame.buffer for frame in body]))

    # --- the supervisor's word ---------------------------------------------------------------------------

    def to_supervisor(self, frame: bytes) -> None:
        self._send(partial(self._supervisor.send, frame))

    def _hear_supervisor(self) -> None:
        while self._supervisor.poll(0):
            message = _from_supervisor.decode(self._supervisor.recv())
            if isinstance(message, Stop):
                self.stopping = True
            else:
                self._meet(message.members)

    def _meet(self, members: list[Member]) -> None:
        self._members = {member.name: member for member in members}
        self._forget_the_dead(members)
        for peer in list(self._peers.values()):
            member = self._members.get(peer.name)
            if member is None:
                continue
            if member.state == "gone":
                self._fail(peer, member)
            elif member.state == "down" and peer.socket is not None:
                self._lose(peer, member)
            elif member.state == "up" and (member.incarnation != peer.incarnation or peer.socket is None):
                self._connect(peer, member)
                assert peer.socket is not None
                for message in peer.unhandled.values():
                    peer.socket.send_multipart(message.frames, copy=False)

    def _forget_the_dead(self, members: list[Member]) -> None:
        # Incarnations grow, so a sender above all of these is newer than this word, not dead.
        newest = max((member.incarnation for member in members), default=0)
        alive = {member.incarnation for member in members if member.state != "gone"}
        for sender in self.page.senders - alive:
            if sender <= newest:
                self.page.forget(sender)

    def _lose(self, peer: Peer, member: Member) -> None:
        """Its actor died: an ask that had begun and must not run twice ends here; the rest waits for the next."""
        self._disconnect(peer)
        page = Page(page_path(self.sockets, peer.name))
        for seq, message in list(peer.unhandled.items()):
            pending = message.pending
            if pending is None or message.idempotent or page.fate(self.incarnation, seq) is Fate.NEW:
                continue
            peer.remove(seq)
            pending.settle(error=ActorDied(peer.name, member.reason, maybe_executed=True))

    def _fail(self, peer: Peer, member: Member) -> None:
        """Its actor is gone for good: tell every asker, and write down what was only told."""
        self._disconnect(peer)
        page = Page(page_path(self.sockets, peer.name))
        for seq, message in list(peer.unhandled.items()):
            peer.remove(seq)
            fate = page.fate(self.incarnation, seq)
            if message.pending is not None:
                if member.reason:
                    began = fate is not Fate.NEW
                    error: RolecallError = ActorDied(peer.name, member.reason, maybe_executed=began)
                else:
                    error = ActorStopped(f"{peer.name} has stopped")
                message.pending.settle(error=error)
            elif fate is not Fate.DONE:
                self.dead_letters.append((peer.name, message.method, member.reason or "stopped"))

    # --- receiving ---------------------------------------------------------------------------------------

    def _hear_mail(self) -> None:
        while self._inbox.poll(0):
            route, head, *frames = self._inbox.recv_multipart(copy=False)
            message = Incoming(decode_header(head.bytes), [frame.buffer for frame in frames], route.bytes)
            self.mailbox.put(message)

    def answer(self, message: Incoming, kind: Kind, value: Any = None) -> None:
        """Tell the sender that its message was handled. A sender that died meanwhile needs no answer."""
        header = message.header
        reply = encode_header(Header(kind, header.seq, self.incarnation, 0.0, (), ""))
        body = [] if kind is Kind.DONE else encode_body(value)
        self._send(partial(self._send_back, [message.route, reply, *body]))

    def _send_back(self, frames: list[Any]) -> None:
        try:
            self._inbox.send_multipart(frames, copy=False)
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise

    def close(self) -> None:
        self._zmq.destroy(linger=500)
        os.close(self._wake)
