"""A completion of several turns: what is sampled next, and what becomes of it."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from rolecall import Unrecoverable
from rolecall.actors.engines import Request, Sample, Sampling
from rolecall.actors.episode import Episode, play
from rolecall.actors.types import Prompt, Turn

from .fakes import FakeEngine

PROMPT = Prompt(id=0, text="ask", answer="")


def episode(max_tokens: int = 20, seed: int = 5) -> Episode:
    return Episode(PROMPT, [7, 8], seed, Sampling(temperature=0.5, max_tokens=max_tokens, stop=("=",)))


def sample(ids: list[int], version: int = 1, reason: str = "stop", text: str = "1+1=") -> Sample:
    return Sample(ids, [-0.5] * len(ids), [version] * len(ids), reason, text)


def test_turns_and_answers_become_one_completion():
    one, engine = episode(), FakeEngine()
    first, sampling = one.request()
    assert first == Request([7, 8], 5) and sampling == Sampling(temperature=0.5, max_tokens=20, stop=("=",))
    one.add_turn(sample([10, 11], version=1))
    one.add_answer(Turn(text="2", reward=0.5), engine)
    second, sampling = one.request()
    assert second.prompt_ids == [7, 8, 10, 11, ord("2")]
    assert sampling == Sampling(temperature=0.5, max_tokens=17, stop=("=",))
    one.add_turn(sample([12], version=3, text=" #"))
    one.add_answer(Turn(text="not put there", reward=0.25, done=True), engine)
    assert one.done and one.turns == ["1+1=", " #"]
    done = one.completion()
    assert done.ids == [10, 11, ord("2"), 12]
    assert done.logprobs == [-0.5, -0.5, 0.0, -0.5]
    assert done.versions == [1, 1, 1, 3]
    assert done.mask == [True, True, False, True] and done.sampled == 3
    assert (done.text, done.reward, done.finish_reason) == ("1+1=2 #", 0.75, "stop")


def test_a_completion_that_is_all_the_policy_s_needs_no_mask():
    one = episode()
    one.add_turn(sample([10, 11]))
    one.add_answer(Turn(reward=1.0, done=True), FakeEngine())
    assert one.completion().mask == [] and one.completion().sampled == 2


def test_a_reward_is_the_sum_of_its_turns_and_so_is_each_of_its_parts():
    one = episode()
    one.add_turn(sample([10]))
    one.add_answer(Turn(text="2", reward=1.0, rewards={"right": 1.0}), FakeEngine())
    one.add_turn(sample([11]))
    one.add_answer(Turn(reward=0.5, rewards={"right": 1.0, "short": -0.5}, done=True), FakeEngine())
    assert (one.completion().reward, one.completion().rewards) == (1.5, {"right": 2.0, "short": -0.5})


@pytest.mark.parametrize(
    "turn",
    [
        Turn(reward=float("nan"), done=True),
        Turn(reward=float("inf"), done=True),
        Turn(reward=2e38, done=True),
        Turn(rewards={"right": float("nan")}, done=True),
        Turn(rewards={"x" * 201: 1.0}, done=True),
    ],
)
def test_a_reward_that_no_group_could_have_is_an_error_and_not_sampled_for_ever(turn: Turn):
    one = episode()
    one.add_turn(sample([10]))
    one.add_answer(Turn(text="2", reward=2e38), FakeEngine())
    one.add_turn(sample([11]))
    with pytest.raises(
        Unrecoverable, match=r"of a completion of prompt 0 \('ask'\) is .* mend whoever judges it"
    ):
        one.add_answer(turn, FakeEngine())


def test_every_turn_has_a_seed_of_its_own():
    seeds = set[int]()
    for seed in (5, 6):
        one = episode(seed=seed)
        for _ in range(4):
            seeds.add(one.request()[0].seed)
            one.add_turn(sample([10]))
            one.add_answer(Turn(text="2"), FakeEngine())
    assert len(seeds) == 8 and all(0 <= seed < 2**64 for seed in seeds)


def test_without_room_to_go_on_it_is_cut_off_and_keeps_its_rewards():
    for room, done in ((4, False), (3, True), (2, True)):
        one = episode(max_tokens=room)
        one.add_turn(sample([10, 11], reason="length" if room == 2 else "stop"))
        one.add_answer(Turn(text="2", reward=0.5), FakeEngine())
        assert one.done == done
        if done:
            cut = one.completion()
            assert (cut.ids, cut.finish_reason, cut.reward) == ([10, 11], "length", 0.5)
            assert cut.text == "1+1="


class Talkative:
    """Answers each turn with its number, up to three."""

    def open(self, prompts: Sequence[Prompt]) -> list[str]:
        return [""] * len(prompts)

    def respond(self, prompt: Prompt, transcripts: Sequence[Sequence[str]]) -> list[Turn]:
        return [Turn(text=str(len(turns)), reward=1.0, done=len(turns) == 3) for turns in transcripts]


def test_all_are_played_to_their_ends():
    engine = FakeEngine()
    engine.version, engine._weights = 0, b"weights"
    episodes = [episode(seed=seed) for seed in range(3)]
    play(engine, Talkative(), episodes)
    assert [one.reward for one in episodes] == [3.0] * 3
    for one in episodes:
        done = one.completion()
        assert [n for n, sampled in enumerate(done.mask) if not sampled] == [4, 9]
        assert len(done.ids) == 14 and done.ids[4] == ord("1") and done.ids[9] == ord("2")
    assert len(set(engine.seeds)) == 9 and engine.running == 0
