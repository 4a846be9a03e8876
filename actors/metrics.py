"""The numbers of an optimizer step, under the names of its line in metrics.jsonl: TRL's, where it has them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from .losses import TokenStats
from .types import MOST_REWARDS, Completion, Group

__all__ = ["Seen", "group_metrics", "token_metrics"]


class Seen(NamedTuple):
    """What a micro-batch's tokens showed; every tensor is [N]."""

    stats: TokenStats
    entropy: Tensor
    mask: Tensor
    fresh: Tensor


def group_metrics(groups: Sequence[Group]) -> dict[str, float]:
    """Rewards and lengths of all completions; reward_std is the mean over groups of σ within one, ddof 0.

    rewards/…: of each function that rewards are the sum of, if there are several, before it is weighted.
    """
    rewards = [torch.tensor(group.rewards, dtype=torch.float64) for group in groups]
    completions = [completion for group in groups for completion in group.completions]
    lengths = [len(completion.ids) for completion in completions]
    cut_off = sum(completion.finish_reason == "length" for completion in completions)
    return {
        "reward": torch.cat(rewards).mean().item(),
        "reward_std": torch.stack([r.std(correction=0) for r in rewards]).mean().item(),
        **_mean_rewards(completions),
        "completions/mean_length": sum(lengths) / len(lengths),
        "completions/min_length": float(min(lengths)),
        "completions/max_length": float(max(lengths)),
        "completions/clipped_ratio": cut_off / len(completions),
    }


def _mean_rewards(completions: Sequence[Completion]) -> dict[str, float]:
    told = Counter(name for completion in completions for name in completion.rewards)
    names = sorted(
        name for name, _ in told.most_common(MOST_REWARDS)
    )  # a machine may make up its own for each
    sums = {name: sum(completion.rewards.get(name, 0.0) for completion in completions) for name in names}
    return {f"rewards/{name}": total / len(completions) for name, total in sums.items()}


def token_metrics(seen: Sequence[Seen]) -> dict[str, float]:
    """Over all trained tokens; kl is Schulman's k3 of the policy from the sampling one, r − 1 − log r.

    Of a loss with an off-policy correction: its mean weight and the share of tokens it truncated or masked; of one
    held to a reference: kl_ref, by the loss's own estimator.
    """
    mask = torch.cat([s.mask for s in seen])
    fresh = torch.cat([s.fresh for s in seen])[mask]
    entropy = torch.cat([s.entropy for s in seen])[mask]
    log_ratio, ratio, low, high, weight, cut, kl_ref = (
        torch.cat(parts)[mask] if parts[0] is not None else None
        for parts in zip(*[s.stats for s in seen], strict=True)
    )
    assert log_ratio is not None and ratio is not None and low is not None and high is not None
    metrics = {
        "ratio/mean": ratio.mean(),
        "ratio/max": ratio.max(),
        "clip_ratio/low": low.float().mean(),
        "clip_ratio/high": high.float().mean(),
        "kl": (log_ratio.expm1() - log_ratio).mean(),
        "entropy": entropy.mean(),
    }
    if weight is not None and cut is not None:
        metrics["correction/weight_mean"] = weight.mean()
        metrics["correction/cut_share"] = cut.float().mean()
    if kl_ref is not None:
        metrics["kl_ref"] = kl_ref.mean()
    if fresh.any():
        metrics["fresh/ratio_mean"] = ratio[fresh].mean()
        metrics["fresh/log_ratio_max"] = log_ratio[fresh].abs().max()
    return dict(zip(metrics, torch.stack(list(metrics.values())).tolist(), strict=True))
