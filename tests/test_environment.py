"""Environments and their host: what was played is played again as it was, whoever has died meanwhile."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from rolecall import Unrecoverable
from rolecall.actors import environment
from rolecall.actors.calculator import Calculator
from rolecall.actors.environment import EnvironmentHost, environment_factory
from rolecall.actors.types import Prompt, Turn

from .fakes import begin

PROMPT = Prompt(id=3, text="Count. ", answer="7")
OTHER = Prompt(id=3, text="Count on. ", answer="7")  # of another data set, as an evaluator's may be

PARTS = {"asked": 0.25}


class Counter:
    """Answers how often it was asked, and what. It is done when it is told to be."""

    made = 0
    stepped = 0

    def __init__(self) -> None:
        type(self).made += 1

    def reset(self, prompt: Prompt) -> str:
        self.seen = [prompt.text]
        return "From 1:"

    def step(self, answer: str) -> Turn:
        type(self).stepped += 1
        self.seen.append(answer)
        return Turn(text=" ".join(self.seen), reward=0.25, rewards=PARTS, done=answer == "end")


@pytest.fixture(autouse=True)
def _from_nothing() -> None:
    Counter.made = Counter.stepped = 0


def host(folder: Path, made_by: Any = Counter, **options: Any) -> EnvironmentHost:
    made = EnvironmentHost(environment=made_by, **options)
    begin(made, folder, "environment")
    return made


def test_a_turn_is_played_once_as_long_as_the_host_lives(tmp_path: Path):
    one = host(tmp_path)
    assert one.open([PROMPT, OTHER]) == ["From 1:"] * 2
    for count in range(1, 5):
        turns = [str(turn) for turn in range(count)]
        assert one.respond(PROMPT, [turns]) == [
            Turn(text=" ".join(["Count. ", *turns]), reward=0.25, rewards=PARTS)
        ]
    assert (Counter.made, Counter.stepped) == (2, 4)


def test_after_a_death_the_answer_is_the_same(tmp_path: Path):
    one = host(tmp_path)
    one.open([PROMPT])
    one.respond(PROMPT, [["a"]])
    one.respond(PROMPT, [["a", "b"]])
    before = one.respond(PROMPT, [["a", "b", "c"]])
    assert one.respond(PROMPT, [["a", "b", "c"]]) == before  # asked for again, as the answer was lost
    assert host(tmp_path).respond(PROMPT, [["a", "b", "c"]]) == before


def test_completions_that_say_the_same_do_not_get_into_each_other_s_way(tmp_path: Path):
    one = host(tmp_path)
    assert one.respond(PROMPT, [["a"], ["a"]]) == [Turn(text="Count.  a", reward=0.25, rewards=PARTS)] * 2
    texts = [turn.text for turn in one.respond(PROMPT, [["a", "b"], ["a", "c"], ["a"]])]
    assert texts == ["Count.  a b", "Count.  a c", "Count.  a"]
    assert [turn.text for turn in one.respond(OTHER, [["a", "b"]])] == ["Count on.  a b"]


def test_one_that_is_done_is_not_kept(tmp_path: Path):
    one = host(tmp_path)
    assert one.respond(PROMPT, [["a"], ["end"]])[1].done
    assert one._count == 1 and list(one._kept) == [(PROMPT, ("a",))]


def test_only_so_many_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(environment, "MOST_KEPT", 3)
    one = host(tmp_path)
    for turn in "abcde":
        one.respond(PROMPT, [[turn]])
    assert [turns for _, turns in one._kept] == [("c",), ("d",), ("e",)] and one._count == 3
    assert [turn.text for turn in one.respond(PROMPT, [["a", "b"]])] == ["Count.  a b"]


def test_a_completion_has_only_so_many_turns(tmp_path: Path):
    one = host(tmp_path, max_turns=2)
    assert not one.respond(PROMPT, [["a"]])[0].done
    assert one.respond(PROMPT, [["a", "b"]]) == [Turn(reward=0.25, rewards=PARTS, done=True)]
    assert one._count == 0


class Broken(Counter):
    def step(self, answer: str) -> Turn:
        given: dict[str, Any] = {
            "nan": Turn(reward=math.nan),
            "endless": Turn(reward=math.inf),
            "part": Turn(rewards={"length": math.nan}),
            "long": Turn(rewards={"length" * 100: 1.0}),
            "text": "an answer",
        }
        return given[answer]


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        ("nan", "Broken gave Turn.*on prompt 3"),
        ("endless", "must be finite numbers"),
        ("part", "must be finite numbers"),
        ("long", "have short names"),
        ("text", "gave 'an answer'.*a step gives a Turn"),
        ("more", "Broken raised KeyError: 'more', on prompt 3 .*at the turn 'more': mend"),
    ],
)
def test_a_broken_environment_ends_the_run_and_is_named(tmp_path: Path, answer: str, says: str):
    with pytest.raises(Unrecoverable, match=says):
        host(tmp_path, Broken).respond(PROMPT, [[answer]])


class Unopened(Counter):
    def reset(self, prompt: Prompt) -> str:
        raise RuntimeError("no board")


def test_one_that_can_not_be_reset_is_named(tmp_path: Path):
    with pytest.raises(
        Unrecoverable, match=r"Unopened raised RuntimeError: no board, on prompt 3 .* its reset"
    ):
        host(tmp_path, Unopened).open([PROMPT])


def test_environments_by_name(tmp_path: Path):
    assert environment_factory("calculator") is Calculator
    file = tmp_path / "mine.py"
    file.write_text("class Chess:\n    pass\n")
    assert environment_factory(f"{file}:Chess").__name__ == "Chess"
    with pytest.raises(Unrecoverable, match=r"no function 'Go'; it has: Chess"):
        environment_factory(f"{file}:Go")
    with pytest.raises(Unrecoverable, match="no environment 'abacus': give calculator or the path"):
        environment_factory("abacus")


def played(*turns: str) -> list[Turn]:
    calculator = Calculator()
    assert calculator.reset(PROMPT) == ""
    return [calculator.step(turn) for turn in turns]


def test_the_calculator_fills_in_what_sums_make_and_then_marks_the_answer():
    right = Turn(reward=1.0, done=True)
    assert played("12+7=", "\n19-4=", "\n#### 7") == [Turn(text="19"), Turn(text="15"), right]
    assert played("3-7=", "\n-4+9=", "#### 8") == [Turn(text="-4"), Turn(text="13"), Turn(done=True)]
    assert played("#### 7") == [right]


@pytest.mark.parametrize("turn", ["", "=", "+4=", "ell+4=", "12+7", f"{10**9}+{10**9}="])
def test_the_calculator_has_no_answer_to_what_is_no_sum(turn: str):
    assert played(turn) == [Turn(done=True)]
