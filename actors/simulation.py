"""A recipe's own graph in virtual time: what a run would do with a thousand workers, before a machine is rented.

real: PromptSource, Buffer, RolloutWorker, Trainer, and all messages between them and the others
simulated: the engine, the reward, the learner, the store; they take the time that a profile says they do
"""

from __future__ import annotations

import gc
import math
import random
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path

import msgspec

from ..runtime import Graph
from ..runtime.errors import Unrecoverable
from ..runtime.testing import LocalRun
from .canary import CANARY
from .measures import bottleneck
from .profile import Profile
from .rollout import RolloutWorker
from .simulated import CANARY_OF_ALL, World, recast
from .trainer import Trainer

__all__ = ["Prediction", "simulate"]

MEMORY = "/dev/shm"  # noqa: S108  a file system in memory, where there is one


class Prediction(msgspec.Struct, frozen=True, kw_only=True):
    """What a run would come to.

    wall_s: from the start of its first process until the trainer has finished. first_step_s: the first step's wait
    and work.
    groups_per_s, tokens_per_s: trained, after the first step. trainer_wait_share: as in a run's result.
    shares: of the time of each role's machines, what it went on; they add up to 1.
    dropped: groups by reason. gpu_h: hours of the trainer's and the rollout workers' machines. lost: machines.
    bottleneck: "trainer-bound", "rollout-bound" or "balanced": who waits for whom.
    """

    steps: int
    workers: int
    wall_s: float
    first_step_s: float
    groups_trained: int
    groups_per_s: float
    tokens_per_s: float
    trainer_wait_share: float
    staleness_mean: float
    staleness_max: int
    dropped: dict[str, int]
    shares: dict[str, dict[str, float]]
    bottleneck: str
    gpu_h: dict[str, float]
    lost: int


def simulate(
    graph: Graph,
    profile: Profile,
    *,
    seed: int = 0,
    lost_per_h: float = 0.0,
    away_s: float = 60.0,
    starts: bool = True,
) -> Prediction:
    """Run `graph`, with whatever is heavy simulated, to its end.

    lost_per_h: how often each rollout worker's machine is lost, as a rented one may be, on average in an hour; the next
    is there in `away_s` seconds, and its worker begins then to start. starts: whether roles take time to start.
    Raises Unrecoverable (exit code 2) for a graph without a trainer and rollout workers.
    """
    roles = {
        real: [role for role in graph if issubclass(role.actor, real)] for real in (RolloutWorker, Trainer)
    }
    if not all(len(found) == 1 for found in roles.values()):
        raise Unrecoverable(
            f"{graph.name} can't be simulated: it needs one role of rollout workers and one trainer",
            exit_code=2,
        )
    (rollout,), (trainer,) = roles.values()
    with tempfile.TemporaryDirectory(dir=MEMORY if Path(MEMORY).is_dir() else None) as name:
        folder = Path(name)
        (folder / CANARY).write_bytes(msgspec.json.encode(CANARY_OF_ALL))
        world = World(profile, seed, folder, starts)
        recast(graph, world)
        losses = _Losses(rollout.members, lost_per_h / 3600, away_s, random.Random(seed))
        run = LocalRun(
            graph, folder=folder / "run", kill=losses.due, spared_until=losses.next, rng=random.Random(seed)
        )
        with nullcontext() if lost_per_h else _no_collections():
            run.run()
        return _prediction(run, world, rollout.members, trainer.name, len(losses.happened))


@contextmanager
def _no_collections() -> Iterator[None]:
    """A run of a thousand workers leaves hardly any garbage in cycles, but a fifth of its time was to look for some.

    Not so where machines are lost: each leaves 0.1 MB.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


class _Losses:
    """Machines that are lost as time passes, each as likely as any other (a Poisson process)."""

    def __init__(self, names: Sequence[str], per_s: float, away_s: float, rng: random.Random) -> None:
        self._names, self._rate, self._away_s, self._rng = names, per_s * len(names), away_s, rng
        self._next = rng.expovariate(self._rate) if self._rate > 0 else math.inf
        self.happened: list[tuple[float, str]] = []

    def next(self) -> float:
        """When the next is lost."""
        return self._next

    def due(self, run: LocalRun) -> list[str]:
        while self._next <= run.now:
            name = self._rng.choice(self._names)
            run.lose(name, self._away_s)
            self.happened.append((self._next, name))
            self._next += self._rng.expovariate(self._rate)
        return []


def _prediction(run: LocalRun, world: World, workers: Sequence[str], trainer: str, lost: int) -> Prediction:
    # A step that was made again, after a death, counts once.
    steps = list({report["step"]: report for report in run.reports[trainer]}.values())
    later, wall_s = steps[1:], world.ended
    waited = sum(step["perf/rollout_wait_s"] for step in later)
    worked = sum(step["perf/step_s"] for step in later)
    groups = [sum(step["workers"].values()) for step in steps]
    spent = {"rollout": [world.spent[name] for name in workers], "trainer": [world.spent[trainer]]}
    spent["trainer"][0]["wait"] = sum(step["perf/rollout_wait_s"] for step in steps)
    shares = {role: _shares(counters, wall_s * len(counters)) for role, counters in spent.items()}
    idle = shares["rollout"].get("lease wait", 0.0) + shares["rollout"].get("put wait", 0.0)
    wait_share = waited / worked if worked else 0.0
    return Prediction(
        steps=len(steps),
        workers=len(workers),
        wall_s=wall_s,
        first_step_s=steps[0]["perf/step_s"],
        groups_trained=sum(groups),
        groups_per_s=sum(groups[1:]) / worked if worked else 0.0,
        tokens_per_s=sum(step["tokens_trained"] for step in later) / worked if worked else 0.0,
        trainer_wait_share=wait_share,
        staleness_mean=sum(step["staleness/mean"] for step in steps) / len(steps),
        staleness_max=max(step["staleness/max"] for step in steps),
        dropped=dict(steps[-1]["dropped"]),
        shares=shares,
        bottleneck=bottleneck(wait_share, idle),
        gpu_h={"rollout": len(workers) * wall_s / 3600, "trainer": wall_s / 3600},
        lost=lost,
    )


def _shares(spent: Sequence[Mapping[str, float]], total_s: float) -> dict[str, float]:
    kinds = sorted({kind for one in spent for kind in one})
    shares = {kind: sum(one.get(kind, 0.0) for one in spent) / total_s for kind in kinds}
    return {**shares, "other": max(0.0, 1.0 - sum(shares.values()))}
