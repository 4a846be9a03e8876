"""Who lives where, and which deaths a watcher hears of."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from rolecall.runtime.actor import Down
from rolecall.runtime.control import Member
from rolecall.runtime.members import Members

# One step in the life of a member, as its supervisor tells it.
STEPS = st.lists(st.sampled_from(["start", "ready", "die", "watch"]), max_size=40)


def told(members: Members) -> list[Down]:
    heard = list(members.downs)
    members.downs.clear()
    return heard


def test_one_that_is_dead_already_is_told_at_once():
    members = Members()
    members.hear([Member("worker", "worker", 3, "down", "killed by SIGKILL")])
    members.watch("worker")
    assert told(members) == [Down("worker", 3, "killed by SIGKILL", final=False)]


def test_one_that_never_lived_is_not_dead():
    members = Members()
    members.watch("worker")
    members.hear([Member("worker", "worker", 0, "down")])
    members.hear([Member("worker", "worker", 1, "starting")])
    members.hear([Member("worker", "worker", 1, "up")])
    assert told(members) == []
    members.hear([Member("worker", "worker", 1, "gone")])
    assert told(members) == [Down("worker", 1, "", final=True)]


def test_who_watches_a_role_also_watches_those_that_join_later():
    members = Members()
    members.watch("worker")
    members.hear(
        [Member("gpu/worker-0", "worker", 3, "up", node="gpu"), Member("gpu/a", "a", 4, "up", node="gpu")]
    )
    members.hear([Member("gpu/worker-0", "worker", 3, "cut", node="gpu")])
    assert told(members) == []
    lost = [
        Member(f"gpu/{name}", name[:6], number, "gone", "lost", "gpu")
        for name, number in (("worker-0", 3), ("a", 4))
    ]
    members.hear(lost)
    assert told(members) == [Down("gpu/worker-0", 3, "lost", final=True)]


def test_a_death_that_was_overtaken_by_the_next_start_is_told():
    members = Members()
    members.hear([Member("worker", "worker", 1, "up")])
    members.watch("worker")
    members.hear([Member("worker", "worker", 4, "starting", "killed by SIGSEGV")])
    assert told(members) == [Down("worker", 1, "killed by SIGSEGV", final=False)]


def test_each_replica_is_watched():
    members = Members()
    members.hear([Member(f"worker-{i}", "worker", i + 1, "up") for i in range(3)])
    members.watch("worker")
    members.hear([Member("worker-1", "worker", 2, "down", "x"), Member("worker-2", "worker", 3, "gone")])
    assert [down.name for down in told(members)] == ["worker-1", "worker-2"]


@given(STEPS)
def test_every_incarnation_that_is_watched_ends_exactly_once(steps: list[str]):
    members, incarnation, state, watched = Members(), 0, "down", False
    expected: list[int] = []
    for step in steps:
        if step == "watch":
            members.watch("worker")
            if not watched and incarnation and state == "down":
                expected.append(incarnation)  # dead already
            watched = True
            continue
        if step == "start" and state == "down":
            incarnation, state = incarnation + 1, "starting"
        elif step == "ready" and state == "starting":
            state = "up"
        elif step == "die" and state != "down":
            state = "down"
            expected += [incarnation] if watched else []
        else:
            continue
        members.hear([Member("worker", "worker", incarnation, state, "x")])
        if step == "die":  # the supervisor may say it twice
            members.hear([Member("worker", "worker", incarnation, state, "x")])
    assert [down.incarnation for down in told(members)] == expected
