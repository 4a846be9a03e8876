"""The rollout worker when completions have several turns, alone with real peers and a fake engine."""

from __future__ import annotations

import re
from typing import Any

from rolecall.actors.environment import EnvironmentHost
from rolecall.actors.types import Group, Prompt, Turn
from rolecall.runtime.ref import Call

from .fakes import Direct, FakeEngine, FakeRollout, begin
from .test_rollout import BATCH, GROUP_SIZE, Peers, Slow, peers, sync_peers, work

__all__ = ["peers", "sync_peers"]


class Game:
    """Over after two answers; each repeats what was said."""

    def reset(self, prompt: Prompt) -> str:
        self.answers = 0
        return " Go."

    def step(self, answer: str) -> Turn:
        self.answers += 1
        return Turn(text=f"<{answer}>", reward=float(answer[-1]), done=self.answers == 3)


def in_a_game(peers: Peers, **options: Any) -> FakeRollout:
    """A worker whose completions have three turns of four tokens, and two answers of eight bytes between them."""
    peers.actors["reward"] = EnvironmentHost(environment=Game)
    begin(peers.actors["reward"], peers.folder, "reward")
    return peers.worker(max_tokens=40, **options)


def check_game(group: Group) -> None:
    assert group.prompt_ids == list(f"{group.prompt.text} Go.".encode())
    for completion in group.completions:
        turns = re.findall(r"#### (\d)(?:<#### \1>)?", completion.text)
        assert len(turns) == 3 and completion.reward == sum(map(float, turns))
        assert completion.mask == ([True] * 4 + [False] * 8) * 2 + [True] * 4
        assert bytes(completion.ids[4:12]) == f"<#### {turns[0]}>".encode()
        assert all(
            (one == 0.0) != sampled for one, sampled in zip(completion.logprobs, completion.mask, strict=True)
        )
        assert len(completion.versions) == len(completion.ids) == 28


def test_turns_follow_answers_until_the_environment_is_done(peers: Peers):
    worker = in_a_game(peers, sink=True)
    work(worker, 8)
    groups = peers.delivered()
    assert [group.id for group in groups][:BATCH] == list(range(BATCH))
    for group in groups:
        check_game(group)
    engine = worker.engine
    assert isinstance(engine, FakeEngine)
    assert len(set(engine.seeds)) == len(engine.seeds) >= 3 * BATCH * GROUP_SIZE


def test_a_share_of_several_turns_is_sampled_when_it_is_taken_and_is_the_same_again(sync_peers: Peers):
    groups = in_a_game(sync_peers, sink=False).take(1, BATCH, 0, 0).groups
    for group in groups:
        check_game(group)
    assert in_a_game(sync_peers, sink=False, incarnation=2).take(1, BATCH, 0, 0).groups == groups


def test_a_completion_goes_on_under_the_version_there_is_and_says_so(peers: Peers):
    worker = in_a_game(peers, sink=True, lease=1)
    work(worker, 2)
    peers.publish(1, step=1)
    work(worker, 6)
    first = peers.delivered()[0]
    check_game(first)
    for completion in first.completions:
        assert completion.versions == sorted(completion.versions) and set(completion.versions) == {0, 1}
    assert first.version == 0 and first.digests == {n: peers.store.policy(n).digest for n in (0, 1)}


def test_the_environments_death_between_two_turns_is_not_noticed(sync_peers: Peers):
    undisturbed = in_a_game(sync_peers, sink=False).take(1, BATCH, 0, 0).groups
    worker = in_a_game(sync_peers, sink=False, incarnation=2)
    deaths = 0

    def die(name: str, call: Call) -> None:
        nonlocal deaths
        if call.method == "respond":
            begin(
                sync_peers.actors["reward"], sync_peers.folder, "reward", incarnation=2
            )  # it remembers nothing
            deaths += 1

    sync_peers.before = die
    assert worker.take(1, BATCH, 0, 0).groups == undisturbed
    assert deaths == 3 * BATCH


def test_between_two_turns_a_completion_keeps_its_seat(peers: Peers):
    worker = in_a_game(peers, sink=True, lease=2)
    most = 0
    while len(peers.delivered()) < 2 * BATCH:
        worker.step()
        if len(peers.delivered()) >= BATCH:  # by then it knows that turns go on
            most = max(most, len(worker._held().keys() - peers.buffer._waiting.keys()))
    assert most == 2


class Ponderous:
    """An answer that comes when it is told to."""

    def __init__(self, answer: Any) -> None:
        self.answer, self.done = answer, False

    def result(self) -> Any:
        assert self.done
        return self.answer.result()


def test_while_one_completion_is_answered_others_are_sampled(peers: Peers):
    """And one group's completions are in as many places; nothing is begun before the prompt is opened."""
    worker = in_a_game(peers, sink=True, lease=2)
    worker.engine = Slow()
    slow = list[Ponderous]()
    ask_soon = Direct.ask_soon

    def ponder(name: str, call: Call, timeout_s: float) -> Any:
        answer = ask_soon(peers, name, call, timeout_s)
        if name != "reward":
            return answer
        slow.append(Ponderous(answer))
        return slow[-1]

    peers.ask_soon = ponder
    work(worker, 3)
    assert len(slow) == 1 and not worker.engine.running  # one opening for all of a lease
    slow[0].done = True
    worker.step()
    assert worker.engine.running == 2 * GROUP_SIZE - 1 and len(slow) == 2
    worker.step()
    assert worker.engine.running == 2 * GROUP_SIZE - 2 and len(slow) == 3
    assert worker._held().keys() == {0, 1}
    slow[1].done = True
    worker.step()
    assert (
        worker.engine.running == 2 * GROUP_SIZE - 2
    )  # one more has ended, and one has begun its second turn
    while not peers.delivered():
        for answer in slow:
            answer.done = True
        worker.step()
    check_game(peers.delivered()[0])
