"""A GRPO run of fakes for several machines: `graphs.hosts`, with tests/ on the path of all of them.

A worker of it costs little to start, its groups go the real way, and what was trained can be counted.
"""

from __future__ import annotations

import os
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from fakes import FakeLearner, FakeRollout, FakeTrainer
from rolecall import Graph
from rolecall.actors.buffer import Buffer
from rolecall.actors.engines import Sampling
from rolecall.actors.lora import Lora
from rolecall.actors.losses import Loss
from rolecall.actors.prompts import PromptSource
from rolecall.actors.reward import Reward
from rolecall.runtime.recipe import AtLeastOne, NotNegative, Positive
from rolecall.runtime.store import Store

if TYPE_CHECKING:
    from rolecall.actors.learner import Learner

STALENESS = 2


class SlowLearner(FakeLearner):
    """Takes `pace_s` for a step until the file `hurry` is there."""

    def __init__(self, pace_s: float, hurry: Path) -> None:
        super().__init__()
        self.pace_s, self.hurry = pace_s, hurry

    def step(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        if not self.hurry.exists():
            threading.Event().wait(self.pace_s)  # stands in for what a network computes
        return super().step(*args, **kwargs)


class SlowTrainer(FakeTrainer):
    def __init__(self, *, pace_s: float, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.pace_s = pace_s

    def _load_learner(self) -> Learner:
        return cast("Learner", SlowLearner(self.pace_s, self.context.folder / "hurry"))


class Rollout(FakeRollout):
    """Also says what it runs in."""

    def on_start(self) -> None:
        super().on_start()
        file = self.context.folder / f"{self.name}.environment"
        file.write_text(f"{self.engine_name} {os.environ.get('CUDA_VISIBLE_DEVICES')}")


@dataclass(frozen=True, kw_only=True)
class Config:
    store: str = "file://"
    steps: AtLeastOne = 8
    batch: AtLeastOne = 4
    rollout_workers: NotNegative = 0
    pace_s: Positive = 0.01
    lease_s: Positive = 600.0
    engine: str = "fake"


def build(config: Config) -> Graph:
    graph, weights = Graph("hosts"), Store(config.store)
    prompts = graph.add("prompts", PromptSource, dataset="tiny", seed=0, steps=config.steps,
                        groups_per_step=config.batch, max_staleness=STALENESS, lease_s=config.lease_s)  # fmt: skip
    reward = graph.add("reward", Reward, fn="exact_match")
    buffer = graph.add("buffer", Buffer, capacity=config.batch * (1 + STALENESS), max_staleness=STALENESS,
                       prompts=prompts, weights=weights)  # fmt: skip
    rollout = graph.add("rollout", Rollout, model="fake", sampling=Sampling(max_tokens=4), group_size=2, lease=2,
                        seed=0, engine=config.engine, prompts=prompts, reward=reward, weights=weights,
                        max_staleness=STALENESS, sink=buffer)  # fmt: skip
    trainer = graph.add("trainer", SlowTrainer, model="fake", loss=Loss(), lora=Lora(rank=1, alpha=1), lr=1.0,
                        temperature=1.0, steps=config.steps, batch=config.batch, seed=0, max_staleness=STALENESS,
                        groups=buffer, prompts=prompts, weights=weights, pace_s=config.pace_s)  # fmt: skip
    graph.place(rollout, replicas=config.rollout_workers, elastic=True)
    graph.until(trainer)
    return graph
