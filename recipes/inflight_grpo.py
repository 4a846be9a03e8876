"""GRPO with weights that change in flight: completions that are under way go on under each new version.

Each token says which version sampled it, and is trained by its own log-probability; a correction, at first tis,
weighs it by how much more or less likely the trainer's policy is to write it.

prompts ─▶ rollout ×N ─▶ buffer ─▶ trainer ─▶ store ─▶ evaluator
   reward ─┘   ▲                                │
               └─────────── weights ────────────┘
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import ceil

from ..actors import forecast, outcome
from ..actors.buffer import Buffer
from ..actors.delay import Delay
from ..actors.engines import Sampling
from ..actors.evaluator import Evaluator, accuracy_function
from ..actors.losses import Loss
from ..actors.prompts import PromptSource
from ..actors.reward import Reward
from ..actors.rollout import RolloutWorker
from ..actors.settings import Settings
from ..actors.trainer import Trainer
from ..runtime import Graph, Strategy
from ..runtime.recipe import NotNegative
from ..runtime.store import Store

__all__ = ["Config", "build", "forecast", "outcome"]


@dataclass(frozen=True, kw_only=True)
class Config(Settings):
    """What a run may change, besides the settings that all recipes have."""

    reward: str = "exact_match"
    eval_reward: str = ""  # what accuracy counts; by default a built-in reward, or exact_match
    max_staleness: NotNegative = 4
    loss: Loss = field(default_factory=lambda: Loss(correction="tis"))


def build(config: Config) -> Graph:
    # A lost worker costs only the prompts it held: restart it alone.
    graph = Graph("inflight_grpo", strategy=Strategy.ONE_FOR_ONE)
    weights = Store(config.store)
    under_way = config.batch * (1 + config.max_staleness)  # groups, at most
    sampling = Sampling(temperature=config.temperature, max_tokens=config.max_tokens)

    # Who talks to whom.
    prompts = graph.add(
        "prompts", PromptSource, dataset=config.train_set, seed=config.seed, steps=config.steps,
        groups_per_step=config.batch, max_staleness=config.max_staleness,
        curriculum=config.curriculum,
    )  # fmt: skip
    reward = graph.add("reward", Reward, fn=config.reward)
    buffer = graph.add(
        "buffer", Buffer, capacity=under_way, max_staleness=config.max_staleness, prompts=prompts, weights=weights,
    )  # fmt: skip
    rollout = graph.add(
        "rollout", RolloutWorker, model=config.model, sampling=sampling, group_size=config.group_size,
        lease=ceil(under_way / max(1, config.rollout_workers)), seed=config.seed,
        engine=config.engine, lora_rank=config.lora.rank, prompts=prompts, reward=reward, weights=weights,
        delay=Delay.parse(config.rollout_delay),
        max_staleness=config.max_staleness, inflight_swap=True, sink=buffer,
    )  # fmt: skip
    trainer = graph.add(
        "trainer", Trainer, model=config.model, loss=config.loss, lora=config.lora, lr=config.lr,
        temperature=config.temperature, steps=config.steps,
        max_tokens=config.max_tokens, batch=config.batch, seed=config.seed,
        groups=buffer, max_staleness=config.max_staleness, prompts=prompts, weights=weights,
    )  # fmt: skip
    evaluator = graph.add(
        "evaluator", Evaluator, model=config.model, dataset=config.eval_set, problems=config.eval_problems,
        sampling=sampling, every=config.eval_every, steps=config.steps, seed=config.seed, weights=weights,
        score=accuracy_function(config.eval_reward, config.reward),
    )  # fmt: skip

    # How they run, and when the run is over.
    graph.place(rollout, python=config.engine_python, replicas=config.rollout_workers, elastic=True)
    graph.until(trainer, evaluator)
    return graph
