"""Tasks of others: reasoning-gym's by name, and environments in the verifiers style."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from rolecall import Unrecoverable
from rolecall.actors import gyms
from rolecall.actors.data import load_dataset, load_rows
from rolecall.actors.environment import EnvironmentHost
from rolecall.actors.gyms import Chat, Messages, reasoning_gym
from rolecall.actors.reward import reward_function
from rolecall.actors.types import Prompt, Turn

from .fakes import begin


class Sums:
    """As reasoning-gym's data sets are: entries by index, made from a seed, and a score for answers in part."""

    def __init__(self, largest: int = 9, seed: int = 0, size: int = 500) -> None:
        if largest < 0:
            raise AssertionError("largest must be positive")
        self.largest, self.seed = largest, seed

    def __getitem__(self, index: int) -> dict[str, Any]:
        first, second = (self.seed + index) % (self.largest + 1), index // 7 % 5
        return {"question": f"{first}+{second}?", "answer": str(first + second), "metadata": {"index": index}}

    def score_answer(self, answer: str | None, entry: dict[str, Any]) -> float:
        return 0.0 if answer is None else 1.0 if answer == entry["answer"] else 0.25


@pytest.fixture(params=["stand-in", "reasoning-gym"])
def name(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """A data set of the real package if it is installed, and of a stand-in in any case."""
    gyms._tasks.cache_clear()
    gyms._entry.cache_clear()
    if request.param == "reasoning-gym":
        pytest.importorskip("reasoning_gym")
        return "reasoning-gym:chain_sum?max_terms=3&max_digits=1&min_digits=1"

    class StandIn:
        @staticmethod
        def create_dataset(name: str, **settings: Any) -> Sums:
            if name != "sums":
                raise ValueError(f"Dataset '{name}' not registered")
            return Sums(**settings)

    monkeypatch.setitem(sys.modules, "reasoning_gym", StandIn)
    return "reasoning-gym:sums?largest=5"


def test_rows_are_the_same_for_ever_and_held_out_ones_are_others(name: str):
    rows, again = load_dataset(name, seed=0), load_dataset(name, seed=0)
    assert [rows[i] for i in range(20)] == [again[i] for i in range(20)]
    held_out = {answer for _, answer in load_rows(name, 20)}
    for seed in (0, 1):
        assert held_out.isdisjoint(load_dataset(name, seed=seed)[i][1] for i in range(50))
    assert len(held_out) == 20


def test_answers_are_scored_by_the_gym(name: str):
    for id, (text, answer) in enumerate(load_rows(name, 5)):
        right = gyms._entry(name, int(answer.rpartition("#")[2]))["answer"]
        prompt = Prompt(id=id, text=text, answer=answer)
        score = reward_function("reasoning_gym")
        assert "<answer>" in text
        assert score(prompt, f"It is <answer>17</answer>, no, <answer> {right}\n</answer>.") == 1.0
        assert score(prompt, f"<answer>{right}</answer><answer>x") == 1.0
        assert score(prompt, f"It is {right}") == 0.0
        assert score(prompt, "</answer>") == 0.0
        assert score(prompt, "<answer>no idea</answer>") < 1.0


@pytest.mark.parametrize("wrong", ["reasoning-gym:nothing", "?unheard_of=1"])
def test_what_the_gym_does_not_have_is_a_mistake_of_the_user_s(name: str, wrong: str):
    asked = wrong if wrong.startswith("reasoning") else name.partition("?")[0] + wrong
    with pytest.raises(
        Unrecoverable, match=r"reasoning-gym can't make the data set.*check the name"
    ) as raised:
        load_dataset(asked, seed=0)
    assert raised.value.exit_code == 2


def test_without_the_package_the_way_out_is_named(monkeypatch: pytest.MonkeyPatch):
    gyms._tasks.cache_clear()
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    with pytest.raises(Unrecoverable, match=r"pip install 'rolecall\[envs\]'"):
        load_dataset("reasoning-gym:chain_sum", seed=0)


def test_other_prompts_have_no_such_reward():
    with pytest.raises(Unrecoverable, match="prompt 3 is of another"):
        reasoning_gym(Prompt(id=3, text="1+1?", answer="2"), "<answer>2</answer>")


class Guessing:
    """A number to guess, in the verifiers style as it was first: plain functions, and the state comes back."""

    def setup_state(self, state: dict[str, Any]) -> dict[str, Any]:
        return state | {"guesses": []}

    def is_completed(self, messages: Messages, state: dict[str, Any]) -> bool:
        return messages[-1]["content"] == state["answer"] or state["turn"] == 3

    def env_response(self, messages: Messages, state: dict[str, Any]) -> tuple[Messages, dict[str, Any]]:
        guess = int(messages[-1]["content"])
        state = state | {"guesses": [*state["guesses"], guess]}
        hint = "more" if guess < int(state["answer"]) else "less"
        return [{"role": "user", "content": f"no {guess}"}, {"role": "user", "content": hint}], state


class AsyncGuessing:
    """And as it became: coroutines, which give messages and change the state."""

    async def setup_state(self, state: dict[str, Any]) -> None:
        state["guesses"] = []

    async def is_completed(self, messages: Messages, state: dict[str, Any]) -> bool:
        return Guessing().is_completed(messages, state)

    async def env_response(self, messages: Messages, state: dict[str, Any]) -> Messages:
        said, changed = Guessing().env_response(messages, state)
        state.update(changed)
        return said


def guessed(messages: Messages, state: dict[str, Any]) -> float:
    assert len(state["guesses"]) == state["turn"] - 1 and state["prompt"] == messages[:1]
    return 1.0 / state["turn"] if messages[-1]["content"] == state["answer"] else 0.0


@pytest.mark.parametrize("style", [Guessing, AsyncGuessing])
def test_a_chat_is_played_by_the_host(style: type[Guessing | AsyncGuessing], tmp_path: Path):
    host = EnvironmentHost(environment=lambda: Chat(style, guessed))
    begin(host, tmp_path, "environment")
    prompt = Prompt(id=0, text="Guess.", answer="5")
    assert host.open([prompt]) == [""]
    assert host.respond(prompt, [["3"], ["9"]]) == [Turn(text="no 3\nmore"), Turn(text="no 9\nless")]
    assert host.respond(prompt, [["3", "5"]]) == [Turn(reward=0.5, done=True)]
    assert host.respond(prompt, [["9", "7", "6"]]) == [Turn(done=True)]
