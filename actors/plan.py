"""What a run costs, and what is left of the claim that asynchronous GRPO on rented machines costs over 70 % less.

    cost = groups ÷ groups/s ÷ 3600 · (1 trainer + n workers) · $ per GPU-hour

Groups/s are simulated from a profile; three layouts are compared:

    async       async_grpo: a trainer, and n workers that sample meanwhile
    sync        sync_grpo: the same machines, which take turns
    colocated   one pool of GPUs that all sample, then all train: what a synchronous run on a cluster does today
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from .profile import Line, Measure, Profile, uniform
from .simulation import Prediction, simulate

__all__ = ["PUBLISHED", "Costs", "Offer", "Plan", "Prices", "Row", "cost_usd", "describe", "saving"]

PUBLISHED = Path(__file__).parent / "published"

WORKERS = (1, 2, 3, 4, 6, 8)
GPUS = (2, 4, 8)  # of a colocated pool
SETTINGS = {"batch": 64, "group_size": 8, "max_tokens": 1024, "eval_problems": 1}
STEPS = 10
NCCL_SYNC_S = 0.5  # the upper end of the 100–500 ms of the survey that the built-in profile names
FASTER = 1.25


class Offer(msgspec.Struct, frozen=True, kw_only=True):
    """A GPU for rent. kind: serverless, on-demand, spot or cluster (with InfiniBand). lost_per_h: how often it is taken
    back; assumed: what of this is not in the source."""

    name: str
    kind: str
    gpu: str
    usd_per_gpu_h: float
    source: str
    read: str
    lost_per_h: float = 0.0
    assumed: str = ""


class Prices(msgspec.Struct, frozen=True, kw_only=True):
    """about: how the list was made."""

    about: str
    offers: list[Offer]


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One way to train. gpus: the trainer's and the workers'. predicted: None where it was worked out by hand."""

    layout: str
    offer: str
    gpus: int
    hours: float
    usd: float
    predicted: Prediction | None = None

    @property
    def gpu_h(self) -> float:
        return self.gpus * self.hours


class Costs(msgspec.Struct, frozen=True, kw_only=True):
    """rows: for each layout and offer the cheapest number of GPUs. sensitivity: the asynchronous row's cost, relative
    to what it is, if something were otherwise."""

    profile: Profile
    prices: Prices
    groups: int
    rows: list[Row]
    sensitivity: dict[str, float]


def cost_usd(groups: float, groups_per_s: float, gpus: int, usd_per_gpu_h: float) -> float:
    """Of training on so many groups, without the start."""
    return groups / groups_per_s / 3600 * gpus * usd_per_gpu_h


def saving(usd: float, instead_of: float) -> float:
    """The share that is saved."""
    return 1.0 - usd / instead_of


def colocated_step_s(profile: Profile, gpus: int, *, batch: int, group_size: int, max_tokens: int) -> float:
    """Seconds of one step of a pool of `gpus` that all sample, then all train, by formula.

    Sampling lasts until the longest of its share is done, each faster as others end; training is split evenly, without
    loss; versions go by NCCL. All three favour the pool.
    """
    lengths = [
        min(max_tokens, profile.tokens.draw(uniform(f"colocated/{number}")))
        for number in range(batch * group_size)
    ]
    mine = sorted(lengths[::gpus])
    sample_s = at = 0.0
    for done, length in enumerate(mine):
        sample_s += (length - at) * profile.sample.at(len(mine) - done)
        at = length
    return sample_s + profile.train.at(sum(lengths)) / gpus + NCCL_SYNC_S


@dataclass
class Plan:
    """recipes: the modules async_grpo and sync_grpo."""

    recipes: Mapping[str, Any]
    profile: Profile
    prices: Prices
    groups: int

    def made(self) -> Costs:
        """Simulates every number of workers once; a few seconds each."""
        steady = {
            (layout, workers): self._simulated(recipe, workers, self.profile)
            for layout, recipe in (("async", "async_grpo"), ("sync", "sync_grpo"))
            for workers in WORKERS
        }
        rows: list[Row] = []
        for offer in self.prices.offers:
            if offer.kind == "cluster":
                rows.append(self._colocated(offer))
            for layout in ("sync", "async"):
                choices = [self._row(layout, offer, workers, steady[layout, workers]) for workers in WORKERS]
                rows.append(min(choices, key=lambda row: row.usd))
        rows = [self._with_losses(row) for row in rows]
        best = min((row for row in rows if row.layout == "async"), key=lambda row: row.usd)
        return Costs(
            profile=self.profile,
            prices=self.prices,
            groups=self.groups,
            rows=rows,
            sensitivity=self._sensitivity(best),
        )

    def _simulated(self, recipe: str, workers: int, profile: Profile) -> Prediction:
        module = self.recipes[recipe]
        settings = SETTINGS | {"steps": STEPS, "eval_every": STEPS, "rollout_workers": workers}
        graph = module.build(module.Config(**settings))
        return simulate(graph, profile, starts=False)

    def _offer(self, name: str) -> Offer:
        return next(offer for offer in self.prices.offers if offer.name == name)

    def _row(self, layout: str, offer: Offer, workers: int, predicted: Prediction) -> Row:
        rate, gpus = predicted.groups_per_s, workers + 1
        start_h = self.profile.start.mean / 3600
        usd = cost_usd(self.groups, rate, gpus, offer.usd_per_gpu_h) + start_h * gpus * offer.usd_per_gpu_h
        hours = self.groups / rate / 3600 + start_h
        return Row(layout=layout, offer=offer.name, gpus=gpus, hours=hours, usd=usd, predicted=predicted)

    def _colocated(self, offer: Offer) -> Row:
        shape = {name: SETTINGS[name] for name in ("batch", "group_size", "max_tokens")}
        choices = []
        for gpus in GPUS:
            rate = SETTINGS["batch"] / colocated_step_s(self.profile, gpus, **shape)
            hours = self.groups / rate / 3600 + self.profile.start.mean / 3600
            choices.append(
                Row(
                    layout="colocated",
                    offer=offer.name,
                    gpus=gpus,
                    hours=hours,
                    usd=hours * gpus * offer.usd_per_gpu_h,
                )
            )
        return min(choices, key=lambda row: row.usd)

    def _with_losses(self, row: Row) -> Row:
        again = self._with_losses_of(self._offer(row.offer).lost_per_h)
        return msgspec.structs.replace(row, hours=row.hours * again, usd=row.usd * again)

    def _with_losses_of(self, per_h: float) -> float:
        """By how much longer it takes, at most, if all wait whenever a machine is lost until the next has started."""
        return 1.0 + per_h * self.profile.restart.mean / 3600

    def _sensitivity(self, best: Row) -> dict[str, float]:
        """Of the cheapest asynchronous way."""
        assert best.predicted is not None
        rate, workers = best.predicted.groups_per_s, best.predicted.workers

        def relative(profile: Profile) -> float:
            return rate / self._simulated("async_grpo", workers, profile).groups_per_s

        def changed(**parts: Any) -> Profile:
            return msgspec.structs.replace(self.profile, **parts)

        sample, train = self.profile.sample, self.profile.train
        return {
            "price + 20 %": 1.2,
            "price − 20 %": 0.8,
            "workers sample 1.25 × faster": relative(changed(sample=_times(sample, 1 / FASTER))),
            "workers sample 1.25 × slower": relative(changed(sample=_times(sample, FASTER))),
            "the trainer 1.25 × faster": relative(changed(train=_times(train, 1 / FASTER))),
            "the trainer 1.25 × slower": relative(changed(train=_times(train, FASTER))),
            "swaps and publishing take twice as long": relative(
                changed(apply=_scaled(self.profile.apply, 2.0), publish=_scaled(self.profile.publish, 2.0))
            ),
            "each machine lost once an hour (at most)": self._with_losses_of(1.0),
        }


def _times(line: Line, factor: float) -> Line:
    return msgspec.structs.replace(line, fixed=line.fixed * factor, each=line.each * factor)


def _scaled(measure: Measure, factor: float) -> Measure:
    return msgspec.structs.replace(measure, quantiles=[value * factor for value in measure.quantiles])


def describe(costs: Costs) -> str:
    """The table, what of it is assumed, and what is left of the claim."""
    shape = f"{costs.groups} groups of {SETTINGS['group_size']}, batches of {SETTINGS['batch']}"
    title = f"{shape}, from: {costs.profile.about}"
    rows = [title, "", f"{'layout':<10}{'offer':<32}{'GPUs':>5}{'hours':>8}{'GPU-h':>8}{'$':>9}"]
    for row in sorted(costs.rows, key=lambda row: row.usd):
        name, size = f"{row.layout:<10}{row.offer:<32}", f"{row.gpus:>5}{row.hours:>8.2f}"
        rows += [f"{name}{size}{row.gpu_h:>8.1f}{row.usd:>9.2f}"]
    rows += ["", *_claim(costs), "", "If things were otherwise, the cheapest asynchronous way would cost:"]
    rows += [f"  {share:6.2f} ×  {what}" for what, share in costs.sensitivity.items()]
    rows += ["", "Where the numbers are from:"]
    for name in costs.profile.__struct_fields__:
        value = getattr(costs.profile, name)
        if isinstance(value, Measure | Line):
            rows.append(f"  {name:<8} {value.source}")
    for offer in costs.prices.offers:
        assumed = f"; assumed: {offer.assumed}" if offer.assumed else ""
        rows.append(
            f"  {offer.name}: {offer.usd_per_gpu_h:.2f} $/GPU-h, {offer.source}, read {offer.read}{assumed}"
        )
    return "\n".join(rows)


def _claim(costs: Costs) -> Sequence[str]:
    """Savings of the asynchronous ways on rented GPUs over the synchronous ones on clusters."""
    kinds = {offer.name: offer.kind for offer in costs.prices.offers}

    def cheapest(test: Callable[[Row], bool], worst: bool = False) -> Row:
        return (max if worst else min)((row for row in costs.rows if test(row)), key=lambda row: row.usd)

    rented = {
        kind: cheapest(lambda row, kind=kind: row.layout == "async" and kinds[row.offer] == kind)
        for kind in ("serverless", "on-demand", "spot")
        if kind in kinds.values()
    }
    lines = [
        'The claim, "over 70 % less than a synchronous run on a cluster with NCCL": saved, by price and by GPU-hours'
    ]
    for layout in ("colocated", "sync"):
        for worst in (True, False):
            cluster = cheapest(
                lambda row, of=layout: row.layout == of and kinds[row.offer] == "cluster", worst
            )
            for kind, row in rented.items():
                price = (row.usd / row.gpu_h) / (cluster.usd / cluster.gpu_h)
                lines.append(
                    f"  {saving(row.usd, cluster.usd):>5.0%}  async on {row.offer} ({kind}) instead of {layout} on "
                    f"{cluster.offer}: price × {price:.2f}, GPU-hours × {row.gpu_h / cluster.gpu_h:.2f}"
                )
    same = [
        (saving(row.usd, other.usd), row.offer, other.layout)
        for row in costs.rows
        for other in costs.rows
        if row.layout == "async" and other.layout != "async" and row.offer == other.offer
    ]
    for layout in ("colocated", "sync"):
        shares = [share for share, _, found in same if found == layout]
        if shares:
            lines.append(
                f"  {min(shares):>5.0%}  async instead of {layout} on the same GPUs: what asynchrony alone saves"
            )
    return lines
