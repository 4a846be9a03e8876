"""Rewards: plain functions of (prompt, completion text), and the actor that runs them."""

from __future__ import annotations

import inspect
import math
import re
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

import msgspec

from ..runtime import Actor, Unrecoverable, idempotent, max_run_s
from .custom import load_from_file
from .gyms import reasoning_gym
from .types import LARGEST, Prompt, Rewards, Turn

__all__ = [
    "Reward",
    "RewardFunction",
    "are_rewards",
    "exact_match",
    "is_reward",
    "math_verify",
    "reward_function",
    "reward_functions",
    "split_weights",
]

PATIENCE_WITH_A_REWARD_S = (
    600.0  # a function that takes longer over one group hangs, as far as a run can tell
)

RewardFunction = Callable[[Prompt, str], float]

CHECK_TIMEOUT_S = 1
_REPORTED_AT_ONCE = 16  # groups
_WEIGHTED = re.compile(r"(-?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?)\s*\*\s*(.*)", re.ASCII | re.DOTALL)
_FINAL_ANSWER = re.compile(r"####\s*(-?[\d,]*\.?\d+)\s*$")


def exact_match(prompt: Prompt, completion: str) -> float:
    """1 if the completion ends in `#### N` with the N of the reference answer, else 0 (GSM8K's form)."""
    given = _FINAL_ANSWER.search(completion)
    return float(given is not None and _number(given[1]) == _number(_reference(prompt.answer)))


def math_verify(prompt: Prompt, completion: str) -> float:
    """1 if math-verify finds the completion's final answer equal to the reference, else 0.

    It reads LaTeX and plain expressions. Whatever takes longer than CHECK_TIMEOUT_S to read, or to compare,
    counts as wrong. math-verify's time-outs are signals, so this works in a process's main thread only: there
    a Reward's messages run.
    """
    from math_verify import parse, verify

    given = parse(completion, parsing_timeout=CHECK_TIMEOUT_S)
    return float(verify(_parse_gold(prompt.answer), given, timeout_seconds=CHECK_TIMEOUT_S))


@lru_cache(maxsize=4096)
def _parse_gold(answer: str) -> Any:
    from math_verify import parse

    gold = parse(_reference(answer), parsing_timeout=CHECK_TIMEOUT_S)
    if not gold:
        raise ValueError(f"math-verify can't read the reference answer {answer!r}")
    return gold


def _reference(answer: str) -> str:
    """GSM8K keeps the number behind `####`, after the worked solution."""
    return answer.rpartition("####")[2].strip()


def _number(text: str) -> float | str:
    try:
        return float(text.replace(",", ""))
    except ValueError:
        return text


def reward_function(name: str) -> RewardFunction:
    """exact_match, math_verify, reasoning_gym, or "file.py:function" with a function of (prompt, completion text).

    Raises Unrecoverable (exit code 2) if there is no such function or its file can't be loaded.
    """
    named = {"exact_match": exact_match, "math_verify": math_verify, "reasoning_gym": reasoning_gym}
    return named[name] if name in named else load_from_file(name, "reward", named)


class Weighted(NamedTuple):
    """A reward function, and how much it counts."""

    name: str
    weight: float
    fn: RewardFunction


def split_weights(names: str) -> dict[str, float]:
    """The functions that a setting such as "exact_match,0.1*short.py:short" names, and what each counts."""
    weights: dict[str, float] = {}
    for part in names.split(","):
        match = _WEIGHTED.fullmatch(part.strip())
        name, weight = (match[2], float(match[1])) if match else (part.strip(), 1.0)
        if name in weights:
            raise Unrecoverable(f"the reward {names!r} names {name!r} twice: name it once", exit_code=2)
        weights[name] = weight
    return weights


def reward_functions(names: str) -> list[Weighted]:
    """Those that `split_weights` finds, each as `reward_function` gives it.

    They are called as in their files; several that are called alike, as in the setting.
    """
    weights = split_weights(names)
    fns = {name: reward_function(name) for name in weights}
    called = [_called(fn) for fn in fns.values()]
    alike = len(set(called)) < len(called)
    named = [Weighted(name if alike else _called(fn), weights[name], fn) for name, fn in fns.items()]
    if not are_rewards({one.name: 0.0 for one in named}):
        raise Unrecoverable(
            f"the reward {names!r} has too many functions, or too long a path: a group can tell of 64, by names of at "
            "most 200 characters",
            exit_code=2,
        )
    return named


def _called(fn: RewardFunction) -> str:
    return getattr(fn, "__name__", repr(fn))


class Reward(Actor):
    """Scores completions with one function, or the weighted sum of several, in its own process: slow or broken checks
    hurt nobody else.

    Reported: the seconds that each group took.

    fn: the function, or the name of one or several as `reward_functions` takes them.
    """

    functions: Sequence[Weighted] = ()

    def __init__(self, *, fn: RewardFunction | str) -> None:
        self.given = fn

    def on_start(self) -> None:
        fn = self.given
        self.functions = reward_functions(fn) if isinstance(fn, str) else [Weighted(_called(fn), 1.0, fn)]
        for name, _, fn in self.functions:
            try:
                inspect.signature(fn).bind(None, "")
            except TypeError as error:
                raise Unrecoverable(
                    f"reward function {name} must take two arguments, the prompt and the completion's text: {error}",
                    exit_code=2,
                ) from error

    @cached_property
    def _took_s(self) -> deque[float]:
        return deque(maxlen=1024)

    @idempotent
    def open(self, prompts: Sequence[Prompt]) -> list[str]:
        """Nothing for each: see Judge."""
        return [""] * len(prompts)

    @idempotent
    @max_run_s(PATIENCE_WITH_A_REWARD_S)
    def respond(self, prompt: Prompt, transcripts: Sequence[Sequence[str]]) -> list[Turn]:
        """A reward for each completion, which ends with its first turn. Raises as `score` does."""
        began = time.monotonic()
        completions = ["".join(turns) for turns in transcripts]
        if len(self.functions) > 1:
            turns = [self._turn(prompt, completion) for completion in completions]
        else:  # what there is to tell is the reward itself, and `score` may be a subclass's own
            turns = [Turn(reward=score, done=True) for score in self.score(prompt, completions)]
        self._took_s.append(time.monotonic() - began)
        return turns

    @idempotent
    @max_run_s(PATIENCE_WITH_A_REWARD_S)
    def score(self, prompt: Prompt, completions: Sequence[str]) -> list[float]:
        """One reward a completion. Raises Unrecoverable if a function raises or gives no finite number."""
        return [self._turn(prompt, completion).reward for completion in completions]

    def step(self) -> float | None:
        if len(self._took_s) >= _REPORTED_AT_ONCE:
            self.on_stop()
        return None

    def on_stop(self) -> None:
        if self._took_s:
            self.report(score_s=list(self._took_s))
            self._took_s.clear()

    def _turn(self, prompt: Prompt, completion: str) -> Turn:
        rewards = {one.name: _score(one, prompt, completion) for one in self.functions}
        total = sum(one.weight * rewards[one.name] for one in self.functions)
        if not is_reward(total):
            raise Unrecoverable(
                f"rewards {rewards} weighed as in {self.given!r} give {total!r} on prompt {prompt.id} "
                f"({prompt.text[:80]!r}): a reward must be a finite number, below {LARGEST}"
            )
        return Turn(reward=total, rewards=rewards, done=True)


def _score(one: Weighted, prompt: Prompt, completion: str) -> float:
    try:
        value = one.fn(prompt, completion)
    except Exception as error:  # whatever a user's function raises
        raise Unrecoverable(
            f"reward function {one.name} raised {type(error).__name__}: {error}, on prompt {prompt.id} "
            f"({prompt.text[:80]!r}) and completion {completion[:80]!r}: mend the function"
        ) from error
    if not is_reward(value):
        raise Unrecoverable(
            f"reward function {one.name} gave {value!r} on prompt {prompt.id} ({prompt.text[:80]!r}): a "
            f"reward must be a finite number, below {LARGEST}"
        )
    return float(value)


def are_rewards(values: Mapping[str, float]) -> bool:
    """Whether a completion can have these, each by its name."""
    try:
        msgspec.convert(values, Rewards)
    except msgspec.ValidationError:
        return False
    return all(map(is_reward, values.values()))


def is_reward(value: object) -> bool:
    """Whether it can be trained: a group with one that can't be is refused, and sampled again for ever."""
    try:
        return math.isfinite(value) and abs(value) < LARGEST  # type: ignore[arg-type]  whatever a user's function gave
    except (TypeError, ValueError, OverflowError):
        return False
