"""Reward functions, and the actor that runs them."""

from __future__ import annotations

import time
from pathlib import Path
from typing import cast

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rolecall import Unrecoverable
from rolecall.actors.reward import (
    CHECK_TIMEOUT_S,
    Reward,
    RewardFunction,
    exact_match,
    math_verify,
    reward_function,
)
from rolecall.actors.tiny import problems
from rolecall.actors.types import Prompt

from .fakes import begin


def prompt(answer: str) -> Prompt:
    return Prompt(id=7, text="How many eggs?", answer=answer)


def started(folder: Path, fn: RewardFunction | str) -> Reward:
    reward = Reward(fn=fn)
    begin(reward, folder, "reward")
    return reward


@pytest.mark.parametrize(
    ("completion", "answer"),
    [
        ("#### 18", "18"),
        ("####18", "18"),
        ("9+9=18\n#### 18\n", "18"),
        ("#### 18   ", "18"),
        ("#### 1,234", "1234"),
        ("#### 1234", "1,234"),
        ("#### 1,234,567", "1234567"),
        ("#### 18.0", "18"),
        ("#### 0.5", ".5"),
        ("#### -3", "-3"),
        ("#### 007", "7"),
        ("#### 5\nno, wait\n#### 18", "18"),  # the last one counts
        ("#### 18", "She eats 3 and bakes 4.\n3+4=<<3+4=7>>7\nThe rest is 18.\n#### 18"),  # GSM8K's own form
    ],
)
def test_right_answers(completion: str, answer: str):
    assert exact_match(prompt(answer), completion) == 1.0


@pytest.mark.parametrize(
    ("completion", "answer"),
    [
        ("", "18"),
        ("18", "18"),  # the form is part of the task
        ("#### ", "18"),
        ("#### 1", "18"),  # cut off
        ("### 18", "18"),
        ("#### 18 eggs", "18"),  # text behind it
        ("#### 18\nor 19", "18"),
        ("#### 18 #### 19", "18"),
        ("#### eighteen", "18"),
        ("#### 3", "-3"),
        ("#### 1.8", "18"),
        ("#### 5\n#### ", "5"),
        ("#### ,", "18"),
        ("#### 1-8", "18"),
        ("#### nan", "nan"),
    ],
)
def test_wrong_answers(completion: str, answer: str):
    assert exact_match(prompt(answer), completion) == 0.0


@given(st.text(), st.text())
def test_any_text_can_be_scored(completion: str, answer: str):
    assert exact_match(prompt(answer), completion) in (0.0, 1.0)


@given(st.integers(-(10**9), 10**9))
def test_a_number_matches_itself_however_it_is_written(number: int):
    for written in (f"{number}", f"{number:,}", f"{number}.0"):
        assert exact_match(prompt(f"{number:,}"), f"so\n#### {written}") == 1.0
    assert exact_match(prompt(str(number)), f"#### {number + 1}") == 0.0


def test_a_long_run_of_digits_takes_no_time():
    began = time.monotonic()
    exact_match(prompt("18"), "#### " + "1" * 5000 + "x")
    assert time.monotonic() - began < 5.0


def test_worked_and_direct_answers_of_the_tiny_problems():
    for problem in problems.held_out(20):
        assert exact_match(prompt(problem.answer), problem.worked) == 1.0
        assert exact_match(prompt(problem.worked), problem.direct) == 1.0


@pytest.mark.parametrize(
    ("completion", "answer", "reward"),
    [
        ("so the answer is $\\frac{1}{2}$", "0.5", 1.0),
        ("\\boxed{18}", "18", 1.0),
        ("\\boxed{18}", "#### 18", 1.0),
        ("$x = 3$", "3", 1.0),
        ("\\boxed{19}", "18", 0.0),
        ("I don't know", "18", 0.0),
        ("", "18", 0.0),
    ],
)
def test_math_verify(completion: str, answer: str, reward: float):
    assert math_verify(prompt(answer), completion) == reward


@pytest.mark.slow
@pytest.mark.parametrize(
    "completion",
    [
        "$9^{9^{9^{9}}}$",
        "$100000000!$",
        "$(2^{100000})^{100000}$",
        "\\boxed{10^{10^{10}}}",
        "$" + "\\frac{1}{" * 200,
    ],
)
def test_a_hostile_answer_costs_a_few_seconds_at_most(completion: str):
    """Here as in a reward's process, in the main thread: math-verify's time-outs are signals."""
    began = time.monotonic()
    assert math_verify(prompt("18"), completion) == 0.0
    assert time.monotonic() - began < 2 * CHECK_TIMEOUT_S + 3.0


def test_a_reference_that_cannot_be_read_is_named(tmp_path: Path):
    with pytest.raises(Unrecoverable, match=r"math_verify raised ValueError: .*can't read the reference"):
        started(tmp_path, "math_verify").score(prompt("no number"), ["\\boxed{1}"])


def test_functions_by_name(tmp_path: Path):
    assert reward_function("exact_match") is exact_match
    assert reward_function("math_verify") is math_verify
    file = tmp_path / "rewards.py"
    file.write_text("def short(prompt, completion):\n    return 1.0 / (1 + len(completion)) + prompt.id\n")
    assert started(tmp_path, f"{file}:short").score(prompt("1"), ["", "abc"]) == [8.0, 7.25]


def test_several_functions_are_weighed_and_each_is_told(tmp_path: Path):
    file = tmp_path / "rewards.py"
    file.write_text("def short(prompt, completion):\n    return -float(len(completion))\n")
    reward = started(tmp_path, f"exact_match, 0.5*{file}:short")
    right, wrong = reward.respond(prompt("1"), [["####", " 1"], ["ab"]])
    assert (right.reward, right.rewards) == (-2.0, {"exact_match": 1.0, "short": -6.0})
    assert (wrong.reward, wrong.rewards) == (-1.0, {"exact_match": 0.0, "short": -2.0})
    assert reward.score(prompt("1"), ["#### 1", "ab"]) == [-2.0, -1.0]
    for weight, reward in (("-.5", -0.5), ("1e-3", 0.001)):
        [turn] = started(tmp_path, f"{weight} * exact_match").respond(prompt("1"), [["#### 1"]])
        assert turn.reward == reward


def test_several_functions_of_one_name_are_told_apart(tmp_path: Path):
    for name, value in (("a.py", 1.0), ("b.py", 2.0)):
        (tmp_path / name).write_text(f"def mine(prompt, completion):\n    return {value}\n")
    [turn] = started(tmp_path, f"{tmp_path}/a.py:mine,{tmp_path}/b.py:mine").respond(prompt("1"), [["x"]])
    assert turn.rewards == {f"{tmp_path}/a.py:mine": 1.0, f"{tmp_path}/b.py:mine": 2.0}


def test_a_name_that_no_group_can_tell_is_an_error_here(tmp_path: Path):
    """The buffer would not read the group again after a restart."""
    folder = tmp_path / ("x" * 200)
    folder.mkdir()
    for name in ("a.py", "b.py"):
        (folder / name).write_text("def mine(prompt, completion): return 1.0\n")
    with pytest.raises(Unrecoverable, match="too long a path"):
        started(tmp_path, f"{folder}/a.py:mine,{folder}/b.py:mine")


@pytest.mark.parametrize("names", ["1e38*{0}:ten", "1e999*{0}:ten,{0}:none", "1e999*{0}:none", "{0}:much"])
def test_what_no_trainer_could_train_is_an_error_here(tmp_path: Path, names: str):
    """The buffer would refuse it, and the worker sample it again, for ever."""
    file = tmp_path / "rewards.py"
    values = {"ten": "10.0", "none": "0.0", "much": "1e39"}
    file.write_text("".join(f"def {name}(p, c): return {value}\n" for name, value in values.items()))
    with pytest.raises(Unrecoverable, match="must be a finite number, below 3e"):
        started(tmp_path, names.format(file)).score(prompt("1"), ["x"])


@pytest.mark.parametrize(
    ("names", "text"),
    [
        ("exact_match,exact_match", "names 'exact_match' twice: name it once"),
        ("exact_match,", "there is no reward ''"),
        ("exact_match,2*", "there is no reward ''"),
        ("x*exact_match", r"there is no reward 'x\*exact_match'"),
    ],
)
def test_names_that_cannot_be(tmp_path: Path, names: str, text: str):
    with pytest.raises(Unrecoverable, match=text) as caught:
        started(tmp_path, names)
    assert caught.value.exit_code == 2


REWARDS = """
LIMIT = 3
def short(prompt, completion): return 1.0
def one(completion): return 1.0
def three(prompt, completion, scale): return 1.0
"""


@pytest.mark.parametrize(
    ("function", "text"),
    [
        (
            "",
            "there is no reward '.*rewards.py': give exact_match, math_verify, reasoning_gym or the path of a file",
        ),
        (":shrt", "rewards.py has no function 'shrt'; it has: short, one, three"),
        (":LIMIT", "rewards.py has no function 'LIMIT'"),
        (":one", "reward function one must take two arguments, .*: too many positional arguments"),
        (":three", "reward function three must take two arguments, .*: missing a required argument: 'scale'"),
    ],
)
def test_a_function_that_cannot_be(tmp_path: Path, function: str, text: str):
    (tmp_path / "rewards.py").write_text(REWARDS)
    with pytest.raises(Unrecoverable, match=text) as caught:
        started(tmp_path, f"{tmp_path}/rewards.py{function}")
    assert caught.value.exit_code == 2


@pytest.mark.parametrize(
    ("source", "text"),
    [
        (None, "there is no reward '.*mine.py:short'"),
        ("def short(:", "mine.py can't be loaded: SyntaxError"),
        (
            "import no_such_module",
            "mine.py can't be loaded: ModuleNotFoundError: No module named 'no_such_module'",
        ),
    ],
)
def test_a_file_that_cannot_be_loaded(tmp_path: Path, source: str | None, text: str):
    if source is not None:
        (tmp_path / "mine.py").write_text(source)
    with pytest.raises(Unrecoverable, match=text) as caught:
        started(tmp_path, f"{tmp_path}/mine.py:short")
    assert caught.value.exit_code == 2


def test_a_name_that_is_none(tmp_path: Path):
    with pytest.raises(
        Unrecoverable,
        match="there is no reward 'exact_mach': give exact_match, math_verify, reasoning_gym or",
    ):
        started(tmp_path, "exact_mach")


def test_defaults_and_stars_are_fine(tmp_path: Path):
    def scaled(prompt: Prompt, completion: str, scale: float = 2.0) -> float:
        return scale

    assert started(tmp_path, scaled).score(prompt("1"), ["x"]) == [2.0]
    assert started(tmp_path, lambda *given: float(len(given))).score(prompt("1"), ["x"]) == [2.0]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), None, "1", [1.0], 10**400])
def test_what_is_no_finite_number_ends_the_run(tmp_path: Path, value: object):
    def odd(prompt: Prompt, completion: str) -> float:
        return cast(float, value)

    with pytest.raises(
        Unrecoverable, match=r"reward function odd gave .* on prompt 7 \('How many eggs\?'\)"
    ) as caught:
        started(tmp_path, odd).score(prompt("1"), ["x"])
    assert caught.value.exit_code == 1


def test_a_function_that_raises_ends_the_run_with_all_one_needs_to_know(tmp_path: Path):
    def fails(prompt: Prompt, completion: str) -> float:
        return 1 / 0

    with pytest.raises(Unrecoverable) as caught:
        started(tmp_path, fails).score(prompt("1"), ["a completion"])
    assert str(caught.value) == (
        "reward function fails raised ZeroDivisionError: division by zero, on prompt 7 ('How many eggs?') and "
        "completion 'a completion': mend the function"
    )
    assert caught.value.exit_code == 1


def test_numbers_of_other_libraries(tmp_path: Path):
    import numpy as np

    assert started(tmp_path, lambda prompt, completion: cast(float, np.float32(0.5))).score(
        prompt("1"), ["x"]
    ) == [0.5]
    assert started(tmp_path, lambda prompt, completion: True).score(prompt("1"), ["x"]) == [1.0]
