"""Graphs as text."""

from __future__ import annotations

from rolecall import Ref, Strategy
from rolecall.recipes import async_grpo, sync_grpo
from rolecall.runtime.show import difference, picture

PICTURE = """\
sync_grpo: restarts only it
  prompts     PromptSource
  reward      Reward
  rollout ×2  RolloutWorker   prompts ─▶ prompts, reward ─▶ reward
  trainer     Trainer         groups ─▶ rollout, prompts ─▶ prompts
  evaluator   Evaluator
  until trainer and evaluator have finished"""

DIFFERENCE = """\
--- sync_grpo
+++ async_grpo
- prompts.max_staleness: 0
+ prompts.max_staleness: 2
- trainer.max_staleness: 0
+ trainer.max_staleness: 2
- trainer.groups: ─▶ rollout
+ trainer.groups: ─▶ buffer
+ buffer: Buffer
+ buffer.capacity: 48
+ buffer.max_staleness: 2
+ buffer.prompts: ─▶ prompts
+ buffer.weights.url: 'file://'
+ rollout elastic: yes
+ rollout.max_staleness: 2
+ rollout.inflight_swap: False
+ rollout.sink: ─▶ buffer"""


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
    assert lines[3] == "  buffer              Buffer          prompts ─▶ prompts"
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


def test_the_difference_is_edges_and_settings():
    sync, other = sync_grpo.build(sync_grpo.Config()), async_grpo.build(async_grpo.Config())
    assert difference(sync, other) == DIFFERENCE
    back = difference(other, sync).splitlines()
    swapped = [
        line.replace("+ ", "- ", 1) if line[0] == "+" else line.replace("- ", "+ ", 1) for line in back[2:]
    ]
    assert sorted(swapped) == sorted(DIFFERENCE.splitlines()[2:])


def test_alike():
    graphs = [sync_grpo.build(sync_grpo.Config()) for _ in range(2)]
    assert difference(*graphs) == "sync_grpo and sync_grpo are wired alike"


def test_replicas_and_restarts_are_part_of_the_difference():
    one, two = (sync_grpo.build(sync_grpo.Config(rollout_workers=count)) for count in (1, 2))
    marked = difference(one, two).splitlines()[2:]
    assert "- rollout: RolloutWorker" in marked and "+ rollout: RolloutWorker ×2" in marked


def test_where_a_role_runs_is_part_of_the_difference():
    one, two = (sync_grpo.build(sync_grpo.Config(engine_python=path)) for path in ("", "/vllm/bin/python"))
    assert difference(one, two).splitlines()[2:] == ["+ rollout runs in: /vllm/bin/python"]
    assert difference(two, one).splitlines()[2:] == ["- rollout runs in: /vllm/bin/python"]
    two = sync_grpo.build(sync_grpo.Config())
    for graph, replicas in ((one, 1), (two, 0)):
        graph.place(Ref("rollout"), replicas=replicas, elastic=True)
    assert difference(one, two).splitlines()[2:] == [
        "- rollout: RolloutWorker",
        "+ rollout: RolloutWorker ×0",
    ]


def test_supervisors_of_their_own_are_part_of_the_picture_and_the_difference():
    one, two = (sync_grpo.build(sync_grpo.Config()) for _ in range(2))
    two.supervise(Ref("reward"), Ref("rollout"), strategy=Strategy.ONE_FOR_ALL, max_restarts=9)
    assert (
        picture(two).splitlines()[-2] == "  reward and rollout apart: restarts everybody, at most 9 in 60 s"
    )
    assert difference(one, two).splitlines()[2:] == [
        "+ reward and rollout apart: restarts everybody, at most 9 in 60 s"
    ]
