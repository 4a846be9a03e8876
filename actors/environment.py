"""Environments: what answers a policy's turns until a completion is done; and the actor that hosts them.

    rollout ─prompt, turns so far─▶ host ─reset, step, step …─▶ the answer to the last of them

A host owes nobody anything: what it is asked holds all that came before, so it can always play it again. That is how
it survives its death, and why no environment is ever on its way between processes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from msgspec.structs import replace

from ..runtime import Actor, Unrecoverable, idempotent, max_run_s
from .calculator import Calculator
from .custom import load_from_file
from .reward import PATIENCE_WITH_A_REWARD_S, are_rewards, is_reward
from .types import LARGEST, Prompt, Turn

__all__ = ["Environment", "EnvironmentHost", "environment_factory"]

MOST_KEPT = 4096


class Environment(Protocol):
    """One completion's partner. It answers the same turns in the same way, whenever it is reset to the same prompt:
    what is random in it is seeded by the prompt."""

    def reset(self, prompt: Prompt) -> str:
        """What is put after the prompt's text before the policy's first turn: mostly nothing."""
        ...

    def step(self, answer: str) -> Turn:
        """The answer to the policy's turn: decoded, without special tokens, and with the text it stopped at."""
        ...


def environment_factory(name: str) -> Callable[[], Environment]:
    """calculator, or "file.py:name" with a class, or a function without arguments, that makes one.

    Raises Unrecoverable (exit code 2) if there is none, or its file can't be loaded.
    """
    named = {"calculator": Calculator}
    return named[name] if name in named else load_from_file(name, "environment", named)


class EnvironmentHost(Actor):
    """Plays environments, in its own process: slow or broken ones hurt nobody else.

    environment: what makes one, or its name as `environment_factory` takes it.
    max_turns:   of one completion; the environment is asked no more after so many, whatever it says.

    A Judge. Environments of completions under way are kept, as long as there are not too many, so that each turn is
    played once; else they are played again from their start.
    """

    def __init__(self, *, environment: Callable[[], Environment] | str, max_turns: int = 64) -> None:
        self.given, self.max_turns = environment, max_turns

    def on_start(self) -> None:
        self.make = environment_factory(self.given) if isinstance(self.given, str) else self.given
        self._kept: dict[tuple[Prompt, tuple[str, ...]], list[Environment]] = {}  # by what they have seen
        self._count = 0

    @idempotent
    @max_run_s(PATIENCE_WITH_A_REWARD_S)
    def open(self, prompts: Sequence[Prompt]) -> list[str]:
        """What the environment puts after each prompt's text. Raises Unrecoverable if it raises."""
        return [self._open(prompt) for prompt in prompts]

    @idempotent
    @max_run_s(PATIENCE_WITH_A_REWARD_S)
    def respond(self, prompt: Prompt, transcripts: Sequence[Sequence[str]]) -> list[Turn]:
        """The environment's answer to each of these completions, given as all their turns so far.

        Raises Unrecoverable if the environment raises or gives no finite reward.
        """
        return [self._respond(prompt, tuple(turns)) for turns in transcripts]

    def _open(self, prompt: Prompt) -> str:
        environment, text = self._reset(prompt)
        self._keep(prompt, (), environment)
        return text

    def _respond(self, prompt: Prompt, turns: tuple[str, ...]) -> Turn:
        environment = self._pick(prompt, turns[:-1])
        if environment is None:
            environment, _ = self._reset(prompt)
            for turn in turns[:-1]:
                self._step(environment, prompt, turn)
        answer = self._step(environment, prompt, turns[-1])
        if len(turns) >= self.max_turns and not answer.done:
            return replace(answer, text="", done=True)
        if not answer.done:
            self._keep(prompt, turns, environment)
        return answer

    def _pick(self, prompt: Prompt, turns: tuple[str, ...]) -> Environment | None:
        """One that has seen just this; it is nobody else's any more."""
        same = self._kept.get((prompt, turns))
        if same is None:
            return None
        environment = same.pop()
        self._count -= 1
        if not same:
            del self._kept[prompt, turns]
        return environment

    def _keep(self, prompt: Prompt, turns: tuple[str, ...], environment: Environment) -> None:
        self._kept.setdefault((prompt, turns), []).append(environment)
        self._count += 1
        if self._count > MOST_KEPT:
            oldest = next(iter(self._kept))  # of a completion that was given up, most likely
            self._count -= len(self._kept.pop(oldest))

    def _reset(self, prompt: Prompt) -> tuple[Environment, str]:
        try:
            environment = self.make()
            return environment, environment.reset(prompt)
        except Exception as error:  # whatever a user's environment raises
            raise self._broken(error, prompt) from error

    def _step(self, environment: Environment, prompt: Prompt, turn: str) -> Turn:
        try:
            answer = environment.step(turn)
        except Exception as error:  # whatever a user's environment raises
            raise self._broken(error, prompt, turn) from error
        if not isinstance(answer, Turn) or not (is_reward(answer.reward) and are_rewards(answer.rewards)):
            raise Unrecoverable(
                f"environment {self._name} gave {answer!r} on prompt {prompt.id} ({prompt.text[:80]!r}): a step gives "
                f"a Turn, and its rewards must be finite numbers, below {LARGEST}, and have short names"
            )
        return answer

    def _broken(self, error: Exception, prompt: Prompt, turn: str | None = None) -> Unrecoverable:
        at = "at its reset" if turn is None else f"at the turn {turn[:80]!r}"
        return Unrecoverable(
            f"environment {self._name} raised {type(error).__name__}: {error}, on prompt {prompt.id} "
            f"({prompt.text[:80]!r}) {at}: mend the environment"
        )

    @property
    def _name(self) -> str:
        return getattr(self.make, "__name__", repr(self.make))
