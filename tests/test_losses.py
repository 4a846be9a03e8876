"""Numbers worked by hand, in float64, and what must hold for any."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from rolecall.actors.losses import MAX_LOG_RATIO, GRPOLoss, advantages
from rolecall.runtime.errors import Unrecoverable
from torch import Tensor


def doubles(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def run(
    loss: GRPOLoss, lp: Tensor, lp_gen: Tensor, advantage: Tensor, mask: Tensor | None = None, total: int = 0
) -> tuple[float, Tensor]:
    """The loss and its gradient with respect to lp."""
    lp = lp.clone().requires_grad_()
    mask = torch.ones_like(lp, dtype=torch.bool) if mask is None else mask
    value, _ = loss(lp, lp_gen, advantage, mask, total_tokens=total or int(mask.sum()))
    value.backward()
    assert lp.grad is not None
    return value.item(), lp.grad


@pytest.mark.parametrize(
    ("rewards", "options", "expected"),
    [
        ([1, 1, 0, 0], {"scale": "none"}, [0.5, 0.5, -0.5, -0.5]),
        ([1, 1, 0, 0], {}, [0.999998, 0.999998, -0.999998, -0.999998]),  # ½ / (½ + eps)
        ([1, 1, 0, 0], {"ddof": 1, "eps": 1e-4}, [0.8658755, 0.8658755, -0.8658755, -0.8658755]),
        ([1, 0, 0, 0], {"eps": 0}, [3**0.5, -(3**-0.5), -(3**-0.5), -(3**-0.5)]),
        ([1, 0, 0, 0], {}, [1.7320468, -0.5773489, -0.5773489, -0.5773489]),  # √3 less eps's share
        ([3, 1], {"scale": "none"}, [1, -1]),
    ],
)
def test_advantages_by_hand(rewards: list[float], options: dict, expected: list[float]) -> None:
    assert advantages(rewards, **options) == pytest.approx(expected, abs=1e-7)


@pytest.mark.parametrize("rewards", [[0.1, 0.1, 0.1], [5.0], [0.0, 0.0], []])
@pytest.mark.parametrize("scale", ["std", "none"])
@pytest.mark.parametrize("ddof", [0, 1])
def test_equal_rewards_and_single_members_are_worth_exactly_zero(rewards, scale, ddof) -> None:
    assert advantages(rewards, scale=scale, ddof=ddof) == [0.0] * len(rewards)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_a_reward_that_is_not_finite_is_an_error(bad: float) -> None:
    with pytest.raises(ValueError, match=f"reward 1 of the group is {bad}"):
        advantages([1.0, bad, 0.0])


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=16))
def test_advantages_sum_to_zero_and_keep_the_order(rewards: list[float]) -> None:
    values = advantages(rewards)
    assert sum(values) == pytest.approx(0, abs=1e-5 * len(rewards))
    order = sorted(range(len(rewards)), key=lambda i: rewards[i])
    assert [values[i] for i in order] == sorted(values)


RATIOS = doubles(0.5, 1.0, 1.5).log()
WORTH = doubles(1, -1, 2)


@pytest.mark.parametrize(
    ("loss", "log_ratio", "expected"),
    [
        # min(.5, .8) − 1 + min(3, 2.4) = 1.9
        (GRPOLoss(), RATIOS, -0.633333),
        (GRPOLoss(clip_high=0.28), RATIOS, -0.686667),
        (GRPOLoss(), torch.zeros(3, dtype=torch.float64), -0.666667),
    ],
)
def test_the_loss_by_hand(loss: GRPOLoss, log_ratio: Tensor, expected: float) -> None:
    lp_gen = doubles(-1, -1, -1)
    assert run(loss, lp_gen + log_ratio, lp_gen, WORTH)[0] == pytest.approx(expected, abs=1e-6)


def test_the_gradient_by_hand() -> None:
    # −r·A/3 inside the corridor and where leaving it is punished; 0 where r is above and A > 0.
    _, gradient = run(GRPOLoss(), RATIOS - 1, doubles(-1, -1, -1), WORTH)
    assert gradient.tolist() == pytest.approx([-0.5 / 3, 1 / 3, 0], abs=1e-9)
    # A < 0: below the corridor no gradient, above it the full one.
    _, gradient = run(GRPOLoss(), doubles(0.5, 1.5).log(), doubles(0, 0), doubles(-1, -1))
    assert gradient.tolist() == pytest.approx([0, 0.75], abs=1e-9)


def test_what_is_clipped_is_reported_by_side() -> None:
    lp = doubles(0.5, 0.5, 1.5, 1.5, 1.0).log()
    mask = torch.ones(5, dtype=torch.bool)
    _, stats = GRPOLoss()(lp, torch.zeros_like(lp), doubles(1, -1, 1, -1, 1), mask, total_tokens=5)
    assert stats.clipped_low.tolist() == [False, True, False, False, False]
    assert stats.clipped_high.tolist() == [False, False, True, False, False]
    assert stats.ratio.tolist() == pytest.approx([0.5, 0.5, 1.5, 1.5, 1.0])
    assert stats.log_ratio.tolist() == pytest.approx(lp.tolist())


def test_micro_batches_weigh_by_their_tokens() -> None:
    # 100 tokens at loss 2.0 and 900 at 0.5: the mean of means would be 1.25.
    shares = [
        run(GRPOLoss(), torch.zeros(n), torch.zeros(n), torch.full((n,), -worth), total=1000)[0]
        for n, worth in ((100, 2.0), (900, 0.5))
    ]
    assert sum(shares) == pytest.approx(0.65, abs=1e-6)


def test_all_masked_is_zero_and_not_nan() -> None:
    nan = torch.full((3,), float("nan"))
    value, gradient = run(GRPOLoss(), nan, nan, nan, torch.zeros(3, dtype=torch.bool))
    assert value == 0
    assert gradient.tolist() == [0, 0, 0]


tokens = st.lists(
    st.tuples(
        st.floats(-30, 0),
        st.floats(-30, 0),
        st.floats(-3, 3),
        st.booleans(),
        st.integers(min_value=0, max_value=3),
    ),
    min_size=1,
    max_size=40,
)


@given(tokens)
def test_any_split_gives_the_same_loss_and_gradient(drawn) -> None:
    lp, lp_gen, worth = (doubles(*column) for column in list(zip(*drawn, strict=True))[:3])
    mask = torch.tensor([token[3] for token in drawn])
    total = int(mask.sum())
    whole, gradient = run(GRPOLoss(), lp, lp_gen, worth, mask, total)
    split, split_gradient = 0.0, torch.zeros_like(lp)
    for part in range(4):
        at = torch.tensor([i for i, token in enumerate(drawn) if token[4] == part], dtype=torch.long)
        value, split_gradient[at] = run(GRPOLoss(), lp[at], lp_gen[at], worth[at], mask[at], total)
        split += value
    assert split == pytest.approx(whole, rel=1e-9, abs=1e-9)
    assert torch.allclose(split_gradient, gradient, rtol=1e-9)
    assert bool((gradient[~mask] == 0).all())


@given(tokens, st.floats(1, 1e4))
def test_extreme_ratios_stay_finite_in_float32(drawn, stretch: float) -> None:
    lp, lp_gen, worth = (torch.tensor(column) for column in list(zip(*drawn, strict=True))[:3])
    lp = lp.float().requires_grad_()
    value, stats = GRPOLoss()(
        lp * stretch, lp_gen.float(), worth.float(), torch.ones(len(lp), dtype=torch.bool), total_tokens=1
    )
    value.backward()
    assert lp.grad is not None
    assert bool(value.isfinite()) and bool(lp.grad.isfinite().all())
    assert float(stats.log_ratio.abs().max()) <= MAX_LOG_RATIO


def test_a_corridor_that_cannot_be_is_refused() -> None:
    with pytest.raises(Unrecoverable, match="clip_low within"):
        GRPOLoss(clip_low=1.2)
    with pytest.raises(Unrecoverable, match="clip_high from 0 up"):
        GRPOLoss(clip_high=-0.1)
    with pytest.raises(Unrecoverable, match='no scale "batch"'):
        GRPOLoss(scale="batch")  # pyright: ignore[reportArgumentType]


def test_a_recipe_can_name_a_loss_without_importing_torch() -> None:
    code = "import sys; from rolecall.actors.losses import GRPOLoss; GRPOLoss(); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
