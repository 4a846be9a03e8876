"""The evaluator: follows the store and measures held-out accuracy of the versions it sees."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import msgspec
from msgspec.structs import replace

from ..runtime import Actor, Finished
from ..runtime.files import read_lines, write_whole
from ..runtime.store import PolicyVersion, Store
from .canary import attest
from .data import load_rows
from .engines import Engine, Sampling
from .environment import Environment, EnvironmentHost
from .episode import Episode, Judge, play
from .reward import Reward, RewardFunction, split_weights
from .types import Prompt

_RIGHT_IS_1 = ("exact_match", "math_verify", "reasoning_gym")

__all__ = ["Evaluation", "Evaluator", "accuracy_function"]


def accuracy_function(eval_reward: str, reward: str) -> str:
    """The function that says which answers are right: `eval_reward` if given, else the first in `reward` that is a
    built-in one, which gives 1 for a right answer; a reward of the user's own may not, so else exact_match."""
    return eval_reward or next((name for name in split_weights(reward) if name in _RIGHT_IS_1), "exact_match")


class Evaluation(msgspec.Struct, frozen=True, kw_only=True):
    """One line of eval.jsonl.

    accuracy, greedy: share of held-out problems with a score ≥ 1, sampled at the run's temperature and at 0.
    """

    version: int
    step: int
    time: float
    accuracy: float
    greedy: float


class Evaluator(Actor):
    """Evaluates the first version, then one at least `every` optimizer steps later, and that of step number `steps`.

    problems: how many held-out ones. score: a reward function, or its name as `reward_functions` takes it;
    1 or more counts as right. environment: what completions are played in, if given, as EnvironmentHost takes it; then
    its rewards count instead of a score's. Either runs in this process. poll_s: between two looks at the store (a
    conditional GET). It finishes with the last.
    """

    preloads = ("torch", "peft", "transformers", "rolecall.actors.engines.transformers")

    def __init__(
        self,
        *,
        model: str,
        dataset: str,
        problems: int,
        sampling: Sampling,
        every: int,
        steps: int,
        seed: int,
        weights: Store,
        score: RewardFunction | str = "exact_match",
        environment: Callable[[], Environment] | str = "",
        poll_s: float = 0.5,
    ) -> None:
        self.model, self.dataset, self.problems = model, dataset, problems
        self.sampling, self.every, self.steps, self.seed = sampling, every, steps, seed
        self.score, self.environment = score, environment
        self.weights, self.poll_s = weights, poll_s

    def on_start(self) -> None:
        self.rows = load_rows(self.dataset, self.problems)
        self.judge = self._start_judge()
        self.engine = self._load_engine()
        self.store = self.weights.open(self.context.run, self.context.folder)
        self.file: Path = self.context.folder / "eval.jsonl"
        done = msgspec.convert(read_lines(self.file), list[Evaluation])
        # A kill may have cut the last line short, and the next must not be joined to it.
        write_whole(self.file, b"".join(msgspec.json.encode(evaluation) + b"\n" for evaluation in done))
        self.next_step = self._step_after(done[-1].step) if done else 0

    def _start_judge(self) -> Judge:
        """No actor here, but the same checks."""
        environment = self.environment
        judge = EnvironmentHost(environment=environment) if environment else Reward(fn=self.score)
        judge.on_start()
        return judge

    def _load_engine(self) -> Engine:
        from .engines.transformers import load_engine

        return load_engine(self.model, max_num_seqs=self.problems)

    def step(self) -> float | None:
        if self.next_step > self.steps:
            raise Finished
        head = self.store.head()
        if head is None or head.step < self.next_step:
            return self.poll_s
        # The first version is what the run is measured against, however far the trainer is by now.
        policy = head if self.next_step else self.store.policy(0)
        folder = self.store.fetch(policy.version)
        self.engine.load(policy.version, policy.digest, folder)
        attest(self.engine, folder, self.name)
        evaluation = self._evaluate(policy)
        with self.file.open("ab") as file:
            file.write(msgspec.json.encode(evaluation) + b"\n")
        self.report(step=policy.step, accuracy=evaluation.accuracy, greedy=evaluation.greedy)
        self.next_step = self._step_after(policy.step)
        return 0.0

    def _step_after(self, step: int) -> int:
        """The next to evaluate; beyond `steps` if that was the last."""
        return step + 1 if step >= self.steps else min(step + self.every, self.steps)

    def _evaluate(self, policy: PolicyVersion) -> Evaluation:
        return Evaluation(
            version=policy.version,
            step=policy.step,
            time=time.time(),
            accuracy=self._accuracy(self.sampling),
            greedy=self._accuracy(replace(self.sampling, temperature=0.0)),
        )

    def _accuracy(self, sampling: Sampling) -> float:
        episodes = [self._episode(i, sampling) for i in range(len(self.rows))]
        play(self.engine, self.judge, episodes)
        return sum(episode.reward >= 1.0 for episode in episodes) / len(episodes)

    def _episode(self, i: int, sampling: Sampling) -> Episode:
        text, answer = self.rows[i]
        prompt = Prompt(id=i, text=text, answer=answer)
        [opening] = self.judge.open([prompt])
        return Episode(prompt, self.engine.encode(text + opening), self.seed + i, sampling)
