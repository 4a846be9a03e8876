"""LocalRun: a whole graph in one process, in a fixed order, one thing at a time.

    run = LocalRun(build(Config(steps=3)), folder=tmp_path)
    run.run()
    assert run.reports["trainer"][-1]["step"] == 3

The same actors, mailboxes, NotYet, deadlines, steps and supervision as in a run of processes, but every choice
of who goes next is fixed and time is virtual: it moves only when nobody can go on, and then to the next timer.
So a run repeats bit for bit, and a deadline that passes means that everybody waits: a deadlock, named as such.

A test may kill actors, and what follows is what would follow in a run of processes, but at once and the same
each time. Between two turns `kill` names who dies now:

    rng = random.Random(seed)
    LocalRun(graph, folder=tmp_path, kill=lambda run: ["buffer"] if rng.random() < 0.01 else [])

and an actor that raises Killed dies right there. What a killed actor told the others is in their mailboxes;
if they die, too, before they have handled it, it is lost, as it is in a run.

Each actor has a stack of its own, a greenlet, so that it can wait in the middle of a handler; all share one thread.
"""

from __future__ import annotations

import random
import shutil
import signal
from collections.abc import Callable, Iterable
from heapq import heappop, heappush
from pathlib import Path

from .actor import Actor
from .baton import Killed, Turns
from .child import describe_exit
from .errors import DeadlockError, RolecallError
from .files import first_incarnation
from .graph import Graph
from .local import NEVER, Exchange, Incarnation, Place
from .ref import bind_transport, bound_transport
from .tree import Death, Tree

__all__ = ["Killed", "LocalRun", "spend", "virtual_clock"]


def virtual_clock() -> float:
    """For an actor of a LocalRun: virtual seconds since its start."""
    return _this_actor().now()


def spend(seconds: float) -> None:
    """For an actor of a LocalRun: be busy for so many virtual seconds, while others go on and its messages wait."""
    _this_actor().spend(seconds)


def _this_actor() -> Incarnation:
    actor = bound_transport()
    assert isinstance(actor, Incarnation), "this is no actor of a LocalRun"
    return actor


class LocalRun:
    """Runs `graph` in this process. `folder` is its run folder.

    kill: asked once between any two turns, also when nobody can go on: the names of those (of replicas,
          "worker-0") that die now by SIGKILL. Nothing happens to one that does not live.
    spared_until: the virtual time before which `kill` names nobody, so that it need not be asked: that is faster.
    rng:  for the waits before restarts; one with seed 0 if none is given.

    reports:      what each actor reported, in order, by name.
    dead_letters: (receiver, method, reason).
    deaths:       who died, of what, and in how many virtual seconds it is started again (None: it is not).
    turns:        who ran, in order: two runs of one graph with the same deaths have the same.

    A handler takes no virtual time unless it spends some, so a `max_run_s` has no meaning here, and nobody hangs. No
    mailbox is full.
    """

    def __init__(
        self,
        graph: Graph,
        *,
        folder: Path,
        run: str = "local",
        kill: Callable[[LocalRun], Iterable[str]] | None = None,
        spared_until: Callable[[], float] = lambda: 0.0,
        rng: random.Random | None = None,
    ) -> None:
        self.graph, self.folder, self.run_id = graph, folder, run
        pages = folder / "pages"
        # Numbers start at 1 again, so an earlier run's pages mean other messages.
        shutil.rmtree(pages, ignore_errors=True)
        pages.mkdir(parents=True)
        self._places = [Place(role, at, name) for at, role in enumerate(graph) for name in role.members]
        wired = [other for role in graph for other in role.wires.values() for _ in role.members]
        for number, place in enumerate(self._places):
            place.number, place.senders = number, wired.count(place.role.name)
        self._turns = Turns(range(len(self._places)))
        self._exchange = Exchange(
            run, folder, pages, {place.name: place for place in self._places}, self._turns, self._next_turn
        )
        self._exchange.members.hear(place.member for place in self._places)
        self._timers: list[tuple[float, int]] = []  # until when each waits, by number; some are of the past
        self._change_at = NEVER  # when a timer of the supervision runs out
        self.reports, self.dead_letters = self._exchange.reports, self._exchange.dead_letters
        self.deaths: list[Death] = []
        self.turns: list[str] = []
        self._tree = Tree(graph, self._places, rng or random.Random(0))
        self._whom_to_kill, self._spared_until, self._asked = kill, spared_until, -1
        self._incarnation = first_incarnation(folder)
        self._story = ""

    @property
    def now(self) -> float:
        """Virtual seconds since the start."""
        return self._exchange.now

    def actor(self, name: str) -> Actor:
        """The actor itself, in its newest incarnation, to look at from a test."""
        place = self._exchange.places[name]
        assert place.life is not None, f"{name} has not been started"
        return place.life.life.actor

    def run(self) -> None:
        """Until the roles of `graph.until` have finished.

        Raises what an actor dies of by itself (in a step, in `on_start`, or when it was told something): a test
        wants to see that, so it is not restarted. Raises RolecallError, with the story, if there were more deaths
        than the graph's restarts mend, and DeadlockError if nobody can go on.
        """
        try:
            while not self._tree.ending or any(place.running for place in self._places):
                progress = self._advance()
                if not self._round() and not progress:
                    self._let_time_pass()
                if self._exchange.changed:
                    self._tree.ending |= self._tree.finished
        finally:
            for place in self._places:
                if place.alive is not None:
                    place.alive.kill()
            bind_transport(None)
        if self._story:
            raise RolecallError(self._story)

    # --- who goes next -----------------------------------------------------------------------------------

    def _round(self) -> bool:
        """Let everybody who can go on do so once, in the order of the graph; whether anything happened."""
        self._turns.begin_round()
        went = self._kill_whom_the_test_names()
        while (number := self._turns.next()) is not None:
            place = self._places[number]
            if (life := place.alive) is not None and life.can_go():
                self.turns.append(place.name)
                life.go_on()
                went = True
                life = self._exchange.running  # the last of those that have handed over to each other
                assert life is not None
                if life.strand.done:
                    self._bury(life.place, life)
                else:
                    self._waits(life)
                if number + 1 < len(self._places):
                    self._kill_whom_the_test_names()
        return went

    def _kill_whom_the_test_names(self) -> bool:
        if self._asked == len(self.turns):
            return False  # one that died before this turn and has been restarted is not to die again
        self._asked = len(self.turns)
        if self._whom_to_kill is None:
            return False
        named = [self._exchange.places[name] for name in self._whom_to_kill(self)]
        dying = [place for place in named if place.alive is not None]
        for place in dying:
            self._kill(place)
        return bool(dying)

    def _waits(self, life: Incarnation) -> None:
        """Its turn is over."""
        life.stir()
        if life.strand.until != NEVER:
            heappush(self._timers, (life.strand.until, life.place.number))

    def _next_turn(self, life: Incarnation) -> Incarnation | None:
        """Whose turn comes next, in the same order as by rounds; None: that is for the supervision to say."""
        spared_until = NEVER if self._whom_to_kill is None else self._spared_until()
        if self._exchange.changed or self.now >= spared_until:
            return None
        self._waits(life)
        while True:
            while (number := self._turns.next()) is not None:
                other = self._places[number].alive
                if other is not None and other.can_go():
                    self.turns.append(other.name)
                    return other
            if self._turns.nobodys:
                until, due = self._next_timer()
                asks = any(other.asking for other in due)
                if until == NEVER or until >= min(self._change_at, spared_until) or asks:
                    return None
                self._exchange.now = until
                for other in due:
                    other.stir()
            self._turns.begin_round()

    def _let_time_pass(self) -> None:
        until, due = self._next_timer()
        if self._change_at == NEVER and (until == NEVER or any(life.asking for life in due)):
            lives = [place.alive for place in self._places if place.alive is not None]
            waits = [f"{life.name} waits for {life.asking or 'a message'}" for life in lives]
            raise DeadlockError(f"nobody can go on: {'; '.join(waits)}")
        self._exchange.now = min(until, self._change_at)
        for life in due if until == self.now else ():
            life.stir()

    def _next_timer(self) -> tuple[float, list[Incarnation]]:
        """When the next runs out of those that actors wait for, and whose it is."""
        due: dict[int, Incarnation] = {}
        until = NEVER
        while self._timers and (not due or self._timers[0][0] == until):
            at, number = heappop(self._timers)
            life = self._places[number].alive
            if life is not None and life.strand.until == at:
                until, due[number] = at, life
        for number in due:
            heappush(self._timers, (until, number))
        return until, list(due.values())

    # --- what a supervisor does --------------------------------------------------------------------------

    def _advance(self) -> bool:
        """Stop and start whom the tree says; whether there was anybody."""
        if not self._exchange.changed and self.now < self._change_at:
            return False  # it would say nothing new
        changed = False
        for place in self._tree.to_stop():
            if place.state == "up":
                assert place.alive is not None
                place.alive.stopping, place.alive.again = True, place.again and not self._tree.ending
                place.alive.stir()
                # At the end of a run one that does not stop is a deadlock to be told of, no death.
                stop_timeout_s = NEVER if self._tree.ending else place.role.actor.stop_timeout_s
                place.state, place.kill_at, changed = "stopping", self.now + stop_timeout_s, True
            elif place.state == "starting" or self.now >= place.kill_at:
                self._kill(place)
                changed = True
        for place in self._tree.to_start(self.now):
            self._incarnation += 1
            place.incarnation, place.state, changed = self._incarnation, "starting", True
            place.life = Incarnation(self._exchange, place)
        self._exchange.changed = changed
        timers = [place.not_before for place in self._places if place.state == "waiting"]
        timers += [place.kill_at for place in self._places if place.state == "stopping"]
        self._change_at = min((at for at in timers if at > self.now), default=NEVER)
        return changed

    def lose(self, name: str, for_s: float) -> None:
        """Its machine is lost without a word, as a rented one may be, and the next is there in `for_s` seconds.

        Called from `kill`. That is no death of which a supervisor keeps count. Nothing happens to one that does not
        live.
        """
        place = self._exchange.places[name]
        if place.alive is not None:
            self._tree.restart(name, self.now + for_s)
            self._kill(place)

    def _kill(self, place: Place) -> None:
        """Kill it by SIGKILL, if it lives."""
        if (life := place.alive) is not None:
            life.kill()
            self._bury(place, life)

    def _bury(self, place: Place, life: Incarnation) -> None:
        if life.strand.died_of is not None:
            raise life.strand.died_of
        killed = life.strand.killed
        finished = not killed and life.ending.kind == "finished"
        reason = describe_exit(signal.SIGKILL if killed else 0)
        verdict = self._tree.ended(place, reason, self.now, finished=finished)
        self.deaths += verdict.deaths
        if verdict.story and not self._story:
            self._story, self._tree.ending = verdict.story, True
        self._exchange.announce(place)
