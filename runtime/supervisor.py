"""Who starts, watches, restarts and stops the actors of a run: OTP's supervisor over plain processes.

The supervisor is control plane only. It spawns, notices deaths (pidfd) and hangs, does what the Tree decides, and
tells everybody who lives where; messages between actors never pass through it.
"""

from __future__ import annotations

import os
import random
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

from msgspec import json, msgpack

from .child import Child, describe_exit, tail
from .control import (
    NODE_BITS,
    Bridge,
    DeadLetter,
    FarMembers,
    FromActor,
    FromBridge,
    FromCommand,
    Hello,
    ListActors,
    Member,
    Membership,
    Ready,
    Report,
    Restarting,
    RestartRole,
    RunStatus,
    Stop,
    StopRun,
)
from .errors import Unrecoverable
from .far import Abroad, observe
from .files import first_incarnation
from .forkserver import ForkServer, become_subreaper, check_interpreter
from .graph import Graph, Role
from .hang import HangWatch
from .leftovers import Leftovers, kill_marked
from .page import RECEIVERS
from .process import Spec
from .sockets import Connection, allow_descriptors
from .status import run_status
from .switchboard import Switchboard
from .tree import Tree, Verdict

__all__ = ["Observer", "Outcome", "Supervisor"]

LEFTOVERS_TIMEOUT_S = 2.0

_from_anybody = msgpack.Decoder(FromActor | FromCommand | FromBridge)


class Observer(Protocol):
    """Who watches a run: the command line, or a test."""

    def on_report(self, name: str, values: dict[str, Any]) -> None: ...
    def on_state(self, name: str, state: str) -> None: ...
    def on_death(self, name: str, reason: str, restart_in_s: float | None) -> None: ...
    def on_dead_letter(self, receiver: str, method: str, reason: str) -> None: ...


@dataclass(frozen=True)
class Outcome:
    """How a run ended. exit_code: 0 finished, 1 failed, 2 a mistake of the user's, 130 stopped by request."""

    exit_code: int
    story: str
    restarts: int
    asked: bool = False  # to stop, if only after it had begun to end of something else


@dataclass
class Supervisor:
    """Runs a graph: `outcome = Supervisor(graph, ...).run()`.

    run, folder: the run's id and its folder. recipe: what `load_recipe` takes, so that children can.
    node, number: this machine's name and number in the run (see `NODE_BITS`).
    clock, rng: for back-off and restart intensity. frozen_s: how long a process may be stopped by SIGSTOP.
    """

    graph: Graph
    run_id: str
    folder: Path
    recipe: str
    observer: Observer
    node: str = ""
    number: int = 0
    clock: Callable[[], float] = time.monotonic
    rng: random.Random = field(default_factory=random.Random)
    frozen_s: float = 5.0

    def __post_init__(self) -> None:
        members = sum(len(role.members) for role in self.graph)
        if members > RECEIVERS:
            raise Unrecoverable(
                f"graph {self.graph.name} has {members} actors on one machine, and there is room for {RECEIVERS}: "
                "let other machines join with some of them",
                exit_code=2,
            )
        placed = {role.python: role.name for role in self.graph if role.python and role.replicas}
        for python, name in placed.items():
            check_interpreter(python, name)
        # Mode 0700, and short whatever TMPDIR says: socket paths end at 107 bytes.
        self.sockets = Path(tempfile.mkdtemp(prefix="rolecall-", dir="/tmp"))
        self.children = [
            Child(role, position, name, sockets=self.sockets)
            for position, role in enumerate(self.graph)
            for name in role.members
        ]
        self._by_name = {child.name: child for child in self.children}
        self._tree = Tree(self.graph, self.children, self.rng)
        self._incarnation = (self.number << NODE_BITS) + first_incarnation(self.folder)
        self._abroad = Abroad()
        self._forks: ForkServer | None = None
        self._forks_not_before = 0.0
        self._leftovers = Leftovers()
        self._ending: Outcome | None = None
        self._stop_signals = 0
        self._dead_letters = 0
        self._changed: dict[str, Child] = {}  # of whom not everybody has heard yet
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    # --- the run -----------------------------------------------------------------------------------------

    def run(self) -> Outcome:
        """Start everybody, keep them alive until the run is over, stop everybody."""
        become_subreaper()
        self._hangs = HangWatch(self.frozen_s)
        allow_descriptors()
        self._switchboard = Switchboard(self.sockets)
        self._switchboard.add(self._wake)
        try:
            while self._ending is None or any(child.alive for child in self.children):
                self._advance()
                self._listen(self._patience_s())
                self._hangs.look(self.children, self._forks, time.monotonic())
                self._check_end()
        finally:
            self._close()
        assert self._ending is not None
        return replace(self._ending, asked=self._stop_signals > 0)

    def stop(self) -> None:
        """Ask for an orderly end; twice: kill everybody now. Safe to call from a signal handler."""
        self._stop_signals += 1
        os.eventfd_write(self._wake, 1)

    def _check_end(self) -> None:
        if self._stop_signals:
            self._end(Outcome(130, "stopped by request", self.restarts))
            if self._stop_signals > 1:
                for child in self.children:
                    child.kill()
        if self._tree.finished:
            self._end(Outcome(0, "finished", self.restarts))

    def _end(self, outcome: Outcome) -> None:
        if self._ending is None:
            self._ending = outcome
            self._tree.ending = True

    @property
    def restarts(self) -> int:
        return sum(child.restarts for child in self.children)

    def _close(self) -> None:
        self._end(Outcome(1, "the supervisor itself failed", self.restarts))  # if it did: nobody is restarted
        if self._forks is not None:
            self._bury_forkserver(self._forks)
        for child in self.children:
            child.kill()
            if child.alive:
                self._reap(child)
        self._switchboard.poll(0.0)
        self._hear_all()
        kill_marked(self.sockets, LEFTOVERS_TIMEOUT_S)
        self._leftovers.reap(LEFTOVERS_TIMEOUT_S)
        self._switchboard.close()
        os.close(self._wake)
        shutil.rmtree(self.sockets)

    # --- starting and stopping, in order -----------------------------------------------------------------

    def _advance(self) -> None:
        (self.folder / "logs").mkdir(parents=True, exist_ok=True)
        if self._forks is None and self._ending is None and self.clock() >= self._forks_not_before:
            sessions = [child.pid for child in self.children if child.alive]
            self._forks = ForkServer(self.folder / "logs" / "forkserver.log", self.sockets, sessions)
            self._switchboard.add(self._forks.fileno())
        for child in self._tree.to_stop():
            self._stop_child(child)
        if self._forks is not None:
            for child in self._tree.to_start(self.clock()):
                self._spawn(child, self._forks)

    def _spawn(self, child: Child, forks: ForkServer) -> None:
        self._incarnation += 1
        child.incarnation, child.state = self._incarnation, "spawning"
        role = child.role
        spec = Spec(
            child.name, child.incarnation, self.sockets, self.folder, self.node, self.run_id, self.recipe,
            role.actor, role.args, role.kwargs,
        )  # fmt: skip
        forks.send(
            {
                "name": child.name,
                "spec": str(spec.write()),
                "log": str(self.folder / "logs" / f"{child.name}.log"),
                "preloads": role.actor.preloads,
                "fresh": _why_fresh(role),
                "python": role.python or sys.executable,
                "environment": child.environment,
            }
        )

    def _stop_child(self, child: Child) -> None:
        now = self.clock()
        if child.hung:
            return  # it is killed when it has had time for its stacks
        if child.state == "up":
            child.state, child.kill_at = "stopping", now + child.role.actor.stop_timeout_s
            stop = Stop(again=child.again and self._ending is None)
            self._switchboard.send(child.name, child.incarnation, msgpack.encode(stop))
        elif child.state != "stopping" or now >= child.kill_at:
            child.kill()  # one that is still starting has nothing to give back

    def _patience_s(self) -> float:
        now = self.clock()
        times = [child.not_before for child in self.children if child.state == "waiting"]
        times += [child.kill_at for child in self.children if child.state == "stopping"]
        times += [self._forks_not_before] if self._forks is None else []
        waits = [at - now for at in times if at > now]
        return max(0.0, min([self._hangs.next_look - time.monotonic(), *waits]))

    # --- hearing -----------------------------------------------------------------------------------------

    def _listen(self, timeout_s: float) -> None:
        ready = self._switchboard.poll(timeout_s)
        if self._forks is not None:
            self._forks.flush()
        if self._wake in ready:
            os.eventfd_read(self._wake)
        if self._forks is not None and self._forks.fileno() in ready:
            self._hear_forkserver(self._forks)
        self._hear_all()
        for child in self.children:
            if child.alive and child.pidfd in ready:
                self._reap(child)
        self._leftovers.reap()
        self._tell_changes()

    def _hear_all(self) -> None:
        for caller, frame in self._switchboard.heard():
            self._hear(caller, _from_anybody.decode(frame))

    def _hear(self, caller: Connection, message: FromActor | FromCommand | FromBridge) -> None:
        match message:
            case ListActors():
                caller.send(json.encode(self.status()))
            case StopRun():
                self.stop()
            case RestartRole(name=name):
                caller.send(json.encode(self.restart(name)))
            case Hello(name=name, incarnation=incarnation):
                self._switchboard.introduce(caller, name, incarnation)
                caller.send(msgpack.encode(self._everybody()))
            case Bridge():
                self._switchboard.introduce(caller, *self._abroad.add(message))
                caller.send(msgpack.encode(self._everybody()))
            case FarMembers(members=members):
                self._abroad.hear(self._switchboard.actor(caller)[0], members)
                observe(self.observer, members)
                self._tell(members)
            case _:
                self._hear_actor(*self._switchboard.actor(caller), message)

    def _hear_actor(self, name: str, incarnation: int, message: Ready | Report | DeadLetter) -> None:
        match message:
            case Ready():
                child = self._by_name[name]
                # Otherwise it has died or is being stopped by now.
                if child.incarnation == incarnation and child.state in ("spawning", "starting"):
                    child.state = "up"
                    self._announce(child)
            case Report(values=values):
                self.observer.on_report(name, values)
            case DeadLetter(receiver=receiver, method=method, reason=reason):
                self._dead_letters += 1
                with (self.folder / "dead_letters.jsonl").open("ab") as file:
                    file.write(json.encode({"to": receiver, "message": method, "reason": reason}) + b"\n")
                self.observer.on_dead_letter(receiver, method, reason)

    def _hear_forkserver(self, forks: ForkServer) -> None:
        if (reply := forks.reply()) is not None:
            self._adopt(reply)
            return
        # It died. Whoever it had not forked yet is asked for again.
        status = self._bury_forkserver(forks)
        reason = forks.hung or describe_exit(-status if status < 0 else status << 8)
        verdict = self._tree.died_beside("forkserver", reason, self.clock())
        self._heed(verdict, "forkserver")
        self._forks_not_before = self.clock() + (verdict.deaths[0].restart_in_s or 0.0)
        for child in self.children:
            if child.state == "spawning":
                child.state, child.doomed, child.again = "waiting", "", False

    def _adopt(self, reply: dict[str, Any]) -> None:
        child = self._by_name[reply["name"]]
        child.adopt(reply["pid"])
        self._switchboard.add(child.pidfd)

    def _bury_forkserver(self, forks: ForkServer) -> int:
        """Kill it if it lives, and adopt whom it has forked. Returns its exit status."""
        status = forks.kill()
        while reply := forks.reply():
            self._adopt(reply)
        self._leftovers.add(forks.pid)
        self._hangs.forget(forks.pid)
        forks.close()
        self._forks = None
        return status

    # --- deaths ------------------------------------------------------------------------------------------

    def _reap(self, child: Child) -> None:
        self._leftovers.add(child.pid)  # before its number is free to be another's
        ending = child.reap()
        for who in ((child.name, child.incarnation), *self._abroad.bridges.get(child.name, ())):
            self._switchboard.forget(*who)
        self._hear_all()  # what a process said before it died comes before its death
        self._hangs.forget(child.pid)
        if self._forks is not None:
            self._forks.send({"forget": child.pid})
        if ending.kind == "unrecoverable":
            child.state, child.reason = "gone", ending.reason
            self._end(Outcome(ending.exit_code, ending.reason, self.restarts))
        else:
            finished = ending.kind == "finished"
            self._heed(self._tree.ended(child, ending.reason, self.clock(), finished=finished), child.name)
        self._tell(self._abroad.lose(child.name, ended=child.state in ("done", "gone")))
        self._announce(child)

    def _heed(self, verdict: Verdict, name: str) -> None:
        """Say who died, and end the run if that was too much. name: whose log ends with the cause."""
        for death in verdict.deaths:
            self.observer.on_death(death.name, death.reason, death.restart_in_s)
        if verdict.story:
            story = verdict.story + tail(self.folder / "logs" / f"{name}.log")
            self._end(Outcome(1, story, self.restarts))

    # --- telling -----------------------------------------------------------------------------------------

    def _announce(self, child: Child) -> None:
        self.observer.on_state(child.name, child.state)
        self._changed[child.name] = child

    def _tell_changes(self) -> None:
        """Everybody who is there hears what has changed since the last time."""
        if self._changed:
            members = [child.member for child in self._changed.values()]
            self._changed.clear()
            self._tell(members)

    def _tell(self, members: list[Member]) -> None:
        """At once and each time: of a member of another machine that was cut off and is back, both must be heard."""
        frame = msgpack.encode(Membership(members))
        bridges = [name for names in self._abroad.bridges.values() for name in names]
        for name in (*((child.name, child.incarnation) for child in self.children), *bridges):
            if members:
                self._switchboard.send(*name, frame)

    def _everybody(self) -> Membership:
        return Membership([*(child.member for child in self.children), *self._abroad.members.values()])

    def restart(self, name: str) -> Restarting:
        """Stop a role or one of its replicas in order and start it again at once; no death is counted."""
        return Restarting([child.name for child in self._tree.restart(name, self.clock())])

    def status(self) -> RunStatus:
        """Everybody, for `rolecall ps`."""
        return run_status(self.children, list(self._abroad.members.values()), self._dead_letters)


def _why_fresh(role: Role) -> str:
    """Why a role's processes can't be forks; empty if they can."""
    if role.python:
        return f"it is placed in {role.python}"
    return "" if role.actor.fork_safe else f"{role.actor.__name__}.fork_safe is False"
