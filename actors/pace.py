"""How much work a run keeps under way: what the trainer needs, and no more of it than may be stale."""

from __future__ import annotations

from math import ceil

__all__ = ["Pace"]


class Pace:
    """How many groups may be under way at once, from the lease of their prompts to the end of their step.

    A queue that is never empty makes nothing faster, and all that goes through it older. So what has been to spare all
    the time that groups take to come round is taken off, but for a version's worth against bad luck; and what a step
    lacked is put on. The standing queue is seen as CoDel sees it, by its minimum over a time (RFC 8289), for a queue
    after a burst is a good one.

    version_groups: that are trained from one version to the next. most: groups that can be under way without any
    being trained too late.
    """

    def __init__(self, version_groups: int, most: int) -> None:
        self.version_groups, self.most = version_groups, most
        self.least = min(2 * version_groups, most)  # some are trained while others are sampled
        self.groups = min(3 * version_groups, most)  # and some to spare, for a start
        self._spares: list[int] = []  # since the last change
        self._settled_after = 0  # steps from then on

    def heed(self, spare: int) -> None:
        """So many whole groups waited besides a step's own when it was to be made; or, negative, it lacked so many."""
        if spare < 0:
            self._change(self.groups - spare + self.version_groups)
            return
        self._spares.append(spare)
        round_steps = ceil(self.groups / self.version_groups)
        if len(self._spares) >= self._settled_after + round_steps:
            self._change(self.groups - max(0, min(self._spares[-round_steps:]) - self.version_groups))

    def _change(self, groups: int) -> None:
        self._settled_after = ceil(
            self.groups / self.version_groups
        )  # what is under way now must come round first
        self.groups = max(self.least, min(groups, self.most))
        self._spares.clear()
