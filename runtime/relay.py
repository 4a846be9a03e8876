"""The run's half of the link: which machines have joined, whether they are alive, and the requests that carry frames.

A machine joins and gets a number that nobody else ever gets in this run; its Link opens a session and from then on
brings frames and takes others with POST /v1/relay, one of which always waits here for what is to be taken. Any
request renews the machine's lease; without one for `lease_s` it is dead for the run, and whatever it says later is
refused with 410. The lease begins with the first session: before it the machine starts its processes, which takes
what it takes.
"""

from __future__ import annotations

import hashlib
import re
import secrets
import threading
import time
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from msgspec import Struct, json, msgpack

from .actor import Actor
from .bridge import Bridge
from .codec import Codec
from .directory import Machine
from .errors import RolecallError
from .files import write_whole
from .line import Batch, Frame, Gap, Line, Mail
from .tokens import Forbidden, Scope

__all__ = ["LEASE_S", "START_S", "Fenced", "Joined", "Opened", "Relay", "Stale"]

LEASE_S = 30.0
START_S = 60.0  # from joining to the first session
MAX_NUMBER = 1 << 20
MAX_MACHINES = 128  # at a time: a request of each waits in one of the proxy's 256 threads


class Joined(Struct, frozen=True):
    """The answer to a machine that joins: its name and number in the run, how often it must be heard of, and the secret
    by which it proves that it is this machine."""

    name: str
    number: int
    lease_s: float
    secret: str = ""


class Opened(Struct, frozen=True):
    """The answer to a Link that begins: what its requests must name."""

    session: str


class Fenced(RolecallError):
    """This machine is dead for the run."""


class Stale(RolecallError):
    """This session has ended: one of the two bridges is new. Open another."""


class _Known(Struct, frozen=True):
    """A machine that is not gone. proof: the SHA-256 of its secret; scope: of the token it joined with."""

    name: str
    proof: str
    scope: Scope


class _Remembered(Struct):
    """What outlives the proxy. last: the highest number given; lost: of the machines that are gone, name and why."""

    last: int = 0
    known: dict[int, _Known] = {}
    lost: dict[int, tuple[str, str]] = {}


@dataclass(eq=False)
class _Node:
    machine: Machine
    known: _Known
    bridge: Bridge
    thread: threading.Thread
    seen: float
    session: str = ""
    line: Line | None = None


class Relay:
    """Bridges to all machines that have joined. Its methods may be called in any thread.

    owner, incarnation, sockets: of the actor it works for, as for Bridge. elastic: the roles that others may run;
    may_send: what those may send that joined with a worker's token, by role. file: where it keeps who has joined.
    """

    def __init__(
        self,
        owner: str,
        incarnation: int,
        sockets: Path,
        roles: Mapping[str, type[Actor]],
        elastic: Sequence[str],
        may_send: Mapping[str, Container[str]],
        file: Path,
        lease_s: float = LEASE_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._owner, self._incarnation, self._sockets, self._file = owner, incarnation, sockets, file
        self._elastic, self._may_send = elastic, may_send
        self._codec, self._lease_s, self._clock = Codec(roles), lease_s, clock
        self._lock = threading.Lock()
        self._remembered = (
            json.decode(file.read_bytes(), type=_Remembered) if file.exists() else _Remembered()
        )
        self._nodes = {number: self._node(number, known) for number, known in self._remembered.known.items()}
        for number, (name, why) in self._remembered.lost.items():
            # The one before may have been killed before it could say so.
            self._node(number, _Known(name, "", "worker")).bridge.lose(why)

    def _node(self, number: int, known: _Known) -> _Node:
        machine = Machine(known.name, number)
        bridge = Bridge(
            self._owner,
            self._incarnation,
            self._sockets,
            self._codec,
            Machine(),
            machine,
            elastic=self._elastic,
        )
        thread = threading.Thread(target=bridge.run, name=f"bridge to {known.name}", daemon=True)
        thread.start()
        return _Node(machine, known, bridge, thread, self._clock())

    @property
    def machines(self) -> list[str]:
        """Those that have joined and are not given up."""
        with self._lock:
            return [node.machine.name for node in self._nodes.values()]

    def knows(self, number: int) -> bool:
        """Whether this machine has joined and is not given up."""
        with self._lock:
            return number in self._nodes

    def join(self, host: str, scope: Scope = "worker") -> Joined:
        """Give a machine its number. Raises RolecallError if there are too many."""
        with self._lock:
            number = self._remembered.last + 1
            if number >= MAX_NUMBER or len(self._nodes) >= MAX_MACHINES:
                raise RolecallError(f"{len(self._nodes)} machines are in this run, and it takes no more")
            name = f"{re.sub(r'[^A-Za-z0-9.]', '-', host)[:16] or 'machine'}-{number}"
            secret = secrets.token_hex(16)
            known = _Known(name, _proof(secret), scope)
            self._remembered.last = number
            self._remembered.known[number] = known
            self._save()  # before anybody hears of it
            self._nodes[number] = self._node(number, known)
            return Joined(name, number, self._lease_s, secret)

    def prove(self, number: int, secret: str) -> Scope:
        """Whoever asks is this machine, and not another that has the same token. The scope it joined with.

        Raises Fenced, Forbidden.
        """
        with self._lock:
            node = self._find(number)
            if not secrets.compare_digest(node.known.proof, _proof(secret)):
                raise Forbidden(f"this is not machine {number}: join to get a number")
            node.seen = self._clock()  # only now: nobody keeps alive whom he is not
            return node.known.scope

    def open(self, number: int) -> Opened:
        """A new session, for a Link that is new or was told that its last one is stale. Raises Fenced."""
        with self._lock:
            node = self._find(number)
            node.seen = self._clock()
            if node.line is not None:
                node.line.close()
            node.line, node.session = node.bridge.open(), secrets.token_hex(16)
            return Opened(node.session)

    def renew(self, number: int, session: str) -> Scope:
        """A request has come, and is not read yet. The scope its machine joined with. Raises Fenced, Stale."""
        with self._lock:
            node = self._find(number)
            if not session or not secrets.compare_digest(node.session.encode(), session.encode()):
                raise Stale("this session has ended: open another")
            node.seen = self._clock()
            return node.known.scope

    def exchange(self, number: int, session: str, body: bytes, wait_s: float | None) -> bytes:
        """Take a batch and give one. wait_s: until there are frames to give; None: give none. Raises Fenced, Stale, and
        ValueError for a body that is no batch, or speaks for others, and Forbidden."""
        batch = msgpack.decode(body, type=Batch)
        with self._lock:
            node = self._find(number)
            line = node.line
            if line is None or node.session != session:
                raise Stale("this session has ended: open another")
            node.seen = self._clock()
        node.bridge.check(batch.frames)
        if node.known.scope == "worker":
            self._check(batch.frames)
        try:
            line.receive(batch)
            answer = line.after(batch.heard, None if wait_s is None else min(wait_s, self._lease_s / 3))
        except Gap as error:
            raise Stale("frames are missing: open another session") from error
        if line.closed:
            raise Stale("this session has ended: open another")
        return answer

    def _check(self, frames: Sequence[Frame]) -> None:
        """Raises Forbidden for mail that no machine with a worker's token may send."""
        for frame in frames:
            # A replica's name is its role's and a number.
            if isinstance(frame, Mail) and frame.method not in self._may_send.get(
                frame.receiver.partition("-")[0], ()
            ):
                raise Forbidden(
                    f"{frame.receiver} takes no {frame.method!r} from machines with a worker's token: list it in the "
                    "actor's for_workers, or join with a trainer's token"
                )

    def leave(self, number: int) -> None:
        """This machine says goodbye. Raises Fenced."""
        with self._lock:
            self._lose(self._find(number), "has left the run")

    def look(self) -> None:
        """Give up the machines whose lease has run out. Raises RuntimeError if a bridge has died."""
        with self._lock:
            for node in list(self._nodes.values()):
                if not node.thread.is_alive():
                    raise RuntimeError(f"the bridge to {node.machine.name} has died: its traceback is above")
                # No session yet, also because this proxy is new, and may be while the machine starts.
                limit_s = self._lease_s if node.session else max(self._lease_s, START_S)
                if self._clock() - node.seen > limit_s:
                    self._lose(node, f"has not been heard of for {limit_s:g} s")

    def close(self) -> None:
        """The run is over: nobody waits here any longer."""
        with self._lock:
            for node in self._nodes.values():
                if node.line is not None:
                    node.line.close()

    def _find(self, number: int) -> _Node:
        node = self._nodes.get(number)
        if node is None:
            raise Fenced(
                f"machine {number} is dead for this run: it was not heard of for too long, or has left"
            )
        return node

    def _lose(self, node: _Node, what: str) -> None:
        if node.line is not None:
            node.line.close()
        name, number = node.machine.name, node.machine.number
        why = f"machine {name} {what}"
        del self._nodes[number], self._remembered.known[number]
        self._remembered.lost[number] = name, why
        self._save()  # before anybody hears of it: its word must not count after a restart either
        node.bridge.lose(why)

    def _save(self) -> None:
        write_whole(self._file, json.encode(self._remembered))


def _proof(secret: str) -> str:
    return hashlib.sha256(secret.encode()).hexdigest()
