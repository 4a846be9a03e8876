"""The recipes that come with the package: how they read, and whole runs of them in one process."""

from __future__ import annotations

import ast
import difflib
import io
import json
import re
import tokenize
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
from rolecall import Graph
from rolecall.actors.types import Group
from rolecall.recipes import async_grpo, expert_iteration, inflight_grpo, one_step_off, sync_grpo, tool_grpo
from rolecall.runtime.recipe import load_recipe, recipe_names
from rolecall.runtime.store import Store
from rolecall.runtime.testing import Killed, LocalRun

from .fakes import FakeTrainer, fake_ring

FOLDER = Path(async_grpo.__file__).parent
SMALL: dict[str, Any] = {"steps": 3, "batch": 4, "group_size": 4, "eval_problems": 2, "max_tokens": 40}
SMALL_4: dict[str, Any] = {**SMALL, "steps": 4}
TIMES = ("time", "perf/")


def code_lines(path: Path) -> list[str]:
    """Its lines without docstrings, comments and blanks, however they are indented."""
    source = path.read_text()
    prose: set[int] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            assert node.end_lineno is not None
            prose.update(range(node.lineno, node.end_lineno + 1))
    lines = dict(enumerate(source.splitlines(), 1))
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            lines[token.start[0]] = lines[token.start[0]][: token.start[1]]
    return [line.strip() for number, line in lines.items() if number not in prose and line.strip()]


def test_sync_and_async_differ_in_their_wiring_alone():
    sync, other = (code_lines(FOLDER / f"{name}_grpo.py") for name in ("sync", "async"))
    marked = [line for line in difflib.ndiff(sync, other) if line[0] in "+-"]
    assert 0 < len(marked) <= 20, "\n".join(marked)


@pytest.mark.parametrize("name", recipe_names())
def test_a_recipe_fits_two_screens_and_begins_with_a_picture(name: str):
    path = FOLDER / f"{name}.py"
    assert len(path.read_text().splitlines()) <= 100
    graph = load_recipe(name).build(load_recipe(name).Config())
    drawn = (load_recipe(name).__doc__ or "").rpartition("\n\n")[2]
    assert "─▶" in drawn
    assert {role.name for role in graph} | {"store", "weights"} == set(re.findall(r"[a-z]+", drawn))


def run(graph: Graph, folder: Path) -> LocalRun:
    local = LocalRun(graph, folder=folder)
    local.run()
    return local


def lines(folder: Path, name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / name).read_text().splitlines()]


def timeless(folder: Path) -> list[dict[str, Any]]:
    """metrics.jsonl and eval.jsonl without what only clocks decide."""
    everything = lines(folder, "metrics.jsonl") + lines(folder, "eval.jsonl")
    return [{key: line[key] for key in line if not key.startswith(TIMES)} for line in everything]


def final_digest(folder: Path) -> str:
    head = Store().open("local", folder).head()
    assert head is not None
    return head.digest


def check_ledger(folder: Path, *, steps: int, batch: int, max_staleness: int) -> None:
    """Each step once, each group once, none missing, none too old."""
    metrics = lines(folder, "metrics.jsonl")
    assert [line["step"] for line in metrics] == list(range(1, steps + 1))
    trained = sorted(id for line in metrics for id in line["groups"])
    assert trained == list(range(steps * batch))
    assert max(line["staleness/max"] for line in metrics) <= max_staleness
    evaluations = lines(folder, "eval.jsonl")
    assert evaluations[0]["step"] == 0 and evaluations[-1]["step"] == steps


def test_with_a_tool_only_who_judges_differs():
    plain, tool = (code_lines(FOLDER / f"{name}_grpo.py") for name in ("async", "tool"))
    marked = [line for line in difflib.ndiff(plain, tool) if line[0] in "+-"]
    assert 0 < len(marked) <= 30, "\n".join(marked)


# One worker's one batch is sampled fastest; what of the ring two workers test is tested below.
BRIEF: dict[str, Any] = {"steps": 5, "batch": 8, "eval_problems": 4, "max_tokens": 40, "lr": 5e-3,
                         "rollout_workers": 1, "seed": 1}  # fmt: skip
SOONER: dict[str, dict[str, Any]] = {
    "async_grpo": {"max_staleness": 1},
    "inflight_grpo": {"max_staleness": 1},
    "expert_iteration": {"iteration": 2},
    "judged": {"max_staleness": 1, "steps": 7},
}


@pytest.mark.parametrize("name", ["sync_grpo", "async_grpo", "one_step_off", "inflight_grpo", "expert_iteration",
                                  "judged"])  # fmt: skip
def test_a_recipe_learns(tmp_path: Path, name: str):
    recipe = load_recipe(name)
    run(recipe.build(recipe.Config(**(BRIEF | SOONER.get(name, {})))), tmp_path)
    rewards = [line["reward"] for line in lines(tmp_path, "metrics.jsonl")]
    assert rewards[-1] >= rewards[0] + 0.25, rewards


@pytest.mark.slow
def test_one_step_off_is_one_version_behind_no_more_and_no_less(tmp_path: Path):
    run(one_step_off.build(one_step_off.Config(**SMALL_4)), tmp_path)
    check_ledger(tmp_path, steps=4, batch=4, max_staleness=1)
    assert [line["staleness/mean"] for line in lines(tmp_path, "metrics.jsonl")] == [0, 1, 1, 1]


@pytest.mark.slow
def test_inflight_goes_on_under_new_versions_and_weighs_its_tokens(tmp_path: Path):
    settings: dict[str, Any] = {**SMALL, "steps": 8}
    config = inflight_grpo.Config(**settings)
    run(inflight_grpo.build(config), tmp_path)
    check_ledger(tmp_path, steps=8, batch=4, max_staleness=4)
    last = [msgspec.msgpack.decode(file.read_bytes(), type=Group) for file in tmp_path.rglob("*.group")]
    assert any(len(set(completion.versions)) > 1 for group in last for completion in group.completions)
    assert all("correction/weight_mean" in line for line in lines(tmp_path, "metrics.jsonl")[1:])


@pytest.mark.slow
def test_expert_iteration_samples_a_whole_iteration_with_one_version_and_learns_from_winners(tmp_path: Path):
    run(expert_iteration.build(expert_iteration.Config(**SMALL, iteration=2)), tmp_path)
    check_ledger(tmp_path, steps=3, batch=4, max_staleness=0)
    assert [line["version"] for line in lines(tmp_path, "metrics.jsonl")] == [0, 0, 1]
    assert expert_iteration.Config().loss.advantages([[1.0, 0.0, 0.0]]) == [[1.0, 0.0, 0.0]]


@pytest.mark.slow
def test_an_iteration_whose_trainer_dies_in_the_middle_is_sampled_again(tmp_path: Path):
    """Under the version that the trainer publishes when it is back; no group is trained twice."""

    def once_in_the_first(run: LocalRun) -> list[str]:
        made = len(run.reports["trainer"])
        return ["trainer"] if made == 1 and not run.deaths else []

    config = expert_iteration.Config(**SMALL_4, iteration=2)
    local = LocalRun(expert_iteration.build(config), folder=tmp_path, kill=once_in_the_first)
    local.run()
    assert [death.name for death in local.deaths] == ["trainer"]
    check_ledger(tmp_path, steps=4, batch=4, max_staleness=0)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_no_prompt_is_forgotten_however_often_the_trainer_dies_in_an_iteration(tmp_path: Path, seed: int):
    """While some of the first are still being sampled, for groups take more or less long."""

    def after_some_steps(run: LocalRun) -> list[str]:
        made = [report["step"] for report in run.reports["trainer"]]
        return ["trainer"] if len(run.deaths) < 4 and made[-1:] == [(1, 2, 5, 7)[len(run.deaths)]] else []

    delay = "lognormal(1.0,1.0)"
    settings: dict[str, Any] = {**SMALL, "steps": 8, "max_tokens": 4, "seed": seed, "rollout_delay": delay}
    config = expert_iteration.Config(**settings, iteration=4)
    local = LocalRun(expert_iteration.build(config), folder=tmp_path, kill=after_some_steps)
    local.run()
    assert [death.name for death in local.deaths] == ["trainer"] * 4
    # What it was given before it died is trained after the version that it publishes when it is back.
    check_ledger(tmp_path, steps=8, batch=4, max_staleness=1)


@pytest.fixture(scope="module")
def sync(tmp_path_factory: pytest.TempPathFactory) -> LocalRun:
    """A run of sync_grpo that others are compared with."""
    return run(sync_grpo.build(sync_grpo.Config(**SMALL)), tmp_path_factory.mktemp("sync"))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["sync_grpo", "async_grpo"])
def test_a_recipe_runs_to_its_end_and_repeats_bit_for_bit(tmp_path: Path, name: str, sync: LocalRun):
    recipe = load_recipe(name)
    first = sync if name == "sync_grpo" else run(recipe.build(recipe.Config(**SMALL)), tmp_path / "first")
    second = run(recipe.build(recipe.Config(**SMALL)), tmp_path / "second")
    assert timeless(first.folder) == timeless(second.folder)
    assert first.turns == second.turns
    assert final_digest(first.folder) == final_digest(second.folder)
    check_ledger(first.folder, steps=3, batch=4, max_staleness=0 if name == "sync_grpo" else 2)


@pytest.mark.slow
def test_another_seed_is_another_run(tmp_path: Path, sync: LocalRun):
    run(sync_grpo.build(sync_grpo.Config(**SMALL, seed=1)), tmp_path)
    assert final_digest(tmp_path) != final_digest(sync.folder)


@pytest.mark.slow
def test_sync_is_on_policy(sync: LocalRun):
    metrics = lines(sync.folder, "metrics.jsonl")
    assert [line["staleness/max"] for line in metrics] == [0, 0, 0]
    assert [line["fresh/ratio_mean"] for line in metrics] == pytest.approx([1.0] * 3, abs=0.005)


@pytest.mark.slow
def test_answers_are_read_and_not_trained(tmp_path: Path):
    settings: dict[str, Any] = {**SMALL, "max_tokens": 64}  # shorter ones are never right
    run(tool_grpo.build(tool_grpo.Config(**settings)), tmp_path)
    for line in lines(tmp_path, "metrics.jsonl"):
        assert 0 < line["tokens_trained"] < 16 * line["completions/mean_length"]
        # If tokens that nobody sampled were counted, as certain ones, ratios would be far below 1.
        assert line.get("fresh/ratio_mean", 1.0) == pytest.approx(1.0, abs=0.005)


@pytest.mark.slow
@pytest.mark.parametrize("max_staleness", [0, 1])
def test_async_is_as_stale_as_it_may_be(tmp_path: Path, max_staleness: int):
    config = async_grpo.Config(**SMALL, max_staleness=max_staleness)
    run(async_grpo.build(config), tmp_path)
    check_ledger(tmp_path, steps=3, batch=4, max_staleness=max_staleness)
    fresh = [
        line["fresh/ratio_mean"] for line in lines(tmp_path, "metrics.jsonl") if "fresh/ratio_mean" in line
    ]
    assert fresh == pytest.approx([1.0] * len(fresh), abs=0.005)


@pytest.mark.slow
def test_async_without_staleness_learns_what_sync_learns(tmp_path: Path, sync: LocalRun):
    """The same groups under the same weights, by way of a buffer."""
    run(async_grpo.build(async_grpo.Config(**SMALL, max_staleness=0)), tmp_path)
    assert final_digest(tmp_path) == final_digest(sync.folder)


@pytest.mark.parametrize("max_staleness", [None, 0, 1, 4])
@pytest.mark.parametrize(("batch", "workers"), [(1, 1), (1, 3), (5, 2), (4, 4)])
def test_the_ring_conserves_groups(tmp_path: Path, max_staleness: int | None, batch: int, workers: int):
    graph = fake_ring(steps=6, batch=batch, workers=workers, max_staleness=max_staleness)
    local = run(graph, tmp_path)
    check_ledger(tmp_path, steps=6, batch=batch, max_staleness=max_staleness or 0)
    assert all(line["dropped"] == {} for line in lines(tmp_path, "metrics.jsonl"))
    assert local.dead_letters == []


class Interrupted(Exception):
    """In the middle of a run."""


class Brief(FakeTrainer):
    def step(self) -> float | None:
        if self.done == 3:
            raise Interrupted
        return super().step()


def test_a_run_that_is_started_again_goes_on_where_it_was(tmp_path: Path):
    quiet = run(fake_ring(steps=6, batch=4, max_staleness=0), tmp_path / "quiet")
    with pytest.raises(Interrupted):
        run(
            fake_ring(steps=6, batch=4, max_staleness=0, checkpoint_every=2, trainer=Brief),
            tmp_path / "killed",
        )
    run(fake_ring(steps=6, batch=4, max_staleness=0), tmp_path / "killed")
    assert final_digest(tmp_path / "killed") == final_digest(quiet.folder)
    check_ledger(tmp_path / "killed", steps=6, batch=4, max_staleness=4)


@pytest.mark.parametrize("max_staleness", [None, 0, 1, 4])
@pytest.mark.parametrize("checkpoint_every", [1, 2])
def test_a_run_whose_folder_is_gone_goes_on_from_its_store(
    tmp_path: Path, max_staleness: int | None, checkpoint_every: int
):
    """Each group is trained once, in one place or the other, and both have the lines of all steps before."""
    ring = partial(fake_ring, steps=6, batch=4, max_staleness=max_staleness, checkpoint_every=checkpoint_every,
                   store=f"file://{tmp_path}/store")  # fmt: skip
    with pytest.raises(Interrupted):
        run(ring(trainer=Brief), tmp_path / "lost")
    run(ring(), tmp_path / "found")
    most = (max_staleness or 0) + 2 * (checkpoint_every - 1)  # versions of steps that were made again stay
    check_ledger(tmp_path / "found", steps=6, batch=4, max_staleness=most)


class Again(Brief):
    """Makes its first step again and again: versions of it come out until what waits is stale."""

    def step(self) -> float | None:
        if self.done == 1 and self.version < 6:
            raise Killed
        return super().step()


def test_what_is_dropped_for_the_next_step_is_not_lost_with_the_folder(tmp_path: Path):
    """A checkpoint's snapshots are of before it was asked for, or the dropped would be in neither of them."""
    ring = partial(
        fake_ring, steps=6, batch=4, max_staleness=2, checkpoint_every=2, store=f"file://{tmp_path}/store"
    )
    with pytest.raises(Interrupted):
        run(ring(trainer=Again), tmp_path / "lost")
    run(ring(), tmp_path / "found")
    assert lines(tmp_path / "found", "metrics.jsonl")[-1]["dropped"]["stale"] > 0
    check_ledger(tmp_path / "found", steps=6, batch=4, max_staleness=8)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["sync_grpo", "async_grpo"])
def test_a_run_that_goes_on_elsewhere_learns_what_one_in_one_place_learns(
    tmp_path: Path, name: str, sync: LocalRun
):
    """Bit for bit, if it is synchronous. It can also be made longer than it was meant to be."""
    recipe, config = load_recipe(name), SMALL | {"store": f"file://{tmp_path}/store"}
    run(recipe.build(recipe.Config(**config | {"steps": 1})), tmp_path / "lost")
    run(recipe.build(recipe.Config(**config)), tmp_path / "found")
    check_ledger(tmp_path / "found", steps=3, batch=4, max_staleness=0 if name == "sync_grpo" else 2)
    if name == "sync_grpo":
        head = Store(config["store"]).open("local", tmp_path / "found").head()
        assert head is not None and head.digest == final_digest(sync.folder)
