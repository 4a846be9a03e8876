"""Rewards: plain functions of (prompt, completion text), and the actor that runs them."""

from __future__ import annotations

import inspect
import math
import re
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import cached_property, lru_cache
from typing import Any

from ..runtime import Actor, Unrecoverable, idempotent, max_run_s
from .custom import load_from_file
from .gyms import reasoning_gym
from .types import Prompt, Turn

__all__ = ["Reward", "RewardFunction", "exact_match", "math_verify", "reward_function"]

PATIENCE_WITH_A_REWARD_S = (
    600.0  # a function that takes longer over one group hangs, as far as a run can tell
)

RewardFunction = Callable[[Prompt, str], float]

CHECK_TIMEOUT_S = 1
_REPORTED_AT_ONCE = 16  # groups
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


class Reward(Actor):
    """Scores completions with one function, in its own process: slow or broken checks hurt nobody else.

    Reported: the seconds that each group took.

    fn: the function, or its name as `reward_function` takes it.
    """

    def __init__(self, *, fn: RewardFunction | str) -> None:
        self.given = fn

    def on_start(self) -> None:
        self.fn = reward_function(self.given) if isinstance(self.given, str) else self.given
        try:
            inspect.signature(self.fn).bind(None, "")
        except TypeError as error:
            raise Unrecoverable(
                f"reward function {self._name} must take two arguments, the prompt and the completion's text: "
                f"{error}",
                exit_code=2,
            ) from error

    @cached_property
    def _took_s(self) -> deque[float]:
        return deque(maxlen=1024)

    @property
    def _name(self) -> str:
        return getattr(self.fn, "__name__", repr(self.fn))

    @idempotent
    def open(self, prompts: Sequence[Prompt]) -> list[str]:
        """Nothing for each: see Judge."""
        return [""] * len(prompts)

    @idempotent
    @max_run_s(PATIENCE_WITH_A_REWARD_S)
    def respond(self, prompt: Prompt, transcripts: Sequence[Sequence[str]]) -> list[Turn]:
        """A reward for each completion, which ends with its first turn. Raises as `score` does."""
        began = time.monotonic()
        scores = self.score(prompt, ["".join(turns) for turns in transcripts])
        self._took_s.append(time.monotonic() - began)
        return [Turn(reward=score, done=True) for score in scores]

    @idempotent
    @max_run_s(PATIENCE_WITH_A_REWARD_S)
    def score(self, prompt: Prompt, completions: Sequence[str]) -> list[float]:
        """One reward a completion. Raises Unrecoverable if the function raises or gives no finite number."""
        return [self._score_one(prompt, completion) for completion in completions]

    def step(self) -> float | None:
        if len(self._took_s) >= _REPORTED_AT_ONCE:
            self.on_stop()
        return None

    def on_stop(self) -> None:
        if self._took_s:
            self.report(score_s=list(self._took_s))
            self._took_s.clear()

    def _score_one(self, prompt: Prompt, completion: str) -> float:
        try:
            value = self.fn(prompt, completion)
        except Exception as error:  # whatever a user's function raises
            raise Unrecoverable(
                f"reward function {self._name} raised {type(error).__name__}: {error}, on prompt {prompt.id} "
                f"({prompt.text[:80]!r}) and completion {completion[:80]!r}: mend the function"
            ) from error
        if not _is_finite(value):
            raise Unrecoverable(
                f"reward function {self._name} gave {value!r} on prompt {prompt.id} ({prompt.text[:80]!r}): a "
                "reward must be a finite number"
            )
        return float(value)


def _is_finite(value: object) -> bool:
    try:
        return math.isfinite(value)  # type: ignore[arg-type]  whatever a user's function gave
    except (TypeError, ValueError, OverflowError):
        return False
