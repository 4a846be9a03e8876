"""Messages between two machines: bridges and actors that die, and a link that drops, doubles, reorders and cuts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from rolecall import ActorDied, RolecallError
from rolecall.runtime.control import NODE_BITS
from rolecall.runtime.line import Answered, FarMember, Heard, Mail, Members
from rolecall.runtime.ref import Call

from .machines import Counting, Note, World


@pytest.fixture
def world() -> Iterator[World]:
    made = World(0)
    yield made
    made.close()


def test_both_ways(world: World):
    assert world.ask(world.node, Counting.ask_me, Note("b", 7)) == 7
    assert world.ask(world.run, Counting.ask_me_later, Note("a", 8)) == 8
    assert (world.run.asked, world.node.asked) == ([Note("b", 7)], [Note("a", 8)])


def test_the_names_of_both_machines(world: World):
    assert list(world.run.abroad.members) == ["gpu-1/b"]
    assert list(world.node.abroad.members) == ["a"]


def test_another_machine_that_has_joined_cannot_be_reached_and_that_is_said_at_once(world: World):
    endpoint, call = world.node.endpoint, Call.of(Counting.ask_me, (Note("b", 1),), {})
    for send in (
        lambda: endpoint.ask(["gpu-2/b"], call, 600.0),
        lambda: endpoint.ask_soon("gpu-2/b", call, 600.0),
        lambda: endpoint.tell("gpu-2/b", call),
        lambda: endpoint.watch("gpu-2/b"),
    ):
        with pytest.raises(
            RolecallError, match=r"b can't reach gpu-2/b: .* place that role on the run's own"
        ):
            send()
    assert not endpoint.answers.waiting
    assert world.ask(world.node, Counting.ask_me, Note("b", 7)) == 7


def test_a_sender_is_known_by_its_name_in_the_run(world: World):
    world.node.endpoint.tell("a", Call.of(Counting.who_tells, (), {}))
    world.run.endpoint.tell("b", Call.of(Counting.who_tells, (), {}))
    world.settle()
    assert (world.run.told, world.node.told) == ([Note("gpu-1/b", 0)], [Note("a", 0)])


def test_exceptions(world: World):
    with pytest.raises(RolecallError, match="ValueError: no") as caught:
        world.ask(world.run, Counting.fail)
    assert any("(in b.fail)" in note for note in caught.value.__notes__)


def test_what_cannot_travel_is_told_to_its_sender(world: World):
    with pytest.raises(
        RolecallError, match=r"Counting\.take: its argument 'thing' has the type builtins\.object"
    ):
        world.ask(world.run, Counting.take, 1)
    world.run.endpoint.tell("b", Call.of(Counting.take, (1,), {}))
    world.settle()
    assert world.run.dead_letters == 1
    assert not world.run.endpoint._outbox.telling


@pytest.mark.parametrize("method", ["fail", "ask_me"])
def test_an_answer_is_read_by_what_was_asked(world: World, method: str):
    """Another machine's word for what it answers is worth nothing, nor are answers that nobody waits for."""
    run = world.run
    answer = run.endpoint.ask_soon("b", Call.of(Counting.ask_me_later, (Note("a", 7),), {}), 600.0)
    asked: dict[tuple[int, int], str] = {}
    while not asked:
        run.endpoint.wait(0.0)
        run.turn()
        run.bridge.turn(0.0)
        asked = {key: name for one in run.bridge._callers.values() for key, name in one.asked.items()}
    [(sender, seq)] = asked
    assert asked[sender, seq] == "ask_me_later"
    for number in (seq + 1, seq, seq):  # one that was not asked, one that was, and again
        run.bridge._hear_frame(Answered("gpu-1/b", sender, number, method, False, b"\xc0"))
    while not answer.done:
        run.endpoint.wait(0.0)
    with pytest.raises(
        RolecallError, match=r"Counting\.ask_me_later: its answer came from another machine and is"
    ):
        answer.result()


def test_what_has_the_wrong_type_is_refused_on_the_other_machine(world: World):
    with pytest.raises(RolecallError, match=r"Counting\.ask_me: its arguments came from another machine"):
        world.ask(world.run, Counting.ask_me, 3)
    world.run.endpoint.tell("b", Call.of(Counting.tell_me, (3,), {}))
    world.settle()
    assert world.node.dead_letters == 1
    assert not world.run.endpoint._outbox.telling


def test_a_machine_that_is_gone(world: World):
    answer = world.run.endpoint.ask_soon("b", Call.of(Counting.ask_me, (Note("a", 1),), {}), 600.0)
    world.run.endpoint.wait(0.0)
    world.run.bridge.turn(0.0)
    world.run.bridge.lose("gpu-1 has not been heard of for 30 s")
    for _ in range(10):
        world.run.bridge.turn(0.0)
        world.run.turn()
        world.run.endpoint.wait(0.0)
    with pytest.raises(ActorDied, match="not been heard of") as caught:
        answer.result()
    assert caught.value.maybe_executed


def test_a_machine_speaks_only_for_its_own(world: World):
    mail = Mail("a", 1, False, 1, 1, 0.0, (), "tell_me", b"")
    member = FarMember("a", "a", (1 << NODE_BITS) + 1, "up", "", [])
    for frame in (mail, Heard("a", 1, [1]), Members([member])):
        with pytest.raises(ValueError, match="is not of machine"):
            world.run.bridge.check([frame])


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    faults=st.sampled_from([0.0, 0.3, 0.6]),
    kills=st.sampled_from([0.0, 0.02]),
    deaths=st.sampled_from([0.0, 0.01]),
)
@example(
    seed=2113565934, faults=0.0, kills=0.01, deaths=0.03
)  # an older connection was read after a newer one
def test_every_tell_is_handled_once_and_in_order_and_every_ask_ends(
    seed: int, faults: float, kills: float, deaths: float
):
    """kills: how often a bridge is killed, deaths: how often an actor is."""
    world = World(seed, faults)
    for _ in range(600):
        if world.rng.random() < 0.2:
            world.send(world.rng.choice(world.both))
        if world.rng.random() < kills:
            world.restart_bridge(world.rng.choice(world.both))
        if world.rng.random() < deaths:
            world.kill_actor(world.rng.choice(world.both))
        world.turn()
    world.network.faults = 0.0
    for _ in range(20_000):
        world.turn()
        if all(answer.done for answer in world.answers.values()) and not any(
            computer.endpoint._outbox.telling for computer in world.both
        ):
            break
    for computer in world.both:
        told: dict[int, list[int]] = {}
        for note in computer.told:
            told.setdefault(int(note.sender), []).append(note.number)
        for sender, numbers in told.items():
            assert numbers == list(range(1, len(numbers) + 1))
            lives = any(other.member.incarnation == sender for other in world.both)
            assert not lives or len(numbers) == world.told[sender]  # a dead one kept some to itself
    asked = Counter(note.number for computer in world.both for note in computer.asked)
    assert all(count == 1 for count in asked.values())
    for number, answer in world.answers.items():
        try:
            assert answer.result() == number and asked[number] == 1
        except ActorDied as error:
            assert deaths and error.maybe_executed
    assert all(computer.dead_letters == 0 for computer in world.both)
    world.close()
