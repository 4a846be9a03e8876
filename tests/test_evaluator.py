"""The evaluator: which versions it measures, and what it writes down."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from rolecall import Finished, Unrecoverable
from rolecall.actors.canary import Quarantined
from rolecall.actors.engines import Request, Sample, Sampling
from rolecall.actors.evaluator import Evaluator, accuracy_function
from rolecall.actors.tiny import problems
from rolecall.actors.types import Prompt
from rolecall.recipes import async_grpo, sync_grpo
from rolecall.runtime.store import PolicyStore, Store

from .fakes import FakeEngine, FakeEvaluator, begin, fake_version

PROBLEMS = 4


@pytest.fixture
def store(tmp_path: Path) -> PolicyStore:
    opened = Store().open("local", tmp_path)
    assert opened.take_epoch() == 1
    return opened


def publish(store: PolicyStore, version: int, *, step: int | None = None) -> None:
    step = version if step is None else step
    store.publish(fake_version(bytes([version + 1])), version=version, step=step, epoch=1)


def started(folder: Path, cls: type[Evaluator] = FakeEvaluator, **changes: Any) -> Evaluator:
    arguments: dict[str, Any] = {
        "model": "fake", "dataset": "tiny", "problems": PROBLEMS, "every": 10, "steps": 40,
        "seed": 0,
        "sampling": Sampling(temperature=0.7, max_tokens=9), "score": "exact_match", "weights": Store(),
        "poll_s": 0.25,
    }  # fmt: skip
    evaluator = cls(**(arguments | changes))
    begin(evaluator, folder, "evaluator")
    return evaluator


def lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "eval.jsonl").read_text().splitlines()]


def test_it_waits_for_the_first_version(tmp_path: Path, store: PolicyStore):
    evaluator = started(tmp_path)
    assert evaluator.step() == 0.25
    publish(store, 0)
    assert evaluator.step() == 0.0
    assert evaluator.step() == 0.25
    assert [line["step"] for line in lines(tmp_path)] == [0]


def test_it_measures_now_and_then_and_the_last_one(tmp_path: Path, store: PolicyStore):
    evaluator = started(tmp_path, steps=25)
    for version in range(26):
        publish(store, version)
        evaluator.step()
    assert [line["step"] for line in lines(tmp_path)] == [0, 10, 20, 25]
    with pytest.raises(Finished):
        evaluator.step()


def test_the_first_version_is_measured_however_late_it_looks(tmp_path: Path, store: PolicyStore):
    for version in range(30):
        publish(store, version)
    store.collect(keep=2)
    evaluator = started(tmp_path, steps=29)
    assert [evaluator.step(), evaluator.step()] == [0.0, 0.0]
    assert [line["version"] for line in lines(tmp_path)] == [0, 29]
    with pytest.raises(Finished):
        evaluator.step()


def test_after_a_restart_it_goes_on(tmp_path: Path, store: PolicyStore):
    publish(store, 0)
    started(tmp_path).step()
    with (tmp_path / "eval.jsonl").open("a") as file:
        file.write('{"version": 3, "cut sh')
    publish(store, 5)
    restarted = started(tmp_path)
    assert restarted.step() == 0.25
    publish(store, 10)
    restarted.step()
    assert [line["step"] for line in lines(tmp_path)] == [0, 10]
    publish(store, 11)
    assert restarted.step() == 0.25
    shorter = started(tmp_path, steps=11)
    shorter.step()
    assert [line["step"] for line in lines(tmp_path)] == [0, 10, 11]
    with pytest.raises(Finished):
        started(tmp_path, steps=11).step()
    assert started(tmp_path).step() == 0.25  # the run goes on for longer than it was meant to


class Engine(FakeEngine):
    """Knows the answers of the first `knows` problems; greedily only of the first."""

    knows = 3

    def __init__(self) -> None:
        super().__init__()
        self.samplings: list[Sampling] = []

    def add(self, requests: Sequence[Request], sampling: Sampling) -> list[int]:
        self.samplings.append(sampling)
        self._known = self.knows if sampling.temperature else 1
        return super().add(requests, sampling)

    def _sample(self, request: Request) -> Sample:
        [place] = [
            at
            for at, kept in enumerate(problems.held_out(PROBLEMS))
            if request.prompt_ids == self.encode(kept.text)
        ]
        worked = problems.held_out(PROBLEMS)[place].worked
        return Sample([1], [-1.0], [self.version], "stop", worked if place < self._known else "####")


class KnowingEvaluator(FakeEvaluator):
    def _load_engine(self) -> Engine:
        return Engine()


def test_accuracy_at_the_runs_temperature_and_greedy(tmp_path: Path, store: PolicyStore):
    publish(store, 0)
    evaluator = started(tmp_path, KnowingEvaluator)
    evaluator.step()
    assert (lines(tmp_path)[0]["accuracy"], lines(tmp_path)[0]["greedy"]) == (0.75, 0.25)
    engine = evaluator.engine
    assert isinstance(engine, Engine)
    assert engine.samplings == [
        Sampling(temperature=0.7, max_tokens=9),
        Sampling(temperature=0.0, max_tokens=9),
    ]
    assert engine.version == 0


class ServesAnother(FakeEngine):
    def load(self, version: int, digest: str, folder: Path) -> None:
        super().load(version, digest, folder)
        self._weights += b" of another"


class LyingEvaluator(FakeEvaluator):
    def _load_engine(self) -> FakeEngine:
        return ServesAnother()


def test_no_other_weights_are_measured_under_a_versions_name(tmp_path: Path, store: PolicyStore):
    publish(store, 0)
    with pytest.raises(Quarantined, match="evaluator can't prove that it samples version 0"):
        started(tmp_path, LyingEvaluator).step()
    assert lines(tmp_path) == []


def test_accuracy_counts_what_its_own_function_calls_right(tmp_path: Path, store: PolicyStore):
    def generous(prompt: Prompt, completion: str) -> float:
        return 1.0

    publish(store, 0)
    started(tmp_path, KnowingEvaluator, score=generous).step()
    assert lines(tmp_path)[0]["accuracy"] == 1.0


@pytest.mark.parametrize(
    ("eval_reward", "reward", "score"),
    [
        ("", "exact_match", "exact_match"),
        ("", "math_verify", "math_verify"),
        ("", "short.py:short", "exact_match"),
        ("", "short.py:short,2*math_verify", "math_verify"),
        ("mine.py:right", "math_verify", "mine.py:right"),
    ],
)
@pytest.mark.parametrize("recipe", [sync_grpo, async_grpo])
def test_what_a_recipe_counts_as_right(recipe: Any, eval_reward: str, reward: str, score: str):
    assert accuracy_function(eval_reward, reward) == score
    graph = recipe.build(recipe.Config(reward=reward, eval_reward=eval_reward))
    [evaluator] = [role for role in graph if role.name == "evaluator"]
    assert evaluator.kwargs["score"] == score


def test_a_function_that_does_not_exist_is_found_at_the_start(tmp_path: Path):
    with pytest.raises(Unrecoverable, match="there is no reward 'nothing'"):
        started(tmp_path, score="nothing")


def test_a_file_of_problems(tmp_path: Path, store: PolicyStore):
    path = tmp_path / "test.jsonl"
    path.write_text('{"prompt": "1+1?", "answer": "2"}\n' * 2)
    publish(store, 0)
    started(tmp_path, dataset=str(path)).step()  # fewer than it was to take: all of them
    assert lines(tmp_path)[0]["accuracy"] in (0.0, 0.5, 1.0)


def test_more_problems_than_there_are(tmp_path: Path):
    with pytest.raises(Unrecoverable, match="tiny has 1024"):
        started(tmp_path, problems=1025)


def test_a_file_that_is_none(tmp_path: Path):
    path = tmp_path / "test.jsonl"
    path.write_text('{"prompt": "1+1?"}\n')
    with pytest.raises(Unrecoverable, match=r'line 1 of .* needs a text "prompt"') as caught:
        started(tmp_path, dataset=str(path))
    assert caught.value.exit_code == 2
