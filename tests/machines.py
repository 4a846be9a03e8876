"""Two machines in one process and one thread, each with an actor, a supervisor's word, and a bridge to the other."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import tempfile
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from msgspec import Struct, msgpack
from rolecall import Actor, NotYet
from rolecall.runtime import control
from rolecall.runtime.bridge import Bridge
from rolecall.runtime.codec import Codec
from rolecall.runtime.control import NODE_BITS, Member, Membership
from rolecall.runtime.directory import Machine
from rolecall.runtime.endpoint import Endpoint
from rolecall.runtime.far import Abroad
from rolecall.runtime.line import Batch, Gap, Line
from rolecall.runtime.process import Life, Spec
from rolecall.runtime.ref import Answer, Call
from rolecall.runtime.supervisor import _from_anybody
from rolecall.runtime.switchboard import Switchboard


class Note(Struct, frozen=True):
    sender: str
    number: int


class Counting(Actor):
    """Remembers what it is told and asked, in order, over all its incarnations."""

    def __init__(self, told: list[Note], asked: list[Note]) -> None:
        self.told, self.asked = told, asked
        self.waited: set[int] = set()

    def tell_me(self, note: Note) -> None:
        self.told.append(note)

    def who_tells(self) -> None:
        self.told.append(Note(self.sender, 0))

    def ask_me(self, note: Note) -> int:
        self.asked.append(note)
        return note.number

    def ask_me_later(self, note: Note) -> int:
        """Is set aside when it comes first."""
        if note.number not in self.waited:
            self.waited.add(note.number)
            raise NotYet
        self.asked.append(note)
        return note.number

    def fail(self) -> None:
        raise ValueError("no")

    def take(self, thing: object) -> None: ...


CODEC = Codec({"a": Counting, "b": Counting})


class Computer:
    """One machine: who is there, a supervisor that only says who lives where, an actor, and a bridge."""

    def __init__(self, here: Machine, there: Machine, role: str) -> None:
        self.here, self.there, self.role = here, there, role
        self.sockets = Path(tempfile.mkdtemp(prefix="rolecall-", dir="/tmp"))
        self.switchboard = Switchboard(self.sockets)
        self.abroad = Abroad()
        self.incarnation = here.number << NODE_BITS
        self.dead_letters = 0
        self.told: list[Note] = []  # what its actor, in all its incarnations, was told and asked
        self.asked: list[Note] = []
        self.start_actor()
        self.start_bridge()

    def start_actor(self) -> None:
        self.incarnation += 1
        self.member = Member(self.role, self.role, self.incarnation, "up")
        self.endpoint = Endpoint(self.role, self.incarnation, self.sockets)
        self.endpoint._late.set()  # no thread sends what only waits to be sent: all is done by `turn`
        spec = Spec(
            self.role,
            self.incarnation,
            self.sockets,
            self.sockets,
            "",
            "run",
            "",
            Counting,
            (self.told, self.asked),
            {},
        )
        self.life = Life(spec, self.endpoint)
        self.endpoint.wait(0.0)
        self.turn()

    def start_bridge(self) -> None:
        self.incarnation += 1
        self.bridge = Bridge("bridge", self.incarnation, self.sockets, CODEC, self.here, self.there)

    def kill_bridge(self) -> None:
        """As SIGKILL would: nothing that it has in memory is passed on."""
        self._close_bridge()
        self.turn()  # it may have said its first word since anybody looked
        for who in self.abroad.bridges["bridge"]:
            self.switchboard.forget(*who)
        self.turn()
        self.tell(self.abroad.lose("bridge", ended=False))
        self.start_bridge()

    def kill_actor(self) -> None:
        """As SIGKILL would, between two messages; the next incarnation is up at once."""
        self._close_actor()
        self.switchboard.forget(self.role, self.member.incarnation)
        self.turn()
        self.tell([Member(self.role, self.role, self.member.incarnation, "down", "killed by SIGKILL")])
        self.start_actor()
        self.tell([self.member])

    def turn(self) -> None:
        """Of the supervisor."""
        self.switchboard.poll(0.0)
        for caller, frame in self.switchboard.heard():
            match message := _from_anybody.decode(frame):
                case control.Hello(name=name, incarnation=incarnation):
                    self.switchboard.introduce(caller, name, incarnation)
                    caller.send(msgpack.encode(self.everybody()))
                case control.Bridge():
                    self.switchboard.introduce(caller, *self.abroad.add(message))
                    caller.send(msgpack.encode(self.everybody()))
                case control.FarMembers(members=members):
                    self.abroad.hear(self.switchboard.actor(caller)[0], members)
                    self.tell(members)
                case control.DeadLetter():
                    self.dead_letters += 1

    def tell(self, members: list[Member]) -> None:
        frame = msgpack.encode(Membership(members))
        bridges = [name for names in self.abroad.bridges.values() for name in names]
        for name in ((self.role, self.member.incarnation), *bridges):
            self.switchboard.send(*name, frame)

    def everybody(self) -> Membership:
        return Membership([self.member, *self.abroad.members.values()])

    def handle(self) -> None:
        """One message, if there is one."""
        self.endpoint.wait(0.0)
        message = self.endpoint.mailbox.next()
        if message is None or self.life._handle(message):
            self.endpoint.mailbox.changed()  # as a step would

    def _close_bridge(self) -> None:
        bridge: Any = self.bridge
        connections = [one.connection for one in (*bridge._callers.values(), *bridge._ways.values())]
        listeners = [stand.listener for stand in bridge._who.stands.values()]
        for one in (*connections, *listeners, bridge._supervisor):
            one.close()
        bridge._poller.close()
        os.close(bridge._wake)

    def _close_actor(self) -> None:
        endpoint: Any = self.endpoint
        peers = [peer.connection for peer in endpoint._outbox.peers.values() if peer.connection]
        for one in (*endpoint._callers.values(), *peers, endpoint._supervisor, endpoint._inbox):
            one.close()
        endpoint._poller.close()
        os.close(endpoint._wake)

    def close(self) -> None:
        self._close_bridge()
        self._close_actor()
        self.switchboard.close()
        shutil.rmtree(self.sockets)


@dataclass
class Network:
    """Carries batches between the two bridges of a session. faults: how often one is dropped, doubled or late."""

    run: Computer
    node: Computer
    rng: random.Random
    faults: float = 0.0
    on_its_way: list[tuple[bool, int, bytes]] = field(default_factory=list)  # up?, session, batch
    session: int = 0
    heard: dict[bool, int] = field(default_factory=dict)  # by who gets it: what the other said it has heard

    def __post_init__(self) -> None:
        self.open()

    def open(self) -> None:
        """One of the bridges is new."""
        self.session += 1
        self.lines: dict[bool, Line] = {True: self.node.bridge.open(), False: self.run.bridge.open()}
        self.heard = {True: 0, False: 0}

    def carry(self) -> None:
        up = self.rng.random() < 0.5
        batch = self.lines[up].after(self.heard[up], 0.0)
        copies = 1
        if self.rng.random() < self.faults:
            copies = self.rng.choice((0, 2))
        self.on_its_way += [(up, self.session, batch)] * copies
        while self.on_its_way and self.rng.random() > self.faults:
            at = self.rng.randrange(len(self.on_its_way)) if self.rng.random() < self.faults else 0
            self.arrive(*self.on_its_way.pop(at))

    def arrive(self, up: bool, session: int, data: bytes) -> None:
        if session != self.session:
            return  # 409
        batch = msgpack.decode(data, type=Batch)
        receiver = self.run if up else self.node
        receiver.bridge.check(batch.frames)
        with contextlib.suppress(Gap):  # an earlier batch is late: it comes again
            self.lines[not up].receive(batch)
            self.heard[not up] = max(self.heard[not up], batch.heard)


class World:
    def __init__(self, seed: int, faults: float = 0.0) -> None:
        self.rng = random.Random(seed)
        run, node = Machine(), Machine("gpu-1", 1)
        self.run, self.node = Computer(run, node, "a"), Computer(node, run, "b")
        self.both = (self.run, self.node)
        self.network = Network(self.run, self.node, self.rng, faults)
        self.told: Counter[int] = Counter()  # by each incarnation
        self.asks = 0
        self.answers: dict[int, Answer[Any]] = {}  # of those whose asker lives
        self.settle()

    def peer(self, computer: Computer) -> str:
        return "b" if computer is self.run else "a"

    def turn(self) -> None:
        """Somebody does something."""
        what = self.rng.randrange(4)
        computer = self.rng.choice(self.both)
        if what == 0:
            computer.turn()
        elif what == 1:
            computer.bridge.turn(0.0)
        elif what == 2:
            self.network.carry()
        else:
            computer.handle()

    def settle(self, turns: int = 400) -> None:
        for _ in range(turns):
            self.turn()

    def send(self, computer: Computer) -> None:
        receiver, number = self.peer(computer), self.rng.randrange(3)
        if number == 0:
            sender = computer.member.incarnation
            self.told[sender] += 1
            note = Note(str(sender), self.told[sender])
            computer.endpoint.tell(receiver, Call.of(Counting.tell_me, (note,), {}))
        else:
            handler = Counting.ask_me if number == 1 else Counting.ask_me_later
            call = Call.of(handler, (Note(computer.role, self.asks),), {})
            self.answers[self.asks] = computer.endpoint.ask_soon(receiver, call, 600.0)
            self.asks += 1

    def kill_actor(self, computer: Computer) -> None:
        endpoint = computer.endpoint
        computer.kill_actor()
        mine = {
            id(peer.pending) for one in endpoint._outbox.peers.values() for peer in one.unhandled.values()
        }
        self.answers = {number: answer for number, answer in self.answers.items() if id(answer) not in mine}

    def restart_bridge(self, computer: Computer) -> None:
        computer.kill_bridge()
        self.network.open()

    def ask(self, computer: Computer, handler: Any, *args: Any) -> Any:
        answer = computer.endpoint.ask_soon(self.peer(computer), Call.of(handler, args, {}), 600.0)
        for _ in range(20_000):
            if answer.done:
                return answer.result()
            self.turn()
        raise AssertionError("no answer")

    def close(self) -> None:
        for computer in self.both:
            computer.close()
