"""Rollouts that take their time: what slow GPUs and long answers do to a run, on a machine that has neither."""

from __future__ import annotations

import math
import random
import re
from dataclasses import dataclass

from ..runtime.errors import Unrecoverable

__all__ = ["Delay"]

_NUMBER = r"\s*(\d+(?:\.\d*)?|\.\d+)\s*"
_FIXED = re.compile(rf"fixed\({_NUMBER}\)", re.ASCII)
_LOGNORMAL = re.compile(rf"lognormal\({_NUMBER},{_NUMBER}\)", re.ASCII)


@dataclass(frozen=True)
class Delay:
    """How long after it was begun a group is whole, at the earliest.

    median_s: half of the groups take longer than that many seconds.
    sigma:    standard deviation of the logarithm: with 0 all take the same, with 1 one in six takes more than e times
              the median, and the mean is 1.65 times it (exp(σ²/2)).

    The worker computes nothing meanwhile and leaves the cores to others; it begins and samples other groups, but
    the delayed one keeps its seat, as if its last token were still to come. So groups are slow side by side, as
    long completions are in one batch of an engine, and what was begun under a version is as stale as it would be.
    """

    median_s: float = 0.0
    sigma: float = 0.0

    @classmethod
    def parse(cls, text: str) -> Delay:
        """From "none", "fixed(SECONDS)" or "lognormal(MEDIAN, SIGMA)". Raises Unrecoverable (exit code 2)."""
        if text == "none":
            return cls()
        if match := _FIXED.fullmatch(text):
            return cls(float(match[1]))
        if match := _LOGNORMAL.fullmatch(text):
            return cls(float(match[1]), float(match[2]))
        raise Unrecoverable(
            f"rollout_delay={text!r} is no delay: write none, fixed(0.2) for seconds, or lognormal(0.5,1.0) for a "
            "median in seconds and a sigma",
            exit_code=2,
        )

    def seconds(self, seed: int, prompt: int, worker: str) -> float:
        """Of this prompt's group on this worker: the same in every run with this seed."""
        if not self.sigma:
            return self.median_s
        return self.median_s * math.exp(
            self.sigma * random.Random(f"{seed}/{prompt}/{worker}").gauss(0.0, 1.0)
        )
