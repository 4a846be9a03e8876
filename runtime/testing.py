"""LocalRun: a whole graph in one process, in a fixed order, one thing at a time.

    run = LocalRun(build(Config(steps=3)), folder=tmp_path)
    run.run()
    assert run.reports["trainer"][-1]["step"] == 3

The same actors, mailboxes, NotYet, deadlines and steps as in a run of processes, but every choice of who
goes next is fixed and time is virtual: it moves only when nobody can go on, and then to the next timer. So a
run repeats bit for bit, and a deadline that passes means that everybody waits: a deadlock, named as such.

Each actor has a thread only so that it can wait in the middle of a handler; exactly one runs at any moment.
"""

from __future__ import annotations

import shutil
import threading
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from msgspec import msgpack

from .actor import Actor, Down
from .control import DeadLetter, FromActor, Ready, Report, page_path
from .errors import ActorStopped, DeadlockError
from .graph import Graph, Role
from .mailbox import Incoming, Mailbox
from .page import Page
from .process import Life, Spec
from .ref import Call, bind_transport, only_one
from .wire import Header, Kind, decode_body, encode_body, encode_call

__all__ = ["LocalRun"]

_from_actor = msgpack.Decoder(FromActor)


class LocalRun:
    """Runs `graph` in this process. `folder` is its run folder.

    reports:      what each actor reported, in order, by name.
    dead_letters: (receiver, method, reason).
    turns:        who ran, in order: two runs of one graph have the same.
    now:          virtual seconds since the start.
    """

    def __init__(self, graph: Graph, *, folder: Path, run: str = "local") -> None:
        self.graph, self.folder, self.run_id = graph, folder, run
        self.reports: dict[str, list[dict[str, Any]]] = defaultdict(list)
        self.dead_letters: list[tuple[str, str, str]] = []
        self.turns: list[str] = []
        self.now = 0.0
        self._pages = folder / "pages"
        # Numbers start at 1 again, so an earlier run's pages mean other messages.
        shutil.rmtree(self._pages, ignore_errors=True)
        self._pages.mkdir(parents=True)
        self._actors: dict[str, _LocalActor] = {}
        for role in graph:
            for name in role.members:
                self._actors[name] = _LocalActor(self, role, name, len(self._actors) + 1)
        self._back = threading.Semaphore(0)
        self._current: _LocalActor | None = None

    def actor(self, name: str) -> Actor:
        """The actor itself, to look at from a test."""
        return self._actors[name].life.actor

    def run(self) -> None:
        """Until the roles of `graph.until` have finished. Raises what an actor dies of, or DeadlockError."""
        bind_transport(self)
        try:
            self._play()
            self._stop()
        finally:
            self._kill()
            bind_transport(None)

    def _play(self) -> None:
        for actor in self._actors.values():
            actor.start()
            while not (actor.ready or actor.done):
                self._turn()
        ends = [self._actors[name] for role in self.graph.ends_with for name in self.graph[role].members]
        while not all(actor.done for actor in ends):
            self._turn()

    def _stop(self) -> None:
        for actor in reversed(self._actors.values()):
            actor.stopping = True
            while not actor.done:
                self._turn()

    def _kill(self) -> None:
        """End the threads of a run that failed."""
        for actor in self._actors.values():
            actor.killed = True
            if actor.started and not actor.done:
                actor.go.release()
                self._back.acquire()

    def _turn(self) -> None:
        """Let everybody who can go on do so once, in the order of the graph."""
        went = False
        for actor in self._actors.values():
            if actor.started and not actor.done and actor.can_go():
                self._resume(actor)
                went = True
        if not went:
            self._let_time_pass()

    def _let_time_pass(self) -> None:
        waiting = [actor for actor in self._actors.values() if actor.started and not actor.done]
        until = min((actor.until for actor in waiting), default=float("inf"))
        if until == float("inf") or any(actor.asking and actor.until == until for actor in waiting):
            waits = [f"{actor.name} waits for {actor.asking or 'a message'}" for actor in waiting]
            raise DeadlockError(f"nobody can go on: {'; '.join(waits)}")
        self.now = until

    def _resume(self, actor: _LocalActor) -> None:
        self.turns.append(actor.name)
        self._current = actor
        actor.go.release()
        self._back.acquire()
        if actor.error is not None:
            error, actor.error = actor.error, None
            raise error

    # --- the Transport of whoever runs now ---------------------------------------------------------------

    def ask(self, names: Sequence[str], call: Call, timeout_s: float) -> list[Any]:
        answers = [self.ask_soon(name, call, timeout_s) for name in names]
        return [answer.result() for answer in answers]

    def ask_soon(self, name: str, call: Call, timeout_s: float) -> _Answer:
        assert self._current is not None
        return self._current.ask_soon(name, call, timeout_s)

    def tell(self, name: str, call: Call) -> None:
        assert self._current is not None
        self._current.post(name, call, None)

    def replicas(self, name: str) -> Sequence[str]:
        return self.graph[name].members if name in self.graph else [name]

    def pick(self, name: str) -> str:
        return min(self.replicas(name), key=lambda replica: len(self._actors[replica].mailbox))

    def watch(self, name: str) -> None:
        assert self._current is not None


class _Killed(BaseException):
    """Unwinds the thread of an actor whose run has failed."""


class _Answer:
    """What `asker` waits for: the answer of `what`, as in "buffer.take"."""

    def __init__(self, asker: _LocalActor, what: str, deadline: float) -> None:
        self.asker, self.what, self.deadline = asker, what, deadline
        self.kind: Kind | None = None
        self.body, self.buffers = b"", []

    @property
    def done(self) -> bool:
        return self.kind is not None

    def set(self, kind: Kind, value: Any) -> None:
        self.kind, (self.body, self.buffers) = kind, encode_body(value)

    def result(self) -> Any:
        self.asker.wait_for(self)
        value = decode_body(self.body, self.buffers)
        if self.kind is Kind.ERROR:
            raise value
        return value


class _LocalActor:
    """One actor's thread, and the LifeSupport it lives on."""

    def __init__(self, run: LocalRun, role: Role, name: str, incarnation: int) -> None:
        self.run, self.role, self.name, self.incarnation = run, role, name, incarnation
        self.mailbox = Mailbox()
        self.page = Page(page_path(run._pages, name))
        self.chain: tuple[str, ...] = ()
        self.deadline = float("inf")
        self.stopping = self.again = False
        self.downs: deque[Down] = deque()
        self.dead_letters: list[tuple[str, str, str]] = []
        self.started = self.ready = self.done = self.killed = False
        self.error: BaseException | None = None
        self.asking = ""  # "buffer.take" while it waits for that answer
        self.until = float("inf")  # virtual time at which it goes on in any case
        self.go = threading.Semaphore(0)
        self._may_go: Callable[[], bool] = lambda: True
        self._seq = 0
        self._thread = threading.Thread(target=self._body, name=name, daemon=True)
        self.life = Life(
            Spec(
                name, incarnation, run._pages, run.folder, "", run.run_id, "", {}, role.actor, role.args,
                role.kwargs,
            ),
            self,
        )  # fmt: skip

    def start(self) -> None:
        self.started = True
        self._thread.start()

    def can_go(self) -> bool:
        return self._may_go() or self.until <= self.run.now or self.stopping

    def _body(self) -> None:
        try:
            self._wait_for_baton()
            self.life.live()
        except BaseException as error:  # noqa: BLE001  handed to LocalRun.run, which raises it
            self.error = error
        self.done = True
        self.run._back.release()

    def _wait_for_baton(self) -> None:
        self.go.acquire()
        if self.killed:
            raise _Killed

    def _pause(self, may_go: Callable[[], bool], until: float) -> None:
        self._may_go, self.until = may_go, until
        self.run._back.release()
        self._wait_for_baton()
        self._may_go, self.until = (lambda: True), float("inf")

    # --- sending -----------------------------------------------------------------------------------------

    def ask_soon(self, name: str, call: Call, timeout_s: float) -> _Answer:
        return self.post(name, call, min(self.run.now + timeout_s, self.deadline))

    def wait_for(self, answer: _Answer) -> None:
        while not answer.done:
            if self.stopping:
                raise ActorStopped(f"{self.name} is being stopped")
            self.asking = answer.what
            self._pause(lambda: answer.done, answer.deadline)
            self.asking = ""

    def post(self, name: str, call: Call, deadline: float | None) -> _Answer:
        name = only_one(name, self.run.replicas(name))
        chain = () if deadline is None else (*self.chain, self.name)
        if name in chain:
            raise DeadlockError.of(chain, name, call.method)
        self._seq += 1
        kind = Kind.TELL if deadline is None else Kind.ASK
        header = Header(kind, self._seq, self.incarnation, deadline or 0.0, chain, call.method)
        answer = _Answer(self, f"{name}.{call.method}", deadline or float("inf"))
        receiver = self.run._actors[name]
        message = Incoming(header, *encode_call(call.args, call.kwargs), answer)
        if receiver.done:
            answer.set(Kind.ERROR, ActorStopped(f"{name} has stopped"))
            if kind is Kind.TELL:
                self.run.dead_letters.append((name, call.method, "stopped"))
        else:
            receiver.mailbox.put(message)
        return answer

    # --- LifeSupport -------------------------------------------------------------------------------------

    def now(self) -> float:
        return self.run.now

    def now_ns(self) -> int:
        return int(self.run.now * 1e9)

    def wait(self, timeout_s: float | None) -> None:
        until = float("inf") if timeout_s is None else self.run.now + timeout_s
        self._pause(lambda: self.mailbox.ready or self.stopping, until)

    def breathe(self) -> None:
        """Nothing waits to be sent here."""

    def settle(self, timeout_s: float) -> None:
        """What was told lies in its receiver's mailbox already."""

    def handled(self, message: Incoming) -> None:
        message.route.set(Kind.DONE, None)

    def answer(self, message: Incoming, kind: Kind, value: Any) -> None:
        message.route.set(kind, value)

    def to_supervisor(self, frame: bytes) -> None:
        match _from_actor.decode(frame):
            case Ready():
                self.ready = True
            case Report(values=values):
                self.run.reports[self.name].append(values)
            case DeadLetter(receiver=receiver, method=method, reason=reason):
                self.run.dead_letters.append((receiver, method, reason))
            case _:
                pass
