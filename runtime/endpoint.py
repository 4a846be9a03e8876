"""One process's sockets: an inbox others send to, and one socket for each actor it sends to.

Peer to peer: the supervisor only says who lives where. A sender keeps every message until it hears that it
was handled; when the receiver dies the rest is sent again, in order, to its next incarnation, whose Page
tells what was done before. So a message is handled exactly once for all kills in between, or its sender is
told that it may have been.

libzmq moves the bytes in the background, and whoever waits (for a message, or for an answer) drives the
sockets meanwhile. Several threads may wait; one of them drives for all. What is sent without waiting goes out
with the next wait, in one datagram with whatever else there is for that actor; or, if its sender computes,
within about a millisecond by a thread that does nothing else.
"""

from __future__ import annotations

import math
import os
import threading
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import zmq
from msgspec import msgpack

from .control import Member, Stop, ToActor, by_role, inbox_path, page_path, quiet_socket
from .errors import ActorDied, ActorStopped, AskTimeout, DeadlockError, RolecallError
from .mailbox import Incoming, Mailbox
from .page import Fate, Page
from .peer import Heard, Outgoing, Peer, Pending, Replies
from .ref import Answer, Call
from .remote import RemoteActor
from .wire import (
    Header,
    Kind,
    encode_body,
    encode_call,
    pack_message,
    pack_reply,
    unpack_messages,
    unpack_replies,
)

__all__ = ["Endpoint"]

TELL_TIMEOUT_S = 300.0  # how long a tell waits for room in the receiver's mailbox
BATCH = 64  # messages or answers that wait for nothing else before they are sent
LATE_S = 0.001  # what waits longer is sent by a thread of its own
BREATH_S = 0.005
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
        self.again = False  # stopping in order to be started again
        self.dead_letters: list[tuple[str, str, str]] = []  # receiver, method, reason
        self._seq = 0
        self._members: dict[str, Member] = {}
        self._peers: dict[str, Peer] = {}
        self._replicas: dict[str, list[str]] = {}
        self._news = False  # of members, for the page
        # What waits to be sent; only the thread that drives touches a socket.
        self._unsent: dict[str, Peer] = {}
        self._replies = Replies()
        self._words: deque[bytes] = deque()  # for the supervisor
        self._turn = threading.Condition()
        self._driver: int | None = None  # the thread that drives the sockets now
        self._drove = 0.0
        self._late = threading.Event()
        self._sender: threading.Thread | None = None
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
        if not self._members:
            self._wait_for_members()
        return self._replicas.get(name) or [name]

    def _wait_for_members(self) -> None:
        deadline = min(self.now() + TELL_TIMEOUT_S, self.deadline)
        while not self._members and self.now() < deadline:  # a role's replicas are known with the first word
            self._raise_if_stopping()
            self._drive(POLL_S)

    def ask(self, names: Sequence[str], call: Call, timeout_s: float) -> list[Any]:
        answers = [self._ask(name, call, timeout_s) for name in names]
        for answer in answers:
            if isinstance(answer, Pending):
                self._wait(answer)  # for all, before the first that failed is raised
        return [answer.result() for answer in answers]

    def ask_soon(self, name: str, call: Call, timeout_s: float) -> Answer[Any]:
        answer = self._ask(name, call, timeout_s)
        self._send_soon()
        return answer

    def _ask(self, name: str, call: Call, timeout_s: float) -> Answer[Any]:
        deadline = min(time.monotonic() + timeout_s, self.deadline)
        if name in self.remotes:
            return Heard(self.remotes[name].ask(call, deadline, self._between))
        pending = Pending(name, deadline, self._wait)
        self._post(name, call, pending)
        return pending

    def tell(self, name: str, call: Call) -> None:
        if name in self.remotes:
            self.remotes[name].ask(call, time.monotonic() + TELL_TIMEOUT_S, self._between)
        else:
            self._post(name, call)
            self._send_soon()

    def _between(self) -> None:
        """Called between two tries of a request to another machine: hear the supervisor meanwhile."""
        self._drive(0.0)
        self._raise_if_stopping()

    def _post(self, name: str, call: Call, pending: Pending | None = None) -> None:
        chain = (*self.chain, self.name)
        if pending is not None and name in chain:
            raise DeadlockError.of(chain, name, call.method)
        peer = self._peers.get(name) or self._peers.setdefault(name, Peer(name))
        if peer.full:
            self._wait_for_room(
                peer, TELL_TIMEOUT_S + time.monotonic() if pending is None else pending.deadline
            )
        body, buffers = encode_call(call.method, call.args, call.kwargs)
        kind, until = (Kind.TELL, 0.0) if pending is None else (Kind.ASK, pending.deadline)
        with self._turn:  # messages leave in the order of their seq, whichever thread they come from
            self._seq += 1
            header = Header(kind, self._seq, self.incarnation, until, chain, call.method)
            record = pack_message(header, body)
            peer.add(Outgoing(self._seq, call.method, call.idempotent, record, buffers, pending))
            self._unsent[name] = peer
        if pending is not None:
            pending.seq = header.seq
        if buffers or len(peer.unsent) >= BATCH:
            self._drive(0.0)

    def _send_soon(self) -> None:
        """Let the sending thread send what nobody's wait has sent by then."""
        if not self._late.is_set():
            if self._sender is None:
                self._sender = threading.Thread(target=self._send_late, daemon=True)
                self._sender.start()
            self._late.set()

    def _send_late(self) -> None:
        while True:
            self._late.wait()
            time.sleep(LATE_S)
            self._late.clear()
            if self._unsent or self._replies or self._words:
                self._drive(0.0, send_only=True)

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
                pending.fail(AskTimeout(f"no answer from {pending.name} within the deadline"))
                with self._turn:
                    self._peers[pending.name].remove(pending.seq)
                return
            self._drive(min(left, POLL_S), pending)

    def _raise_if_stopping(self) -> None:
        if self.stopping:
            raise ActorStopped(f"{self.name} is being stopped")

    # --- driving the sockets -----------------------------------------------------------------------------

    def wait(self, timeout_s: float | None) -> None:
        """Let messages in until there is one to handle, the supervisor says stop, or the time is over."""
        self._drive(POLL_S if timeout_s is None else max(0.0, min(timeout_s, POLL_S)))
        self._forget_the_dead()

    def breathe(self) -> None:
        """Between two messages of many: let answers out and the supervisor's word in, now and then."""
        if len(self._replies) >= BATCH or time.monotonic() - self._drove > BREATH_S:
            self._drive(0.0)

    def _drive(self, timeout_s: float, pending: Pending | None = None, *, send_only: bool = False) -> None:
        """Move messages for up to `timeout_s`, or until another thread that drives has settled `pending`."""
        with self._turn:
            if self._driver is not None:
                if self._unsent or self._replies or self._words:
                    os.eventfd_write(self._wake, 1)  # the driver sleeps in its poll: let it send them
                if timeout_s and not (pending and pending.done):
                    self._turn.wait(timeout_s)
                return
            if (pending and pending.done) or self._zmq.closed:
                return
            self._driver = threading.get_ident()
        try:
            if not send_only:
                self._turn_over(timeout_s)
        finally:
            with self._turn:
                self._flush()  # also what others posted too late for the poll to see
                self._driver = None
                self._turn.notify_all()

    def _turn_over(self, timeout_s: float) -> None:
        self._flush()
        ready = dict(self._poller.poll(math.ceil(timeout_s * 1000)))
        self._drove = time.monotonic()
        if self._wake in ready:
            os.eventfd_read(self._wake)
        if self._supervisor in ready:
            self._hear_supervisor()
        if self._inbox in ready:
            self._hear_mail()
        if len(ready) > (self._inbox in ready):
            for peer in list(self._peers.values()):
                if peer.socket in ready:
                    self._hear_answers(peer)

    def _flush(self) -> None:
        """Send all that waits to be sent."""
        while self._words:
            self._supervisor.send(self._words.popleft())
        while self._unsent:
            _, peer = self._unsent.popitem()
            self._send_to(peer)
        for frames in self._replies.datagrams():
            self._send_back(frames)

    def _send_to(self, peer: Peer) -> None:
        member = self._members.get(peer.name)
        with self._turn:
            messages, peer.unsent = peer.unsent, []
        if member is not None and member.state == "gone":
            self._fail(peer, member)
        elif member is not None and member.state == "up" and not self._connect(peer, member):
            peer.transmit(messages)

    def _connect(self, peer: Peer, member: Member) -> bool:
        """Whether it had to be connected, and so was sent all it has not handled."""
        if peer.incarnation == member.incarnation and peer.socket is not None:
            return False
        self._disconnect(peer)
        peer.incarnation = member.incarnation
        peer.socket = quiet_socket(self._zmq, zmq.DEALER)
        peer.socket.setsockopt(zmq.IDENTITY, b"%d" % self.incarnation)
        peer.socket.connect(inbox_path(self.sockets, peer.name, member.incarnation))
        self._poller.register(peer.socket, zmq.POLLIN)
        with self._turn:
            messages, peer.unsent = list(peer.unhandled.values()), []
        peer.transmit(messages)
        return True

    def _disconnect(self, peer: Peer) -> None:
        if peer.socket is not None:
            self._hear_answers(peer)  # what it said last still counts
            self._poller.unregister(peer.socket)
            peer.socket.close()
            peer.socket = None

    def _hear_answers(self, peer: Peer) -> None:
        socket = peer.socket
        while socket is not None and socket.getsockopt(zmq.EVENTS) & zmq.POLLIN:  # type: ignore[operator]
            data, *buffers = socket.recv_multipart(copy=False)
            for kind, seq, body in unpack_replies(data.bytes):
                with self._turn:
                    message = peer.remove(seq)
                if message is not None and message.pending is not None:
                    pending = message.pending
                    pending.kind, pending.body = kind, body
                    pending.buffers = [frame.buffer for frame in buffers]
                    pending.done = True

    # --- the supervisor's word ---------------------------------------------------------------------------

    def to_supervisor(self, frame: bytes) -> None:
        self._words.append(frame)
        self._drive(0.0)

    def _hear_supervisor(self) -> None:
        while self._supervisor.poll(0):
            message = _from_supervisor.decode(self._supervisor.recv())
            if isinstance(message, Stop):
                self.stopping = True
                self.again = message.again
            else:
                self._meet(message.members)

    def _meet(self, members: list[Member]) -> None:
        self._members = {member.name: member for member in members}
        self._replicas = by_role(members)
        self._news = True
        for peer in list(self._peers.values()):
            member = self._members.get(peer.name)
            if member is None:
                continue
            if member.state == "gone":
                self._fail(peer, member)
            elif member.state == "down" and peer.socket is not None:
                self._lose(peer, member)
            elif member.state == "up":
                self._connect(peer, member)

    def _forget_the_dead(self) -> None:
        """In the thread that handles messages: the page is its."""
        if not self._news:
            return
        self._news = False
        members = list(self._members.values())
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
            with self._turn:
                peer.remove(seq)
            pending.fail(ActorDied(peer.name, member.reason, maybe_executed=True))

    def _fail(self, peer: Peer, member: Member) -> None:
        """Its actor is gone for good: tell every asker, and write down what was only told."""
        self._disconnect(peer)
        page = Page(page_path(self.sockets, peer.name))
        for seq, message in list(peer.unhandled.items()):
            with self._turn:
                peer.remove(seq)
            fate = page.fate(self.incarnation, seq)
            if message.pending is not None:
                if member.reason:
                    began = fate is not Fate.NEW
                    error: RolecallError = ActorDied(peer.name, member.reason, maybe_executed=began)
                else:
                    error = ActorStopped(f"{peer.name} has stopped")
                message.pending.fail(error)
            elif fate is not Fate.DONE:
                self.dead_letters.append((peer.name, message.method, member.reason or "stopped"))

    # --- receiving ---------------------------------------------------------------------------------------

    def _hear_mail(self) -> None:
        inbox = self._inbox
        while inbox.getsockopt(zmq.EVENTS) & zmq.POLLIN:  # type: ignore[operator]
            route, data, *frames = inbox.recv_multipart(copy=False)
            buffers, sender = [frame.buffer for frame in frames], route.bytes
            for header, body in unpack_messages(data.bytes):
                self.mailbox.put(Incoming(header, body, buffers, sender))

    def answer(self, message: Incoming, kind: Kind, value: Any = None) -> None:
        """Tell the sender that its message was handled. A sender that died meanwhile needs no answer."""
        if kind is Kind.DONE:
            self._replies.add_done(message.route, message.header.seq)
        else:
            body, buffers = encode_body(value)
            self._replies.add(message.route, pack_reply(kind, message.header.seq, body), buffers)
        if self.mailbox.ready:
            self._send_soon()  # the next message may take long

    def _send_back(self, frames: list[Any]) -> None:
        try:
            self._inbox.send_multipart(frames, copy=len(frames) == 2)
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise

    def close(self) -> None:
        self._drive(0.0)
        with self._turn:
            self._zmq.destroy(linger=500)
        os.close(self._wake)
