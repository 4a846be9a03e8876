"""The life of one actor's process: start, handle messages and take steps, stop."""

from __future__ import annotations

import faulthandler
import importlib
import io
import logging
import math
import os
import signal
import sys
import traceback
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, Protocol

import cloudpickle
from msgspec import json, msgpack

from .actor import Actor, Context, Down, is_idempotent
from .control import DeadLetter, Ending, FromActor, Hello, Ready, Report, ending_path, spec_path
from .endpoint import Endpoint
from .errors import ActorDied, ActorStopped, Finished, NotYet, RolecallError, Unrecoverable
from .files import write_whole
from .mailbox import Incoming, Mailbox
from .page import Fate, Page
from .peer import Answers
from .recipe import load_recipe
from .ref import bind_transport
from .sockets import allow_descriptors
from .wire import Kind, decode_body, encode_body

__all__ = ["Life", "LifeSupport", "Spec", "be_actor", "run_actor"]

log = logging.getLogger("rolecall")

SWEEP_S = 1.0  # between two looks for messages that nobody waits for any more
STACKS_SIGNAL = signal.SIGUSR2  # the supervisor sends it to an actor that hangs
STOP_WORD_S = 1.0  # how much later than others that stop an actor may hear that it is being stopped, too
POISON_DEATHS = 2  # a message that killed its actor this often is not tried again


@dataclass(frozen=True)
class Spec:
    """Everything a new process needs to become its actor."""

    name: str
    incarnation: int
    sockets: Path
    folder: Path
    node: str
    run: str
    recipe: str
    actor: type[Actor]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def write(self) -> Path:
        """Write it where only this user can read it."""
        path = spec_path(self.sockets, self.name, self.incarnation)
        data = cloudpickle.dumps((self.recipe, cloudpickle.dumps(self)))
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        with os.fdopen(fd, "wb") as file:
            file.write(data)
        return path

    @staticmethod
    def read(path: Path) -> Spec:
        # A recipe given as a file has no importable name here until it is loaded under the same one.
        recipe, data = cloudpickle.loads(path.read_bytes())
        load_recipe(recipe)
        return cloudpickle.loads(data)


def run_actor(spec_path: Path) -> None:
    """Be the actor described in `spec_path` until it finishes, is stopped or crashes."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True)  # what it printed last, before a kill, tells most
    allow_descriptors()
    faulthandler.enable()
    # In C, whatever holds the GIL; a handler of Python's own would wait until it is let go.
    faulthandler.register(STACKS_SIGNAL, all_threads=True, chain=False)
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    # httpx logs a line for every request, so a poll would drown everything else.
    logging.getLogger("httpx").setLevel(logging.WARNING)
    spec = Spec.read(spec_path)
    ending = Ending("stopped")
    endpoint = Endpoint(spec.name, spec.incarnation, spec.sockets)
    bind_transport(endpoint)
    try:
        ending = Life(spec, endpoint).live()
    except Unrecoverable as error:
        ending = Ending("unrecoverable", str(error), error.exit_code)
    except BaseException as error:
        ending = Ending("crashed", f"{type(error).__name__}: {error}")
        raise
    finally:
        endpoint.close()
        write_whole(ending_path(spec.sockets, spec.name, spec.incarnation), json.encode(ending))


def be_actor(spec_path: Path) -> NoReturn:
    """Be the actor, and end this process with it: no thread of a library's may hold it up."""
    code = 1
    try:
        run_actor(spec_path)
        code = 0
    except BaseException:  # noqa: BLE001  the process ends here, and its log says why
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


class LifeSupport(Protocol):
    """What an actor lives on: sockets in a run, an exchange in one process in a LocalRun."""

    mailbox: Mailbox
    page: Page
    chain: tuple[str, ...]
    deadline: float
    stopping: bool
    again: bool
    downs: deque[Down]
    answers: Answers
    dead_letters: list[tuple[str, str, str]]

    def now(self) -> float: ...
    def now_ns(self) -> int: ...
    def wait(self, timeout_s: float | None) -> None: ...
    def wait_for_stop(self, timeout_s: float) -> None: ...
    def breathe(self) -> None: ...
    def expire(self, now: float) -> None: ...
    def handled(self, message: Incoming) -> None: ...
    def answer(self, message: Incoming, kind: Kind, value: Any) -> None: ...
    def to_supervisor(self, frame: bytes) -> None: ...
    def settle(self, timeout_s: float) -> None: ...


class Life:
    """Drives one incarnation of an actor: messages first, its own steps between them."""

    def __init__(self, spec: Spec, endpoint: LifeSupport) -> None:
        self.endpoint = endpoint
        self._swept = endpoint.now()
        self._sender = ""
        self._tell_supervisor(Hello(spec.name, spec.incarnation))
        self._limits_s = _limits_s(spec.actor)
        self.actor = spec.actor(*spec.args, **spec.kwargs)
        self.actor.context = Context(
            spec.name, spec.incarnation, spec.node, spec.run, spec.folder, self._report, spec.sockets,
            lambda: self._sender, endpoint.now, self._sleep,
        )  # fmt: skip

    def live(self) -> Ending:
        """From on_start to on_stop. Raises what the actor dies of."""
        self._limit("on_start")
        self.actor.on_start()
        self._limit(None)
        self._tell_supervisor(Ready())
        try:
            self._work()
            ending = Ending("stopped")
        except Finished:
            ending = Ending("finished")
        self._limit(None)  # of a step that did not return
        self.endpoint.stopping = False  # on_stop may still ask those that stop later
        self.actor.on_stop()
        if not self.endpoint.again or ending.kind == "finished":
            self._refuse_the_rest()  # otherwise the next incarnation handles it
        self.endpoint.settle(self.actor.stop_timeout_s / 2)
        self._bury()
        return ending

    def _work(self) -> None:
        try:
            self._loop()
        except ActorStopped:
            # At the end of a run others stop first.
            self.endpoint.wait_for_stop(STOP_WORD_S)
            if not self.endpoint.stopping:
                raise  # somebody else stopped, whom this actor can't do without

    def _loop(self) -> None:
        mailbox, endpoint = self.endpoint.mailbox, self.endpoint
        steps = type(self.actor).step is not Actor.step
        step_at: float | None = 0.0 if steps else None
        while not endpoint.stopping:
            while endpoint.downs:
                self.actor.on_down(endpoint.downs.popleft())
                mailbox.changed()
                step_at = 0.0 if steps else None
            message = mailbox.next()
            if message is not None:
                if self._handle(message):
                    mailbox.changed()
                    step_at = 0.0 if steps else None
                endpoint.breathe()
                continue
            self._sweep()
            if endpoint.answers.take() and steps:
                step_at = 0.0
            wait_s = None if step_at is None else max(0.0, step_at - endpoint.now())
            endpoint.wait(wait_s)  # also when it is 0: answers must not wait for the step
            if wait_s == 0.0 and not mailbox.ready and not endpoint.stopping:
                self._limit("step")
                pause_s = self.actor.step()
                self._limit(None)
                step_at = None if pause_s is None else endpoint.now() + pause_s
                mailbox.changed()
            if endpoint.dead_letters:
                self._bury()

    def _limit(self, handler: str | None) -> None:
        """Note until when this may run, for the supervisor; None: what ran is over."""
        if self._limits_s:
            seconds = self._limits_s.get(handler)
            self.endpoint.page.limit(0 if seconds is None else int((self.endpoint.now() + seconds) * 1e9))

    def _sweep(self) -> None:
        """Let go of what NotYet keeps although its asker has gone on: without a change it would stay for ever."""
        now = self.endpoint.now()
        if now - self._swept >= SWEEP_S:
            self._swept = now
            self.endpoint.expire(now)
            for message in self.endpoint.mailbox.drop_late(now):
                self.endpoint.page.done(message.header.sender, message.header.seq)
                self.endpoint.handled(message)

    def _handle(self, message: Incoming) -> bool:
        """Whether the handler ran, so that the actor's state may have changed."""
        header, page = message.header, self.endpoint.page
        sender, seq = header.sender, header.seq
        if not page.is_new(sender, seq) and not self._may_run_again(message):
            return False
        now_ns = self.endpoint.now_ns()
        if header.deadline and header.deadline * 1e9 < now_ns:
            page.done(sender, seq)  # its asker has gone on with AskTimeout
            self.endpoint.handled(message)
            return False
        page.begin(sender, seq, now_ns)
        try:
            kind, value = self._call(message)
        except NotYet as wait:
            page.set_aside(sender, seq)
            self.endpoint.mailbox.set_aside(message, wait.until)
            return False
        except Finished:
            self._turn_away(message)
            raise
        page.done(sender, seq)
        if kind is Kind.DONE:
            self.endpoint.handled(message)
        else:
            self._answer(message, kind, value)
        return True

    def _may_run_again(self, message: Incoming) -> bool:
        """Whether a message that was begun or done before runs (again); if not, its sender is told."""
        header, page = message.header, self.endpoint.page
        fate = page.fate(header.sender, header.seq)
        if fate is Fate.NEW:
            return True  # it was set aside
        if header.kind is Kind.TELL and fate is Fate.DONE:
            self.endpoint.handled(message)  # only this word was lost
            return False
        if page.deaths(header.sender, header.seq) >= POISON_DEATHS:
            refusal = f"{header.method} killed {self.actor.name} {POISON_DEATHS} times"
        elif is_idempotent(type(self.actor), header.method):
            return True
        else:
            refusal = (
                f"{self.actor.name} died while it handled {header.method}, or before its answer was sent"
            )
        self._refuse(message, refusal)
        page.done(header.sender, header.seq)  # only now: a kill in between must not leave it without a word
        return False

    def _refuse(self, message: Incoming, reason: str) -> None:
        header = message.header
        if header.kind is Kind.ASK:
            error = ActorDied(self.actor.name, reason, maybe_executed=True)
            self.endpoint.answer(message, Kind.ERROR, error)
        else:
            self._tell_supervisor(DeadLetter(self.actor.name, header.method, reason))
            self.endpoint.handled(message)

    def _call(self, message: Incoming) -> tuple[Kind, Any]:
        header, endpoint = message.header, self.endpoint
        endpoint.chain = header.chain if header.kind is Kind.ASK else ()
        endpoint.deadline = header.deadline or math.inf
        self._sender = header.chain[-1] if header.chain else ""
        try:
            args, kwargs = decode_body(message.body, message.buffers)
            self._limit(header.method)
            answer = getattr(self.actor, header.method)(*args, **kwargs)
        except (NotYet, Finished):
            raise
        except Exception as error:
            if header.kind is Kind.TELL or endpoint.stopping:
                raise  # nobody waits to hear of it: this actor dies of it, or is stopping anyway
            error.add_note(f"(in {self.actor.name}.{header.method})\n{traceback.format_exc()}")
            return Kind.ERROR, error
        else:
            return (Kind.DONE, None) if header.kind is Kind.TELL else (Kind.ANSWER, answer)
        finally:
            self._limit(None)
            endpoint.chain, endpoint.deadline, self._sender = (), math.inf, ""

    def _answer(self, message: Incoming, kind: Kind, value: Any) -> None:
        try:
            if kind is Kind.ERROR:
                decode_body(*encode_body(value))  # some exceptions pickle but do not unpickle
            self.endpoint.answer(message, kind, value)
        except Exception as error:  # noqa: BLE001  whatever a value's own pickling raises goes to the asker
            what = f"its {'exception' if kind is Kind.ERROR else 'answer'} of type {type(value).__name__}"
            text = f"{self.actor.name}.{message.header.method}: {what} can't be sent: {error}"
            self.endpoint.answer(message, Kind.ERROR, RolecallError(text))

    def _refuse_the_rest(self) -> None:
        self.endpoint.wait(0.0)
        for message in self.endpoint.mailbox.drain():
            if message.header.kind is Kind.TELL:
                self._tell_supervisor(DeadLetter(self.actor.name, message.header.method, "stopped"))
            self._turn_away(message)

    def _turn_away(self, message: Incoming) -> None:
        """This actor stops and hears no more of it."""
        header = message.header
        self.endpoint.page.done(header.sender, header.seq)
        if header.kind is Kind.ASK:
            self.endpoint.answer(message, Kind.ERROR, ActorStopped(f"{self.actor.name} has stopped"))
        else:
            self.endpoint.handled(message)

    def _bury(self) -> None:
        while self.endpoint.dead_letters:
            self._tell_supervisor(DeadLetter(*self.endpoint.dead_letters.pop()))

    def _sleep(self, seconds: float) -> None:
        self.endpoint.wait_for_stop(seconds)
        if self.endpoint.stopping:
            raise ActorStopped(f"{self.actor.name} is being stopped")

    def _report(self, values: dict[str, Any]) -> None:
        self._tell_supervisor(Report(values))

    def _tell_supervisor(self, message: FromActor) -> None:
        self.endpoint.to_supervisor(msgpack.encode(message))


def _limits_s(actor: type[Actor]) -> dict[str | None, float]:
    """The `max_run_s` of those of its methods that have one, by name."""
    methods = {name: getattr(actor, name) for name in dir(actor)}
    return {name: method.max_run_s for name, method in methods.items() if hasattr(method, "max_run_s")}


if __name__ == "__main__":
    # The module's own copy of itself: what is pickled must not be a class of __main__.
    importlib.import_module("rolecall.runtime.process").be_actor(Path(sys.argv[1]))
