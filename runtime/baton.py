"""Threads of which exactly one runs at any moment, and which can be killed wherever they wait; whose turn it is."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from heapq import heapify, heappop, heappush

__all__ = ["Killed", "Strand", "Turns"]


class Killed(BaseException):
    """Raise it in an actor of a LocalRun, in a handler, a step, `on_start` or `on_stop`: it dies there as by SIGKILL.

    From the moment this is made, whatever the actor's own `except` and `finally` do goes nowhere.
    """

    def __init__(self) -> None:
        super().__init__()
        if _running is not None:
            _running.die()


_running: Strand | None = None
_back = threading.Lock()  # to whoever lets strands run
_back.acquire()


class Strand:
    """A thread that runs `body` whenever it is let, until it waits or ends.

    on_death: called once, in the moment in which it is killed.
    error:    what `body` raised, unless it was killed.
    until:    when it goes on in any case, on a clock of whoever lets it.
    """

    def __init__(self, name: str, body: Callable[[], None], on_death: Callable[[], None]) -> None:
        self.killed = self.done = False
        self.error: BaseException | None = None
        self.until = float("inf")
        self._body, self._on_death = body, on_death
        self._may_go: Callable[[], bool] = lambda: True
        self._go = threading.Lock()  # open once it has been released, as is _back
        self._go.acquire()
        threading.Thread(target=self._run, name=name, daemon=True).start()

    def can_go(self, now: float) -> bool:
        return not self.done and (self.until <= now or self._may_go())

    def go_on(self) -> None:
        """Let it run; returns when it, or the one that it has handed over to, waits or has ended."""
        global _running
        _running = self
        self._go.release()
        _back.acquire()
        _running = None

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

    def pause(self, may_go: Callable[[], bool], until: float) -> None:
        """Let others run until `may_go`, or until that time."""
        self.wait_for(may_go, until)
        self.hand_over(None)

    def wait_for(self, may_go: Callable[[], bool], until: float) -> None:
        """As `pause`, up to the moment in which others run."""
        self.check()
        self._may_go, self.until = may_go, until

    def hand_over(self, other: Strand | None) -> None:
        """Let this one run now, or whoever lets strands run choose; returns when it is one's own turn again."""
        global _running
        if other is None:
            _back.release()
        else:
            _running = other
            other._go.release()
        self._go.acquire()
        self.check()

    def _run(self) -> None:
        self._go.acquire()
        try:
            self.check()
            self._body()
        except BaseException as error:  # noqa: BLE001  kept for whoever lets it run
            self.error = None if self.killed else error
        self.done = True
        _back.release()


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
