"""What must hold of every loss: kind × aggregation × correction."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from rolecall.actors.losses import Loss
from rolecall.actors.objectives import MAX_LOG_RATIO, Totals
from torch import Tensor

from .losses import LOSSES, name_of, run

WITH_KL = [Loss(kl_coef=0.1), Loss(kind="cispo", kl_coef=1, kl="k2"), Loss(kl_coef=0.1, correction="tis")]
every = pytest.mark.parametrize("loss", [*LOSSES, *WITH_KL], ids=name_of)
few = settings(max_examples=6)  # of each of more than a hundred losses

token = st.tuples(st.floats(-9, 0), st.floats(-9, 0), st.floats(-9, 0))
completion = st.tuples(
    st.lists(token, min_size=1, max_size=5), st.floats(-3, 3), st.booleans(), st.integers(0, 2)
)
steps = st.lists(completion, min_size=1, max_size=6)
"""Completions: (lp, lp_gen, lp_ref) of each token, its advantage, whether it is trained, its micro-batch."""


class Step:
    """A drawn step as tensors, in float64."""

    def __init__(self, drawn: list) -> None:
        rows = [
            (*values, worth, trained, number, part)
            for number, (tokens, worth, trained, part) in enumerate(drawn)
            for values in tokens
        ]
        columns = list(zip(*rows, strict=True))
        self.lp, self.lp_gen, self.lp_ref, self.worth = (
            torch.tensor(column, dtype=torch.float64) for column in columns[:4]
        )
        self.mask = torch.tensor(columns[4])
        self.sequence, self.part = (torch.tensor(column) for column in columns[5:])
        trained = len(self.sequence[self.mask].unique())
        self.totals = Totals(int(self.mask.sum()), trained, len(drawn) * 5)

    def run(self, loss: Loss, at: Tensor | None = None, relabel: int = 0) -> tuple[float, Tensor]:
        """Loss and gradient of the tokens `at`, in that order, with the completions' numbers moved."""
        at = torch.arange(len(self.lp)) if at is None else at
        value, gradient, _ = run(
            loss, self.lp[at], self.lp_gen[at], self.worth[at], mask=self.mask[at],
            sequence=(self.sequence[at] * 7 + relabel) % 101, totals=self.totals, lp_ref=self.lp_ref[at],
        )  # fmt: skip
        return value, gradient


@every
@few
@given(drawn=steps, seed=st.integers(0, 2**32))
def test_any_split_and_order_gives_the_same_loss_and_gradient(loss: Loss, drawn, seed: int) -> None:
    step = Step(drawn)
    whole, gradient = step.run(loss)
    order = list(range(len(step.lp)))
    random.Random(seed).shuffle(order)
    for parts in (step.part, step.sequence):  # micro-batches as drawn, and every completion by itself
        split, split_gradient = 0.0, torch.zeros_like(gradient)
        for part in parts.unique():
            at = torch.tensor([i for i in order if parts[i] == part])
            value, split_gradient[at] = step.run(loss, at, relabel=seed % 50)
            split += value
        assert split == pytest.approx(whole, rel=1e-9, abs=1e-9)
        assert torch.allclose(split_gradient, gradient, rtol=1e-9, atol=1e-12)
    assert bool((gradient[~step.mask] == 0).all())


@every
@few
@given(drawn=steps)
def test_what_is_masked_may_be_anything(loss: Loss, drawn) -> None:
    step = Step(drawn)
    whole, gradient = step.run(loss)
    for tensor in (step.lp, step.lp_gen, step.lp_ref, step.worth):
        tensor[~step.mask] = float("nan")
    value, again = step.run(loss)
    assert value == whole
    assert torch.equal(again, gradient)


@every
def test_all_masked_is_zero_and_not_nan(loss: Loss) -> None:
    nan = torch.full((3,), float("nan"))
    value, gradient, _ = run(loss, nan, nan, nan, mask=torch.zeros(3, dtype=torch.bool), lp_ref=nan)
    assert value == 0
    assert gradient.tolist() == [0, 0, 0]


@every
@pytest.mark.parametrize("far", [1e4, -1e4])
@pytest.mark.parametrize("worth", [-3.0, 3.0])
def test_extreme_ratios_stay_finite_in_float32(loss: Loss, far: float, worth: float) -> None:
    lp = torch.tensor([-1.0, -1.0, -1e4, 0.0])
    value, gradient, stats = run(loss, lp, lp + far, torch.full((4,), worth), lp_ref=lp - far)
    assert torch.tensor(value).isfinite()
    assert bool(gradient.isfinite().all())
    assert float(stats.log_ratio.abs().max()) <= MAX_LOG_RATIO
    assert bool(stats.ratio.isfinite().all())


@every
def test_on_policy_the_gradient_is_the_policy_gradient(loss: Loss) -> None:
    """With lp_gen = lp every ratio and weight is 1: −A × each token's share, whatever the kind."""
    if loss.kl_coef:
        loss = Loss(kind=loss.kind)
    lp, worth = torch.tensor([-1.0, -2.0, -3.0], dtype=torch.float64), torch.tensor([2.0, 2.0, -1.0])
    sequence = torch.tensor([0, 0, 1])
    shares = {"token_mean": [1 / 3] * 3, "seq_mean": [1 / 4, 1 / 4, 1 / 2], "dr": [1 / 8] * 3}[
        loss.averages_by
    ]
    _, gradient, _ = run(loss, lp, lp, worth.double(), sequence=sequence)
    expected = [-w * share for w, share in zip(worth.tolist(), shares, strict=True)]
    assert gradient.tolist() == pytest.approx(expected)
