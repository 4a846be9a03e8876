"""One process's connections: an inbox that others send to, an outbox, a line to the supervisor."""

from __future__ import annotations

import os
import select
import threading
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from msgspec import msgpack

from .control import NODE_BITS, Stop, ToActor, inbox_path, page_path, supervisor_path
from .errors import ActorStopped, AskTimeout, DeadlockError, RolecallError
from .far import FarMail
from .mailbox import Incoming, Mailbox
from .members import Members
from .outbox import Outbox
from .page import Page
from .peer import Answers, Outgoing, Peer, Pending, Replies, together
from .ref import Answer, Call, only_one
from .sockets import Connection, Parcel, connect, listen
from .turns import LATE_S, POLL_S, Turns
from .wire import (
    Kind,
    encode_body,
    encode_call,
    pack_label,
    pack_message,
    pack_reply,
    unpack_messages,
)

__all__ = ["Endpoint"]

TELL_TIMEOUT_S = 300.0  # how long a tell waits for room in the receiver's mailbox
BATCH = 64  # messages or answers that wait for nothing else before they are sent
BREATH_NS = 5_000_000
FAR_REMEMBERED = 64  # dead senders of other machines, of whose mail a second copy may still be under way
LAST_WORDS_S = 0.5  # how long a process that ends waits for the kernel to take what it has said
_from_supervisor = msgpack.Decoder(ToActor)


class Endpoint:
    """The Transport of an actor's process, and its inbox."""

    def __init__(self, name: str, incarnation: int, sockets: Path) -> None:
        self.name, self.incarnation, self.sockets = name, incarnation, sockets
        self.mailbox = Mailbox()
        self.page = Page(page_path(sockets, name))
        self.page.recover()
        self.chain: tuple[str, ...] = ()  # who waits for the message being handled
        self.deadline = float("inf")  # and until when
        self.stopping = False
        self.again = False  # stopping in order to be started again
        self.answers = Answers()
        self._seq = 0
        self._members = Members()
        self.downs = self._members.downs
        # What waits to be sent; only the thread that drives touches a socket.
        self._replies = Replies()
        self._words: deque[bytes] = deque()  # for the supervisor
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._turns = Turns(self, self._wake)
        self._drive, self._lock, self._late = self._turns.drive, self._turns.lock, self._turns.late
        self._handler = threading.get_ident()  # the thread that handles messages
        self._drove_ns = 0
        self._inbox = listen(inbox_path(sockets, name, incarnation))
        self._poller = select.epoll()
        self._poller.register(self._wake, select.EPOLLIN)
        self._poller.register(self._inbox, select.EPOLLIN)
        self._supervisor = Connection(connect(supervisor_path(sockets)), self._poller)
        self._callers: dict[int, Connection] = {}  # who sends to this actor, by file descriptor
        self._outbox = Outbox(
            incarnation, sockets, self.page, self._members, self._poller, self._lock, self._transmit
        )
        self.dead_letters = self._outbox.dead_letters
        self._node = incarnation >> NODE_BITS
        self._far = FarMail(self._replies)

    def now(self) -> float:
        """CLOCK_MONOTONIC seconds, which all processes of a machine share."""
        return time.monotonic()

    now_ns = staticmethod(time.monotonic_ns)  # called for every message

    def fileno(self) -> int:
        """Readable while there is something to let in, which `wait` does."""
        return self._poller.fileno()

    # --- sending -----------------------------------------------------------------------------------------

    def replicas(self, name: str) -> Sequence[str]:
        return self._members.replicas.get(name) or self._replicas_of_new(name)

    def _replicas_of_new(self, name: str) -> Sequence[str]:
        if not self._members.by_name:
            self._wait_for_members()
        return self._members.replicas.get(name, [name])

    def _wait_for_members(self) -> None:
        deadline = min(self.now() + TELL_TIMEOUT_S, self.deadline)
        while not self._members.by_name and self.now() < deadline:  # the first word names a role's replicas
            self._raise_if_stopping()
            self._drive(POLL_S)

    def pick(self, name: str) -> str:
        self.replicas(name)
        return self._members.pick(name, self._unhandled)

    def _unhandled(self, name: str) -> int:
        peer = self._outbox.peers.get(name)
        return 0 if peer is None else len(peer.unhandled)

    def watch(self, name: str) -> None:
        self._check_reach(name)
        self.replicas(name)
        with self._lock:
            self._members.watch(name)

    def ask(self, names: Sequence[str], call: Call, timeout_s: float) -> list[Any]:
        answers = [self._ask(name, call, timeout_s) for name in names]
        for answer in answers:
            if isinstance(answer, Pending):
                self._wait(answer)  # for all, before the first that failed is raised
        return [answer.result() for answer in answers]

    def ask_soon(self, name: str, call: Call, timeout_s: float) -> Answer[Any]:
        answer = self._ask(name, call, timeout_s, self.answers)
        self._turns.send_soon()
        return answer

    def _ask(self, name: str, call: Call, timeout_s: float, answers: Answers | None = None) -> Answer[Any]:
        deadline = time.monotonic() + timeout_s
        if threading.get_ident() == self._handler:
            deadline = min(deadline, self.deadline)
        pending = Pending(name, deadline, self._wait, answers=answers)
        if answers is not None:
            answers.waiting.add(pending)
        try:
            self._post(name, call, pending)
        except BaseException:
            self.answers.waiting.discard(pending)
            raise
        return pending

    def tell(self, name: str, call: Call) -> None:
        self._post(name, call)
        if not self._late.is_set():
            self._turns.send_soon()

    def _post(self, name: str, call: Call, pending: Pending | None = None) -> None:
        peer = self._outbox.peers.get(name) or self._new_peer(name)
        if pending is None:
            kind, until, chain = Kind.TELL, 0.0, (self.name,)
        else:
            kind, until, pending.name = Kind.ASK, pending.deadline, peer.name
            # Other threads of this process do not work for whoever waits for the message being handled.
            chain = (*self.chain, self.name) if threading.get_ident() == self._handler else (self.name,)
            if peer.name in chain:
                raise DeadlockError.of(chain, peer.name, call.method)
        if peer.full:
            self._wait_for_room(peer, until or time.monotonic() + TELL_TIMEOUT_S)
        label = pack_label(chain, call.method)
        body, buffers = encode_call(call.args, call.kwargs)
        with self._lock:  # messages leave in the order of their seq, whichever thread they come from
            self._seq = seq = self._seq + 1
            record = pack_message(kind, seq, self.incarnation, until, label, body, buffers)
            peer.add(Outgoing(seq, call.method, call.idempotent, record, pending, self.now_ns()))
            self._outbox.unsent[peer.name] = peer
            if pending is not None:
                pending.seq = seq
        if buffers or len(peer.unsent) >= BATCH:
            self._drive(0.0)

    def _new_peer(self, name: str) -> Peer:
        self._check_reach(name)
        name = only_one(name, self.replicas(name))
        return self._outbox.peers.setdefault(name, Peer(name))

    def _check_reach(self, name: str) -> None:
        """Raises RolecallError at once for whom nobody will ever name here."""
        if self._node and name.find("/") > 0:
            raise RolecallError(
                f"{self.name} can't reach {name}: machines that have joined reach their own actors, by their short "
                "names, and those of the run's own machine, but not each other's: place that role on the run's own"
            )

    @property
    def stuck(self) -> bool:
        """Whether the kernel had no room for something that was sent."""
        links = (self._supervisor, *list(self._callers.values()))
        return self._outbox.stuck or any(link.backlog for link in links)

    @property
    def unsent(self) -> bool:
        """Whether something waits for `flush`."""
        return bool(self._outbox.unsent or self._replies.waiting or self._words)

    def _wait_for_room(self, peer: Peer, deadline: float) -> None:
        while peer.full:
            if time.monotonic() > deadline:
                raise AskTimeout(
                    f"{peer.name} has {len(peer.unhandled)} messages to handle and takes no more"
                )
            self._raise_if_stopping()
            self._drive(0.0)  # an actor that is gone for good has room at once
            if peer.full:
                self._drive(POLL_S)

    def _wait(self, pending: Pending) -> None:
        while not pending.done:
            self._raise_if_stopping()
            left = pending.deadline - time.monotonic()
            if left <= 0:
                self._time_out(pending)
                return
            self._drive(min(left, POLL_S), pending)

    def _time_out(self, pending: Pending) -> None:
        pending.fail(AskTimeout(f"no answer from {pending.name} within the deadline"))
        self._outbox.remove(pending.name, pending.seq)

    def expire(self, now: float) -> None:
        """End the asks that nobody waits in, and whose time is over."""
        for pending in self.answers.late(now):
            self._time_out(pending)

    def _raise_if_stopping(self) -> None:
        if self.stopping:
            raise ActorStopped(f"{self.name} is being stopped")

    # --- driving the sockets -----------------------------------------------------------------------------

    def wait(self, timeout_s: float | None) -> None:
        """Let messages in until there is one to handle, the supervisor says stop, or the time is over."""
        self._drive(POLL_S if timeout_s is None else max(0.0, min(timeout_s, POLL_S)))
        self._forget_the_dead()

    def wait_for_stop(self, timeout_s: float) -> None:
        """Until the supervisor says stop, or the time is over."""
        until = time.monotonic() + timeout_s
        while not self.stopping and (left := until - time.monotonic()) > 0:
            self._drive(left)

    def breathe(self) -> None:
        """Between two messages of many: let answers out and the supervisor's word in, now and then."""
        if len(self._replies.waiting) >= BATCH or time.monotonic_ns() - self._drove_ns > BREATH_NS:
            self._drive(0.0)

    def turn(self, timeout_s: float) -> None:
        """Let in what there is; wait for the first of it."""
        ready = self._poller.poll(timeout_s)
        self._drove_ns = time.monotonic_ns()
        for fd, event in ready:
            # One datagram of each: there is more to hear as long as it is ready again at the next turn.
            if (peer := self._outbox.callees.get(fd)) is not None:
                self._outbox.hear(peer, event)
            elif (caller := self._callers.get(fd)) is not None:
                self._hear_mail(caller, event)
            elif fd == self._inbox.fileno():
                self._accept()
            elif fd == self._supervisor.fileno():
                self._hear_supervisor(event)
            elif fd == self._wake:
                os.eventfd_read(self._wake)

    def flush(self) -> None:
        """Send all that waits to be sent."""
        while self._words:
            self._supervisor.send(self._words.popleft())
        self._outbox.flush()
        if self._replies.waiting:
            for caller, records in self._replies.take().items():
                self._transmit(caller, records)

    def _transmit(self, connection: Connection, records: Sequence[bytes | Parcel]) -> None:
        for datagram in together(records):
            connection.send(datagram)
        if connection.backlog:
            self._turns.send_soon()  # this thread may not wait here again for long

    # --- the supervisor's word ---------------------------------------------------------------------------

    def to_supervisor(self, frame: bytes) -> None:
        """When this returns it has left the process, whatever becomes of it; a supervisor that is behind is waited
        for."""
        self._words.append(frame)
        self._drive(0.0)
        while self._words:
            self._drive(LATE_S)  # another thread drives, and has been told
        while self._supervisor.backlog:
            self._drive(POLL_S)

    def _hear_supervisor(self, event: int) -> None:
        if event & select.EPOLLOUT:
            self._supervisor.flush()
        data = self._supervisor.receive()
        if data is None:
            if self._supervisor.ended:  # it is dead, and this process about to be
                self._supervisor.close()
            return
        message = _from_supervisor.decode(data)
        if isinstance(message, Stop):
            self.stopping, self.again = True, message.again
        else:
            with self._lock:
                self._members.hear(message.members)
            self._outbox.meet(message.members)

    def _forget_the_dead(self) -> None:
        """In the thread that handles messages: the page is its."""
        if not self._members.news:
            return
        self._members.news = False
        members = list(self._members.by_name.values())
        # A machine's incarnations grow, so a sender above all of them is newer than this word, not dead.
        newest: dict[int, int] = {}
        for member in members:
            node = member.incarnation >> NODE_BITS
            newest[node] = max(member.incarnation, newest.get(node, 0))
        alive = {member.incarnation for member in members if member.state != "gone"}
        senders = self.page.senders - alive
        dead = sorted(sender for sender in senders if sender <= newest.get(sender >> NODE_BITS, 0))
        far = [sender for sender in dead if sender >> NODE_BITS != self._node]
        for sender in far:
            self._far.forget(sender)
        for sender in set(dead).difference(far[-FAR_REMEMBERED:]):
            self.page.forget(sender)

    # --- receiving ---------------------------------------------------------------------------------------

    def _accept(self) -> None:
        try:
            caller, _ = self._inbox.accept()
        except BlockingIOError:
            return
        connection = Connection(caller, self._poller)
        self._callers[connection.fileno()] = connection

    def _hear_mail(self, caller: Connection, event: int) -> None:
        if event & select.EPOLLOUT:
            caller.flush()
        data = caller.receive()
        if data is not None:
            for header, body, buffers in unpack_messages(data):
                if header.sender >> NODE_BITS == self._node or self._far.is_new(header, body, caller):
                    self.mailbox.put(Incoming(header, body, buffers, caller))
        elif caller.ended:
            del self._callers[caller.fileno()]
            caller.close()

    def handled(self, message: Incoming) -> None:
        """Tell the sender of a tell that it was handled; all of one sender's are told in one record."""
        waiting = self._replies.waiting
        waiting.append((self._route(message), message.header.seq, b""))
        if len(waiting) == 1:
            self._turns.send_soon()  # the next message may take long

    def answer(self, message: Incoming, kind: Kind, value: Any) -> None:
        """Answer an ask. A sender that died meanwhile needs no answer."""
        waiting = self._replies.waiting
        record = pack_reply(kind, message.header.seq, *encode_body(value))
        waiting.append((self._route(message, record), 0, record))
        if len(waiting) == 1:
            self._turns.send_soon()

    def _route(self, message: Incoming, answer: bytes | Parcel | None = None) -> Connection:
        """The way back to its sender, now that it is handled."""
        if message.header.sender >> NODE_BITS == self._node:
            return message.route
        return self._far.handled(message.header, answer)

    def settle(self, timeout_s: float) -> None:
        """Before the end: wait until what this actor told others is handled, for only its sender can send it again.
        What is not by then becomes a dead letter."""
        until = time.monotonic() + timeout_s
        self._drive(0.0)
        while self._outbox.telling and (left := until - time.monotonic()) > 0:
            self._drive(min(left, POLL_S))
        self._outbox.give_up(f"{self.name} ended before it heard that this was handled")

    def close(self) -> None:
        """Say what is left to say."""
        until = time.monotonic() + LAST_WORDS_S
        self._drive(0.0)
        while self.stuck and time.monotonic() < until:
            self._drive(LATE_S)
        self._turns.close()
