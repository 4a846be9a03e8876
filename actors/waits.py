"""Where a rollout worker's time goes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable

__all__ = ["Waits"]


class Waits:
    """Seconds, since they were last taken:

    sample_s      the engine stepped
    lease_wait_s  there was nothing to sample, for want of prompts
    put_wait_s    there was nothing to sample, while the reward or room in the buffer was waited for
    pause_s       longest time between two steps of the engine with completions under way: what a swap, or
                  anything else that a worker does between two tokens, costs those who wait for theirs
    load_s        what the last swap took: fetch, load and proof
    first_token_s from a version's publication to the first token under it here, by both machines' clocks; only in what
                  is taken next after that

    and how often it stepped (engine_steps), for how many completions at once on average (sequences).
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._spent: defaultdict[str, float] = defaultdict(float)
        self._waiting: tuple[str, float] | None = None
        self._stepped = -1.0
        self._pause_s = self.load_s = 0.0
        self.first_token_s: float | None = None
        self._steps = self._tokens = 0

    def begin(self, wait: str) -> None:
        """From now on nothing is sampled."""
        self._waiting = wait, self._clock()
        self._stepped = -1.0

    def over(self) -> None:
        """What was waited for may be there."""
        if self._waiting is not None:
            wait, since = self._waiting
            self._spent[wait] += self._clock() - since
            self._waiting = None

    def sampled(self, began: float, running: int) -> None:
        """A step of the engine, with so many completions under way, has just ended."""
        now = self._clock()
        self._steps += 1
        self._tokens += running
        self._spent["sample_s"] += now - began
        if self._stepped >= 0:
            self._pause_s = max(self._pause_s, began - self._stepped)
        self._stepped = now

    def take(self) -> dict[str, float]:
        """All of it. Leaves nothing but the last load_s."""
        spent = {name: self._spent[name] for name in ("sample_s", "lease_wait_s", "put_wait_s")}
        spent |= {"pause_s": self._pause_s, "load_s": self.load_s}
        if self.first_token_s is not None:
            spent["first_token_s"], self.first_token_s = self.first_token_s, None
        spent |= {"engine_steps": self._steps, "sequences": self._tokens / max(1, self._steps)}
        self._steps = self._tokens = 0
        self._spent.clear()
        self._pause_s = 0.0
        return spent
