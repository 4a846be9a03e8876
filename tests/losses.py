"""Losses tried on tensors: what tests of them share."""

from __future__ import annotations

from typing import get_args

import torch
from rolecall.actors.losses import Loss, TokenStats
from rolecall.actors.objectives import Aggregation, Kind, Level, Totals
from torch import Tensor

LEVELS: tuple[Level, ...] = get_args(Level)
CORRECTIONS = [{}] + [
    {"correction": name, "correction_level": level} for name in ("tis", "mis", "icepop") for level in LEVELS
]
AVERAGES = [
    {"kind": kind, "aggregation": aggregation}
    for kind in get_args(Kind)
    for aggregation in (get_args(Aggregation) if kind != "dr_grpo" else ["dr"])
]
LOSSES = [Loss(**average, **correction) for average in AVERAGES for correction in CORRECTIONS]
"""Every kind × aggregation × correction there is."""


def name_of(loss: Loss) -> str:
    parts = (loss.kind, loss.aggregation, loss.correction, loss.correction_level)
    return "-".join(part for part in parts if part and part != "none")


def doubles(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def run(
    loss: Loss,
    lp: Tensor,
    lp_gen: Tensor,
    advantage: Tensor,
    *,
    mask: Tensor | None = None,
    sequence: Tensor | None = None,
    totals: Totals | None = None,
    **others: Tensor,
) -> tuple[float, Tensor, TokenStats]:
    """The loss, its gradient with respect to lp, and what it saw. By default one sequence, and a step of its own."""
    lp = lp.clone().requires_grad_()
    mask = torch.ones(len(lp), dtype=torch.bool) if mask is None else mask
    sequence = torch.zeros(len(lp), dtype=torch.int64) if sequence is None else sequence
    totals = totals or Totals(int(mask.sum()), len(sequence[mask].unique()), 8)
    value, stats = loss(lp, lp_gen, advantage, mask, sequence, totals, **others)
    value.backward()
    assert lp.grad is not None
    return value.item(), lp.grad, stats
