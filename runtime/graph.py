"""A run as data: which roles there are, who is wired to whom, where they run, when it is over.

    graph = Graph("async_grpo")
    buffer = graph.add("buffer", Buffer, capacity=64)
    trainer = graph.add("trainer", Trainer, groups=buffer)     # arguments are checked against Trainer's own
    graph.until(trainer)

A ref exists before it can be handed over, so the wiring has no cycles: the order of `add` is the order of
start and, reversed, of stop.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any, ParamSpec, TypeVar, cast

from .actor import Actor
from .ref import Ref

__all__ = ["Graph", "Restart", "Role", "Strategy", "Subtree"]

A = TypeVar("A", bound=Actor)
P = ParamSpec("P")


class Strategy(Enum):
    """Who is restarted when one actor dies (Erlang/OTP's words and meanings)."""

    ONE_FOR_ONE = "only it"
    ONE_FOR_ALL = "everybody"
    REST_FOR_ONE = "it and all that were added after it"


class Restart(Enum):
    """When an actor is restarted."""

    PERMANENT = "always, also when it has finished"
    TRANSIENT = "when it died, not when it has finished"
    TEMPORARY = "never"


@dataclass(frozen=True)
class Role:
    """One `add`. `wires` are the roles it was given refs to, by argument name."""

    name: str
    actor: type[Actor]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    replicas: int = 1
    elastic: bool = False
    restart: Restart = Restart.TRANSIENT
    python: str = ""
    gpus: tuple[str, ...] = ()  # of each replica the one it sees; empty: all see what there is

    @property
    def members(self) -> list[str]:
        if self.replicas == 1:
            return [self.name]
        return [f"{self.name}-{i}" for i in range(self.replicas)]

    @property
    def wires(self) -> dict[str, str]:
        given = inspect.signature(self.actor).bind(*self.args, **self.kwargs).arguments
        return {key: value.name for key, value in given.items() if isinstance(value, Ref)}


@dataclass(frozen=True)
class Subtree:
    """Roles with a supervisor of their own, and what it may do before it gives up (see `Graph.supervise`)."""

    roles: tuple[str, ...]
    strategy: Strategy
    max_restarts: int
    within_s: float

    @property
    def name(self) -> str:
        return f"subtree {'+'.join(self.roles)}"


class Graph:
    """Roles and wires. Building one starts nothing."""

    def __init__(
        self,
        name: str,
        *,
        strategy: Strategy = Strategy.ONE_FOR_ONE,
        max_restarts: int = 5,
        within_s: float = 60.0,
    ) -> None:
        self.name, self.strategy = name, strategy
        self.max_restarts, self.within_s = max_restarts, within_s
        self.ends_with: list[str] = []
        self.subtrees: list[Subtree] = []
        self._roles: dict[str, Role] = {}

    def __iter__(self) -> Iterator[Role]:
        """The roles in the order they start."""
        return iter(self._roles.values())

    def __getitem__(self, name: str) -> Role:
        return self._roles[name]

    def __contains__(self, name: str) -> bool:
        return name in self._roles

    def add(self, name: str, role: Callable[P, A], /, *args: P.args, **kwargs: P.kwargs) -> Ref[A]:
        """Add a role; `args` and `kwargs` are its constructor's.

        Raises ValueError for a name that can't be, or arguments the constructor doesn't take.
        """
        if not re.fullmatch(r"[a-z][a-z0-9_]{0,30}", name):
            raise ValueError(f"role name {name!r}: use a short word of a-z, 0-9 and _")
        if name in self._roles:
            raise ValueError(f"graph {self.name} has a role {name!r} already: give this one another name")
        for ref in (*args, *kwargs.values()):
            if isinstance(ref, Ref) and ref.name not in self._roles:
                raise ValueError(f"{name} is wired to {ref.name!r}, which is not in graph {self.name}")
        try:
            inspect.signature(role).bind(*args, **kwargs)
        except TypeError as error:
            raise ValueError(f"{name} can't be made: {getattr(role, '__name__', role)}: {error}") from error
        self._roles[name] = Role(name, cast("type[Actor]", role), args, dict(kwargs))
        return Ref(name)

    def place(
        self,
        ref: Ref[Any],
        *,
        replicas: int = 1,
        elastic: bool = False,
        restart: Restart = Restart.TRANSIENT,
        python: str = "",
    ) -> None:
        """Say how a role runs.

        replicas: how many processes; elastic: whether machines that join may run more of them, so that there
        may be none here; restart: when a dead one is started again; python: the interpreter of its processes,
        for libraries that need an environment of their own, with this package in it (by default this one).
        """
        if replicas < (0 if elastic else 1):
            raise ValueError(f"{ref.name} needs at least one replica, not {replicas}")
        role = self._roles[ref.name]
        self._roles[ref.name] = replace(
            role, replicas=replicas, elastic=elastic, restart=restart, python=python
        )

    def recast(self, name: str, actor: type[Actor], **changed: Any) -> None:
        """Let another class, with these arguments changed, play a role: the same wiring round other parts."""
        role = self._roles[name]
        self._roles[name] = replace(role, actor=actor, kwargs=role.kwargs | changed)

    def supervise(
        self,
        *refs: Ref[Any],
        strategy: Strategy = Strategy.ONE_FOR_ONE,
        max_restarts: int = 5,
        within_s: float = 60.0,
    ) -> None:
        """Give these roles a supervisor of their own: their deaths are counted apart, with a wait of their own.

        When its restarts are used up all of them are taken down, which counts as one death among the graph's
        own, and they are started again with a fresh count, together with whom the graph's strategy names.
        Raises ValueError for a role that is not in the graph, or has such a supervisor already.
        """
        if not refs:
            raise ValueError(f"graph {self.name}: a supervisor needs at least one role")
        supervised = [name for subtree in self.subtrees for name in subtree.roles]
        names = [ref.name for ref in refs]
        for name in names:
            if name not in self._roles:
                raise ValueError(f"{name!r} is not in graph {self.name}: add it before it is supervised")
            if name in supervised or names.count(name) > 1:
                raise ValueError(f"{name} has a supervisor of its own already: name each role only once")
        roles = tuple(name for name in self._roles if name in names)
        self.subtrees.append(Subtree(roles, strategy, max_restarts, within_s))

    def until(self, *refs: Ref[Any]) -> None:
        """The run is over when all of these have finished."""
        self.ends_with.extend(ref.name for ref in refs)

    def private_parts(self) -> list[str]:
        """The roles of which each machine that joins has its own: whatever the elastic roles are wired to that has no
        HTTP messages. The others are reached through a link."""
        elastic = [role.name for role in self if role.elastic]
        here = list(elastic)
        for name in here:
            wired = self._roles[name].wires.values()
            here += [other for other in wired if not self._roles[other].actor.http and other not in here]
        return here[len(elastic) :]

    def open_to_workers(self) -> dict[str, tuple[str, ...]]:
        """What machines that join with a worker's token may send, by role: messages that an actor lists in
        `for_workers`, if what runs there is wired to it."""
        private = self.private_parts()
        here = [*private, *(role.name for role in self if role.elastic)]
        wired = [other for name in here for other in self._roles[name].wires.values()]
        return {name: self._roles[name].actor.for_workers for name in wired if name not in private}

    def add_part_for_joining(self, to: Graph, replicas: int, gpus: tuple[str, ...] = ()) -> None:
        """Add to another graph what a machine that joins runs: the elastic roles, each with so many replicas, and the
        private parts. gpus: for each replica the one that it alone sees, as in CUDA_VISIBLE_DEVICES."""
        here = [*self.private_parts(), *(role.name for role in self if role.elastic)]
        for role in self:
            if role.name in here:
                to._roles[role.name] = replace(role, replicas=replicas, gpus=gpus) if role.elastic else role
        for subtree in self.subtrees:
            roles = tuple(name for name in subtree.roles if name in here)
            to.subtrees += [replace(subtree, roles=roles)] if roles else []
