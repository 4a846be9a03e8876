"""Who is restarted and taken down, in which order and after which wait; and when it is too much."""

from __future__ import annotations

import pytest
from rolecall import Restart, Strategy
from rolecall.runtime.tree import RestartBudget, Tree, Verdict

from .trees import Longest, Play, pool, ring


@pytest.mark.parametrize(
    ("strategy", "events"),
    [
        (Strategy.ONE_FOR_ONE, "+b"),
        (Strategy.REST_FOR_ONE, "-d -c -worker-0 -worker-1 +b +worker-0 +worker-1 +c +d"),
        (Strategy.ONE_FOR_ALL, "-d -c -worker-0 -worker-1 -a +a +b +worker-0 +worker-1 +c +d"),
    ],
)
def test_a_strategy_takes_down_in_reverse_and_starts_in_order(strategy: Strategy, events: str):
    assert Play(ring(strategy)[0]).restarts("b") == events


def test_a_replica_does_not_take_its_siblings_down_unless_all_go():
    assert Play(ring(Strategy.REST_FOR_ONE)[0]).restarts("worker-0") == "-d -c +worker-0 +c +d"


@pytest.mark.parametrize(
    ("own", "events"),
    [
        (Strategy.ONE_FOR_ONE, "+b"),
        (Strategy.REST_FOR_ONE, "-worker-0 -worker-1 +b +worker-0 +worker-1"),
        (Strategy.ONE_FOR_ALL, "-worker-0 -worker-1 +b +worker-0 +worker-1"),
    ],
)
def test_a_subtrees_strategy_is_its_own(own: Strategy, events: str):
    assert pool(Strategy.ONE_FOR_ALL, own).restarts("b") == events


@pytest.mark.parametrize(
    ("strategy", "events"),
    [
        (Strategy.ONE_FOR_ONE, "-worker-1 -b +b +worker-0 +worker-1"),
        (Strategy.REST_FOR_ONE, "-d -c -worker-1 -b +b +worker-0 +worker-1 +c +d"),
        (Strategy.ONE_FOR_ALL, "-d -c -worker-1 -b -a +a +b +worker-0 +worker-1 +c +d"),
    ],
)
def test_a_subtree_that_gives_up_dies_as_a_whole_by_its_parents_strategy(strategy: Strategy, events: str):
    play = pool(strategy)
    for _ in range(2):
        assert play.die("worker-0").story == ""
        play.now += 5.0
        assert play.settle() == "+worker-0"
    verdict = play.die("worker-0")
    assert [(death.name, death.restart_in_s) for death in verdict.deaths] == [
        ("worker-0", 0.0),
        ("subtree b+worker", 0.0),
    ]
    assert verdict.deaths[1].reason == (
        "worker-0 died 3 times (killed by SIGKILL) within 60 s, and 2 restarts are allowed"
    )
    assert play.settle() == events


def test_a_subtree_starts_again_with_a_fresh_count_after_its_parents_wait():
    play = pool()
    waits = []
    for _ in range(6):
        verdict = play.die("worker-1")
        waits.append([death.restart_in_s for death in verdict.deaths])
        play.now += 2.0
        play.settle()
    assert waits == [[0.0], [0.4], [0.0, 0.0], [0.0], [0.4], [0.4, 0.4]]


def test_all_of_a_subtree_wait_for_its_parents_wait():
    play = pool()
    for _ in range(5):
        play.die("worker-1")
        play.now += 1.0
        play.settle()
    play.die("worker-1")
    assert play.settle() == "-worker-0 -b"
    play.now += 0.39
    assert play.settle() == ""
    play.now += 0.02
    assert play.settle() == "+b +worker-0 +worker-1"


def test_a_run_ends_with_the_whole_story_when_its_subtree_has_died_too_often():
    play = pool()
    play.tree.graph.max_restarts = 1
    play.tree = Tree(play.tree.graph, list(play.slots.values()), Longest())
    stories = []
    for name, reason in [("b", "exited with code 3"), *[("worker-0", "killed by SIGKILL")] * 5]:
        stories.append(play.die(name, reason).story)
        play.now += 1.0
        play.settle()
    assert stories == [""] * 5 + [
        "subtree b+worker died: worker-0 died 3 times (killed by SIGKILL) within 60 s, and 2 restarts are "
        "allowed. That was death 2 within 60 s and 1 restarts are allowed, so the run ends."
    ]
    assert play.slots["worker-0"].state == "gone"


def test_a_subtrees_story_names_everybody_and_what_they_died_of():
    play = pool()
    play.die("b", "exited with code 3")
    play.now += 1.0
    play.settle()
    play.die("worker-0")
    play.now += 1.0
    play.settle()
    reason = play.die("worker-0").deaths[1].reason
    assert reason.startswith(
        "b died once (exited with code 3), worker-0 died 2 times (killed by SIGKILL) within"
    )


def test_deaths_in_a_subtree_are_not_counted_among_the_graphs_own():
    play = pool()
    for _ in range(2):
        play.die("worker-0")
        play.now += 1.0
        play.settle()
    assert play.die("c").deaths[0].restart_in_s == 0.0  # the first


def test_the_count_falls_only_with_time():
    budget = RestartBudget(2, 60.0, Longest())
    assert [budget.spend("a", "", now) for now in (0.0, 31.0, 62.0, 93.0, 94.0)] == [0.0, 0.4, 0.4, 0.4, None]


def test_who_has_finished_stays_so_and_whoever_is_temporary_does_not_come_back_from_being_taken_down():
    graph, (_, _, _, c, _) = ring(Strategy.ONE_FOR_ALL)
    graph.place(c, restart=Restart.TEMPORARY)
    play = Play(graph)
    play.tree.ended(play.slots["d"], "exited with code 0", 0.0, finished=True)
    play.die("b")
    [going] = play.tree.to_stop()
    verdict = play.tree.ended(going, "exited with code 0", 0.0)
    assert [(death.name, death.reason, death.restart_in_s) for death in verdict.deaths] == [
        ("c", "taken down: b died", None)
    ]
    assert verdict.story == ""
    assert play.settle() == "-worker-0 -worker-1 -a +a +b +worker-0 +worker-1"
    assert (play.slots["c"].state, play.slots["d"].state) == ("gone", "done")


def test_an_actor_that_finishes_while_it_is_taken_down_has_finished():
    play = Play(ring(Strategy.ONE_FOR_ALL)[0])
    play.die("a")
    [going] = play.tree.to_stop()
    assert play.tree.ended(going, "exited with code 0", 0.0, finished=True) == Verdict()
    assert going.state == "done"


def test_a_restart_by_request_is_no_death_and_ends_a_wait():
    play = Play(ring()[0])
    assert [slot.name for slot in play.tree.restart("worker", 0.0)] == ["worker-0", "worker-1"]
    assert play.settle() == "-worker-0 -worker-1 +worker-0 +worker-1"
    assert [slot.name for slot in play.tree.restart("worker-1", 0.0)] == ["worker-1"]
    assert play.settle() == "-worker-1 +worker-1"
    play.die("b")
    assert play.settle() == "+b"  # the first death: nothing was counted before
    assert play.die("b").deaths[0].restart_in_s == 0.4
    assert play.settle() == ""
    assert [slot.name for slot in play.tree.restart("b", play.now)] == ["b"]
    assert play.settle() == "+b"


def test_nobody_is_restarted_by_request_who_is_unknown_or_gone_or_when_the_run_ends():
    graph, refs = ring()
    graph.place(refs[0], restart=Restart.TEMPORARY)
    play = Play(graph)
    play.die("a")
    assert play.tree.restart("a", 0.0) == []
    assert play.tree.restart("x", 0.0) == []
    play.tree.ending = True
    assert play.tree.restart("b", 0.0) == []


def test_at_the_end_everybody_stops_in_reverse():
    play = Play(ring()[0])
    play.die("c")
    play.tree.ending = True
    assert play.settle() == "-d -worker-0 -worker-1 -b -a"
    assert [play.slots[name].state for name in ("a", "b", "d")] == ["done"] * 3


# --- how many deaths are too many ------------------------------------------------------------------------


def deaths_until_it_is_too_much(budget: RestartBudget, lives_s: float) -> int:
    now = 0.0
    for count in range(1, 100):
        wait_s = budget.spend("a", "x", now)
        if wait_s is None:
            return count
        now += wait_s + lives_s
    return 0


@pytest.mark.parametrize("lives_s", [0.1, 1.0, 2.5])
def test_waiting_for_a_restart_is_no_time_without_a_death(lives_s: float):
    assert deaths_until_it_is_too_much(RestartBudget(20, 60.0, Longest()), lives_s) == 21
    assert deaths_until_it_is_too_much(RestartBudget(20, 60.0, Longest()), 3.1) == 0


def test_waits_that_overlap_pass_once():
    budget = RestartBudget(30, 60.0, Longest())
    for burst in range(5):
        assert all(budget.spend(f"worker-{i}", "x", burst * 120.0) is not None for i in range(20))


def test_no_number_of_deaths_makes_a_wait_longer_than_half_a_minute():
    budget = RestartBudget(10_000, 1e9, Longest())
    assert max(budget.spend("a", "x", float(now)) or 0.0 for now in range(2000)) == 30.0
