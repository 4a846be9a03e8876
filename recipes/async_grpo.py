"""Asynchronous GRPO: the rollout workers fill a buffer, the trainer takes batches from it.

prompts ─▶ rollout ×N ─▶ buffer ─▶ trainer ─▶ store ─▶ evaluator
   reward ─┘   ▲                                │
               └─────────── weights ────────────┘
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import ceil

from ..actors import forecast, outcome
from ..actors.buffer import Buffer
from ..actors.engines import Sampling
from ..actors.evaluator import Evaluator, accuracy_function
from ..actors.lora import Lora
from ..actors.losses import Loss
from ..actors.prompts import PromptSource
from ..actors.reward import Reward
from ..actors.rollout import RolloutWorker
from ..actors.trainer import Trainer
from ..runtime import Graph, Strategy
from ..runtime.recipe import AtLeastOne, AtLeastTwo, NotNegative, Positive
from ..runtime.store import Store

__all__ = ["Config", "build", "forecast", "outcome"]


@dataclass(frozen=True, kw_only=True)
class Config:
    """What a run may change, with `--set field=value`."""

    model: str = "tiny"
    train_set: str = "tiny"
    eval_set: str = "tiny"
    reward: str = "exact_match"
    eval_reward: str = ""  # what accuracy counts; by default a built-in reward, or exact_match
    store: str = "file://"
    seed: NotNegative = 0
    steps: AtLeastOne = 40
    batch: AtLeastOne = 16
    group_size: AtLeastTwo = 8
    max_tokens: AtLeastOne = 64
    temperature: Positive = 1.0
    lora: Lora = field(default_factory=Lora)  # set as lora.rank=…: see Lora
    lr: Positive = 1e-3
    rollout_workers: NotNegative = 2
    engine: str = "transformers"  # what the rollout workers sample with: this, or vllm
    engine_python: str = ""  # the interpreter they run in; by default this one
    max_staleness: NotNegative = 2
    inflight_swap: bool = False  # completions go on under a new version, instead of ending under their own
    loss: Loss = field(default_factory=Loss)  # set as loss.kind=…, loss.clip_high=…: see Loss
    eval_problems: AtLeastOne = 256
    eval_every: AtLeastOne = 10


def build(config: Config) -> Graph:
    # A lost worker costs only the prompts it held: restart it alone.
    graph = Graph("async_grpo", strategy=Strategy.ONE_FOR_ONE)
    weights = Store(config.store)
    sampling = Sampling(temperature=config.temperature, max_tokens=config.max_tokens)

    # Who talks to whom.
    prompts = graph.add(
        "prompts", PromptSource, dataset=config.train_set, seed=config.seed, steps=config.steps,
        groups_per_step=config.batch, max_staleness=config.max_staleness,
    )  # fmt: skip
    reward = graph.add("reward", Reward, fn=config.reward)
    buffer = graph.add(
        "buffer", Buffer, capacity=config.batch * (1 + config.max_staleness),
        max_staleness=config.max_staleness, prompts=prompts, weights=weights,
    )  # fmt: skip
    rollout = graph.add(
        "rollout", RolloutWorker, model=config.model, sampling=sampling, group_size=config.group_size,
        lease=ceil(config.batch / max(1, config.rollout_workers)), seed=config.seed,
        engine=config.engine, lora_rank=config.lora.rank, prompts=prompts, reward=reward, weights=weights,
        max_staleness=config.max_staleness, inflight_swap=config.inflight_swap, sink=buffer,
    )  # fmt: skip
    trainer = graph.add(
        "trainer", Trainer, model=config.model, loss=config.loss, lora=config.lora, lr=config.lr,
        temperature=config.temperature, steps=config.steps,
        max_tokens=config.max_tokens, batch=config.batch, seed=config.seed, max_staleness=config.max_staleness,
        groups=buffer, prompts=prompts, weights=weights,
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
