"""What a group's rewards are worth, and the GRPO loss of its tokens: formulas only, no model.

Recipes name a loss in their settings, so this module must import without torch: tensor methods do it all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite
from typing import TYPE_CHECKING, Literal, NamedTuple

from ..runtime.errors import Unrecoverable

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["MAX_LOG_RATIO", "GRPOLoss", "TokenStats", "advantages"]

MAX_LOG_RATIO = 20.0  # exp(20) = 4.9e8: far outside any corridor, and finite in float32 with room for a sum

Scale = Literal["std", "none"]


def advantages(
    rewards: Sequence[float], *, scale: Scale = "std", ddof: int = 0, eps: float = 1e-6
) -> list[float]:
    """Advantage of each completion of one group: reward minus the group's mean, over its standard deviation.

    rewards: one per sibling completion. Computed in float64.
    scale:   "std": ÷ (σ + eps), σ with `ddof`; "none": centred only (Dr. GRPO, arXiv 2503.20783).

    A group whose rewards are all equal, or of one member, gives exactly 0.
    Other libraries' conventions: TRL ddof 1, eps 1e-4; asynchronous TRL ddof 0, 1e-8; verl ddof 1, 1e-6.
    Source: DeepSeekMath, arXiv 2402.03300, §4.1.2. Raises ValueError on a NaN or infinite reward.
    """
    for place, reward in enumerate(rewards):
        if not isfinite(reward):
            raise ValueError(
                f"reward {place} of the group is {reward}: a reward function must give finite numbers"
            )
    if not rewards or min(rewards) == max(rewards):  # the mean of equal floats may be off by a rounding
        return [0.0] * len(rewards)
    mean = sum(rewards) / len(rewards)
    centred = [reward - mean for reward in rewards]
    if scale == "none":
        return centred
    std = (sum(c * c for c in centred) / (len(rewards) - ddof)) ** 0.5
    return [c / (std + eps) for c in centred]


class TokenStats(NamedTuple):
    """What the loss saw of each token, all without gradient, shaped as its arguments.

    log_ratio:    lp − lp_gen, capped at ±MAX_LOG_RATIO; 0 where masked.
    ratio:        exp(log_ratio).
    clipped_low:  bool: below the corridor while A < 0, so without gradient (TRL's clip_ratio/low).
    clipped_high: bool: above it while A > 0.
    """

    log_ratio: Tensor
    ratio: Tensor
    clipped_low: Tensor
    clipped_high: Tensor


@dataclass(frozen=True, kw_only=True)
class GRPOLoss:
    """The clipped surrogate of GRPO, averaged over all trained tokens of an optimizer step ("token mean").

    Per token, to maximise: min(r·A, clip(r, 1 − clip_low, 1 + clip_high)·A) with r = exp(lp − lp_gen).
    The default corridor is [0.8, 1.2]; clip_high=0.28 is DAPO's clip-higher (arXiv 2503.14476).
    Source: DeepSeekMath, arXiv 2402.03300, eq. 3; token mean as in DAPO, eq. 8.

    scale:          what divides the advantages: see `advantages`.
    mask_truncated: don't train on completions cut off by the length limit.
    """

    clip_low: float = 0.2
    clip_high: float = 0.2
    scale: Scale = "std"
    mask_truncated: bool = False

    def __post_init__(self) -> None:
        if not (0 <= self.clip_low <= 1 and 0 <= self.clip_high < float("inf")):
            raise Unrecoverable(
                f"no ratio of probabilities fits the corridor [1 − {self.clip_low}, 1 + {self.clip_high}]: "
                "give clip_low within [0, 1], clip_high from 0 up",
                exit_code=2,
            )
        if self.scale not in ("std", "none"):
            raise Unrecoverable(f'GRPOLoss has no scale "{self.scale}": it has "std" and "none"', exit_code=2)

    def advantages(self, rewards: Sequence[float]) -> list[float]:
        """Advantages of one group under this loss's `scale`."""
        return advantages(rewards, scale=self.scale)

    def __call__(
        self, lp: Tensor, lp_gen: Tensor, advantage: Tensor, mask: Tensor, *, total_tokens: int
    ) -> tuple[Tensor, TokenStats]:
        """This micro-batch's share of the step's loss; the shares of all micro-batches add up to the loss.

        lp:           float32, any shape: log π_θ of each sampled token, with gradient.
        lp_gen:       its log-probability under the distribution that sampled it; no gradient flows there.
        advantage:    its completion's advantage.
        mask:         bool: true on the tokens that are trained; the rest give 0, whatever their values.
        total_tokens: trained tokens of the whole optimizer step, over every micro-batch.
        """
        # Masked before exp, not after: the gradient of a masked-out infinity would still be NaN.
        log_ratio = (lp - lp_gen.detach()).masked_fill(~mask, 0.0).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
        advantage = advantage.masked_fill(~mask, 0.0)
        low, high = 1.0 - self.clip_low, 1.0 + self.clip_high
        ratio = log_ratio.exp()
        objective = (ratio * advantage).minimum(ratio.clamp(low, high) * advantage)
        loss = -objective.sum() / max(total_tokens, 1)

        ratio = ratio.detach()
        clipped_low, clipped_high = (ratio < low) & (advantage < 0), (ratio > high) & (advantage > 0)
        return loss, TokenStats(log_ratio.detach(), ratio, clipped_low, clipped_high)
