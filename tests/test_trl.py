"""Our losses against TRL's, on the same tensors: its own `_compute_loss`, given log-probs instead of a model."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from rolecall.actors.losses import Loss
from rolecall.actors.objectives import Totals
from torch import Tensor

from .losses import run

pytest.importorskip("trl")

LENGTHS = torch.tensor([2, 7, 4, 5, 1, 7])
LONGEST = 7
GENERATOR = torch.Generator().manual_seed(0)
LP_GEN = -3 * torch.rand((6, LONGEST), generator=GENERATOR, dtype=torch.float64)
LP = LP_GEN + 0.4 * torch.randn((6, LONGEST), generator=GENERATOR, dtype=torch.float64)
LP_REF = LP + 0.3 * torch.randn((6, LONGEST), generator=GENERATOR, dtype=torch.float64)
WORTH = torch.tensor([1.5, -0.5, 0.25, -1.25, 0.0, 2.0], dtype=torch.float64)
MASK = torch.arange(LONGEST) < LENGTHS[:, None]
HALVES = [slice(0, 2), slice(2, 6)]


def trls(loss_type: str, rows: list[slice], **changes) -> tuple[float, Tensor]:
    """TRL's loss and its gradient, accumulated over micro-batches of these rows."""
    from trl.trainer.grpo_trainer import GRPOTrainer

    lp = LP.clone().requires_grad_()
    settings = {
        "loss_type": loss_type, "importance_sampling_level": "token", "epsilon_low": 0.2, "epsilon_high": 0.2,
        "beta": 0.0, "max_completion_length": LONGEST, "current_gradient_accumulation_steps": len(rows),
        "aux_loss_enabled": False, "top_entropy_quantile": 1.0, "off_policy_mask_threshold": None,
        "use_vllm": False, "vllm_importance_sampling_correction": False, "_entropy_bonus_enabled": False,
    }  # fmt: skip
    delta = changes.pop("delta", None)
    trainer = SimpleNamespace(
        **(settings | changes),
        model=SimpleNamespace(training=True),
        args=SimpleNamespace(delta=delta, use_bias_correction_kl=False, steps_per_generation=len(rows)),
        accelerator=SimpleNamespace(gather=lambda x: x, reduce=lambda x, reduction: x, num_processes=1),
        _metrics={"train": _Lists()},
    )
    total = 0.0
    for part in rows:
        trainer._get_per_token_logps_and_entropies = lambda *_, part=part, **__: (
            lp[part],
            torch.zeros_like(LP[part]),
            None,
        )
        ids = torch.zeros(LP[part].shape, dtype=torch.int64)
        inputs = {
            "prompt_ids": ids[:, :1], "prompt_mask": ids[:, :1] + 1, "completion_ids": ids,
            "completion_mask": MASK[part].long(), "advantages": WORTH[part], "old_per_token_logps": LP_GEN[part],
            "ref_per_token_logps": LP_REF[part], "num_items_in_batch": MASK.sum(),
        }  # fmt: skip
        value = GRPOTrainer._compute_loss(trainer, None, inputs)  # pyright: ignore[reportArgumentType]
        value.backward()
        total += value.item()
    assert lp.grad is not None
    return total, lp.grad


class _Lists(dict):
    def __missing__(self, key: str) -> list:
        self[key] = []
        return self[key]


def ours(loss: Loss, rows: list[slice]) -> tuple[float, Tensor]:
    totals = Totals(int(MASK.sum()), len(LENGTHS), len(LENGTHS) * LONGEST)
    value, gradient = 0.0, torch.zeros_like(LP)
    numbers = torch.arange(6)[:, None].expand(6, LONGEST)
    for part in rows:
        share, own, _ = run(
            loss, LP[part].flatten(), LP_GEN[part].flatten(), WORTH[part, None].expand(-1, LONGEST).flatten(),
            mask=MASK[part].flatten(), sequence=numbers[part].flatten(), totals=totals,
            lp_ref=LP_REF[part].flatten(),
        )  # fmt: skip
        value += share
        gradient[part] = own.view(-1, LONGEST)
    return value, gradient


PAIRS = [
    ("grpo", {}, Loss(aggregation="seq_mean")),
    ("grpo", {"epsilon_high": 0.28}, Loss(aggregation="seq_mean", clip_high=0.28)),
    ("grpo", {"beta": 0.04}, Loss(aggregation="seq_mean", kl_coef=0.04)),
    ("bnpo", {}, Loss()),
    ("dapo", {}, Loss()),
    ("dr_grpo", {}, Loss(kind="dr_grpo")),
    ("dr_grpo", {"beta": 0.04}, Loss(kind="dr_grpo", kl_coef=0.04)),
    (
        "grpo",
        {"importance_sampling_level": "sequence", "epsilon_low": 3e-4, "epsilon_high": 4e-4},
        Loss(kind="gspo"),
    ),
    # TRL's epsilon_high is the cap itself, and there is no floor.
    ("cispo", {"epsilon_high": 1.28}, Loss(kind="cispo", clip_low=1.0, clip_high=0.28)),
]


@pytest.mark.parametrize(("loss_type", "changes", "loss"), PAIRS, ids=lambda value: str(value)[:30])
def test_the_same_loss_and_gradient_in_one_batch(loss_type: str, changes: dict, loss: Loss) -> None:
    everything = [slice(0, 6)]
    theirs, their_gradient = trls(loss_type, everything, **changes)
    value, gradient = ours(loss, everything)
    assert value == pytest.approx(theirs, abs=1e-6)
    assert torch.allclose(gradient, their_gradient, atol=1e-6)
    assert float(gradient.abs().max()) > 1e-2


@pytest.mark.parametrize(("loss_type", "changes", "loss"), PAIRS, ids=lambda value: str(value)[:30])
def test_in_uneven_micro_batches_ours_is_still_that_of_one(loss_type: str, changes: dict, loss: Loss) -> None:
    value, gradient = ours(loss, HALVES)
    whole, whole_gradient = ours(loss, [slice(0, 6)])
    assert value == pytest.approx(whole, abs=1e-9)
    assert torch.allclose(gradient, whole_gradient, atol=1e-9)
    # TRL takes the mean of each micro-batch's mean for all but those that divide by the step's tokens.
    theirs, _ = trls(loss_type, HALVES, **changes)
    agrees = loss_type in ("dapo", "cispo")
    assert (theirs == pytest.approx(value, abs=1e-6)) == agrees
