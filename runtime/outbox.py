"""What a process has sent and to whom, until it is handled.

Peer to peer: the supervisor only says who lives where. A sender keeps every message until it hears that it was
handled; when the receiver dies the rest is sent again, in order, to its next incarnation, whose Page tells what
was done before. So a message is handled exactly once for all kills in between, or its sender is told that it
may have been.
"""

from __future__ import annotations

import select
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

from .control import Member, inbox_path, page_path
from .errors import ActorDied, ActorStopped
from .members import Members
from .page import Fate, Page
from .peer import Peer
from .sockets import Connection, Parcel, connect
from .wire import Kind, seqs_done, unpack_replies

__all__ = ["Outbox"]


class Outbox:
    """The actors that one incarnation sends to.

    unsent:       those with messages that were not sent yet, by name.
    callees:      those it is connected to, by file descriptor.
    dead_letters: what was told to an actor that is gone: receiver, method, reason.

    `lock` is held while messages are added or taken out; all else is done by the thread that drives the sockets.
    """

    def __init__(
        self,
        incarnation: int,
        sockets: Path,
        page: Page,
        members: Members,
        poller: select.epoll,
        lock: threading.Lock,
        transmit: Callable[[Connection, Sequence[bytes | Parcel]], None],
    ) -> None:
        self._incarnation, self._sockets, self._page = incarnation, sockets, page
        self._members, self._poller, self._lock, self._transmit = members, poller, lock, transmit
        self.peers: dict[str, Peer] = {}
        self.unsent: dict[str, Peer] = {}
        self.callees: dict[int, Peer] = {}
        self.dead_letters: list[tuple[str, str, str]] = []

    @property
    def stuck(self) -> bool:
        """Whether the kernel has no room for something that was sent."""
        links = [peer.connection for peer in list(self.peers.values())]
        return any(link is not None and link.backlog for link in links)

    @property
    def telling(self) -> bool:
        """Whether something was told that is not handled yet."""
        with self._lock:
            peers = list(self.peers.values())
            return any(message.pending is None for peer in peers for message in peer.unhandled.values())

    def give_up(self, reason: str) -> None:
        """Nobody will send again what was told."""
        for peer in list(self.peers.values()):
            told = [message.method for message in list(peer.unhandled.values()) if message.pending is None]
            self.dead_letters += [(peer.name, method, reason) for method in told]

    def remove(self, name: str, seq: int) -> None:
        """Nobody waits for it any more."""
        with self._lock:
            self.peers[name].remove(seq)

    def flush(self) -> None:
        """Send all that waits to be sent."""
        while self.unsent:
            _, peer = self.unsent.popitem()
            self._send_to(peer)

    def _send_to(self, peer: Peer) -> None:
        member = self._members.by_name.get(peer.name)
        if member is not None and member.state == "up" and peer.incarnation != member.incarnation:
            self._connect(peer, member)
            return
        with self._lock:
            messages, peer.unsent = peer.unsent, []
        if member is not None and member.state == "gone":
            self._fail(peer, member)
        elif peer.connection is not None:
            self._transmit(peer.connection, [message.record for message in messages])
        self._note(peer)

    def meet(self, members: list[Member]) -> None:
        """These have changed."""
        for member in members:
            peer = self.peers.get(member.name)
            if peer is None:
                continue
            if member.state == "gone":
                self._fail(peer, member)
            elif member.state == "up":
                if peer.incarnation != member.incarnation:
                    self._connect(peer, member)
            elif member.state == "cut":
                self._disconnect(peer)
                peer.incarnation = (
                    0  # when it is up again, whichever it is, all that is unhandled is sent again
                )
            elif peer.incarnation:
                self._lose(peer, member)

    def hear(self, peer: Peer, event: int) -> None:
        """What `poller` has seen."""
        connection = peer.connection
        assert connection is not None
        if event & select.EPOLLOUT:
            connection.flush()
        data = connection.receive()
        if data is not None:
            self._settle(peer, data)
        elif connection.ended:
            self._disconnect(peer)

    # --- one peer ----------------------------------------------------------------------------------------

    def _connect(self, peer: Peer, member: Member) -> None:
        """Send all that the last incarnation has not handled to this one."""
        self._disconnect(peer)
        try:
            link = connect(inbox_path(self._sockets, peer.name, member.incarnation))
        except (ConnectionRefusedError, FileNotFoundError):
            peer.incarnation = member.incarnation  # it has just died: the supervisor will say so
            return
        except OSError:
            self.unsent[peer.name] = peer  # of this process's own making, and perhaps over the next time
            raise
        peer.incarnation = member.incarnation
        peer.place = self._members.place(peer.name)
        peer.connection = Connection(link, self._poller)
        self.callees[peer.connection.fileno()] = peer
        with self._lock:
            messages, peer.unsent = list(peer.unhandled.values()), []
        self._transmit(peer.connection, [message.record for message in messages])
        self._note(peer)

    def _disconnect(self, peer: Peer) -> None:
        if peer.connection is None:
            return
        peer.connection.take_no_more()
        while (data := peer.connection.receive()) is not None:  # what it said last still counts
            self._settle(peer, data)
        del self.callees[peer.connection.fileno()]
        peer.connection.close()
        peer.connection = None

    def _settle(self, peer: Peer, data: bytes | memoryview) -> None:
        with self._lock:
            for kind, seq, body, buffers in unpack_replies(data):
                if kind is Kind.DONE:
                    peer.strike(seqs_done(body))
                elif (message := peer.remove(seq)) is not None and message.pending is not None:
                    message.pending.answer(kind, body, buffers)
        self._note(peer)

    def _note(self, peer: Peer) -> None:
        """For `rolecall ps`."""
        if peer.place >= 0:
            with self._lock:
                messages, oldest_ns = len(peer.unhandled), peer.oldest_ns
            self._page.note_sent(peer.place, messages, oldest_ns)

    def _lose(self, peer: Peer, member: Member) -> None:
        """Its actor died: an ask that had begun and must not run twice ends here; the rest waits for the next."""
        self._disconnect(peer)
        peer.incarnation = 0
        page = Page(page_path(self._sockets, peer.name))
        for seq, message in list(peer.unhandled.items()):
            pending = message.pending
            if pending is None or message.idempotent or page.fate(self._incarnation, seq) is Fate.NEW:
                continue
            with self._lock:
                peer.remove(seq)
            pending.fail(ActorDied(peer.name, member.reason, maybe_executed=True))

    def _fail(self, peer: Peer, member: Member) -> None:
        """Its actor is gone for good: tell every asker, and write down what was only told."""
        self._disconnect(peer)
        page = Page(page_path(self._sockets, peer.name))
        for seq, message in list(peer.unhandled.items()):
            fate = page.fate(self._incarnation, seq)
            # Said before it is taken out: whoever sees nothing left must find everything said.
            if message.pending is None:
                if fate is not Fate.DONE:
                    self.dead_letters.append((peer.name, message.method, member.reason or "stopped"))
            elif member.reason:
                began = fate is not Fate.NEW
                message.pending.fail(ActorDied(peer.name, member.reason, maybe_executed=began))
            else:
                message.pending.fail(ActorStopped(f"{peer.name} has stopped"))
            with self._lock:
                peer.remove(seq)
