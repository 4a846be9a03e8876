"""A bridge stands in, on one machine, for the actors of another: what is sent to it goes there, and back.

    sender ─▶ bridge ═══ line ═══ bridge ─▶ receiver          one pair for each machine that has joined

Local actors connect to it as to the actor itself, and it connects to local actors as the sender would. It turns
pickles, which it shares with its own machine, into data that handlers' signatures allow (see codec.py), and keeps
nothing that anybody needs: messages stay with their senders until they are handled, answers with who gave them
until they have arrived. So it may be killed at any moment; when a pair has found together again everything unhandled
is sent again, and the receivers' pages strike what was done.
"""

from __future__ import annotations

import os
import select
import threading
import time
from collections import deque
from collections.abc import Container, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from msgspec import msgpack

from . import control
from .codec import Codec, Refused, decode_error, encode_error
from .control import NODE_BITS, DeadLetter, Member, inbox_path, supervisor_path
from .directory import Directory, Machine, Stand
from .line import Answered, Done, Frame, Heard, Line, Mail, Members
from .sockets import Connection, connect
from .wire import (
    Header,
    Kind,
    decode_body,
    encode_body,
    encode_call,
    pack_done,
    pack_heard,
    pack_label,
    pack_message,
    pack_reply,
    seqs_done,
    unpack_messages,
    unpack_replies,
)

__all__ = ["Bridge"]

_from_supervisor = msgpack.Decoder(control.ToActor)


@dataclass(eq=False)
class _Caller:
    """A local sender's connection to a far actor's inbox; asked and unheard (for want of room): by sender and seq."""

    connection: Connection
    member: Member
    asked: dict[tuple[int, int], str] = field(default_factory=dict)
    unheard: list[tuple[int, int]] = field(default_factory=list)


@dataclass(eq=False)
class _Way:
    """A connection to a local actor, for the mail of one far sender. asked: the methods of asks not answered yet."""

    connection: Connection
    receiver: str
    sender: int
    asked: dict[int, str] = field(default_factory=dict)


class Bridge:
    """One of a pair, on machine `here`, for the actors of `there`. Everything is done by the thread that calls `run`.

    owner, incarnation: of the actor in whose process it is. private: roles of which each machine has its own;
    elastic: those that the other may run, if not all.
    introduced: set once everybody on this machine knows the actors of the other.
    """

    def __init__(
        self,
        owner: str,
        incarnation: int,
        sockets: Path,
        codec: Codec,
        here: Machine,
        there: Machine,
        private: Container[str] = (),
        elastic: Container[str] | None = None,
    ) -> None:
        self._sockets, self._codec, self._there = sockets, codec, there
        self.introduced = threading.Event()
        self._callers: dict[int, _Caller] = {}  # these two by file descriptor
        self._ways: dict[int, _Way] = {}
        self._back: dict[tuple[str, int], _Caller] = {}  # far actor, local sender
        self._there_to: dict[tuple[str, int], _Way] = {}  # local actor, far sender
        self._line = Line(self._later)
        self._events: deque[tuple[Line | None, Sequence[Frame] | str]] = deque()  # from the link
        self._closed = False
        self._waking = threading.Lock()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._poller = select.epoll()
        self._poller.register(self._wake, select.EPOLLIN)
        self._supervisor = Connection(connect(supervisor_path(sockets)), self._poller)
        self._supervisor.send(msgpack.encode(control.Bridge(owner, incarnation, there.number)))
        self._who = Directory(owner, sockets, here, there, private, elastic, self._poller, self._supervisor)

    # --- for the link, in any thread ---------------------------------------------------------------------

    def open(self) -> Line:
        """A new line to the other bridge, which has nothing yet of what was sent on an older one."""
        line = Line(self._later)
        self._later(line, ())
        return line

    def lose(self, reason: str) -> None:
        """The other machine is gone for good, and `run` returns."""
        self._later(None, reason)

    def check(self, frames: Sequence[Frame]) -> None:
        """Raises ValueError if the other machine speaks for anybody but its own actors."""
        for frame in frames:
            if isinstance(frame, Mail | Heard) and frame.sender >> NODE_BITS != self._there.number:
                raise ValueError(f"sender {frame.sender} is not of machine {self._there.number}")
            if isinstance(frame, Mail):
                self._who.check_sender(frame.chain[-1] if frame.chain else "")
            if isinstance(frame, Members):
                self._who.check(frame.members)

    def close(self) -> None:
        """Let `run` return."""
        self._closed = True
        self._later(None, ())

    def _later(self, line: Line | None, what: Sequence[Frame] | str) -> None:
        self._events.append((line, what))
        with self._waking:
            if self._wake >= 0:
                os.eventfd_write(self._wake, 1)

    # --- the loop ----------------------------------------------------------------------------------------

    def run(self) -> None:
        """Pass on what there is until `close`, or until the supervisor is gone."""
        while not self._supervisor.ended and (not self._closed or self._supervisor.backlog):
            self.turn(None)
        self._line.close()
        self._part()
        self._supervisor.close()
        self._poller.close()
        with self._waking:
            os.close(self._wake)
            self._wake = -1

    def turn(self, timeout_s: float | None) -> None:
        """Pass on what there is; wait for the first of it."""
        for fd, event in self._poller.poll(timeout_s):
            if (caller := self._callers.get(fd)) is not None:
                self._hear_caller(caller, event)
            elif (way := self._ways.get(fd)) is not None:
                self._hear_receiver(way, event)
            elif (stand := self._who.stands.get(fd)) is not None:
                self._accept(stand)
            elif fd == self._supervisor.fileno():
                self._hear_supervisor(event)
            elif fd == self._wake:
                os.eventfd_read(self._wake)
        while self._events and self._who.own:  # nothing is said before it is known who lives here
            self._heed(*self._events.popleft())

    def _heed(self, line: Line | None, what: Sequence[Frame] | str) -> None:
        if isinstance(what, str):
            self._line.close()
            self._who.lose(what)
            self._closed = True
        elif line is not None and not what:
            self._begin(line)
        elif line is self._line:
            for frame in what:
                self._hear_frame(frame)

    def _begin(self, line: Line) -> None:
        """Of what was under way nobody knows what arrived: let all senders begin anew, each with its oldest message."""
        self._line.close()
        self._line = line
        self._part()
        self._who.cut()
        self._describe(list(self._who.own.values()))

    def _part(self) -> None:
        for connection in [one.connection for one in (*self._callers.values(), *self._ways.values())]:
            connection.close()
        for table in (self._callers, self._ways, self._back, self._there_to):
            table.clear()

    # --- who lives where ---------------------------------------------------------------------------------

    def _hear_supervisor(self, event: int) -> None:
        if event & select.EPOLLOUT:
            self._supervisor.flush()
        if (data := self._supervisor.receive()) is None:
            return
        message = _from_supervisor.decode(data)
        assert isinstance(message, control.Membership)
        own, far = self._who.split(message.members)
        if not self._who.own:  # the first word: a bridge before this one may have stood in for some of them
            self._who.far = {member.name: member for member in far}
        elif any(member.state != "cut" for member in far):
            self.introduced.set()
        for member in own:
            before = self._who.own.get(member.name)
            if before is not None and (
                before.incarnation != member.incarnation or member.state in ("down", "gone")
            ):
                self._leave(member.name)
            self._who.own[member.name] = member
        self._describe(own)

    def _describe(self, members: Sequence[Member]) -> None:
        if (described := self._who.described(members)) is not None:
            self._line.post(described)

    def _leave(self, name: str) -> None:
        """Its incarnation has died; what it said last comes before its death."""
        for way in [way for way in self._ways.values() if way.receiver == name]:
            while (data := way.connection.receive()) is not None:
                self._pass_back(way, data)
            self._end_way(way)

    # --- from here to there ------------------------------------------------------------------------------

    def _accept(self, stand: Stand) -> None:
        try:
            connected, _ = stand.listener.accept()
        except BlockingIOError:
            return
        connection = Connection(connected, self._poller)
        self._callers[connection.fileno()] = _Caller(connection, stand.member)

    def _hear_caller(self, caller: _Caller, event: int) -> None:
        connection = caller.connection
        if event & select.EPOLLOUT:
            connection.flush()
            if not connection.backlog and not connection.refused:
                for sender, seq in caller.unheard:
                    self._line.post(Heard(self._who.outward(caller.member.name), sender, [seq]))
                caller.unheard.clear()
        if (data := connection.receive()) is not None:
            for header, body, buffers in unpack_messages(data):
                key = caller.member.name, header.sender
                # What is left of an older connection may be read after what came over a newer one.
                if connection.opened_ns >= self._back.setdefault(key, caller).connection.opened_ns:
                    self._back[key] = caller
                self._pass_on(caller, header, body, buffers)
        elif connection.ended:
            del self._callers[connection.fileno()]
            for key in [key for key, other in self._back.items() if other is caller]:
                del self._back[key]
            connection.close()

    def _pass_on(self, caller: _Caller, header: Header, body: Any, buffers: Sequence[Any]) -> None:
        member = caller.member
        try:
            args, kwargs = decode_body(body, buffers)
            data = self._codec.encode_call(member.role, header.method, args, kwargs)
        except Exception as error:  # noqa: BLE001  whatever a value's own unpickling raises goes to its sender
            if header.kind is Kind.ASK:
                caller.connection.send(pack_reply(Kind.ERROR, header.seq, *encode_body(_sendable(error))))
            else:
                self._bury(member.name, header.method, str(error))
                caller.connection.send(pack_done([header.seq]))
            return
        if header.kind is Kind.ASK:
            caller.asked[header.sender, header.seq] = header.method
        left_s = max(header.deadline - time.monotonic(), 0.001) if header.deadline else 0.0
        self._line.post(
            Mail(
                self._who.outward(member.name), member.incarnation, header.kind is Kind.ASK, header.seq, header.sender,
                left_s, tuple(map(self._who.outward, header.chain)), header.method, data,
            )
        )  # fmt: skip

    def _bury(self, receiver: str, method: str, reason: str) -> None:
        self._supervisor.send(msgpack.encode(DeadLetter(receiver, method, reason)))

    def _hear_frame(self, frame: Frame) -> None:
        match frame:
            case Members(members=members):
                self._who.meet(members)
            case Mail():
                self._deliver(frame)
            case Answered():
                self._answer(frame)
            case Done(receiver=receiver, sender=sender, seqs=seqs):
                if (caller := self._back.get((self._who.inward(receiver), sender))) is not None:
                    caller.connection.send(pack_done(seqs))
            case Heard(receiver=receiver, sender=sender, seqs=seqs):
                if (way := self._there_to.get((self._who.inward(receiver), sender))) is not None:
                    way.connection.send(pack_heard(sender, seqs))

    def _answer(self, frame: Answered) -> None:
        name = self._who.inward(frame.receiver)
        caller = self._back.get((name, frame.sender))
        method = None if caller is None else caller.asked.pop((frame.sender, frame.seq), None)
        if caller is None or method is None:
            return  # its asker will ask again, on a connection of its own; or nobody has asked
        try:
            kind, role = Kind.ERROR if frame.failed else Kind.ANSWER, self._who.far[name].role
            # By what was asked, not by what the answer says of itself.
            decode = decode_error if frame.failed else partial(self._codec.decode_answer, role, method)
            value = decode(frame.body)
        except Refused as error:
            kind, value = Kind.ERROR, error
        caller.connection.send(pack_reply(kind, frame.seq, *encode_body(value)))
        # What the kernel has reaches its asker, also if this process dies now.
        if caller.connection.backlog:
            caller.unheard.append((frame.sender, frame.seq))
        elif not caller.connection.refused:
            self._line.post(Heard(frame.receiver, frame.sender, [frame.seq]))

    # --- from there to here ------------------------------------------------------------------------------

    def _deliver(self, mail: Mail) -> None:
        receiver = self._who.inward(mail.receiver)
        member = self._who.own.get(receiver)
        if member is None or member.incarnation != mail.incarnation:
            return  # that incarnation is dead: its sender hears of it and sends again what must be
        way = self._way(member, mail.sender)
        if way is None:
            return
        try:
            kwargs = self._codec.decode_call(member.role, mail.method, mail.body)
        except Refused as error:
            if mail.ask:
                self._line.post(_failed(mail.receiver, mail.sender, mail.seq, mail.method, error))
            else:
                self._bury(receiver, mail.method, str(error))
                self._line.post(Done(mail.receiver, mail.sender, [mail.seq]))
            return
        kind, deadline = Kind.TELL, 0.0
        if mail.ask:
            kind, deadline = Kind.ASK, time.monotonic() + mail.left_s
            way.asked[mail.seq] = mail.method
        label = pack_label(tuple(map(self._who.inward, mail.chain)), mail.method)
        record = pack_message(kind, mail.seq, mail.sender, deadline, label, *encode_call((), kwargs))
        way.connection.send(record)

    def _way(self, member: Member, sender: int) -> _Way | None:
        key = member.name, sender
        if (way := self._there_to.get(key)) is None:
            try:
                link = connect(inbox_path(self._sockets, member.name, member.incarnation))
            except (ConnectionRefusedError, FileNotFoundError):
                return None  # it has just died: the supervisor will say so
            way = self._there_to[key] = _Way(Connection(link, self._poller), member.name, sender)
            self._ways[way.connection.fileno()] = way
        return way

    def _hear_receiver(self, way: _Way, event: int) -> None:
        if event & select.EPOLLOUT:
            way.connection.flush()
        if (data := way.connection.receive()) is not None:
            self._pass_back(way, data)
        elif way.connection.ended:
            self._end_way(way)

    def _end_way(self, way: _Way) -> None:
        del self._ways[way.connection.fileno()], self._there_to[way.receiver, way.sender]
        way.connection.close()

    def _pass_back(self, way: _Way, data: bytes | memoryview) -> None:
        name = self._who.outward(way.receiver)
        for kind, seq, body, buffers in unpack_replies(data):
            if kind is Kind.DONE:
                self._line.post(Done(name, way.sender, list(seqs_done(body))))
            elif (method := way.asked.pop(seq, None)) is not None:  # else it comes when it was asked again
                self._line.post(self._translated(way, kind, seq, method, body, buffers))

    def _translated(
        self, way: _Way, kind: Kind, seq: int, method: str, body: Any, buffers: Sequence[Any]
    ) -> Answered:
        name = self._who.outward(way.receiver)
        try:
            value = decode_body(body, buffers)
            if kind is Kind.ERROR:
                return _failed(name, way.sender, seq, method, value)
            data = self._codec.encode_answer(self._who.own[way.receiver].role, method, value)
        except Exception as error:  # noqa: BLE001  whatever a value's own unpickling raises goes to the asker
            return _failed(name, way.sender, seq, method, error)
        return Answered(name, way.sender, seq, method, False, data)


def _failed(receiver: str, sender: int, seq: int, method: str, error: BaseException) -> Answered:
    return Answered(receiver, sender, seq, method, True, encode_error(error))


def _sendable(error: Exception) -> Exception:
    """What any process of this machine can unpickle."""
    return error if isinstance(error, Refused) else decode_error(encode_error(error))
