"""What a new version costs eight workers at once: how soon they sample under it, and what their tokens wait for it.

The run is real, but its trainer only publishes: every few seconds a small adapter and its canary, into the bucket.
Workers follow as they do in any run, and never stop sampling. All eight compute on this machine, so each token takes
as long as eight take: the same waits are measured where no swap is, and the two are told apart.
"""

from __future__ import annotations

import random
import statistics
import tempfile
import time
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
from rolecall.actors.buffer import Buffer
from rolecall.actors.canary import CANARY
from rolecall.actors.engines import Sampling
from rolecall.actors.lora import Lora
from rolecall.actors.losses import Loss
from rolecall.actors.prompts import PromptSource
from rolecall.actors.reward import Reward
from rolecall.actors.rollout import RolloutWorker
from rolecall.actors.trainer import Trainer
from rolecall.runtime import Finished, Graph
from rolecall.runtime.store import Store
from rolecall.runtime.supervisor import Supervisor

WORKERS, EVERY_S = 8, 3.0
NEVER = 1 << 20  # groups: more than the workers will make


class Publisher(Trainer):
    """Publishes another adapter every EVERY_S, and says when it was visible."""

    def step(self) -> float | None:
        import torch

        if self.version >= self.steps:
            raise Finished
        if self.version:  # the first is what workers start with
            with torch.no_grad():
                for parameter in self.learner._policy.parameters():
                    if parameter.requires_grad:
                        parameter += 1e-3 * torch.randn(parameter.shape)
        self.version += 1
        files = self.learner.adapter() | {CANARY: msgspec.json.encode(self.learner.canary())}
        self.store.publish(files, version=self.version, step=0, epoch=self.epoch)
        visible = time.time()
        self.prompts.ask(PromptSource.advance, 0, self.version, {})
        self.report(version=self.version, visible=visible)
        return EVERY_S


class Timed(RolloutWorker):
    """Says when it sampled the first token under each version, and how long its tokens waited meanwhile."""

    def on_start(self) -> None:
        super().on_start()
        self.gaps: list[tuple[float, float]] = []  # when a token was there, and after how long
        self.last = self.ended = 0.0
        self.swapped: tuple[int, float] | None = None
        advance = self.engine._advance  # type: ignore[attr-defined]  of the engine, which others' waits call, too

        def timed() -> None:
            advance()
            now = time.perf_counter()
            if self.last:
                self.gaps.append((now, now - self.last))
            self.last = now if self.engine.running else 0.0

        self.engine._advance = timed  # type: ignore[attr-defined]

    def report(self, **values: Any) -> None:
        pass

    def _load(self, version: int) -> None:
        self.swapping = time.perf_counter()
        super()._load(version)

    def _prove(self) -> None:
        super()._prove()
        self.swapped = self.version, self.swapping

    def _sample(self) -> None:
        super()._sample()
        if self.swapped is not None and self.engine.running:
            (version, began), self.swapped = self.swapped, None
            now = time.perf_counter()
            swap = [gap for at, gap in self.gaps if at > began]
            usual = [gap for at, gap in self.gaps if began - (now - began) < at <= began]
            values = {"pause": max(swap, default=0.0), "usual": max(usual, default=0.0)}
            super().report(version=version, first=time.time(), **values)
            self.gaps.clear()


@dataclass(frozen=True, kw_only=True)
class Config:
    store: str
    versions: int


def build(config: Config) -> Graph:
    graph, weights = Graph("swaps"), Store(config.store)
    prompts = graph.add(
        "prompts", PromptSource, dataset="tiny", seed=0, groups_per_step=NEVER, steps=2, max_staleness=8
    )
    reward = graph.add("reward", Reward, fn="exact_match")
    buffer = graph.add("buffer", Buffer, capacity=NEVER, max_staleness=8, prompts=prompts, weights=weights)
    worker = graph.add(
        "worker", Timed, model="tiny", lora_rank=8, sampling=Sampling(max_tokens=64), group_size=4, lease=2,
        seed=0, max_staleness=8, prompts=prompts, reward=reward, weights=weights, sink=buffer,
    )  # fmt: skip
    trainer = graph.add(
        "trainer", Publisher, model="tiny", loss=Loss(), lora=Lora(), lr=1e-3,
        temperature=1.0, steps=config.versions, batch=NEVER, seed=0, max_staleness=8, groups=buffer,
        prompts=prompts, weights=weights,
    )  # fmt: skip
    graph.place(worker, replicas=WORKERS)
    graph.until(trainer)
    return graph


class _Seen:
    """An Observer that keeps what everybody reported of each version."""

    def __init__(self) -> None:
        self.of: dict[int, list[dict[str, float]]] = defaultdict(list)

    def on_report(self, name: str, values: dict[str, Any]) -> None:
        self.of[values["version"]].append(values)

    def on_state(self, name: str, state: str) -> None:
        pass

    def on_death(self, name: str, reason: str, restart_in_s: float | None) -> None:
        raise AssertionError(f"{name} died: {reason}")

    def on_dead_letter(self, receiver: str, method: str, reason: str) -> None:
        pass


def measure(store: str, versions: int) -> dict[str, Any]:
    """applied_p95_s, pause_ms and what belongs to them, over all workers and all versions but the first two."""
    from rolecall.runtime.recipe import load_recipe

    file, seen = str(Path(__file__).resolve()), _Seen()
    recipe = load_recipe(file)
    with tempfile.TemporaryDirectory() as folder:
        graph = recipe.build(recipe.Config(store=store, versions=versions))
        outcome = Supervisor(graph, "swaps", Path(folder), file, seen, rng=random.Random(0)).run()
    assert outcome.exit_code == 0, outcome.story
    applied, swaps = [], []
    for version in range(2, versions):
        [visible] = [values["visible"] for values in seen.of[version] if "visible" in values]
        mine = [values for values in seen.of[version] if "first" in values]
        assert len(mine) == WORKERS, f"{len(mine)} of {WORKERS} workers sampled under version {version}"
        applied += [values["first"] - visible for values in mine]
        swaps += mine

    def p95(values: list[float]) -> float:
        return statistics.quantiles(values, n=20)[-1]

    pauses, usual = ([swap[name] for swap in swaps] for name in ("pause", "usual"))
    return {
        "applied_p95_s": round(p95(applied), 3),
        "applied_p50_s": round(statistics.median(applied), 3),
        "pause_ms": round(1000 * (statistics.median(pauses) - statistics.median(usual)), 1),
        "longest_gap_in_swap_ms": round(1000 * p95(pauses), 1),
        "longest_gap_elsewhere_ms": round(1000 * p95(usual), 1),
        "swaps": len(swaps),
    }
