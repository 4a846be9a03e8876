"""Expert iteration: sample many completions with one policy, learn the right ones by heart, take that policy.

An iteration is several optimizer steps on what the last version has sampled. REINFORCE without a baseline, under a
reward of 0 or 1, is the log-likelihood of the winners: supervised learning (STaR, arXiv 2203.14465; ReST-EM, arXiv
2312.06585). A reward in between weighs.

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
from ..runtime.recipe import AtLeastOne
from ..runtime.store import Store

__all__ = ["Config", "build", "forecast", "outcome"]


@dataclass(frozen=True, kw_only=True)
class Config(Settings):
    """What a run may change, besides the settings that all recipes have."""

    reward: str = "exact_match"
    eval_reward: str = ""  # what accuracy counts; by default a built-in reward, or exact_match
    iteration: AtLeastOne = 4  # optimizer steps from one version to the next
    loss: Loss = field(default_factory=lambda: Loss(kind="reinforce", centre="none"))


def build(config: Config) -> Graph:
    # A lost worker costs only the prompts it held: restart it alone.
    graph = Graph("expert_iteration", strategy=Strategy.ONE_FOR_ONE)
    weights = Store(config.store)
    under_way = config.batch * config.iteration  # groups, at most
    sampling = Sampling(temperature=config.temperature, max_tokens=config.max_tokens)

    # Who talks to whom.
    prompts = graph.add(
        "prompts", PromptSource, dataset=config.train_set, seed=config.seed, steps=config.steps,
        groups_per_step=config.batch, max_staleness=0, publish_every=config.iteration,
        curriculum=config.curriculum,
    )  # fmt: skip
    reward = graph.add("reward", Reward, fn=config.reward)
    buffer = graph.add(
        "buffer", Buffer, capacity=under_way, max_staleness=0,
        prompts=prompts, weights=weights,
    )  # fmt: skip
    rollout = graph.add(
        "rollout", RolloutWorker, model=config.model, sampling=sampling, group_size=config.group_size,
        lease=ceil(under_way / max(1, config.rollout_workers)), seed=config.seed,
        engine=config.engine, lora_rank=config.lora.rank, prompts=prompts, reward=reward, weights=weights,
        delay=Delay.parse(config.rollout_delay),
        sink=buffer,
    )  # fmt: skip
    trainer = graph.add(
        "trainer", Trainer, model=config.model, loss=config.loss, lora=config.lora, lr=config.lr,
        temperature=config.temperature, steps=config.steps,
        max_tokens=config.max_tokens, batch=config.batch, seed=config.seed,
        publish_every=config.iteration, groups=buffer, max_staleness=0, prompts=prompts, weights=weights,
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
