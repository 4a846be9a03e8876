"""Every loss by numbers worked by hand, in float64, and what a loss may be."""

from __future__ import annotations

import subprocess
import sys
from typing import get_args

import pytest
import torch
from rolecall.actors.losses import Loss
from rolecall.actors.objectives import Correction, Totals, kl_estimate
from rolecall.runtime.errors import Unrecoverable
from torch import Tensor

from .losses import doubles, run

RATIOS = doubles(0.5, 1.0, 1.5).log()
WORTH = doubles(1, -1, 2)
OLD = doubles(-1, -1, -1)
ON_POLICY = torch.zeros(3, dtype=torch.float64)


@pytest.mark.parametrize(
    ("loss", "log_ratio", "expected"),
    [
        # min(.5, .8) − 1 + min(3, 2.4) = 1.9, over 3 tokens
        (Loss(), RATIOS, -0.633333),
        (Loss(clip_high=0.28), RATIOS, -0.686667),
        (Loss(), ON_POLICY, -0.666667),
        # As grpo, 1.9 over B·L_max = 8.
        (Loss(kind="dr_grpo"), RATIOS, -0.2375),
        # What dual-clip adds is for A < 0 alone, and here r is 1.
        (Loss(kind="dual_clip"), RATIOS, -0.633333),
        # A·lp: 1 × (−1 + log .5) + 1 + 2 × (−1 + log 1.5) = −1.693147 + 1 − 1.189070 = −1.882217
        (Loss(kind="reinforce"), RATIOS, 0.627406),
        # Clipped at [.8, 1.28]: .8 × −1.693147 + 1 + 1.28 × −1.189070 = −1.876527
        (Loss(kind="cispo"), RATIOS, 0.625509),
        # One completion, worth 1, −1, 2: s = (.5 × 1 × 1.5)^⅓ = .908560, in the corridor: s × 2 / 3
        (Loss(kind="gspo", clip_low=0.2, clip_high=0.2), RATIOS, -0.605707),
        # Its own corridor [.9997, 1.0004]: s − .9997 + 2s = 1.725981; min takes s where A > 0
        (Loss(kind="gspo"), RATIOS, -0.575327),
        # Decoupled without a correction there is no ratio left: −(1 − 1 + 2)/3
        (Loss(decoupled=True), RATIOS, -0.666667),
    ],
)
def test_the_loss_by_hand(loss: Loss, log_ratio: Tensor, expected: float) -> None:
    assert run(loss, OLD + log_ratio, OLD, WORTH)[0] == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize(
    ("loss", "worth", "expected"),
    [
        # −r·A/3 inside the corridor and where leaving it is punished; 0 where r is above and A > 0.
        (Loss(), WORTH, [-0.5 / 3, 1 / 3, 0]),
        # A < 0: below the corridor no gradient, above it the full one.
        (Loss(), doubles(-1, -1, -1), [0, 1 / 3, 0.5]),
        (Loss(kind="dr_grpo"), WORTH, [-0.5 / 8, 1 / 8, 0]),
        (Loss(kind="reinforce"), WORTH, [-1 / 3, 1 / 3, -2 / 3]),
        # −sg(clip(r))·A/3 with [.8, 1.28]
        (Loss(kind="cispo"), WORTH, [-0.8 / 3, 1 / 3, -2.56 / 3]),
        # −s·A over 3 tokens, each s moved by a third of each lp: all tokens alike, s = .908560
        (Loss(kind="gspo"), doubles(2, 2, 2), [-0.605707] * 3),
        # s < .9997 and A < 0: clipped
        (Loss(kind="gspo"), doubles(-1, -1, -1), [0, 0, 0]),
    ],
)
def test_the_gradient_by_hand(loss: Loss, worth: Tensor, expected: list[float]) -> None:
    assert run(loss, OLD + RATIOS, OLD, worth)[1].tolist() == pytest.approx(expected, abs=1e-6)


def test_dual_clip_by_hand() -> None:
    # min(.5, .8) − 1 + max(min(−40, −4.8), 3 × −4) = −12.5
    lp, worth = doubles(0.5, 1, 10).log(), doubles(1, -1, -4)
    loss, gradient, stats = run(Loss(kind="dual_clip"), lp, 0 * lp, worth)
    assert loss == pytest.approx(4.166667, abs=1e-6)
    assert gradient.tolist() == pytest.approx([-0.5 / 3, 1 / 3, 0])
    assert stats.clipped_high.tolist() == [False, False, True]
    # Without it: −1 × −40.5 / 3; with c = 12 as without.
    for other in (Loss(), Loss(kind="dual_clip", dual_clip_c=12)):
        assert run(other, lp, 0 * lp, worth)[0] == pytest.approx(13.5)


def test_cispo_by_hand() -> None:
    # [1 × 1 × .7, 1.14 × −.5 × 1.2, 1.28 × 2 × .4, .8 × −1 × 2.1] = [.7, −.684, 1.024, −1.68], sum −.64
    lp, worth = doubles(-0.7, -1.2, -0.4, -2.1), doubles(1, -0.5, 2, -1)
    lp_gen = lp - doubles(1, 1.14, 1.56, 0.4).log()
    loss, gradient, stats = run(Loss(kind="cispo", clip_low=0.2, clip_high=0.28), lp, lp_gen, worth)
    assert loss == pytest.approx(-0.16)
    assert (4 * gradient).tolist() == pytest.approx([-1, 0.57, -2.56, 0.8])
    assert stats.clipped_low.tolist() == [False, False, False, True]
    assert stats.clipped_high.tolist() == [False, False, True, False]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        # w = exp(lp_prox − lp_gen) = exp[−.5, .5, −.2] = [.606531, 1.648721, .818731] on [.5, −1, 2.4]:
        # .303265 − 1.648721 + 1.964954 = .619498
        ({"correction": "tis"}, -0.206499),
        ({"correction": "mis"}, -0.206499),  # all within 2
        ({"correction": "icepop"}, -0.206499),  # and within [.5, 5]
        # .303265 − 1.5 + 1.964954 = .768219
        ({"correction": "tis", "correction_cap": 1.5}, -0.256073),
        # .303265 + 1.964954 = 2.268219
        ({"correction": "mis", "correction_cap": 1.5}, -0.756073),
        # −1.648721 + 1.964954 = .316233
        ({"correction": "icepop", "correction_floor": 0.7}, -0.105411),
        ({"correction": "icepop", "correction_floor": 0.7, "correction_cap": 1.5}, -0.654985),  # 1.964954
        # exp(−.5 + .5 − .2) × 1.9 = .818731 × 1.9 = 1.555588
        ({"correction": "tis", "correction_level": "sequence"}, -0.518529),
        ({"correction": "icepop", "correction_level": "sequence", "correction_floor": 0.9}, 0),
    ],
)
def test_corrections_by_hand(options: dict, expected: float) -> None:
    lp_gen = doubles(-0.5, -1.5, -0.8)
    value = run(Loss(**options), OLD + RATIOS, lp_gen, WORTH, lp_prox=OLD)[0]
    assert value == pytest.approx(expected, abs=1e-6)


def test_a_correction_in_the_only_optimizer_step_of_a_batch_by_hand() -> None:
    # r = 1, w as above: −(.606531 − 1.648721 + 2 × .818731)/3, gradient −A·w/3
    lp_gen = doubles(-0.5, -1.5, -0.8)
    for kind in ("grpo", "dual_clip", "reinforce"):
        value, gradient, stats = run(Loss(kind=kind, correction="mis"), OLD, lp_gen, WORTH)
        # reinforce's objective is lp = −1 instead of r = 1
        assert value == pytest.approx(0.198424 if kind == "reinforce" else -0.198424, abs=1e-6)
        assert gradient.tolist() == pytest.approx([-0.202177, 0.549574, -0.545820], abs=1e-6)
        assert stats.weight is not None and stats.cut is not None and not stats.cut.any()
        assert stats.weight.tolist() == pytest.approx([0.606531, 1.648721, 0.818731], abs=1e-6)
        assert stats.ratio.tolist() == stats.weight.tolist(), (
            "the ratio reported is of the policy that sampled"
        )


def test_what_a_correction_cut_is_reported() -> None:
    lp_gen = doubles(-0.5, -1.5, -0.8)
    for loss in (Loss(correction=name, correction_cap=1.5) for name in get_args(Correction)[1:]):
        stats = run(loss, OLD, lp_gen, WORTH)[2]
        assert stats.cut is not None and stats.cut.tolist() == [False, True, False]
    stats = run(Loss(correction="icepop", correction_floor=0.7), OLD, lp_gen, WORTH)[2]
    assert stats.cut is not None and stats.cut.tolist() == [True, False, False]


@pytest.mark.parametrize(
    ("kl", "expected", "slope"),
    [
        # d = ref − lp = [1, −14, −29]
        ("k1", [-1, 14, 29], [1, 1, 1]),
        ("k2", [0.5, 98, 420.5], [-1, 14, 29]),
        ("k3", [0.7182818, 13.0000008, 28], [-1.7182818, 0.9999992, 1]),  # e^d − d − 1, slope 1 − e^d
    ],
)
def test_the_kl_by_hand(kl, expected: list[float], slope: list[float]) -> None:
    ref = doubles(0, -15, -30)
    assert kl_estimate(OLD, ref, kl).tolist() == pytest.approx(expected, abs=1e-6)
    loss = Loss(kl_coef=0.1, kl=kl)
    value, gradient, stats = run(loss, OLD, OLD, 0 * OLD, lp_ref=ref)
    assert value == pytest.approx(0.1 * sum(expected) / 3)
    assert gradient.tolist() == pytest.approx([0.1 * s / 3 for s in slope], abs=1e-6)
    assert stats.kl_ref is not None and stats.kl_ref.tolist() == pytest.approx(expected, abs=1e-6)
    # It is added to the objective, and no correction weighs it.
    corrected = Loss(kl_coef=0.1, kl=kl, correction="icepop", correction_floor=1, correction_cap=1)
    assert run(corrected, OLD, OLD - 3, WORTH, lp_ref=ref)[0] == pytest.approx(value)


@pytest.mark.parametrize("kind", ["grpo", "gspo", "dual_clip"])
@pytest.mark.parametrize(
    ("aggregation", "expected"), [("token_mean", 14 / 6), ("seq_mean", 2), ("dr", 0.875)]
)
def test_aggregations_by_hand(kind, aggregation, expected: float) -> None:
    # Two completions, 2 tokens at loss 1 and 4 at loss 3; L_max = 8.
    worth, sequence = -doubles(1, 1, 3, 3, 3, 3), torch.tensor([7, 7, 2, 2, 2, 2])
    lp, totals = torch.zeros(6, dtype=torch.float64), Totals(6, 2, 16)
    loss = Loss(kind=kind, aggregation=aggregation)
    assert run(loss, lp, lp, worth, sequence=sequence, totals=totals)[0] == pytest.approx(expected)


def test_a_completion_trained_in_part_counts_by_its_trained_tokens() -> None:
    # Of 2 tokens at loss 1 one is trained, of 2 at loss 3 both: seq_mean (1 + 3)/2.
    lp, worth, sequence = (
        torch.zeros(4, dtype=torch.float64),
        -doubles(1, 1, 3, 3),
        torch.tensor([0, 0, 1, 1]),
    )
    mask = torch.tensor([True, False, True, True])
    loss = Loss(aggregation="seq_mean")
    assert run(loss, lp, lp, worth, sequence=sequence, mask=mask)[0] == pytest.approx(2)
    # Ratios .5 and, masked, 10: s = .5, worth 2.
    lp, mask = doubles(0.5, 10).log(), torch.tensor([True, False])
    assert run(Loss(kind="gspo"), lp, 0 * lp, doubles(2, 2), mask=mask)[0] == pytest.approx(-1)


def test_micro_batches_weigh_by_their_tokens() -> None:
    # 100 tokens at loss 2.0 and 900 at 0.5: the mean of means would be 1.25.
    shares = [
        run(Loss(), torch.zeros(n), torch.zeros(n), torch.full((n,), -worth), totals=Totals(1000, 2, 0))[0]
        for n, worth in ((100, 2.0), (900, 0.5))
    ]
    assert sum(shares) == pytest.approx(0.65, abs=1e-6)


def test_what_is_clipped_is_reported_by_side() -> None:
    lp = doubles(0.5, 0.5, 1.5, 1.5, 1.0).log()
    _, _, stats = run(Loss(), lp, torch.zeros_like(lp), doubles(1, -1, 1, -1, 1))
    assert stats.clipped_low.tolist() == [False, True, False, False, False]
    assert stats.clipped_high.tolist() == [False, False, True, False, False]
    assert stats.ratio.tolist() == pytest.approx([0.5, 0.5, 1.5, 1.5, 1.0])
    assert stats.log_ratio.tolist() == pytest.approx(lp.tolist())
    assert (stats.weight, stats.cut, stats.kl_ref) == (None, None, None)
    _, _, stats = run(Loss(kind="reinforce"), lp, torch.zeros_like(lp), doubles(1, -1, 1, -1, 1))
    assert not stats.clipped_low.any() and not stats.clipped_high.any()


def test_each_kind_has_advantages_of_its_own_unless_told_otherwise() -> None:
    rewards = [[1.0, 1.0, 0.0, 0.0], [2.0, 2.0, 2.0, 2.0]]
    for kind in ("grpo", "gspo", "cispo", "reinforce", "dual_clip"):
        assert Loss(kind=kind).advantages(rewards)[0] == pytest.approx([1, 1, -1, -1], abs=1e-5)
    for loss in (Loss(kind="dr_grpo"), Loss(scale="none")):
        assert loss.advantages(rewards) == [[0.5, 0.5, -0.5, -0.5], [0, 0, 0, 0]]
    assert Loss(kind="reinforce", centre="none").advantages(rewards) == rewards
    # The 8 rewards of the step: mean 1.25, squares 2 × .0625 + 2 × 1.5625 + 4 × .5625 = 5.5; σ² = 5.5/7
    batch = Loss(scale="batch_std", ddof=1, eps=0).advantages(rewards)
    assert batch[0] == pytest.approx([0.5 / (5.5 / 7) ** 0.5] * 2 + [-0.5 / (5.5 / 7) ** 0.5] * 2)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"kind": "gpro"}, 'kind "gpro" is none of grpo, dr_grpo, gspo'),
        ({"scale": "batch"}, 'scale "batch" is none of std, batch_std, none'),
        ({"clip_low": 1.2}, "give clip_low within"),
        ({"clip_high": -0.1}, "clip_high from 0 up"),
        ({"clip_high": float("nan")}, "clip_high from 0 up"),
        ({"kind": "dr_grpo", "scale": "std"}, 'scale "std" is not dr_grpo\'s'),
        ({"kind": "dr_grpo", "aggregation": "token_mean"}, 'aggregation "token_mean" is not dr_grpo\'s'),
        ({"kind": "dr_grpo", "centre": "none"}, 'centre "none" is not dr_grpo\'s'),
        ({"kind": "reinforce", "clip_high": 0.2}, "reinforce has no ratio for clip_high"),
        ({"kind": "reinforce", "decoupled": True}, "reinforce has no ratio for decoupled"),
        ({"dual_clip_c": 3.0}, "dual_clip_c is not for grpo"),
        ({"kind": "dual_clip", "dual_clip_c": 1.1}, "above 1 \\+ clip_high = 1.2"),
        ({"centre": "none", "scale": "std"}, 'scale "std" needs centred rewards'),
        ({"correction_cap": 2.0}, "correction_cap is for a correction"),
        ({"correction_level": "token"}, "correction_level is for a correction"),
        ({"correction": "tis", "correction_floor": 0.5}, "correction_floor is icepop's"),
        ({"correction": "tis", "correction_cap": 0.5}, "correction_cap 0.5 can't be"),
        ({"correction": "icepop", "correction_floor": 1.5}, "correction_floor 1.5 can't be"),
        ({"correction": "tis", "decoupled": False}, "twice"),
        ({"ddof": 2}, "ddof 2 can't be"),
        ({"eps": -1.0}, "eps -1.0 can't be"),
        ({"kl_coef": float("inf")}, "kl_coef inf can't be"),
    ],
)
def test_a_loss_that_cannot_be_is_refused(options: dict, sentence: str) -> None:
    with pytest.raises(Unrecoverable, match=sentence) as caught:
        Loss(**options)
    assert caught.value.exit_code == 2


def test_a_recipe_can_name_a_loss_without_importing_torch() -> None:
    code = "import sys; from rolecall.actors.losses import Loss; Loss(); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
