"""Graphs as text."""

from __future__ import annotations

from rolecall import Graph, Ref, Strategy
from rolecall.recipes import async_grpo, sync_grpo
from rolecall.runtime.show import difference, picture
from rolecall.runtime.store import Store

PICTURE = """\
sync_grpo: restarts only it
  prompts     PromptSource
  reward      Reward
  rollout ×2  RolloutWorker   prompts ─▶ prompts, reward ─▶ reward, weights ┄▶ store
  trainer     Trainer         groups ─▶ rollout, prompts ─▶ prompts, weights ┄▶ store
  evaluator   Evaluator       weights ┄▶ store
  until trainer and evaluator have finished"""

DIFFERENCE = """\
--- sync_grpo
+++ async_grpo
actors
  prompts: PromptSource
  reward: Reward
+ buffer: Buffer
- rollout ×2: RolloutWorker
+ rollout ×2 or more: RolloutWorker
  trainer: Trainer
  evaluator: Evaluator
wires
+ buffer: prompts ─▶ prompts
+ buffer: weights ┄▶ store
  rollout: prompts ─▶ prompts
  rollout: reward ─▶ reward
+ rollout: sink ─▶ buffer
  rollout: weights ┄▶ store
- trainer: groups ─▶ rollout
+ trainer: groups ─▶ buffer
  trainer: prompts ─▶ prompts
  trainer: weights ┄▶ store
  evaluator: weights ┄▶ store
settings
- prompts.max_staleness: 0
+ prompts.max_staleness: 2
+ buffer.capacity: 48
+ buffer.max_staleness: 2
+ buffer.weights.url: 'file://'
- rollout.lease: 8
+ rollout.lease: 24
+ rollout.max_staleness: 2
+ rollout.inflight_swap: False
- trainer.max_staleness: 0
+ trainer.max_staleness: 2"""


def changes(a: Graph, b: Graph) -> list[str]:
    """The marked lines."""
    return [line for line in difference(a, b).splitlines()[2:] if line[0] in "-+"]


def test_a_graph_is_its_roles_and_wires():
    assert picture(sync_grpo.build(sync_grpo.Config())) == PICTURE


def test_one_that_ends_with_one_role():
    graph = sync_grpo.build(sync_grpo.Config(rollout_workers=1))
    graph.ends_with = ["trainer"]
    shown = picture(graph).splitlines()
    assert shown[-1] == "  until trainer has finished"
    assert shown[3].split()[:2] == ["rollout", "RolloutWorker"]


def test_a_role_that_may_grow_and_one_with_another_interpreter():
    graph = async_grpo.build(async_grpo.Config(engine_python="/vllm/bin/python"))
    lines = picture(graph).splitlines()
    assert lines[3] == "  buffer              Buffer          prompts ─▶ prompts, weights ┄▶ store"
    assert lines[4].startswith("  rollout ×2 or more  RolloutWorker   prompts ─▶ prompts, ")
    assert lines[-2:] == [
        "  rollout runs in /vllm/bin/python",
        "  until trainer and evaluator have finished",
    ]
    for replicas in (0, 1):  # none but those that join, and one and those
        graph.place(Ref("rollout"), replicas=replicas, elastic=True)
        shown = picture(graph)
        assert f"\n  rollout ×{replicas} or more  RolloutWorker " in shown
        assert "runs in" not in shown


def test_the_difference_is_both_graphs_with_what_differs_marked():
    sync, other = sync_grpo.build(sync_grpo.Config()), async_grpo.build(async_grpo.Config())
    assert difference(sync, other) == DIFFERENCE
    swap = str.maketrans("+-", "-+")
    assert sorted(line[0].translate(swap) + line[1:] for line in changes(other, sync)) == sorted(
        changes(sync, other)
    )


def test_stores_in_two_places_have_two_names():
    graph = sync_grpo.build(sync_grpo.Config())
    graph["evaluator"].kwargs["weights"] = Store("s3://there/else")
    assert "weights ┄▶ store s3://there/else" in picture(graph)
    assert "weights ┄▶ store file://" in picture(graph)


def test_alike():
    graphs = [sync_grpo.build(sync_grpo.Config()) for _ in range(2)]
    assert difference(*graphs) == "sync_grpo and sync_grpo are wired alike"


def test_replicas_and_where_a_role_runs_are_part_of_the_difference():
    one, two = (sync_grpo.build(sync_grpo.Config(rollout_workers=count)) for count in (1, 2))
    assert changes(one, two)[:2] == ["- rollout: RolloutWorker", "+ rollout ×2: RolloutWorker"]
    for graph, replicas in ((one, 1), (two, 0)):
        graph.place(Ref("rollout"), replicas=replicas, elastic=True)
    assert changes(one, two)[1] == "+ rollout ×0 or more: RolloutWorker"
    one, two = (sync_grpo.build(sync_grpo.Config(engine_python=path)) for path in ("", "/vllm/bin/python"))
    assert changes(one, two) == [
        "- rollout ×2: RolloutWorker",
        "+ rollout ×2: RolloutWorker, runs in /vllm/bin/python",
    ]


def test_settings_of_the_same_graph():
    one, two = (sync_grpo.build(sync_grpo.Config(lr=lr)) for lr in (1e-3, 2e-3))
    assert difference(one, two).splitlines()[-3:] == [
        "settings",
        "- trainer.lr: 0.001",
        "+ trainer.lr: 0.002",
    ]


def test_supervisors_of_their_own_are_part_of_the_picture_and_the_difference():
    one, two = (sync_grpo.build(sync_grpo.Config()) for _ in range(2))
    two.supervise(Ref("reward"), Ref("rollout"), strategy=Strategy.ONE_FOR_ALL, max_restarts=9)
    own = "reward and rollout apart: restarts everybody, at most 9 in 60 s"
    assert picture(two).splitlines()[-2] == f"  {own}"
    assert changes(one, two) == [f"+ {own}"]
