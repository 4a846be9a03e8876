"""Who starts, watches, restarts and stops the actors of a run: OTP's supervisor over plain processes.

The supervisor is control plane only. It spawns, notices deaths (pidfd), decides by strategy and intensity, and
tells everybody who lives where; messages between actors never pass through it.
"""

from __future__ import annotations

import os
import random
import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from msgspec import json, msgpack

from .child import Child, Leftovers, RestartBudget, describe_exit, tail
from .control import (
    ActorStatus,
    DeadLetter,
    Ending,
    FromActor,
    Hello,
    ListActors,
    Member,
    Membership,
    Ready,
    Report,
    Stop,
    StopRun,
    ending_path,
    page_path,
)
from .forkserver import ForkServer, become_subreaper
from .graph import Graph, Restart, Strategy
from .page import Page
from .process import Spec
from .remote import RemoteActor
from .sockets import Connection
from .switchboard import Switchboard

__all__ = ["Observer", "Outcome", "Supervisor"]

LEFTOVERS_TIMEOUT_S = 2.0


_from_actor = msgpack.Decoder(Ready | Hello | Report | DeadLetter | ListActors | StopRun)


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


@dataclass
class Supervisor:
    """Runs a graph: `outcome = Supervisor(graph, ...).run()`.

    run, folder: the run's id and its folder. recipe: what `load_recipe` takes, so that children can.
    node: this machine's name in the run. remotes: actors on another machine, by name.
    clock, rng: for back-off and restart intensity.
    """

    graph: Graph
    run_id: str
    folder: Path
    recipe: str
    observer: Observer
    node: str = ""
    remotes: dict[str, RemoteActor] = field(default_factory=dict)
    clock: Callable[[], float] = time.monotonic
    rng: random.Random = field(default_factory=random.Random)

    def __post_init__(self) -> None:
        # Mode 0700, and short whatever TMPDIR says: ipc paths end at 107 bytes.
        self.sockets = Path(tempfile.mkdtemp(prefix="rolecall-", dir="/tmp"))
        self.children = [
            Child(role, position, name) for position, role in enumerate(self.graph) for name in role.members
        ]
        self._by_name = {child.name: child for child in self.children}
        self._incarnation = 0
        self._budget = RestartBudget(self.graph.max_restarts, self.graph.within_s, self.rng)
        self._forks: ForkServer | None = None
        self._forks_not_before = 0.0
        self._leftovers = Leftovers()
        self._ending: Outcome | None = None
        self._stop_signals = 0
        self._changed: dict[str, Child] = {}
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    # --- the run -----------------------------------------------------------------------------------------

    def run(self) -> Outcome:
        """Start everybody, keep them alive until the run is over, stop everybody."""
        become_subreaper()
        (self.folder / "logs").mkdir(parents=True, exist_ok=True)
        self._switchboard = Switchboard(self.sockets)
        self._switchboard.add(self._wake)
        try:
            while self._ending is None or any(child.alive for child in self.children):
                self._advance()
                self._listen(self._patience_s())
                self._check_end()
        finally:
            self._close()
        assert self._ending is not None
        return self._ending

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
        ends = [self._by_name[name] for role in self.graph.ends_with for name in self.graph[role].members]
        if ends and all(child.state == "done" for child in ends):
            self._end(Outcome(0, "finished", self.restarts))

    def _end(self, outcome: Outcome) -> None:
        if self._ending is None:
            self._ending = outcome

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
        self._hear_all()
        self._leftovers.reap(LEFTOVERS_TIMEOUT_S)
        self._switchboard.close()
        os.close(self._wake)
        shutil.rmtree(self.sockets)

    # --- starting and stopping, in order -----------------------------------------------------------------

    def _advance(self) -> None:
        if self._forks is None and self._ending is None and self.clock() >= self._forks_not_before:
            sessions = [child.pid for child in self.children if child.alive]
            self._forks = ForkServer(self.folder / "logs" / "forkserver.log", self.sockets, sessions)
            self._switchboard.add(self._forks.fileno())
        doomed = [child for child in self.children if child.alive and (self._ending or child.doomed)]
        if doomed:
            last = max(child.position for child in doomed)
            for child in doomed:
                if child.position == last:
                    self._stop_child(child)
            return
        if self._ending or self._forks is None:
            return
        now = self.clock()
        for child in self.children:
            if child.state == "waiting" and child.not_before <= now and not self._blocked(child):
                self._spawn(child, self._forks)

    def _blocked(self, child: Child) -> bool:
        return any(
            other.position < child.position and other.state in ("waiting", "spawning", "starting")
            for other in self.children
        )

    def _spawn(self, child: Child, forks: ForkServer) -> None:
        self._incarnation += 1
        child.incarnation, child.state = self._incarnation, "spawning"
        role = child.role
        spec = Spec(
            child.name, child.incarnation, self.sockets, self.folder, self.node, self.run_id, self.recipe,
            self.remotes, role.actor, role.args, role.kwargs,
        )  # fmt: skip
        log = self.folder / "logs" / f"{child.name}.log"
        forks.send(
            {"name": child.name, "spec": str(spec.write()), "log": str(log), "preloads": role.actor.preloads}
        )

    def _stop_child(self, child: Child) -> None:
        now = self.clock()
        if child.state == "up":
            child.state, child.kill_at = "stopping", now + child.role.actor.stop_timeout_s
            self._send(child, Stop())
        elif child.state != "stopping" or now >= child.kill_at:
            child.kill()  # one that is still starting has nothing to give back

    def _patience_s(self) -> float:
        now = self.clock()
        times = [child.not_before for child in self.children if child.state == "waiting"]
        times += [child.kill_at for child in self.children if child.state == "stopping"]
        times += [self._forks_not_before] if self._forks is None else []
        return max(0.0, min([1.0, *(at - now for at in times if at > now)]))

    # --- hearing -----------------------------------------------------------------------------------------

    def _listen(self, timeout_s: float) -> None:
        ready = self._switchboard.poll(timeout_s)
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
            self._hear(caller, _from_actor.decode(frame))

    def _hear(self, caller: Connection, message: FromActor | ListActors | StopRun) -> None:
        match message:
            case ListActors():
                caller.send(json.encode(self.status()))
            case StopRun():
                self.stop()
            case Hello(name=name, incarnation=incarnation):
                self._switchboard.introduce(caller, name, incarnation)
                everybody = Membership([self._member(child) for child in self.children])
                caller.send(msgpack.encode(everybody))
            case _:
                who = self._switchboard.actor(caller)
                if who is not None:
                    self._hear_actor(*who, message)

    def _hear_actor(self, name: str, incarnation: int, message: Ready | Report | DeadLetter) -> None:
        child = self._by_name[name]
        match message:
            case Ready():
                if child.incarnation == incarnation:
                    self._set_state(child, "up")
            case Report(values=values):
                self.observer.on_report(child.name, values)
            case DeadLetter(receiver=receiver, method=method, reason=reason):
                with (self.folder / "dead_letters.jsonl").open("ab") as file:
                    file.write(json.encode({"to": receiver, "message": method, "reason": reason}) + b"\n")
                self.observer.on_dead_letter(receiver, method, reason)

    def _hear_forkserver(self, forks: ForkServer) -> None:
        reply = forks.reply()
        if reply is not None:
            self._adopt(reply)
            return
        # It died. Whoever it had not forked yet is asked for again.
        status = self._bury_forkserver(forks)
        delay_s = self._note_death("forkserver", describe_exit(-status if status < 0 else status << 8))
        self._forks_not_before = self.clock() + (delay_s or 0.0)
        for child in self.children:
            if child.state == "spawning":
                child.state = "waiting"

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
        forks.close()
        self._forks = None
        return status

    # --- deaths ------------------------------------------------------------------------------------------

    def _reap(self, child: Child) -> None:
        status = child.reap()
        self._switchboard.forget(child.name, child.incarnation)
        self._leftovers.add(child.pid)
        if self._forks is not None:
            self._forks.send({"forget": child.pid})
        path = ending_path(self.sockets, child.name, child.incarnation)
        ending = json.decode(path.read_bytes(), type=Ending) if path.exists() else None
        (self.sockets / f"{child.name}.{child.incarnation}.spec").unlink(missing_ok=True)
        child.reason = ending.reason if ending and ending.reason else describe_exit(status)
        if ending and ending.kind == "unrecoverable":
            self._set_state(child, "gone")
            self._end(Outcome(ending.exit_code, ending.reason, self.restarts))
        elif child.doomed and not self._ending:
            child.doomed = False
            self._wait_to_start(child, 0.0)
        elif self._ending or child.state == "stopping" or self._is_done(child, ending):
            child.reason = ""
            self._set_state(child, "done")
        else:
            self._restart(child)

    def _is_done(self, child: Child, ending: Ending | None) -> bool:
        finished = ending is not None and ending.kind == "finished"
        return finished and child.role.restart is not Restart.PERMANENT

    def _restart(self, child: Child) -> None:
        if child.role.restart is Restart.TEMPORARY:
            self._set_state(child, "gone")
            self.observer.on_death(child.name, child.reason, None)
            if child.role.name in self.graph.ends_with:
                story = f"{child.name} died: {child.reason}. The run waits for it and it is never restarted."
                self._end(Outcome(1, story, self.restarts))
            return
        delay_s = self._note_death(child.name, child.reason)
        if delay_s is None:
            self._set_state(child, "gone")
            return
        child.restarts += 1
        self._wait_to_start(child, delay_s)
        for other in self._taken_down_by(child):
            other.doomed = other.alive

    def _taken_down_by(self, child: Child) -> Sequence[Child]:
        match self.graph.strategy:
            case Strategy.ONE_FOR_ONE:
                return []
            case Strategy.ONE_FOR_ALL:
                return [other for other in self.children if other is not child and other.state != "done"]
            case Strategy.REST_FOR_ONE:
                return [other for other in self.children if other.position > child.position]

    def _note_death(self, name: str, reason: str) -> float | None:
        """Count a death; the seconds to wait before the restart, or None: too many, the run ends."""
        count, delay_s = self._budget.spend(self.clock())
        self.observer.on_death(name, reason, delay_s)
        if delay_s is None:
            story = (
                f"{name} died: {reason}. That was death {count} within {self.graph.within_s:g} s and "
                f"{self.graph.max_restarts} restarts are allowed, so the run ends."
            )
            output = tail(self.folder / "logs" / f"{name}.log")
            self._end(Outcome(1, story + output, self.restarts))
        return delay_s

    def _wait_to_start(self, child: Child, delay_s: float) -> None:
        child.not_before = self.clock() + delay_s
        self._set_state(child, "waiting")

    # --- telling -----------------------------------------------------------------------------------------

    def _set_state(self, child: Child, state: str) -> None:
        child.state = state
        self._changed[child.name] = child
        self.observer.on_state(child.name, state)

    def _tell_changes(self) -> None:
        """Everybody who is there hears what has changed since the last time."""
        if self._changed:
            frame = msgpack.encode(Membership([self._member(child) for child in self._changed.values()]))
            self._changed.clear()
            for child in self.children:
                self._switchboard.send(child.name, child.incarnation, frame)

    def _member(self, child: Child) -> Member:
        states = {"up": "up", "stopping": "up", "done": "gone", "gone": "gone"}
        state = states.get(child.state, "down")
        return Member(child.name, child.role.name, child.incarnation, state, child.reason)

    def _send(self, child: Child, message: Membership | Stop) -> None:
        self._switchboard.send(child.name, child.incarnation, msgpack.encode(message))

    def status(self) -> list[ActorStatus]:
        """Every actor, for `rolecall ps`."""
        now = time.monotonic_ns()
        found = []
        for child in self.children:
            pid, handling_s = 0, None
            if child.alive:
                pid = child.pid
                handling_s = Page(page_path(self.sockets, child.name)).running_for_s(now)
            found.append(
                ActorStatus(
                    child.name, pid, child.state, child.incarnation, child.restarts, 0, None, handling_s, 0
                )
            )
        return found
