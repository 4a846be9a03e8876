"""Tasks of others: those of reasoning-gym as a data set and a reward, those in the verifiers style as environments.

Imports reasoning_gym when it is asked to: it comes with the extra `envs`.
"""

from __future__ import annotations

import asyncio
import inspect
import json
from collections.abc import Callable
from functools import lru_cache
from typing import Any, Protocol
from urllib.parse import parse_qsl

from ..runtime import Unrecoverable
from .types import Prompt, Turn

__all__ = ["Chat", "MultiTurn", "ReasoningGym", "reasoning_gym"]

PREFIX = "reasoning-gym:"
_ROWS, _SIZE = 1_000_000, 2**40
_INSTRUCTION = "\nGive the final answer, and nothing else, between <answer> and </answer>.\n"


class ReasoningGym:
    """Endless: "reasoning-gym:chain_sum", or with settings "reasoning-gym:chain_sum?min_terms=2&max_terms=3".

    A row's answer says where its entry is found again: `reasoning_gym` scores by it. seed: 0 and above; −1 is for
    evaluation: no other gives those rows. Raises Unrecoverable (exit code 2) for what reasoning-gym does not have.
    """

    def __init__(self, name: str, seed: int) -> None:
        self._name, self._first = name, (seed + 1) * _ROWS
        _entry(name, self._first)

    def __getitem__(self, index: int) -> tuple[str, str]:
        at = self._first + index % _ROWS
        return _entry(self._name, at)["question"] + _INSTRUCTION, f"{self._name}#{at}"


def reasoning_gym(prompt: Prompt, completion: str) -> float:
    """What reasoning-gym gives for the text in the last `<answer>` … `</answer>`, 0 to 1; for none 0."""
    name, _, at = prompt.answer.rpartition("#")
    if not name.startswith(PREFIX):
        raise Unrecoverable(
            f"the reward reasoning_gym scores prompts of a data set {PREFIX}NAME alone, and prompt {prompt.id} is of "
            "another: choose another reward",
            exit_code=2,
        )
    before, found, _ = completion.rpartition("</answer>")
    answer = before.rpartition("<answer>")[2].strip() if found and "<answer>" in before else None
    return float(_tasks(name).score_answer(answer=answer, entry=_entry(name, int(at))))


@lru_cache(maxsize=4096)
def _entry(name: str, at: int) -> dict[str, Any]:
    return _tasks(name)[at]


@lru_cache
def _tasks(name: str) -> Any:
    try:
        from reasoning_gym import create_dataset  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise Unrecoverable(
            f"the data set {name} comes from reasoning-gym: pip install 'rolecall[envs]'", exit_code=2
        ) from error
    task, _, query = name.removeprefix(PREFIX).partition("?")
    settings = {key: _value(value) for key, value in parse_qsl(query)}
    try:
        return create_dataset(task, seed=0, size=_SIZE, **settings)
    except (ValueError, TypeError, AssertionError) as error:
        raise Unrecoverable(
            f"reasoning-gym can't make the data set {name}: {error}; check the name and its settings",
            exit_code=2,
        ) from error


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text


Messages = list[dict[str, Any]]


class MultiTurn(Protocol):
    """What an environment in the verifiers style has; each may be a coroutine function.

    is_completed(messages, state): whether the chat is over; asked after every message of the policy's.
    env_response(messages, state): the messages that answer; or they and the new state, in a tuple.
    """

    def is_completed(self, messages: Messages, state: dict[str, Any]) -> Any: ...

    def env_response(self, messages: Messages, state: dict[str, Any]) -> Any: ...


class Chat:
    """An Environment that is played by one in the verifiers style.

    made:  by this each completion gets one of its own. score: the reward of (messages, state) at its end.
    state: "prompt", "answer" and "turn" are in it from the start; `setup_state` of the environment, if it has one,
    may put more there.
    """

    def __init__(
        self, made: Callable[[], MultiTurn], score: Callable[[Messages, dict[str, Any]], Any]
    ) -> None:
        self._environment, self._score = made(), score

    def reset(self, prompt: Prompt) -> str:
        """Nothing is said before the first turn: the prompt is the first message."""
        self._messages: Messages = [{"role": "user", "content": prompt.text}]
        self._state: dict[str, Any] = {"prompt": [*self._messages], "answer": prompt.answer, "turn": 0}
        if hasattr(self._environment, "setup_state"):
            given = _wait(self._environment.setup_state(self._state))  # pyright: ignore
            self._state = self._state if given is None else given
        return ""

    def step(self, answer: str) -> Turn:
        """What the environment says to this message, or the end."""
        self._messages.append({"role": "assistant", "content": answer})
        self._state["turn"] += 1
        if _wait(self._environment.is_completed(self._messages, self._state)):
            return Turn(reward=float(_wait(self._score(self._messages, self._state))), done=True)
        said = _wait(self._environment.env_response(self._messages, self._state))
        if isinstance(said, tuple):
            said, self._state = said
        self._messages += said
        return Turn(text="\n".join(message["content"] for message in said))


def _wait(value: Any) -> Any:
    """What a function gave, or the coroutine it gave."""

    async def awaited() -> Any:
        return await value

    return asyncio.run(awaited()) if inspect.isawaitable(value) else value
