"""An actor: one role, one process, one mailbox, one message at a time.

class Counter(Actor):
    def __init__(self, limit: int) -> None:      # stores what it is given, does no work
        self.limit = limit

    def on_start(self) -> None:                  # loads
        self.count = 0

    def add(self, n: int) -> int:                # a message: counter.ask(Counter.add, 2)
        if self.count + n > self.limit:
            raise NotYet                         # keep it until another message has changed me
        self.count += n
        return self.count

    def step(self) -> float | None:              # work of its own, between messages
        return None
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, TypeVar

__all__ = ["Actor", "Context", "Down", "idempotent", "is_idempotent", "max_run_s"]

Handler = TypeVar("Handler", bound=Callable[..., Any])


@dataclass(frozen=True)
class Context:
    """What the runtime tells an actor about itself before `on_start`.

    name:        its name in the run; a replica's ends in its number ("rollout-1").
    incarnation: differs for every start of every actor of a run, and grows.
    node:        the machine's name in the run; empty for the one the run was started on.
    run:         the run's id.
    folder:      the run's folder on this machine.
    report:      sends values to whoever watches the run (see `Actor.report`).
    sockets:     where the processes of this machine meet.
    sender:      see `Actor.sender`.
    now, sleep:  a clock, in seconds, and waiting by it in the middle of a handler; in a LocalRun both are virtual. A
                 sleep ends with ActorStopped when the actor is to stop. Meanwhile no message is handled: an actor
                 that can go on returns from `step` how long it waits.
    """

    name: str
    incarnation: int
    node: str
    run: str
    folder: Path
    report: Callable[[dict[str, Any]], None]
    sockets: Path = Path()
    sender: Callable[[], str] = lambda: ""
    now: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep


@dataclass(frozen=True)
class Down:
    """The end of one incarnation of an actor that is watched: exactly one for each.

    reason: why it died; empty if it finished or was stopped. final: it will not be started again.
    """

    name: str
    incarnation: int
    reason: str
    final: bool


class Actor:
    """Base of every role. Public methods are its messages; they run one at a time, never at once.

    preloads:       modules its process should have imported before it is forked.
    fork_safe:      False: its process is a fresh interpreter, for libraries that don't survive a fork.
    http:           messages other machines may send, as {"POST /v1/groups": "put"}; they must be idempotent.
    for_workers:    messages that a worker's token allows, over HTTP and from machines that join; all others need a
                    trainer's.
    stop_timeout_s: how long it may take to stop before it is killed.
    """

    preloads: ClassVar[tuple[str, ...]] = ()
    fork_safe: ClassVar[bool] = True
    http: ClassVar[dict[str, str]] = {}
    for_workers: ClassVar[tuple[str, ...]] = ()
    stop_timeout_s: ClassVar[float] = 5.0
    context: Context

    @property
    def name(self) -> str:
        return self.context.name

    @property
    def sender(self) -> str:
        """Who has sent the message that is being handled, by its name in the run: "rollout-1", "gpu-7/rollout", or for
        requests over HTTP "proxy". Empty between messages. A machine can give the names of its own actors, no others.
        """
        return self.context.sender()

    @property
    def state_folder(self) -> Path:
        """A folder of its own that outlives this process: what is written here, a restart finds again."""
        folder = self.context.folder / "state" / self.name
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    def report(self, **values: Any) -> None:
        """Tell the run's observer (the progress line) how things are; JSON values only."""
        self.context.report(values)

    def on_start(self) -> None:
        """Load what is heavy. Messages are handled only after it returns."""

    def step(self) -> float | None:
        """One unit of this actor's own work, called whenever its mailbox is empty.

        Returns how many seconds it can wait before the next call (0: at once), or None if only a message
        makes new work. The answer to an `ask_soon` whose result was not asked for yet is called for at once, too,
        whatever was returned. Raises Finished when the actor's work is done.
        """
        return None

    def on_down(self, down: Down) -> None:
        """An actor this one watches (`Ref.watch`) has died. Called between two messages."""

    def on_stop(self) -> None:
        """Give back what others need. Called on an orderly stop, never after a kill."""


def idempotent(handler: Handler) -> Handler:
    """Mark a message as harmless when it runs twice: if it was running when its actor died, it runs again."""
    handler.__dict__["idempotent"] = True
    return handler


def max_run_s(seconds: float) -> Callable[[Handler], Handler]:
    """Mark a handler, `step` or `on_start`: one that runs for longer hangs, and its actor is killed and restarted.

    Without the mark it may compute for as long as it likes. The time that it waits for others' answers counts.
    """

    def mark(handler: Handler) -> Handler:
        handler.__dict__["max_run_s"] = seconds
        return handler

    return mark


def is_idempotent(actor: type[Actor], message: str) -> bool:
    return bool(getattr(getattr(actor, message, None), "idempotent", False))
