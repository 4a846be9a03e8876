"""One incarnation of an actor in a LocalRun: its stack, what it has sent, and how that reaches others.

Messages go from one actor's hands into another's mailbox, but by the rules of an Outbox: their sender keeps them
until they are handled, and gives them again to the receiver's next incarnation.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from msgspec import Struct, msgpack

from .baton import Strand, Turns
from .child import STATES
from .control import DeadLetter, Ending, FromActor, Hello, Member, Ready, Report, page_path
from .errors import ActorDied, ActorStopped, AskTimeout, DeadlockError
from .files import write_whole
from .mailbox import Incoming, Mailbox
from .members import Members
from .page import SENDERS, Fate, Page
from .peer import Answers, Pending
from .process import Life, Spec
from .ref import Call, bind_transport, only_one
from .tree import Slot
from .wire import Header, Kind, encode_body, encode_call

__all__ = ["NEVER", "Exchange", "Incarnation", "Place"]

NEVER = float("inf")
_from_actor = msgpack.Decoder(FromActor)


@dataclass(eq=False)
class Place(Slot):
    """One actor's place in the run.

    number: in the order of turns. senders: how many actors are wired to it. life: its newest incarnation.
    kill_at: until when it may take to stop.
    """

    number: int = 0
    senders: int = 0
    incarnation: int = 0
    kill_at: float = NEVER
    life: Incarnation | None = None

    @property
    def alive(self) -> Incarnation | None:
        """The incarnation that lives now."""
        return None if self.life is None or self.life.strand.done else self.life

    @property
    def member(self) -> Member:
        return Member(self.name, self.role.name, self.incarnation, STATES[self.state], self.reason)


@dataclass
class Exchange:
    """What the actors of a run share. now: virtual seconds since the start. pages: the folder of their pages.

    changed: whether anybody's state has changed since the supervision last looked.
    running: whose turn it is. next_turn: (who has just begun to wait) -> whose turn is next, if that can be said
    without the supervision: to hand over to him directly, or not at all if it is oneself, takes half the time or none.
    """

    run_id: str
    folder: Path
    pages: Path
    places: dict[str, Place]
    turns: Turns
    next_turn: Callable[[Incarnation], Incarnation | None]
    members: Members = field(default_factory=Members)
    running: Incarnation | None = None
    now: float = 0.0
    changed: bool = True
    reports: dict[str, list[dict[str, Any]]] = field(default_factory=lambda: defaultdict(list))
    dead_letters: list[tuple[str, str, str]] = field(default_factory=list)

    def announce(self, changed: Place) -> None:
        """Everybody who lives hears how this one is now."""
        member, self.changed = changed.member, True
        self.members.hear([member])
        for place in self.places.values():
            if place.alive is not None:
                place.alive.meet(member)

    def page(self, name: str) -> Page:
        return Page(self.page_path(name), times=1 + self.places[name].senders // SENDERS)

    def page_path(self, name: str) -> Path:
        return page_path(self.pages, name)


class _Sent(Struct, eq=False):
    """A message that its receiver has not handled yet."""

    header: Header
    body: Any
    buffers: Sequence[Any]
    idempotent: bool
    pending: Pending | None


class Incarnation:
    """One incarnation of an actor: its stack, the Transport and the LifeSupport it lives on, what it has sent."""

    def __init__(self, exchange: Exchange, place: Place) -> None:
        self.exchange, self.place = exchange, place
        self.name, self.incarnation = place.name, place.incarnation
        self.mailbox = Mailbox()
        self.page = exchange.page(self.name)
        self.page.recover()
        exchange.members.hear([place.member])
        self.members = Members(exchange.members)
        self.downs = self.members.downs
        self.answers = Answers()
        self.chain: tuple[str, ...] = ()
        self.deadline = NEVER
        self.stopping = self.again = False
        self.dead_letters: list[tuple[str, str, str]] = []
        self.asking = ""  # "buffer.take" while it waits for that answer
        self.ending = Ending("killed")
        self._unhandled: defaultdict[str, dict[int, _Sent]] = defaultdict(dict)  # by receiver and seq
        self._seq = 0
        self.strand = Strand(self._body, self._keep_page)
        self.stir()

    def _body(self) -> None:
        role, exchange = self.place.role, self.exchange
        spec = Spec(
            self.name, self.incarnation, exchange.pages, exchange.folder, "", exchange.run_id, "", role.actor,
            role.args, role.kwargs,
        )  # fmt: skip
        try:
            self.life = Life(spec, self)
            self.ending = self.life.live()
        finally:
            self.page.close()  # many runs in one process would have too many open

    def _keep_page(self) -> None:
        """The next incarnation's page is as it was at the death, whatever this one notes while it is unwound."""
        path = self.exchange.page_path(self.name)
        write_whole(path, path.read_bytes())

    # --- whoever lets it run -----------------------------------------------------------------------------

    def can_go(self) -> bool:
        return self.strand.can_go(self.exchange.now)

    def stir(self) -> None:
        """What it waits for may have come: whoever changes something in here says so."""
        self.exchange.turns.stir(self.place.number)

    def go_on(self) -> None:
        self._begin_turn()
        self.strand.go_on()

    def _begin_turn(self) -> None:
        self.exchange.running = self
        bind_transport(self)

    def kill(self) -> None:
        bind_transport(self)
        self.strand.kill()

    def _pause(self, may_go: Callable[[], bool], until: float) -> None:
        self.strand.wait_for(may_go, until)
        other = self.exchange.next_turn(self)
        if other is not None:
            other._begin_turn()
        if other is not self:
            self.strand.hand_over(None if other is None else other.strand)

    # --- sending -----------------------------------------------------------------------------------------

    def ask(self, names: Sequence[str], call: Call, timeout_s: float) -> list[Any]:
        answers = [self._ask(name, call, timeout_s) for name in names]
        for answer in answers:
            self._wait_for(answer)  # for all, before the first that failed is raised
        return [answer.result() for answer in answers]

    def ask_soon(self, name: str, call: Call, timeout_s: float) -> Pending:
        return self._ask(name, call, timeout_s, self.answers)

    def _ask(self, name: str, call: Call, timeout_s: float, answers: Answers | None = None) -> Pending:
        deadline = min(self.exchange.now + timeout_s, self.deadline)
        pending = Pending(name, deadline, self._wait_for, answers=answers)
        if answers is not None:
            answers.waiting.add(pending)
        try:
            self._post(name, call, pending)
        except BaseException:
            self.answers.waiting.discard(pending)
            raise
        return pending

    def tell(self, name: str, call: Call) -> None:
        self._post(name, call, None)

    def watch(self, name: str) -> None:
        self.members.watch(name)

    def _post(self, name: str, call: Call, pending: Pending | None) -> None:
        self.strand.check()
        name = only_one(name, self.replicas(name))
        chain = (self.name,) if pending is None else (*self.chain, self.name)
        if pending is not None and name in chain:
            raise DeadlockError.of(chain, name, call.method)
        self._seq += 1
        kind = Kind.TELL if pending is None else Kind.ASK
        if pending is not None:
            pending.name, pending.seq = name, self._seq
        deadline = 0.0 if pending is None else pending.deadline
        header = Header(kind, self._seq, self.incarnation, deadline, chain, call.method)
        sent = _Sent(header, *encode_call(call.args, call.kwargs), call.idempotent, pending)
        self._unhandled[name][self._seq] = sent
        member = self.members.by_name.get(name)
        if member is not None and member.state == "up":
            self._deliver(name, sent)
        elif member is not None and member.state == "gone":
            self._fail(member)

    def _deliver(self, name: str, sent: _Sent) -> None:
        receiver = self.exchange.places[name].life
        assert receiver is not None
        receiver.mailbox.put(Incoming(sent.header, sent.body, sent.buffers, self))
        receiver.stir()

    def replicas(self, name: str) -> Sequence[str]:
        return self.members.replicas.get(name, [name])

    def pick(self, name: str) -> str:
        return self.members.pick(name, lambda replica: len(self._unhandled[replica]))

    def _wait_for(self, pending: Pending) -> None:
        while not pending.done:
            if self.stopping:
                raise ActorStopped(f"{self.name} is being stopped")
            if self.exchange.now >= pending.deadline:
                self._time_out(pending)
                return
            method = self._unhandled[pending.name][pending.seq].header.method
            self.asking = f"{pending.name}.{method}"
            self._pause(lambda: pending.done or self.stopping, pending.deadline)
            self.asking = ""

    def _time_out(self, pending: Pending) -> None:
        self._unhandled[pending.name].pop(pending.seq, None)  # its receiver may have passed over it
        pending.fail(AskTimeout(f"no answer from {pending.name} within the deadline"))

    def expire(self, now: float) -> None:
        for pending in self.answers.late(now):
            self._time_out(pending)

    # --- as an Outbox does -------------------------------------------------------------------------------

    def meet(self, member: Member) -> None:
        """This one has changed: of a thousand others it concerns few."""
        self.members.news = True
        if self.members.watches(member.name):
            self.members.hear([member])
        elif not self._unhandled.get(member.name):
            return
        match member.state:
            case "up":
                for sent in self._unhandled[member.name].values():
                    self._deliver(member.name, sent)
            case "down":
                self._lose(member)
            case "gone":
                self._fail(member)
            case _:
                pass
        if member.state != "up" or self.downs:
            self.stir()

    def _lose(self, member: Member) -> None:
        """It died: an ask that had begun and must not run twice ends here; the rest waits for the next."""
        for sent, fate in self._fates(member.name):
            if sent.pending is not None and not sent.idempotent and fate is not Fate.NEW:
                del self._unhandled[member.name][sent.header.seq]
                sent.pending.fail(ActorDied(member.name, member.reason, maybe_executed=True))

    def _fail(self, member: Member) -> None:
        """It is gone for good: tell every asker, and write down what was only told."""
        for sent, fate in self._fates(member.name):
            if sent.pending is None:
                self.dead_letters.append((member.name, sent.header.method, member.reason or "stopped"))
            elif member.reason:
                began = fate is not Fate.NEW
                sent.pending.fail(ActorDied(member.name, member.reason, maybe_executed=began))
            else:
                sent.pending.fail(ActorStopped(f"{member.name} has stopped"))
        self._unhandled[member.name].clear()

    def _fates(self, name: str) -> list[tuple[_Sent, Fate]]:
        unhandled = list(self._unhandled[name].values())
        if not unhandled:
            return []
        page = self.exchange.page(name)
        return [(sent, page.fate(self.incarnation, sent.header.seq)) for sent in unhandled]

    # --- LifeSupport -------------------------------------------------------------------------------------

    def now(self) -> float:
        return self.exchange.now

    def now_ns(self) -> int:
        return int(self.exchange.now * 1e9)

    def wait(self, timeout_s: float | None) -> None:
        until = NEVER if timeout_s is None else self.exchange.now + timeout_s
        for pending in self.answers.waiting:
            until = min(until, pending.deadline)
        self._pause(self._has_news, until)
        if self.answers.waiting:
            self.expire(self.exchange.now)
        self._forget_the_dead()

    def _has_news(self) -> bool:
        return self.mailbox.ready or bool(self.downs or self.answers or self.dead_letters) or self.stopping

    def wait_for_stop(self, timeout_s: float) -> None:
        self._pause(lambda: self.stopping, self.exchange.now + timeout_s)

    def _forget_the_dead(self) -> None:
        if self.members.news:
            self.members.news = False
            if senders := self.page.senders:
                members = self.members.by_name.values()
                for sender in senders - {member.incarnation for member in members if member.state != "gone"}:
                    self.page.forget(sender)

    def spend(self, seconds: float) -> None:
        """Be busy for so long."""
        self._pause(lambda: False, self.exchange.now + seconds)

    def breathe(self) -> None:
        """Between two messages of many: everybody else's turn."""
        self._pause(lambda: True, self.exchange.now)

    def settle(self, timeout_s: float) -> None:
        until = self.exchange.now + timeout_s
        while self._told() and self.exchange.now < until:
            self._pause(lambda: not self._told(), until)
        reason = f"{self.name} ended before it heard that this was handled"
        self.dead_letters += [(name, sent.header.method, reason) for name, sent in self._told()]

    def _told(self) -> list[tuple[str, _Sent]]:
        waiting = [(name, sent) for name, all_sent in self._unhandled.items() for sent in all_sent.values()]
        return [(name, sent) for name, sent in waiting if sent.pending is None]

    def handled(self, message: Incoming) -> None:
        self.strand.check()
        message.route._unhandled[self.name].pop(message.header.seq, None)
        message.route.stir()

    def answer(self, message: Incoming, kind: Kind, value: Any) -> None:
        self.strand.check()
        body, buffers = encode_body(value)
        sent = message.route._unhandled[self.name].pop(message.header.seq, None)
        if sent is not None:  # otherwise its asker waits no more
            sent.pending.answer(kind, body, buffers)
            message.route.stir()

    def to_supervisor(self, frame: bytes) -> None:
        self.strand.check()
        match _from_actor.decode(frame):
            case Hello():
                self.members.news = True
            case Ready():
                self.place.state = "up"
                self.exchange.announce(self.place)
            case Report(values=values):
                self.exchange.reports[self.name].append(values)
            case DeadLetter(receiver=receiver, method=method, reason=reason):
                self.exchange.dead_letters.append((receiver, method, reason))
