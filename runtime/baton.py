"""Stacks of which exactly one runs at any moment, and which can be killed wherever they wait; whose turn it is."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from heapq import heapify, heappop, heappush

from greenlet import getcurrent, greenlet

__all__ = ["Killed", "Strand", "Turns"]


class Killed(BaseException):
    """Raise it in an actor of a LocalRun, in a handler, a step, `on_start` or `on_stop`: it dies there as by SIGKILL.

    From the moment this is made, whatever the actor's own `except` and `finally` do goes nowhere.
    """

    def __init__(self) -> None:
        super().__init__()
        running = getcurrent()
        if isinstance(running, Strand):
            running.die()


class Strand(greenlet):
    """A stack that runs `body` whenever it is let, until it waits or ends.

    Whoever makes it, in a stack of his own, is who lets it run.

    on_death: called once, in the moment in which it is killed.
    died_of:  what `body` raised, unless it was killed.
    until:    when it goes on in any case, on a clock of whoever lets it.
    """

    def __init__(self, body: Callable[[], None], on_death: Callable[[], None]) -> None:
        self._maker = getcurrent()
        super().__init__(self._run, self._maker)
        self.killed = self.done = False
        self.died_of: BaseException | None = None
        self.until = float("inf")
        self._body, self._on_death = body, on_death
        self._may_go: Callable[[], bool] = lambda: True

    def can_go(self, now: float) -> bool:
        return not self.done and (self.until <= now or self._may_go())

    def go_on(self) -> None:
        """Let it run; returns when it, or the one that it has handed over to, waits or has ended."""
        self.switch()

    def kill(self) -> None:
        """Unwind it from where it waits; nothing after that point runs but its own `except` and `finally`."""
        self.die()
        self.go_on()

    def die(self) -> None:
        if not self.killed:
            self.killed = True
            self._on_death()

    # --- from inside -------------------------------------------------------------------------------------

    def check(self) -> None:
        """Raises Killed once it is dead: called before anything that others could notice."""
        if self.killed:
            raise Killed

    def wait_for(self, may_go: Callable[[], bool], until: float) -> None:
        """Let others run until `may_go`, or until that time; they do once it hands over."""
        self.check()
        self._may_go, self.until = may_go, until

    def hand_over(self, other: Strand | None) -> None:
        """Let this one run now, or whoever lets strands run choose; returns when it is one's own turn again."""
        (self._maker if other is None else other).switch()
        self.check()

    def _run(self) -> None:
        try:
            self.check()
            self._body()
        except BaseException as error:  # noqa: BLE001  kept for whoever lets it run
            self.died_of = None if self.killed else error
        self.done = True


class Turns:
    """Whose turn it may be, by their places' numbers: round after round from the lowest to the highest.

    Looking at all places in every round would make a run of a thousand actors a thousand times as slow.
    """

    def __init__(self, numbers: Iterable[int]) -> None:
        self._this_round = list(numbers)
        heapify(self._this_round)
        self._next_round: set[int] = set()
        self._at = -1

    def stir(self, number: int) -> None:
        """Something has happened that this one may have waited for."""
        if number > self._at:
            heappush(self._this_round, number)
        else:
            self._next_round.add(number)

    def begin_round(self) -> None:
        self._this_round, self._next_round = sorted(self._next_round.union(self._this_round)), set()
        self._at = -1

    @property
    def nobodys(self) -> bool:
        """Whether nobody was stirred since his last turn."""
        return not self._this_round and not self._next_round

    def next(self) -> int | None:
        """The next of this round, each of them once; None: it is over."""
        while self._this_round:
            number = heappop(self._this_round)
            if number > self._at:
                self._at = number
                return number
        return None
