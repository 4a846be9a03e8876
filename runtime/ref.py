"""Addresses of actors, typed by what they accept."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Concatenate, Generic, ParamSpec, Protocol, TypeVar

from msgspec import Struct

from .errors import RolecallError

__all__ = ["Answer", "Ref", "Transport", "bind_transport", "bound_transport", "only_one"]

A = TypeVar("A", covariant=True)
P = ParamSpec("P")
R = TypeVar("R")
R_co = TypeVar("R_co", covariant=True)

DEFAULT_TIMEOUT_S = 300.0


class Answer(Protocol[R_co]):
    """The answer to an ask that went out and may still be on its way."""

    @property
    def done(self) -> bool:
        """Whether `result` would not wait. Looks only at what has been heard: asking others, waiting or
        handling messages is what lets answers in."""
        ...

    def result(self) -> R_co:
        """Wait for it; returns and raises what `Ref.ask` does."""
        ...


class Transport(Protocol):
    """What carries messages: sockets in a run, direct calls in a LocalRun. A name is a role's with one replica, or
    a replica's; of which role another name is, `replicas` and `pick` know.
    """

    def ask(self, names: Sequence[str], call: Call, timeout_s: float) -> list[Any]: ...
    def ask_soon(self, name: str, call: Call, timeout_s: float) -> Answer[Any]: ...
    def tell(self, name: str, call: Call) -> None: ...
    def replicas(self, name: str) -> Sequence[str]: ...
    def pick(self, name: str) -> str: ...
    def watch(self, name: str) -> None: ...


class Call(Struct, frozen=True):
    """A message: which handler, with what, and whether it may run twice."""

    method: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    idempotent: bool = False

    @staticmethod
    def of(message: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
        return Call(message.__name__, args, kwargs, getattr(message, "idempotent", False))


@dataclass(frozen=True)
class Ref(Generic[A]):
    """The address of an actor, or of all replicas of a role.

    It exists before its actor does and survives the actor's restarts. `ask` waits for the answer, `tell`
    does not; both take the message as the handler itself, so a wrong one is a type error:

        count = counter.ask(Counter.add, 2)
    """

    name: str
    timeout_s: float = DEFAULT_TIMEOUT_S

    def ask(self, message: Callable[Concatenate[A, P], R], /, *args: P.args, **kwargs: P.kwargs) -> R:
        """Send and wait for the answer.

        Raises what the handler raised; ActorDied if the actor died over it; AskTimeout after the deadline
        (this ref's, or the asker's own if that is nearer); ActorStopped if either side is stopping;
        DeadlockError if the one asked is waiting for this answer.
        """
        return bound_transport().ask([self.name], Call.of(message, args, kwargs), self.timeout_s)[0]

    def ask_soon(
        self, message: Callable[Concatenate[A, P], R], /, *args: P.args, **kwargs: P.kwargs
    ) -> Answer[R]:
        """Send now, wait later: several waits can overlap, with each other or with work.

            answers = [reward.ask_soon(Reward.score, group) for group in groups]
            scores = [answer.result() for answer in answers]

        The deadline counts from now. An actor can also go on: when the answer is there, its `step` is called.
        """
        return bound_transport().ask_soon(self.name, Call.of(message, args, kwargs), self.timeout_s)

    def ask_each(
        self, message: Callable[Concatenate[A, P], R], /, *args: P.args, **kwargs: P.kwargs
    ) -> list[R]:
        """Send the same to every replica at once, and wait for all answers, in the replicas' order."""
        names = bound_transport().replicas(self.name)
        return bound_transport().ask(names, Call.of(message, args, kwargs), self.timeout_s)

    def tell(self, message: Callable[Concatenate[A, P], Any], /, *args: P.args, **kwargs: P.kwargs) -> None:
        """Send and go on. If the handler raises, its actor dies of it and is restarted."""
        bound_transport().tell(self.name, Call.of(message, args, kwargs))

    def any(self) -> Ref[A]:
        """The address of one replica: the one with the fewest of this actor's messages to handle, in turn among
        equals; one that is down only if all are."""
        return replace(self, name=bound_transport().pick(self.name))

    def watch(self) -> None:
        """Call this actor's `on_down` at the end of each incarnation of that one, or of each of its replicas: once
        for each, at once if it is dead already. A restarted actor watches anew.
        """
        bound_transport().watch(self.name)

    def within(self, timeout_s: float) -> Ref[A]:
        """The same address with another deadline, in seconds."""
        return replace(self, timeout_s=timeout_s)


def only_one(name: str, replicas: Sequence[str]) -> str:
    """The replica that a role's name stands for. Raises RolecallError if there are several."""
    if len(replicas) != 1:
        raise RolecallError(f"{name} has {len(replicas)} replicas: use ask_each for all, any() for one")
    return replicas[0]


_current: Transport | None = None


def bind_transport(transport: Transport | None) -> None:
    """Make `transport` the one this process's refs use: an actor process has exactly one."""
    global _current
    _current = transport


def bound_transport() -> Transport:
    """What this process's refs use."""
    if _current is None:
        raise RolecallError(
            "a Ref works only inside a running actor: wire it in build(), use it in a handler"
        )
    return _current
