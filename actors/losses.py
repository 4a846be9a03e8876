"""The loss of an optimizer step, as a setting: which formula of `objectives`, and how it is averaged.

Recipes hold a Loss in their Config, so this module must import without torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite
from typing import TYPE_CHECKING, NamedTuple, get_args

from ..runtime.errors import Unrecoverable
from . import advantages as formulas
from .advantages import Centre, Scale
from .objectives import (
    KL,
    MAX_LOG_RATIO,
    OBJECTIVES,
    Aggregation,
    Band,
    Correction,
    Kind,
    Level,
    Sequences,
    Tokens,
    Totals,
    correction_weight,
    kl_estimate,
    shares,
)

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["Loss", "TokenStats"]


class _Own(NamedTuple):
    """What a kind has for the options that are None."""

    clip: tuple[float, float]
    aggregation: Aggregation


_OWN: dict[Kind, _Own] = {
    "grpo": _Own((0.2, 0.2), "token_mean"),
    "dr_grpo": _Own((0.2, 0.2), "dr"),
    "gspo": _Own((3e-4, 4e-4), "seq_mean"),  # its paper's: the mean of log-ratios stays near 0
    "cispo": _Own((0.2, 0.28), "token_mean"),
    "reinforce": _Own((0.0, 0.0), "token_mean"),
    "dual_clip": _Own((0.2, 0.2), "token_mean"),
}
_CAPS: dict[Correction, float] = {"none": 0.0, "tis": 2.0, "mis": 2.0, "icepop": 5.0}
_CHOICES = {
    "kind": Kind,
    "correction": Correction,
    "correction_level": Level,
    "aggregation": Aggregation,
    "centre": Centre,
    "scale": Scale,
    "kl": KL,
}


class TokenStats(NamedTuple):
    """What the loss saw of each token, all [N] and without gradient.

    log_ratio:    lp − lp_gen, capped at ±MAX_LOG_RATIO; 0 where masked. Of the sampling policy, decoupled or not.
    ratio:        exp(log_ratio).
    clipped_low:  bool: below the corridor, where that changes the gradient (TRL's clip_ratio/low).
    clipped_high: bool: above it, likewise.
    weight:       the off-policy correction's; None without one.
    cut:          bool: it truncated or masked the token; None without one.
    kl_ref:       the KL to the reference, by the estimator chosen; None without one.
    """

    log_ratio: Tensor
    ratio: Tensor
    clipped_low: Tensor
    clipped_high: Tensor
    weight: Tensor | None
    cut: Tensor | None
    kl_ref: Tensor | None


@dataclass(frozen=True, kw_only=True)
class Loss:
    """Which loss is minimised, and its numbers. What is None is the kind's own.

    kind: by the objective that its function in `objectives` has:
        grpo       clipped at [0.8, 1.2]; clip_high=0.28 is DAPO's clip-higher (arXiv 2503.14476)
        dr_grpo    grpo whose advantages are not scaled and whose sum is divided by a constant, B·L_max
        gspo       the ratio of a whole completion, clipped at [1 − 3e-4, 1 + 4e-4]; seq_mean
        cispo      clipped weights on log π, at [0.8, 1.28]; clip_low=1 is without a floor, as in its paper
        reinforce  A·log π
        dual_clip  grpo, and at worst dual_clip_c·A (3) where A < 0
    clip_low, clip_high: the corridor is [1 − clip_low, 1 + clip_high].

    correction: of tokens that another policy sampled than is trained (older, or of another engine's arithmetic):
        "none", or "tis", "mis", "icepop": see `correction_weight`. It multiplies the objective, not the KL; what
        it masks still counts in the averages, for those are known before the log-probs are.
    correction_level, correction_cap, correction_floor: "token"; tis and mis 2, icepop [0.5, 5].
    decoupled: take r from the trainer's own weights at the start of the optimizer step, lp_prox, and leave the rest,
        w = exp(lp_prox − lp_gen), to the correction (arXiv 2505.24298). On as soon as there is a correction: r over
        lp_gen would count w twice. A batch is trained on in one optimizer step, so these weights are those that
        give lp: lp_prox is lp without its gradient, there is no second pass, r is 1 and no clip takes hold.

    aggregation: "token_mean", "seq_mean" or "dr": see `shares`.
    centre, scale, ddof, eps: see `advantages`; mean and std, but dr_grpo's scale and centre="none"'s are "none".
    kl_coef, kl: kl_coef × the KL to the base model without its adapter is added; 0 is off. See `kl_estimate`.
    mask_truncated: don't train on completions cut off by the length limit.

    Raises Unrecoverable for what can't be, and for an option that this kind would take no notice of.
    """

    kind: Kind = "grpo"
    clip_low: float | None = None
    clip_high: float | None = None
    dual_clip_c: float | None = None
    correction: Correction = "none"
    correction_level: Level | None = None
    correction_cap: float | None = None
    correction_floor: float | None = None
    decoupled: bool | None = None
    aggregation: Aggregation | None = None
    centre: Centre | None = None
    scale: Scale | None = None
    ddof: int = 0
    eps: float = 1e-6
    kl_coef: float = 0.0
    kl: KL = "k3"
    mask_truncated: bool = False

    def __post_init__(self) -> None:
        for name, choices in _CHOICES.items():
            value = getattr(self, name)
            if value is not None and value not in get_args(choices):
                raise _refused(f'{name} "{value}" is none of {", ".join(get_args(choices))}')
        self._check_kind()
        self._check_correction()
        self._check_numbers()

    def _check_kind(self) -> None:
        if self.kind == "dr_grpo":
            for name, own in (("centre", "mean"), ("scale", "none"), ("aggregation", "dr")):
                if getattr(self, name) not in (None, own):
                    raise _refused(
                        f'{name} "{getattr(self, name)}" is not dr_grpo\'s, which is "{own}": leave it out, or take '
                        "kind grpo and choose each by itself"
                    )
        if self.kind == "reinforce":
            for name in ("clip_low", "clip_high", "decoupled"):
                if getattr(self, name) is not None:
                    raise _refused(f"reinforce has no ratio for {name} to bear on: leave it out")
        if self.kind != "dual_clip" and self.dual_clip_c is not None:
            raise _refused(f"dual_clip_c is not for {self.kind}: leave it out, or take kind dual_clip")
        if self.centre == "none" and self.scale not in (None, "none"):
            raise _refused(
                f'scale "{self.scale}" needs centred rewards: take centre mean or leave_one_out, or scale none'
            )

    def _check_correction(self) -> None:
        if self.correction == "none":
            for name in ("correction_level", "correction_cap", "correction_floor"):
                if getattr(self, name) is not None:
                    raise _refused(
                        f"{name} is for a correction, and there is none: choose one or leave it out"
                    )
        elif self.decoupled is False:
            raise _refused(
                f"{self.correction} without decoupling would count how old the data is twice, in the ratio and in "
                "its weight: leave decoupled out"
            )
        if self.correction_floor is not None and self.correction != "icepop":
            raise _refused(f"correction_floor is icepop's, not for {self.correction}: leave it out")

    def _check_numbers(self) -> None:
        low, high = self._clip
        if not (0 <= low <= 1 and 0 <= high < float("inf")):
            raise _refused(
                f"no ratio of probabilities fits the corridor [1 − {low}, 1 + {high}]: give clip_low within "
                "[0, 1], clip_high from 0 up"
            )
        if self.kind == "dual_clip" and self._c <= 1 + high:
            raise _refused(f"dual_clip_c {self._c:g} must be above 1 + clip_high = {1 + high:g}")
        for name, fits, wanted in (
            ("dual_clip_c", lambda c: c > 1, "above 1"),
            ("correction_cap", lambda cap: cap >= 1, "from 1 up, which is the weight on-policy"),
            ("correction_floor", lambda floor: 0 <= floor <= 1, "within [0, 1]"),
            ("ddof", lambda ddof: ddof in (0, 1), "0 or 1"),
            ("eps", lambda eps: eps >= 0, "from 0 up"),
            ("kl_coef", lambda coef: coef >= 0, "from 0 up"),
        ):
            value = getattr(self, name)
            if value is not None and not (isfinite(value) and fits(value)):
                raise _refused(f"{name} {value} can't be: give a number {wanted}")

    @property
    def _clip(self) -> tuple[float, float]:
        low, high = _OWN[self.kind].clip
        return (
            low if self.clip_low is None else self.clip_low,
            high if self.clip_high is None else self.clip_high,
        )

    @property
    def _c(self) -> float:
        return 3.0 if self.dual_clip_c is None else self.dual_clip_c

    @property
    def averages_by(self) -> Aggregation:
        """The aggregation in force."""
        return self.aggregation or _OWN[self.kind].aggregation

    @property
    def trains_equal_groups(self) -> bool:
        """Groups whose advantages are all 0 have a gradient: the KL's alone."""
        return self.kl_coef > 0

    def advantages(self, rewards_P_G: Sequence[Sequence[float]]) -> list[list[float]]:
        """Advantages of a step's groups; raises ValueError on a reward that is not finite."""
        centre = self.centre or "mean"
        unscaled = self.kind == "dr_grpo" or centre == "none"
        scale = self.scale or ("none" if unscaled else "std")
        return formulas.advantages(rewards_P_G, centre=centre, scale=scale, ddof=self.ddof, eps=self.eps)

    def __call__(
        self,
        lp: Tensor,
        lp_gen: Tensor,
        advantage: Tensor,
        mask: Tensor,
        sequence: Tensor,
        totals: Totals,
        *,
        lp_ref: Tensor | None = None,
        lp_prox: Tensor | None = None,
    ) -> tuple[Tensor, TokenStats]:
        """This micro-batch's share of the step's loss; the shares of all micro-batches add up to the loss.

        lp:        [N] float32: log π_θ of each sampled token, with gradient; none flows to the others.
        lp_gen:    [N]: its log-probability under the distribution that sampled it.
        advantage: [N]: its completion's advantage.
        mask:      [N] bool: true on the tokens that are trained; the rest give 0, whatever their values.
        sequence:  [N] int64: number of its completion, all of whose tokens are here.
        lp_ref:    [N]: under the reference; needed if kl_coef > 0.
        lp_prox:   [N]: under the weights at the start of the optimizer step, if those are not lp's own.
        """
        # Masked before exp, not after: the gradient of a masked-out infinity would still be NaN.
        lp, lp_gen, advantage = (
            tensor.masked_fill(~mask, 0.0) for tensor in (lp, lp_gen.detach(), advantage)
        )
        lp_prox = lp.detach() if lp_prox is None else lp_prox.detach().masked_fill(~mask, 0.0)
        sequences = Sequences(sequence, mask.to(lp.dtype))
        decoupled = self.correction != "none" if self.decoupled is None else self.decoupled
        low, high = self._clip
        band = Band(1.0 - low, 1.0 + high, self._c)
        tokens = Tokens(lp - (lp_prox if decoupled else lp_gen), lp, advantage, sequences)
        objective = OBJECTIVES[self.kind](tokens, band)
        loss, weight, cut, kl_ref = -objective.value, None, None, None
        if self.correction != "none":
            weight, cut = correction_weight(
                lp_prox - lp_gen, sequences, kind=self.correction, level=self.correction_level or "token",
                floor=0.5 if self.correction_floor is None else self.correction_floor,
                cap=_CAPS[self.correction] if self.correction_cap is None else self.correction_cap,
            )  # fmt: skip
            loss = loss * weight
        if self.kl_coef > 0:
            assert lp_ref is not None, "kl_coef > 0 needs the reference's log-probs"
            kl_ref = kl_estimate(lp, lp_ref.masked_fill(~mask, 0.0), self.kl)
            loss = loss + self.kl_coef * kl_ref
            kl_ref = kl_ref.detach()
        share = shares(sequences, totals, self.averages_by)
        log_ratio = (lp - lp_gen).detach().clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
        stats = TokenStats(
            log_ratio, log_ratio.exp(), objective.clipped_low, objective.clipped_high, weight, cut, kl_ref
        )
        return (loss * share).sum(), stats


def _refused(message: str) -> Unrecoverable:
    return Unrecoverable(f"the loss: {message}", exit_code=2)
