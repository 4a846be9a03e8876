"""The losses' formulas, as functions of tensors: objectives, off-policy corrections, KL, aggregation.

All of [N], the tokens of a micro-batch, which holds completions whole. Tensor methods do it all, so that what
names a loss in a recipe need not import torch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Literal, NamedTuple

if TYPE_CHECKING:
    from torch import Tensor

__all__ = [
    "KL",
    "MAX_LOG_RATIO",
    "OBJECTIVES",
    "Aggregation",
    "Band",
    "Correction",
    "Kind",
    "Level",
    "Objective",
    "Sequences",
    "Tokens",
    "Totals",
    "correction_weight",
    "kl_estimate",
    "shares",
]

MAX_LOG_RATIO = 20.0  # exp(20) = 4.9e8: far outside any corridor, and finite in float32 with room for a sum

Kind = Literal["grpo", "dr_grpo", "gspo", "cispo", "reinforce", "dual_clip"]
Correction = Literal["none", "tis", "mis", "icepop"]
Level = Literal["token", "sequence"]
Aggregation = Literal["token_mean", "seq_mean", "dr"]
KL = Literal["k1", "k2", "k3"]


class Sequences:
    """Sums over the tokens of each completion, and back.

    sequence: [N] int64: any number of its completion. trained: [N] float: 1 for the tokens that count, else 0.
    """

    def __init__(self, sequence: Tensor, trained: Tensor) -> None:
        numbers, self._index = sequence.unique(return_inverse=True)
        self._count = len(numbers)
        self.lengths = self.sums(trained).clamp(min=1.0)  # [N]: trained tokens of the token's completion

    def sums(self, values: Tensor) -> Tensor:
        """[N]: at each token the sum over its completion."""
        return values.new_zeros(self._count).index_add(0, self._index, values)[self._index]


class Tokens(NamedTuple):
    """What an objective sees, [N] each, 0 where masked.

    log_ratio: log of r, with gradient, not yet capped. lp: log π_θ, with gradient. advantage: its completion's.
    """

    log_ratio: Tensor
    lp: Tensor
    advantage: Tensor
    sequences: Sequences


class Band(NamedTuple):
    """The corridor [low, high] of ratios, and dual-clip's c."""

    low: float
    high: float
    c: float


class Objective(NamedTuple):
    """What to maximise at each token, [N] with gradient; bool [N]: where the corridor changed the gradient."""

    value: Tensor
    clipped_low: Tensor
    clipped_high: Tensor


def _ratio(log_ratio: Tensor) -> Tensor:
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def _clipped(ratio: Tensor, advantage: Tensor, band: Band) -> Objective:
    value = (ratio * advantage).minimum(ratio.clamp(band.low, band.high) * advantage)
    ratio = ratio.detach()
    return Objective(value, (ratio < band.low) & (advantage < 0), (ratio > band.high) & (advantage > 0))


def grpo(tokens: Tokens, band: Band) -> Objective:
    """min(r·A, clip(r, low, high)·A). Source: DeepSeekMath, arXiv 2402.03300, eq. 3."""
    return _clipped(_ratio(tokens.log_ratio), tokens.advantage, band)


def gspo(tokens: Tokens, band: Band) -> Objective:
    """As `grpo`, with s = exp(mean over the completion's tokens of log r) at each of them.

    Source: GSPO, arXiv 2507.18071, eq. 5 to 7.
    """
    mean = tokens.sequences.sums(tokens.log_ratio) / tokens.sequences.lengths
    return _clipped(_ratio(mean), tokens.advantage, band)


def dual_clip(tokens: Tokens, band: Band) -> Objective:
    """As `grpo`, and where A < 0 at least c·A. Source: Ye et al., arXiv 1912.09729, eq. 5."""
    objective, advantage = grpo(tokens, band), tokens.advantage
    bad = advantage < 0
    floor = band.c * advantage
    cut = bad & (objective.value.detach() < floor)
    return objective._replace(
        value=floor.where(cut, objective.value), clipped_high=objective.clipped_high | cut
    )


def cispo(tokens: Tokens, band: Band) -> Objective:
    """sg(clip(r, low, high))·A·log π: what is clipped loses weight and keeps a gradient.

    Source: MiniMax-M1, arXiv 2506.13585, eq. 4 and 5.
    """
    ratio = _ratio(tokens.log_ratio).detach()
    value = ratio.clamp(band.low, band.high) * tokens.advantage * tokens.lp
    return Objective(value, ratio < band.low, ratio > band.high)


def reinforce(tokens: Tokens, band: Band) -> Objective:
    """A·log π. Source: Williams 1992; here any weight of old data is the correction's."""
    never = tokens.lp.detach() > float("inf")
    return Objective(tokens.advantage * tokens.lp, never, never)


OBJECTIVES: dict[Kind, Callable[[Tokens, Band], Objective]] = {
    "grpo": grpo,
    "dr_grpo": grpo,  # what differs are its advantages and its aggregation
    "gspo": gspo,
    "cispo": cispo,
    "reinforce": reinforce,
    "dual_clip": dual_clip,
}


def correction_weight(
    log_w: Tensor, sequences: Sequences, *, kind: Correction, level: Level, floor: float, cap: float
) -> tuple[Tensor, Tensor]:
    """Weight of each token for being sampled by another policy than the trainer's, and whether it was cut: [N].

    log_w: lp_prox − lp_gen, 0 where masked; no gradient flows through a weight.
    level: "token": w of each; "sequence": their product over a completion, at each of its tokens.
    tis:    min(w, cap). Source: Yao et al. 2025, "Your efficient RL framework secretly brings you off-policy RL
            training".
    mis:    w, and 0 above cap. Source: Liu et al. 2025, "When speed kills stability".
    icepop: w, and 0 outside [floor, cap]. Source: Ling team, arXiv 2510.18855.
    """
    log_w = log_w.detach()
    w = _ratio(sequences.sums(log_w) if level == "sequence" else log_w)
    cut = w > cap
    if kind == "tis":
        return w.clamp(max=cap), cut
    if kind == "icepop":
        cut = cut | (w < floor)
    return w.masked_fill(cut, 0.0), cut


def kl_estimate(lp: Tensor, lp_ref: Tensor, kind: KL) -> Tensor:
    """KL of the policy from the reference at each sampled token, [N], with d = lp_ref − lp.

    k1: −d. Its gradient is 0 in the mean over what the policy samples: it shows the divergence, it doesn't hold it.
    k2: d²/2.
    k3: exp(d) − d − 1, which is never negative; d is capped from above, where exp would overflow.
    Source: Schulman 2020, "Approximating KL divergence".
    """
    d = lp_ref.detach() - lp
    if kind == "k1":
        return -d
    if kind == "k2":
        return d.square() / 2
    d = d.clamp(max=MAX_LOG_RATIO)
    return d.exp() - d - 1


class Totals(NamedTuple):
    """Of the whole optimizer step, over every micro-batch.

    tokens:    trained tokens.
    sequences: completions with a trained token.
    budget:    B·L_max: all completions, those without variance too, times the most tokens one may have.
    """

    tokens: int
    sequences: int
    budget: int


def shares(sequences: Sequences, totals: Totals, aggregation: Aggregation) -> Tensor:
    """[N] float32: each token's share in the step's loss, which is the sum over tokens of share × loss.

    token_mean: 1 / trained tokens (DAPO, arXiv 2503.14476, eq. 8).
    seq_mean:   1 / trained completions / trained tokens of its completion (DeepSeekMath, eq. 3).
    dr:         1 / (B·L_max) (Dr. GRPO, arXiv 2503.20783, §3.2).
    """
    if aggregation == "seq_mean":
        return 1.0 / (sequences.lengths * max(totals.sequences, 1))
    total = totals.tokens if aggregation == "token_mean" else totals.budget
    return sequences.lengths.new_full(sequences.lengths.shape, 1.0 / max(total, 1))
