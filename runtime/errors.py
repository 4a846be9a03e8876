"""What can go wrong between actors, each with what to do about it."""

from __future__ import annotations

from collections.abc import Callable

__all__ = [
    "ActorDied",
    "ActorStopped",
    "AskTimeout",
    "DeadlockError",
    "Finished",
    "NotYet",
    "RolecallError",
    "Unrecoverable",
]


class RolecallError(Exception):
    """Base of everything the runtime raises."""


class ActorDied(RolecallError):
    """The actor that was asked died before it answered.

    maybe_executed: its handler had begun, so what it does may have happened.
    """

    def __init__(self, name: str, reason: str, *, maybe_executed: bool) -> None:
        super().__init__(name, reason, maybe_executed)
        self.name, self.reason, self.maybe_executed = name, reason, maybe_executed

    def __reduce__(self) -> tuple[object, ...]:
        return _actor_died, (self.name, self.reason, self.maybe_executed), self.__dict__

    def __str__(self) -> str:
        handler = "while handling this message" if self.maybe_executed else "before it began this message"
        return f"{self.name} died {handler}: {self.reason}"


def _actor_died(name: str, reason: str, maybe_executed: bool) -> ActorDied:
    return ActorDied(name, reason, maybe_executed=maybe_executed)


class ActorStopped(RolecallError):
    """The run is stopping: either the actor that was asked is gone for good, or the one that asked must go."""


class AskTimeout(RolecallError):
    """No answer within the deadline. The message may still be handled later."""


class DeadlockError(RolecallError):
    """Actors wait for each other in a circle."""

    @staticmethod
    def of(chain: tuple[str, ...], name: str, method: str) -> DeadlockError:
        """The last of `chain`, each of whom waits for the next one's answer, asks `name`, who is one of them."""
        circle = " → ".join((*chain[chain.index(name) :], name))
        return DeadlockError(
            f"{circle}: {name} can't answer {method}, it waits for this very answer; let one of them `tell` "
            "instead of `ask`"
        )


class Unrecoverable(RolecallError):
    """A restart cannot help: end the run with this one sentence.

    exit_code: 2 for a mistake in what the user gave (a model id, a bucket), 1 for anything else.
    """

    def __init__(self, message: str, *, exit_code: int = 1) -> None:
        super().__init__(message)
        self.exit_code = exit_code

    def __reduce__(self) -> tuple[object, ...]:
        return _unrecoverable, (str(self), self.exit_code), self.__dict__


def _unrecoverable(message: str, exit_code: int) -> Unrecoverable:
    return Unrecoverable(message, exit_code=exit_code)


class NotYet(Exception):
    """Raised by a handler: keep this message until the actor's state has changed, then try it again.

    until: a method of the actor's, without arguments and quick, that returns False as long as no message that waits
    for it need be tried: a thousand of them then cost no more than one whenever something else changes.
    """

    def __init__(self, until: Callable[[], bool] | None = None) -> None:
        super().__init__()
        self.until = until


class Finished(Exception):
    """Raised by `step` or a handler: this actor's work is done; it stops and is not restarted."""
