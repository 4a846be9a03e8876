"""What each completion's reward is worth against its siblings': formulas only, in float64."""

from __future__ import annotations

from collections.abc import Sequence
from math import isfinite
from typing import Literal

__all__ = ["Centre", "Scale", "advantages", "refuse_unless_finite"]

Centre = Literal["mean", "leave_one_out", "none"]
Scale = Literal["std", "batch_std", "none"]


def advantages(
    rewards_P_G: Sequence[Sequence[float]],
    *,
    centre: Centre = "mean",
    scale: Scale = "std",
    ddof: int = 0,
    eps: float = 1e-6,
) -> list[list[float]]:
    """Advantage of each completion, for all groups of an optimizer step at once.

    rewards_P_G: one list for each prompt, with one reward per sibling completion.
    centre: what is taken off: "mean": the group's mean; "leave_one_out": the mean of the other siblings (RLOO,
            arXiv 2402.14740), which is the centred reward × G/(G − 1); "none": nothing, as in plain REINFORCE.
    scale:  what divides: "std": the group's σ + eps; "batch_std": the σ + eps of all rewards of the step (Lite
            PPO, arXiv 2508.08221); "none": nothing (Dr. GRPO, arXiv 2503.20783).
    ddof:   σ's divisor is the count − ddof: 0 or 1.

    A group whose rewards are all equal, or of one member, says nothing about its members: exactly 0, never NaN.
    Not so with centre="none": there a reward is the advantage, whatever the siblings got. That goes with
    scale="none" alone, for a σ of 0 would have to divide what is not 0.

    Other libraries' conventions for mean and std: TRL ddof 1, eps 1e-4; asynchronous TRL ddof 0, 1e-8; verl
    ddof 1, 1e-6. Source: DeepSeekMath, arXiv 2402.03300, §4.1.2.
    Raises ValueError on a reward that is NaN or infinite, and on centre="none" with a scale.
    """
    if centre == "none" and scale != "none":
        raise ValueError(f'centre="none" with scale="{scale}": rewards that are not centred are not scaled')
    for rewards in rewards_P_G:
        refuse_unless_finite(rewards)
    if centre == "none":
        return [list(rewards) for rewards in rewards_P_G]
    centred = [_centred(rewards, centre) for rewards in rewards_P_G]
    if scale == "none":
        return centred
    everything = [reward for rewards in rewards_P_G for reward in rewards]
    of_all = _std(everything, ddof) if scale == "batch_std" else None
    return [
        _over(own, (_std(rewards, ddof) if of_all is None else of_all) + eps) if any(own) else own
        for rewards, own in zip(rewards_P_G, centred, strict=True)
    ]


def refuse_unless_finite(rewards: Sequence[float]) -> None:
    """Raises ValueError on a reward that is NaN or infinite, with its place in the group."""
    for place, reward in enumerate(rewards):
        if not isfinite(reward):
            raise ValueError(
                f"reward {place} of the group is {reward}: a reward function must give finite numbers"
            )


def _centred(rewards: Sequence[float], centre: Centre) -> list[float]:
    count = len(rewards)
    if not rewards or min(rewards) == max(rewards):  # the mean of equal floats may be off by a rounding
        return [0.0] * count
    mean = sum(rewards) / count
    stretch = count / (count - 1) if centre == "leave_one_out" else 1.0
    return [(reward - mean) * stretch for reward in rewards]


def _over(values: Sequence[float], divisor: float) -> list[float]:
    return [value / divisor for value in values]


def _std(rewards: Sequence[float], ddof: int) -> float:
    if len(rewards) <= ddof:
        return 0.0  # of a step of one completion, which has nothing to be scaled
    mean = sum(rewards) / len(rewards)
    return (sum((reward - mean) ** 2 for reward in rewards) / (len(rewards) - ddof)) ** 0.5
