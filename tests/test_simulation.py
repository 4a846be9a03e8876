"""Runs in virtual time: the same each time, no group lost or doubled, and what arithmetic says where it can say it."""

from __future__ import annotations

from functools import wraps
from pathlib import Path
from typing import Any

import msgspec
import pytest
from rolecall.actors.plan import Offer, Plan, Prices, colocated_step_s, cost_usd, describe, saving
from rolecall.actors.profile import Line, Measure, Profile, measure, quantiles
from rolecall.actors.simulation import Prediction, simulate
from rolecall.recipes import async_grpo, sync_grpo
from rolecall.runtime import Unrecoverable
from rolecall.runtime.runs import create_run


def constant(*values: float) -> Measure:
    return Measure(unit="s", source="the test", quantiles=list(values))


def profile(*, step_s: float = 0.01, token_s: float = 0.001, tokens: float = 100.0, **parts: Any) -> Profile:
    """Every completion has as many tokens, and a step takes as long however many there are under way."""
    given = {
        "tokens": constant(tokens),
        "sample": Line(unit="s", source="the test", fixed=step_s, each=0.0, ratios=[1.0]),
        "train": Line(unit="s", source="the test", fixed=0.0, each=token_s, ratios=[1.0]),
        **{name: constant(0.0) for name in ("publish", "apply", "score", "start", "restart")},
    }
    return Profile(about="the test", **(given | parts))


VARIED = profile(
    tokens=50,
    publish=constant(0.1, 0.3),
    apply=constant(0.05, 0.2),
    score=constant(0.001, 0.02),
    start=constant(1.0, 3.0),
    restart=constant(2.0, 5.0),
)
VARIED = msgspec.structs.replace(VARIED, tokens=constant(5, 20, 50, 64))


def predicted(
    how: Profile, *, lost_per_h: float = 0.0, seed: int = 0, recipe: Any = async_grpo, **settings: Any
) -> Prediction:
    small = {
        "steps": 8,
        "batch": 4,
        "group_size": 2,
        "max_tokens": 128,
        "eval_problems": 1,
        "eval_every": 1000,
    }
    graph = recipe.build(recipe.Config(**(small | settings)))
    return simulate(graph, how, seed=seed, lost_per_h=lost_per_h, away_s=2.0, starts=False)


@pytest.mark.parametrize("recipe", [async_grpo, sync_grpo])
def test_one_seed_gives_one_prediction_and_another_another(recipe: Any):
    first = predicted(VARIED, lost_per_h=500, seed=1, recipe=recipe)
    assert first == predicted(VARIED, lost_per_h=500, seed=1, recipe=recipe)
    assert first != predicted(VARIED, lost_per_h=500, seed=2, recipe=recipe)


@pytest.mark.parametrize("recipe", [async_grpo, sync_grpo])
def test_whatever_machines_are_lost_each_step_has_its_groups_and_none_is_too_stale(recipe: Any):
    found = predicted(VARIED, lost_per_h=1000, recipe=recipe, rollout_workers=3, steps=12)
    assert found.lost >= 3
    assert found.groups_trained == 12 * 4
    assert found.staleness_max <= (2 if recipe is async_grpo else 0)


def test_machines_that_are_lost_all_the_time_are_no_death_of_the_trainer():
    """Of a lockstep step whose shares two have sampled only what is missing is asked for again."""
    for seed in range(3):
        found = predicted(VARIED, lost_per_h=100, seed=seed, recipe=sync_grpo, rollout_workers=4, steps=40)
        assert found.lost >= 5
        assert found.groups_trained == 40 * 4
        assert "start" not in found.shares["trainer"]  # as whoever is restarted has


@pytest.mark.parametrize("recipe", [async_grpo, sync_grpo])
def test_all_time_is_accounted_for(recipe: Any):
    found = predicted(VARIED, recipe=recipe)
    for role, shares in found.shares.items():
        assert sum(shares.values()) == pytest.approx(1.0), role
        assert shares["other"] < 0.03, (role, shares)


def test_a_trainer_half_as_fast_as_the_workers_sets_the_pace():
    """100 tokens of 10 ms, for however many there are: a second. The trainer: 4 · 2 · 100 tokens of 2.5 ms for a batch
    of 4: two. So it has enough of 2 batches under way, and each of 2 workers samples every other second."""
    found = predicted(profile(token_s=0.0025), steps=20)
    assert found.bottleneck == "trainer-bound"
    assert found.groups_per_s == pytest.approx(2.0, rel=0.01)
    assert found.tokens_per_s == pytest.approx(400.0, rel=0.01)
    assert found.trainer_wait_share < 0.02
    assert found.shares["rollout"]["sample"] == pytest.approx(0.5, abs=0.1)


@pytest.mark.parametrize("max_staleness", [4, 12])
def test_what_the_trainer_does_without_is_not_under_way_and_grows_no_older(max_staleness: int):
    """Its groups are about as fresh as they can be, with a batch to be trained and one to spare."""
    found = predicted(profile(token_s=0.0025), steps=40, max_staleness=max_staleness)
    assert found.groups_per_s == pytest.approx(2.0, rel=0.01)
    assert found.staleness_mean < 2.5


def test_workers_slower_than_the_trainer_set_the_pace():
    """A trainer that takes 0.2 s; 12 groups may be under way, each of them for a second and one or two steps."""
    found = predicted(profile(token_s=0.00025), steps=40)
    assert found.bottleneck == "rollout-bound"
    assert 12 / 1.4 <= found.groups_per_s <= 12 / 1.2 + 1e-6
    assert found.trainer_wait_share == pytest.approx(0.5, abs=0.05)
    assert found.shares["rollout"]["sample"] > 0.9


def test_taking_turns_takes_both_times():
    """A second to sample a batch, then 0.8 s to train on it, then 0.2 s to publish."""
    found = predicted(profile(token_s=0.001, publish=constant(0.2)), recipe=sync_grpo, steps=10)
    assert found.groups_per_s == pytest.approx(4 / 2.0, rel=0.01)
    assert found.trainer_wait_share == pytest.approx(0.5, abs=0.01)
    assert found.staleness_max == 0


def test_more_workers_than_prompts_may_be_lent():
    found = predicted(profile(), rollout_workers=40)
    assert found.groups_trained == 32
    assert found.workers == 40 and found.gpu_h["rollout"] == pytest.approx(40 * found.wall_s / 3600)


def test_a_profile_is_measured_from_what_a_run_wrote(tmp_path: Path):
    run = create_run(tmp_path, "async_grpo", {"group_size": 2})
    steps = [
        {"groups": [1, 2], "completions/mean_length": 5.0 * n, "perf/fwd_bwd_s": 1.0 + 0.1 * 20 * n,
         "perf/publish_s": 0.5, "dropped": {"stale": 2}}
        for n in range(1, 5)
    ]  # fmt: skip
    waits = {"lease_wait_s": 0.5, "put_wait_s": 0.0, "sample_s": 1.0, "load_s": 0.25}
    events = [
        {"time": run.info.started + 2.0, "actor": "rollout", "event": "state", "state": "up"},
        *(
            {"time": at, "actor": "rollout", "event": "report",
             "values": {**waits, "version": version, "engine_steps": 10, "sequences": 4.0, "lengths": [3, 7]}}
            for at, version in ((10.0, 0), (12.0, 0), (14.0, 1))
        ),
        {"time": 15.0, "actor": "rollout", "event": "death", "reason": "killed"},
        {"time": 19.0, "actor": "rollout", "event": "state", "state": "up"},
        {"time": 20.0, "actor": "reward", "event": "report", "values": {"score_s": [0.1, 0.3]}},
    ]  # fmt: skip
    for name, lines in (("metrics", steps), ("events", events)):
        (run.path / f"{name}.jsonl").write_bytes(
            b"".join(msgspec.json.encode(line) + b"\n" for line in lines)
        )
    found = measure(run)
    assert (found.tokens.quantiles[0], found.tokens.mean, found.tokens.quantiles[-1]) == (
        3,
        pytest.approx(5),
        7,
    )
    # 2 s less 0.5 of waiting, and the second time less 0.25 for a swap, for ten steps.
    assert found.sample.at(4.0) == pytest.approx((0.15 + 0.125) / 2)
    assert found.train.at(30) == pytest.approx(1.0 + 0.1 * 30)
    assert (found.publish.mean, found.apply.mean, found.score.mean) == (0.5, 0.25, pytest.approx(0.2))
    assert (found.start.mean, found.restart.mean) == (pytest.approx(2.0), 4.0)
    assert found.dropped == {"stale": 0.25}
    assert msgspec.json.decode(msgspec.json.encode(found), type=Profile) == found


def test_a_run_that_cannot_be_measured_is_named(tmp_path: Path):
    run = create_run(tmp_path, "async_grpo", {"group_size": 2})
    with pytest.raises(Unrecoverable, match="0 optimizer steps"):
        measure(run)


def test_a_distribution_keeps_its_tail():
    values = [1.0] * 90 + [100.0] * 10
    kept = constant(*quantiles(values))
    assert kept.draw(0.5) == 1.0 and kept.draw(0.97) == 100.0
    assert kept.mean == pytest.approx(sum(values) / 100, rel=0.25)


def test_costs():
    assert cost_usd(7200, 2.0, 3, 5.0) == 15.0
    assert saving(30.0, 100.0) == pytest.approx(0.7)


def test_a_pool_that_takes_turns():
    """4 groups of 2, of 100 tokens, on 2 GPUs: 100 steps of 10 ms, half of 0.8 s of training, and the sync."""
    step_s = colocated_step_s(profile(), 2, batch=4, group_size=2, max_tokens=128)
    assert step_s == pytest.approx(1.0 + 0.4 + 0.5)


def test_a_plan_adds_up(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("rolecall.actors.plan.WORKERS", (1, 2))
    monkeypatch.setattr(
        "rolecall.actors.plan.SETTINGS", {"batch": 4, "group_size": 2, "max_tokens": 128, "eval_problems": 1}
    )
    offers = [
        Offer(name="near", kind="cluster", gpu="X", usd_per_gpu_h=10.0, source="the test", read="today"),
        Offer(name="far", kind="serverless", gpu="X", usd_per_gpu_h=2.0, source="the test", read="today"),
    ]
    recipes = {"async_grpo": async_grpo, "sync_grpo": sync_grpo}
    costs = Plan(recipes, profile(), Prices(about="the test", offers=offers), groups=1000).made()
    assert {(row.layout, row.offer) for row in costs.rows} == {
        ("colocated", "near"), ("sync", "near"), ("async", "near"), ("sync", "far"), ("async", "far")
    }  # fmt: skip
    usd = {(row.layout, row.offer): row.usd for row in costs.rows}
    assert usd["async", "far"] == pytest.approx(usd["async", "near"] / 5)
    for row in costs.rows:
        price = 10.0 if row.offer == "near" else 2.0
        assert row.usd == pytest.approx(row.gpu_h * price)
    told = describe(costs)
    assert (
        f"{saving(usd['async', 'far'], usd['sync', 'near']):>5.0%}  async on far (serverless) instead of sync"
        in told
    )


def handled(workers: int) -> int:
    """How often handlers are called in all, tries that end in NotYet included."""
    calls = 0

    def counted(handler: Any) -> Any:
        @wraps(handler)
        def call(*args: Any) -> Any:
            nonlocal calls
            calls += 1
            return handler(*args)

        return call

    graph = async_grpo.build(
        async_grpo.Config(steps=6, rollout_workers=workers, batch=workers, group_size=2, eval_every=1000)
    )
    for role in list(graph):
        handlers = {name: getattr(role.actor, name) for name in dir(role.actor)}
        handlers = {name: counted(one) for name, one in handlers.items() if getattr(one, "idempotent", False)}
        graph.recast(role.name, type(role.actor.__name__, (role.actor,), handlers))
    how = profile(token_s=0.00025, publish=constant(0.1, 0.3), score=constant(0.001, 0.02))
    simulate(graph, msgspec.structs.replace(how, tokens=constant(5, 20, 50, 64)), starts=False)
    return calls


def test_four_times_the_workers_have_four_times_as_much_to_do():
    """Whatever waits is tried again when it may succeed: if each change had all of it tried, it would be 5 times."""
    assert handled(96) < 4.4 * handled(24)
