"""Who is started, restarted and taken down, and when it is too much: OTP's supervision as decisions alone.

    verdict = tree.ended(slot, "killed by SIGKILL", now)     # somebody's process has ended
    for slot in tree.to_stop(): ...                          # whom that takes down, the last added first
    for slot in tree.to_start(now): ...                      # who is started now, the first added first

Nothing in here starts a process, reads a clock or says a word: whoever asks does that, a Supervisor in a run
of processes, a LocalRun in virtual time.
"""

from __future__ import annotations

import math
import random
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from .graph import Graph, Restart, Role, Strategy, Subtree

__all__ = ["Death", "RestartBudget", "Slot", "Tree", "Verdict"]

MAX_BACKOFF_S = 30.0


@dataclass(eq=False)
class Slot:
    """One actor's place in a run, over all its incarnations.

    position: its role's in the order of start; replicas share one.
    state: waiting (to be started, not before `not_before`), spawning, starting, up, stopping, done (finished or
    stopped), gone (died and stays dead).
    wave: whom it is started with, one after the other: 0 is the start of the run, later ones are deaths.
    doomed: why it is taken down although it lives; again: it is started again afterwards.
    reason: why the last incarnation died; empty if it finished or was stopped.
    """

    role: Role
    position: int
    name: str
    state: str = "waiting"
    not_before: float = 0.0
    restarts: int = 0
    wave: int = 0
    doomed: str = ""
    again: bool = False
    reason: str = ""

    @property
    def running(self) -> bool:
        return self.state in ("starting", "up", "stopping")

    @property
    def coming(self) -> bool:
        """Whether it is to be ready again, or for the first time."""
        return bool(self.doomed) or self.state in ("waiting", "spawning", "starting")


@dataclass(frozen=True)
class Death:
    """Who died, of what, and in how many seconds it is started again; None: it is not."""

    name: str
    reason: str
    restart_in_s: float | None


@dataclass(frozen=True)
class Verdict:
    """What follows from an ending. story: why it ends the run, empty if the run goes on."""

    deaths: Sequence[Death] = ()
    story: str = ""


@dataclass
class RestartBudget:
    """How many deaths are survived (OTP's intensity and period), and the wait after each."""

    max_restarts: int
    within_s: float
    rng: random.Random
    _deaths: deque[tuple[float, str, str]] = field(default_factory=deque)
    _waited_s: float = 0.0  # up to _until
    _until: float = -math.inf

    def spend(self, name: str, reason: str, now: float) -> float | None:
        """The seconds to wait before the restart; None: there were too many deaths within the period.

        The first restart is at once; then waits double, with full jitter.
        """
        # Waiting for a restart is no time without a death; of waits that overlap each second counts once.
        lived = now - self._waited_s + max(0.0, self._until - now)
        self._deaths.append((lived, name, reason))
        while self._deaths[0][0] <= lived - self.within_s:
            self._deaths.popleft()
        if self.count > self.max_restarts:
            return None
        if self.count == 1:
            return 0.0
        wait_s = self.rng.uniform(0.0, min(MAX_BACKOFF_S, 0.1 * 2.0 ** min(self.count, 20)))
        self._waited_s += max(0.0, now + wait_s - max(now, self._until))
        self._until = max(now + wait_s, self._until)
        return wait_s

    @property
    def count(self) -> int:
        """The deaths within the period that ended with the last one."""
        return len(self._deaths)

    @property
    def story(self) -> str:
        """Who died how often of what."""
        times = Counter((name, reason) for _, name, reason in self._deaths)
        died = [
            f"{name} died {'once' if count == 1 else f'{count} times'} ({reason})"
            for (name, reason), count in times.items()
        ]
        return f"{', '.join(died)} within {self.within_s:g} s, and {self.max_restarts} restarts are allowed"


SlotT = TypeVar("SlotT", bound=Slot)


class Tree(Generic[SlotT]):
    """The supervision of `graph`: its own, and that of its subtrees.

    slots: a place for each member of each role, in the order of start. rng: for the jitter of waits.
    ending: set when the run is over; from then on everybody is stopped and nobody started.
    """

    def __init__(self, graph: Graph, slots: Sequence[SlotT], rng: random.Random) -> None:
        self.graph, self.slots, self.rng = graph, slots, rng
        self.ending = False
        self._waves = 0
        self._budget = RestartBudget(graph.max_restarts, graph.within_s, rng)
        self._subtrees = {name: subtree for subtree in graph.subtrees for name in subtree.roles}
        self._budgets = {subtree.name: self._fresh(subtree) for subtree in graph.subtrees}

    def _fresh(self, subtree: Subtree) -> RestartBudget:
        return RestartBudget(subtree.max_restarts, subtree.within_s, self.rng)

    @property
    def finished(self) -> bool:
        """Whether everybody the run waits for has finished."""
        ends = [slot for slot in self.slots if slot.role.name in self.graph.ends_with]
        return bool(ends) and all(slot.state == "done" for slot in ends)

    # --- who is next -------------------------------------------------------------------------------------

    def to_stop(self) -> list[SlotT]:
        """Of all that are to go down, those that were added last."""
        going = [slot for slot in self.slots if slot.running and (self.ending or slot.doomed)]
        last = max((slot.position for slot in going), default=0)
        return [slot for slot in going if slot.position == last]

    def to_start(self, now: float) -> list[SlotT]:
        """Those whose time has come, and of those that start together only the first.

        Whom one death took down starts together, when all of them are down.
        """
        if self.ending:
            return []
        first: dict[int, int] = {}  # of each wave, the position whose turn it is
        for slot in self.slots:
            if slot.doomed:
                first[slot.wave] = -1
            elif slot.state in ("waiting", "spawning", "starting"):
                first[slot.wave] = min(slot.position, first.get(slot.wave, slot.position))
        waiting = [slot for slot in self.slots if slot.state == "waiting" and not slot.doomed]
        return [slot for slot in waiting if slot.position == first[slot.wave] and slot.not_before <= now]

    def restart(self, name: str, now: float) -> list[SlotT]:
        """Take a role or one of its replicas down by request, to be started again at once; no death is counted.

        Returns who that is: nobody if none has that name, or the run is ending.
        """
        named = [slot for slot in self.slots if name in (slot.name, slot.role.name) and not self.ending]
        self._start_together(named)
        for slot in named:
            if slot.running or slot.state == "spawning":
                slot.doomed, slot.again = slot.doomed or "restarted by request", True
            slot.not_before = now
        return [slot for slot in named if slot.again or slot.state == "waiting"]

    # --- endings -----------------------------------------------------------------------------------------

    def ended(self, slot: SlotT, reason: str, now: float, *, finished: bool = False) -> Verdict:
        """An incarnation has ended: the slot's next state, and who goes down with it.

        finished: the actor's own work was done, and it said so.
        """
        doomed, again = slot.doomed, slot.again
        slot.doomed, slot.again = "", False
        if self.ending or (finished and slot.role.restart is not Restart.PERMANENT):
            slot.state, slot.reason = "done", ""
            return Verdict()
        slot.reason = doomed or reason
        if again:
            slot.state = "waiting"
            return Verdict()
        if slot.role.restart is Restart.TEMPORARY:
            slot.state = "gone"
            story = f"{slot.name} died: {slot.reason}. The run waits for it and it is never restarted."
            awaited = slot.role.name in self.graph.ends_with
            return Verdict([Death(slot.name, slot.reason, None)], story if awaited else "")
        return self._died(slot, now)

    def died_beside(self, name: str, reason: str, now: float) -> Verdict:
        """A helper of the supervisor's own has died: it takes nobody down, and counts as one of the graph's deaths."""
        delay_s, story = self._spend(name, reason, now)
        return Verdict([Death(name, reason, delay_s)], story)

    def _spend(self, name: str, reason: str, now: float) -> tuple[float | None, str]:
        delay_s = self._budget.spend(name, reason, now)
        if delay_s is not None:
            return delay_s, ""
        return None, (
            f"{name} died: {reason}. That was death {self._budget.count} within {self.graph.within_s:g} s and "
            f"{self.graph.max_restarts} restarts are allowed, so the run ends."
        )

    def _died(self, slot: SlotT, now: float) -> Verdict:
        subtree = self._subtrees.get(slot.role.name)
        if subtree is None:
            strategy, among = self.graph.strategy, self.slots
            delay_s, story = self._spend(slot.name, slot.reason, now)
        else:
            strategy, among, story = subtree.strategy, self._members(subtree), ""
            delay_s = self._budgets[subtree.name].spend(slot.name, slot.reason, now)
            if delay_s is None:
                return self._escalate(slot, subtree, now)
        if delay_s is None:
            slot.state = "gone"
        else:
            falling = _falling(strategy, slot.position, among)
            self._start_together([slot, *falling])
            self._again(slot, now + delay_s)
            self._take_down(falling, f"{slot.name} died", now)
        return Verdict([Death(slot.name, slot.reason, delay_s)], story)

    def _escalate(self, slot: SlotT, subtree: Subtree, now: float) -> Verdict:
        """With this death a subtree's restarts are used up: it dies as a whole."""
        reason = self._budgets[subtree.name].story
        delay_s, story = self._spend(subtree.name, reason, now)
        deaths = [Death(slot.name, slot.reason, delay_s), Death(subtree.name, reason, delay_s)]
        if delay_s is None:
            slot.state = "gone"
            return Verdict(deaths, story)
        self._budgets[subtree.name] = self._fresh(subtree)
        members = self._members(subtree)
        others = [other for other in self.slots if other not in members]
        falling = _falling(self.graph.strategy, members[0].position, others)
        self._start_together([*members, *falling])
        self._again(slot, now + delay_s)
        self._take_down(members, f"{subtree.name} died", now + delay_s)
        self._take_down(falling, f"{subtree.name} died", now)
        return Verdict(deaths)

    def _members(self, subtree: Subtree) -> list[SlotT]:
        return [slot for slot in self.slots if slot.role.name in subtree.roles]

    def _start_together(self, slots: Sequence[SlotT]) -> None:
        """And with those whom they were to start with already."""
        self._waves += 1
        waves = {slot.wave for slot in slots if slot.coming}
        for slot in self.slots:
            if slot in slots or (slot.coming and slot.wave in waves):
                slot.wave = self._waves

    def _again(self, slot: SlotT, at: float) -> None:
        slot.state, slot.not_before = "waiting", at
        slot.restarts += 1

    def _take_down(self, slots: Sequence[SlotT], cause: str, at: float) -> None:
        """Whoever of these lives goes down and, as OTP has it, only what is TEMPORARY does not come back."""
        for slot in slots:
            if slot.running or slot.state == "spawning":
                slot.doomed = slot.doomed or f"taken down: {cause}"
                slot.again = slot.again or slot.role.restart is not Restart.TEMPORARY
            slot.not_before = max(slot.not_before, at)


def _falling(strategy: Strategy, position: int, among: Sequence[SlotT]) -> Sequence[SlotT]:
    """Who goes down with the one at `position`, by the strategy; itself may be among them."""
    match strategy:
        case Strategy.ONE_FOR_ONE:
            return []
        case Strategy.ONE_FOR_ALL:
            return among
        case Strategy.REST_FOR_ONE:
            return [slot for slot in among if slot.position > position]
