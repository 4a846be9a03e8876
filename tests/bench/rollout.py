"""What a rollout worker makes of its engine's speed, and what the transformers engine makes of transformers'.

    python -m tests.bench.rollout --json [--rounds 8] [--python .dev/vllm/bin/python]      (from the repository root)

transformers_x, vllm_x  tokens/s of the worker in a run, over its bare engine's, driven in a loop    goal ≥ 0.95
peft_generate_x         tokens a CPU-second of TransformersEngine over `generate` of the same policy as peft keeps
                        it, at batch 32    goal ≥ 2.5
generate_x              the same over `generate` of the base model, without an adapter

The run is real: prompt source, reward, buffer and store, each in its process; only the trainer, once it has published
the first version, waits for a batch that never comes. Worker and bare engine take turns, in one process and with one
engine, over the very same requests, joining as others finish, and take turns to go first, for vLLM keeps what it has
computed of a prompt.
A ratio is the median over rounds of both sides' ratio in a round; the first round warms up. vLLM runs in an
interpreter of its own, which `tests/setup vllm` makes.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections import defaultdict
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from rolecall.actors.buffer import Buffer
from rolecall.actors.data import load_dataset
from rolecall.actors.engines import Request, Sampling
from rolecall.actors.lora import Lora
from rolecall.actors.losses import Loss
from rolecall.actors.prompts import PromptSource
from rolecall.actors.reward import Reward
from rolecall.actors.rollout import RolloutWorker
from rolecall.actors.trainer import Trainer
from rolecall.actors.types import Lease, Prompt
from rolecall.runtime import Answer, Finished, Graph
from rolecall.runtime.store import Store
from rolecall.runtime.supervisor import Supervisor

LEASE, GROUP_SIZE, GROUPS = 8, 8, 32  # prompts sampled at once, completions of each, groups a round
SEED, MAX_TOKENS = 0, 64
NEVER = 1 << 20  # groups: more than the worker will make


class Measured(RolloutWorker):
    """A worker that takes turns with its own engine's loop, and reports the tokens/s of both."""

    def __init__(self, *, rounds: int, **wiring: Any) -> None:
        super().__init__(**wiring)
        self.rounds = rounds

    def on_start(self) -> None:
        super().on_start()
        self.rows = load_dataset("tiny", seed=SEED)  # as the prompt source lends them, one after another
        turns = [["worker", "bare"][:: -1 if number % 2 else 1] for number in range(self.rounds + 1)]
        self.turns = [(number, name) for number, names in enumerate(turns) for name in names]
        self.speeds: dict[str, float] = {}
        self.tokens = self.groups = self.asked_for = 0
        self.began = 0.0

    def report(self, **values: Any) -> None:
        self.tokens += values["tokens"]
        self.groups += values["groups"]

    def step(self) -> float | None:
        if not self.turns:
            raise Finished
        number, name = self.turns[0]
        if not self.began:
            self.began = time.perf_counter()
        if name == "worker":
            pause_s = super().step()
            if self.groups < (number + 1) * GROUPS:
                return pause_s
            self._over(self.tokens)
            self.tokens = 0
        else:
            self._over(self._drive(number))
        return 0.0

    def _over(self, tokens: int) -> None:
        number, name = self.turns.pop(0)
        self.speeds[name] = tokens / (time.perf_counter() - self.began)
        self.began = 0.0
        if number and len(self.speeds) == 2:
            super().report(**self.speeds)
        if len(self.speeds) == 2:
            self.speeds = {}

    def _lease_more(self) -> None:
        """No more than belongs to this round, so that the engine is empty at its end, as at its beginning."""
        if self.asked_for < (self.turns[0][0] + 1) * GROUPS:
            super()._lease_more()

    def _ask(self, count: int, *, wait: bool) -> Answer[Lease]:
        count = min(count, (self.turns[0][0] + 1) * GROUPS - self.asked_for)
        self.asked_for += count
        return super()._ask(count, wait=wait)

    def _drive(self, number: int) -> int:
        """The round's groups by the engine alone: the next as soon as it has seats for one."""
        tokens = 0
        ids = iter(range(number * GROUPS, (number + 1) * GROUPS))
        while True:
            for id in islice(ids, LEASE - -(-self.engine.running // GROUP_SIZE)):
                self.engine.add(self._requests(id), self.sampling)
            if not self.engine.running:
                return tokens
            tokens += sum(len(sampled.sample.ids) for sampled in self.engine.step())

    def _requests(self, id: int) -> list[Request]:
        """Those that the worker makes of a prompt."""
        text, answer = self.rows[id]
        prompt, ids = Prompt(id=id, text=text, answer=answer), self.engine.encode(text)
        return [Request(ids, self._seed_of(prompt, sibling)) for sibling in range(GROUP_SIZE)]


@dataclass(frozen=True, kw_only=True)
class Config:
    engine: str = "transformers"
    python: str = ""
    rounds: int = 8


def build(config: Config) -> Graph:
    graph, weights = Graph("rollout"), Store()
    prompts = graph.add(
        "prompts", PromptSource, dataset="tiny", seed=SEED, groups_per_step=NEVER, steps=1, max_staleness=0
    )
    reward = graph.add("reward", Reward, fn="exact_match")
    buffer = graph.add("buffer", Buffer, capacity=NEVER, max_staleness=0, prompts=prompts, weights=weights)
    worker = graph.add(
        "worker", Measured, rounds=config.rounds, engine=config.engine, model="tiny", lora_rank=8,
        sampling=Sampling(max_tokens=MAX_TOKENS), group_size=GROUP_SIZE, lease=LEASE, seed=SEED, max_staleness=1,
        prompts=prompts, reward=reward, weights=weights, sink=buffer,
    )  # fmt: skip
    graph.add(
        "trainer", Trainer, model="tiny", loss=Loss(), lora=Lora(), lr=1e-3, temperature=1.0,
        steps=1, batch=NEVER, seed=SEED, max_staleness=0, groups=buffer, prompts=prompts, weights=weights,
    )  # fmt: skip
    graph.place(worker, python=config.python)
    graph.until(worker)
    return graph


class _Rounds:
    """An Observer that keeps what the worker reported of each round."""

    def __init__(self) -> None:
        self.speeds: dict[str, list[float]] = defaultdict(list)

    def on_report(self, name: str, values: dict[str, Any]) -> None:
        if name == "worker":
            for side, speed in values.items():
                self.speeds[side].append(speed)

    def on_state(self, name: str, state: str) -> None:
        pass

    def on_death(self, name: str, reason: str, restart_in_s: float | None) -> None:
        raise AssertionError(f"{name} died: {reason}")

    def on_dead_letter(self, receiver: str, method: str, reason: str) -> None:
        pass


def worker_over_engine(engine: str, python: str, rounds: int) -> dict[str, float]:
    from rolecall.runtime.recipe import load_recipe

    file = str(Path(__file__).resolve())
    recipe, seen = load_recipe(file), _Rounds()
    with tempfile.TemporaryDirectory() as folder:
        graph = recipe.build(recipe.Config(engine=engine, python=python, rounds=rounds))
        outcome = Supervisor(graph, "rollout", Path(folder), file, seen).run()
    assert outcome.exit_code == 0, outcome.story
    pairs = zip(seen.speeds["worker"], seen.speeds["bare"], strict=True)
    return {
        f"{engine}_x": round(statistics.median(worker / bare for worker, bare in pairs), 3),
        **{f"{engine}_{side}_tokens_s": round(statistics.median(of)) for side, of in seen.speeds.items()},
    }


def main() -> None:
    from .sampler import measure

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--python", default=".dev/vllm/bin/python", help="an interpreter that has vLLM")
    parser.add_argument("--json", action="store_true", help="one line of JSON instead of a table")
    settings = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # each process has the others beside it
    python = str(Path(settings.python).absolute())
    result: dict[str, Any] = worker_over_engine("transformers", "", settings.rounds)
    result |= worker_over_engine("vllm", python, settings.rounds)
    over = measure(2, settings.rounds)["engine_over"]
    result |= {f"{name}_x": over[name] for name in ("peft_generate", "generate")}
    result |= {"rounds": settings.rounds, "load": round(os.getloadavg()[0], 1)}
    if settings.json:
        print(json.dumps(result))
    else:
        print("\n".join(f"{name:30}{value}" for name, value in result.items()))


if __name__ == "__main__":
    main()
