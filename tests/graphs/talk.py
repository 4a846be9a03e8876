"""One actor asks another, in as many ways as there are scenes; then it reports what came of it."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from rolecall import (
    Actor,
    ActorDied,
    ActorStopped,
    Finished,
    Graph,
    NotYet,
    Ref,
    Restart,
    Unrecoverable,
    idempotent,
)


class Broken(Exception):
    """What `fail` raises."""


class Stubborn(Exception):
    """It pickles, and does not unpickle."""

    def __init__(self, one: int, two: int) -> None:
        super().__init__("a single sentence")


class Target(Actor):
    """Is asked. Its journal outlives it."""

    stop_timeout_s = 0.5

    def __init__(self, slow_restart: bool) -> None:
        self.slow_restart = slow_restart

    def on_start(self) -> None:
        self._journal = self.state_folder / "journal"
        self._journal.touch()
        self.opened: set[str] = set()
        again = self.state_folder / "started"
        if self.slow_restart and again.exists():
            (self.state_folder / "gate").open().read()  # until somebody opens the other end
        again.touch()

    def write(self, line: str) -> None:
        with self._journal.open("a") as file:
            file.write(line + "\n")

    def journal(self) -> list[str]:
        return self._journal.read_text().split()

    def echo(self, value: Any) -> Any:
        return value

    def fail(self, text: str) -> None:
        raise Broken(text)

    def hang(self) -> None:
        self.report(hanging=True)
        signal.pause()

    @idempotent
    def hang_once(self) -> str:
        if "hung" in self.journal():
            return "after all"
        self.write("hung")
        self.report(hanging=True)
        signal.pause()
        return "never"

    @idempotent
    def poison(self) -> None:
        self.write("poison")
        os.kill(os.getpid(), signal.SIGKILL)

    def leave(self, how: str) -> None:
        {"os": os._exit, "sys": sys.exit}[how](3)

    def finish(self) -> None:
        raise Finished

    def give_up(self) -> None:
        raise Unrecoverable("there is no such model", exit_code=2)

    def unpicklable_answer(self) -> Iterator[int]:
        return (number for number in range(3))

    def unpicklable_error(self) -> None:
        raise Broken(threading.Lock())

    def stubborn_error(self) -> None:
        raise Stubborn(1, 2)

    def wait_for(self, key: str) -> str:
        if key not in self.opened:
            raise NotYet
        self.write(f"passed:{key}")
        return key

    def open(self, key: str) -> None:
        self.opened.add(key)
        self.write(f"opened:{key}")

    def ask_back(self, caller: Ref[Caller]) -> None:
        caller.ask(Caller.hello)


class Relay(Actor):
    """Asks the target on behalf of another."""

    def __init__(self, target: Ref[Target]) -> None:
        self.target = target

    def wait_for(self, key: str) -> str:
        try:
            return self.target.ask(Target.wait_for, key)
        except Exception as error:
            self.report(inner=type(error).__name__)
            raise

    def ask_back(self, caller: Ref[Caller]) -> None:
        self.target.ask(Target.ask_back, caller)

    def hello(self) -> str:
        return "hello"


class Caller(Actor):
    def __init__(self, scene: str, target: Ref[Target], relay: Ref[Relay]) -> None:
        self.scene, self.target, self.relay = scene, target, relay

    def step(self) -> float | None:
        self.report(result=SCENES[self.scene](self))
        raise Finished

    def hello(self) -> str:
        return "hello"

    @property
    def me(self) -> Ref[Caller]:
        return Ref(self.name)


def attempt(function: Callable[[], Any]) -> Any:
    """What it returns, or what it raises, as data."""
    try:
        return function()
    except Exception as error:  # noqa: BLE001  whatever it is, the test is told
        described: dict[str, Any] = {
            "error": type(error).__name__,
            "text": str(error),
            "notes": "\n".join(getattr(error, "__notes__", [])),
        }
        if isinstance(error, ActorDied):
            described["maybe_executed"] = error.maybe_executed
        return described


def _array(me: Caller) -> Any:
    sent = np.arange(1_000_000, dtype=np.float32)
    back = me.target.ask(Target.echo, {"array": sent, "words": ["a", None, 2.5]})
    return {
        "same": bool((back["array"] == sent).all()),
        "dtype": str(back["array"].dtype),
        "words": back["words"],
    }


def _idempotent_kill(me: Caller) -> Any:
    return [me.target.ask(Target.hang_once), me.target.ask(Target.echo, "next")]


def _kill(me: Caller) -> Any:
    died = attempt(lambda: me.target.ask(Target.hang))
    return [died, me.target.ask(Target.echo, "next")]


def _kill_told_before_restart(me: Caller) -> Any:
    gate = me.context.folder / "state" / "target" / "gate"
    os.mkfifo(gate)
    died = attempt(lambda: me.target.ask(Target.hang))
    gate.open("w").close()  # only now the target's next incarnation can start
    return [died, me.target.ask(Target.echo, "next")]


def _inherit_deadline(me: Caller) -> Any:
    return [attempt(lambda: me.relay.within(0.2).ask(Relay.wait_for, "never")), me.relay.ask(Relay.hello)]


def _stopped(me: Caller) -> Any:
    me.report(asking=True)
    return attempt(lambda: me.target.ask(Target.wait_for, "never"))


def _stopped_with_many(me: Caller) -> Any:
    """A hundred asks of four threads are waiting when the run is stopped."""
    told: list[str] = []

    def ask_some() -> None:
        for _ in range(25):
            try:
                me.target.ask(Target.wait_for, "never")
            except ActorStopped:
                told.append("ActorStopped")

    threads = [threading.Thread(target=ask_some) for _ in range(4)]
    for thread in threads:
        thread.start()
    me.report(asking=True)
    for thread in threads:
        thread.join()
    return told


def _gone(me: Caller) -> Any:
    first = attempt(lambda: me.target.ask(Target.hang))
    return [first, attempt(lambda: me.target.ask(Target.echo, "next"))]


def _finished(me: Caller) -> Any:
    first = attempt(lambda: me.target.ask(Target.finish))
    return [first, attempt(lambda: me.target.ask(Target.echo, "next"))]


def _tell_fails(me: Caller) -> Any:
    me.target.tell(Target.write, "before")
    me.target.tell(Target.fail, "told")
    me.target.tell(Target.write, "after")
    return me.target.ask(Target.journal)


def _overtaken(me: Caller) -> Any:
    me.target.tell(Target.wait_for, "b")
    me.target.tell(Target.wait_for, "a")
    me.target.tell(Target.write, "overtakes")
    me.target.tell(Target.open, "a")
    me.target.tell(Target.open, "b")
    return me.target.ask(Target.journal)


def _set_aside_then_killed(me: Caller) -> Any:
    me.target.tell(Target.wait_for, "a")
    me.target.tell(Target.write, "one")
    died = attempt(lambda: me.target.ask(Target.hang))
    me.target.tell(Target.open, "a")
    return [died["error"], me.target.ask(Target.journal)]


def _many_threads(me: Caller) -> Any:
    """Four threads ask while the target is killed: how many were answered, how many told that it died."""
    counts = {"answered": 0, "died": 0}
    lock = threading.Lock()

    def ask_many(thread: int) -> None:
        for number in range(100):
            fatal = thread == 0 and number % 30 == 29
            try:
                if fatal:
                    me.target.ask(Target.hang)
                else:
                    me.target.ask(Target.write, f"{thread}:{number}")
                what = "answered"
            except ActorDied:
                what = "died"
            with lock:
                counts[what] += 1

    threads = [threading.Thread(target=ask_many, args=(thread,)) for thread in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return {**counts, "journal": me.target.ask(Target.journal)}


def _full(me: Caller) -> Any:
    me.target.tell(Target.hang)
    for number in range(1023):
        me.target.tell(Target.write, str(number))
    refused = attempt(lambda: me.target.within(0.2).ask(Target.echo, "no room"))
    me.report(full=True)
    me.target.tell(Target.write, "1023")  # waits for room
    return [refused, me.target.ask(Target.journal)]


def _unpicklable(me: Caller) -> Any:
    return [
        attempt(lambda: me.target.ask(Target.unpicklable_answer)),
        attempt(lambda: me.target.ask(Target.unpicklable_error)),
        attempt(lambda: me.target.ask(Target.stubborn_error)),
    ]


SCENES: dict[str, Callable[[Caller], Any]] = {
    "array": _array,
    "fails": lambda me: attempt(lambda: me.target.ask(Target.fail, "on purpose")),
    "kill": _kill,
    "kill_told_before_restart": _kill_told_before_restart,
    "idempotent_kill": _idempotent_kill,
    "timeout": lambda me: attempt(lambda: me.target.within(0.1).ask(Target.wait_for, "never")),
    "inherit_deadline": _inherit_deadline,
    "stopped": _stopped,
    "stopped_with_many": _stopped_with_many,
    "gone": _gone,
    "finished": _finished,
    "tell_fails": _tell_fails,
    "overtaken": _overtaken,
    "set_aside_then_killed": _set_aside_then_killed,
    "deadlock": lambda me: attempt(lambda: me.relay.ask(Relay.ask_back, me.me)),
    "os_exit": lambda me: attempt(lambda: me.target.ask(Target.leave, "os")),
    "sys_exit": lambda me: attempt(lambda: me.target.ask(Target.leave, "sys")),
    "poison_ask": lambda me: [
        attempt(lambda: me.target.ask(Target.poison)),
        me.target.ask(Target.journal),
    ],
    "poison_tell": lambda me: [me.target.tell(Target.poison), me.target.ask(Target.journal)],
    "unpicklable": _unpicklable,
    "unpicklable_message": lambda me: [
        attempt(lambda: me.target.ask(Target.echo, threading.Lock())),
        me.target.ask(Target.echo, "next"),
    ],
    "give_up": lambda me: [me.target.tell(Target.give_up), me.target.ask(Target.wait_for, "never")],
    "each": lambda me: [me.relay.ask_each(Relay.hello), attempt(lambda: me.relay.ask(Relay.hello))],
    "full": _full,
    "many_threads": _many_threads,
}


@dataclass(frozen=True, kw_only=True)
class Config:
    scene: str
    target: Restart = Restart.TRANSIENT
    slow_restart: bool = False
    relays: int = 1


def build(config: Config) -> Graph:
    graph = Graph("talk")
    target = graph.add("target", Target, slow_restart=config.slow_restart)
    relay = graph.add("relay", Relay, target=target)
    caller = graph.add("caller", Caller, scene=config.scene, target=target, relay=relay)
    graph.place(target, restart=config.target)
    graph.place(relay, replicas=config.relays)
    graph.until(caller)
    return graph
