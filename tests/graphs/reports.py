"""Graphs in which what other runtimes were reported to do wrong with messages would happen again."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rolecall import Actor, ActorDied, DeadlockError, Finished, Graph, NotYet, Ref, Restart, idempotent
from rolecall.runtime.ref import Answer


class Callee(Actor):
    """Is asked; hangs, dies and starts slowly as it is told. Its journal outlives it.

    slow_restart: all starts but the first wait at the gate. start_deaths: so many starts after the first die.
    """

    def __init__(self, slow_restart: bool, start_deaths: int) -> None:
        self.slow_restart, self.start_deaths = slow_restart, start_deaths

    def on_start(self) -> None:
        self._journal = self.state_folder / "journal"
        self._write("starting")
        starts = self.journal().count("starting")
        if 1 < starts <= 1 + self.start_deaths:
            os._exit(7)
        if self.slow_restart and starts > 1:
            self.wait_at_gate()
        self._write("ready")

    def _write(self, line: str) -> None:
        with self._journal.open("a") as file:
            file.write(line + "\n")

    def _first(self, what: str) -> bool:
        marker = self.state_folder / what
        first = not marker.exists()
        marker.touch()
        return first

    def journal(self) -> list[str]:
        return self._journal.read_text().split()

    def wait_at_gate(self) -> None:
        """Until somebody opens its other end."""
        gate_of(self.context.folder).open().read()

    def note(self, line: str) -> str:
        self._write(line)
        return line

    def hang_first(self, line: str) -> str:
        """The first of all, over all incarnations, hangs."""
        if self._first("hung"):
            self.report(hanging=True)
            signal.pause()
        return self.note(line)

    @idempotent
    def hang_once(self) -> str:
        return self.hang_first("after all")

    def note_and_die_once(self, line: str) -> str:
        self._write(line)
        if line in ("0:60", "1:120", "2:180") and self._first(line):
            os.kill(os.getpid(), signal.SIGKILL)
        return line

    def work(self, line: str) -> None:
        self._write(line)
        self.wait_at_gate()

    @idempotent
    def work_idempotent(self, line: str) -> None:
        self.work(line)

    def never(self) -> None:
        raise NotYet

    def finish_at_gate(self) -> None:
        self.wait_at_gate()
        raise Finished

    def die(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def who(self) -> tuple[int, int]:
        """Incarnation and pid."""
        return self.context.incarnation, os.getpid()


class Stranger(Actor):
    """Has not asked anybody before it is asked itself."""

    def __init__(self, callee: Ref[Callee]) -> None:
        self.callee = callee

    def who(self) -> tuple[int, int]:
        return self.callee.ask(Callee.who)


class Asker(Actor):
    def __init__(self, scene: str) -> None:
        self.scene = scene
        self.callee, self.stranger = Ref[Callee]("callee"), Ref[Stranger]("stranger")

    def step(self) -> float | None:
        self.report(result=ASKING[self.scene](self))
        raise Finished


def gate_of(folder: Path) -> Path:
    return folder / "gate"


def ending(answer: Answer[Any]) -> Any:
    """What it returns, or the name of what it raises; of an ActorDied whether it may have been executed."""
    try:
        return answer.result()
    except ActorDied as error:
        return f"ActorDied {error.maybe_executed}"
    except Exception as error:  # noqa: BLE001  whatever it is, the test is told
        return type(error).__name__


def _in_flight(me: Asker) -> list[str]:
    """1,000 asks of four threads have gone out before the first answer is waited for."""
    message = {"in_flight": Callee.hang_first, "in_flight_deaths": Callee.note_and_die_once}[me.scene]
    everybody, endings = threading.Barrier(5), list[str]()

    def ask_many(thread: int) -> None:
        answers = [me.callee.ask_soon(message, f"{thread}:{number}") for number in range(250)]
        everybody.wait()
        endings.extend([ending(answer) for answer in answers])

    threads = [threading.Thread(target=ask_many, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    everybody.wait()
    me.report(flying=True)
    for thread in threads:
        thread.join()
    return endings


def _slow_restart(me: Asker) -> Any:
    me.callee.tell(Callee.note, "before")
    died = ending(me.callee.ask_soon(Callee.die))
    for number in range(20):
        me.callee.tell(Callee.note, f"told-{number}")
    answers = [me.callee.ask_soon(Callee.note, f"asked-{number}") for number in range(20)]
    with gate_of(me.context.folder).open("w"):  # once the restarted one waits there
        early = [answer.done for answer in answers]
    return [died, any(early), [ending(answer) for answer in answers], me.callee.ask(Callee.journal)]


def _queued(me: Asker) -> Any:
    """The callee ends with a hundred asks: some it has set aside, some it has not seen."""
    answers = [me.callee.ask_soon(Callee.never) for _ in range(50)]
    if me.scene == "queued_at_stop":
        answers += [me.callee.ask_soon(Callee.never) for _ in range(50)]
        me.callee.ask(Callee.note, "all before this were set aside")
        me.report(asking=True)
    else:
        answers.append(me.callee.ask_soon(Callee.finish_at_gate))
        answers += [me.callee.ask_soon(Callee.never) for _ in range(49)]
        gate_of(me.context.folder).open("w").close()
    return [ending(answer) for answer in answers]


def _names(me: Asker) -> Any:
    """Who answers after each death, whether it died of a message or was killed a moment ago."""
    seen = [me.callee.ask(Callee.who)]
    for number in range(6):
        if number % 2:
            ending(me.callee.ask_soon(Callee.die))
        else:
            os.kill(seen[-1][1], signal.SIGKILL)
        seen.append(me.callee.ask(Callee.who))
    return [seen, me.stranger.ask(Stranger.who)]


def _long_work(me: Asker) -> Any:
    endings = []
    for message in (Callee.work, Callee.work_idempotent):
        endings.append(ending(me.callee.within(0.5).ask_soon(message, message.__name__)))
        gate_of(me.context.folder).open("w").close()
    return [endings, me.callee.ask(Callee.journal)]


def _gone(me: Asker) -> Any:
    died = ending(me.callee.ask_soon(Callee.die))
    began = time.monotonic()
    endings = [ending(me.callee.ask_soon(Callee.who)) for _ in range(5)]
    return [died, endings, time.monotonic() - began]


ASKING: dict[str, Callable[[Asker], Any]] = {
    "in_flight": _in_flight,
    "in_flight_deaths": _in_flight,
    "slow_restart": _slow_restart,
    "spared_retries": lambda me: ending(me.callee.ask_soon(Callee.hang_once)),
    "queued_at_finish": _queued,
    "queued_at_stop": _queued,
    "names": _names,
    "gone": _gone,
    "long_work": _long_work,
}


class Stillborn(Actor):
    """Can't be constructed while the file is there."""

    def __init__(self, marker: str) -> None:
        if Path(marker).exists():
            raise ValueError("not constructed")
        self.marker = marker

    def die(self) -> None:
        Path(self.marker).touch()
        os.kill(os.getpid(), signal.SIGKILL)

    def hello(self) -> str:
        return "hello"


class Midwife(Actor):
    def __init__(self, child: Ref[Stillborn], kills: bool) -> None:
        self.child, self.kills = child, kills

    def step(self) -> float | None:
        asked = [self.child.ask_soon(Stillborn.die)] if self.kills else []
        answers = [*asked, self.child.ask_soon(Stillborn.hello), self.child.ask_soon(Stillborn.hello)]
        self.report(endings=[ending(answer) for answer in answers])
        raise Finished


class Link(Actor):
    """Asks along a path of names; the first one walks all the paths it is given."""

    def __init__(self, paths: list[list[str]]) -> None:
        self.paths, self.greeted = paths, False

    def step(self) -> float | None:
        for path in self.paths:
            for soon in (False, True):
                self.report(path=path, soon=soon, circle=self.walk(path, soon))
        if self.paths:
            Ref[Link]("b").ask(Link.tell_on)
        return None

    def walk(self, path: list[str], soon: bool) -> str:
        try:
            if soon:
                return Ref[Link](path[0]).ask_soon(Link.go_on, path[1:], soon).result()
            return Ref[Link](path[0]).ask(Link.go_on, path[1:], soon)
        except DeadlockError as error:
            return str(error).partition(":")[0]

    def go_on(self, path: list[str], soon: bool) -> str:
        return self.walk(path, soon) if path else "the end"

    def tell_on(self) -> None:
        Ref[Link]("c").tell(Link.ask_the_first)

    def ask_the_first(self) -> None:
        self.report(back=self.walk(["a"], soon=False))


@dataclass(frozen=True, kw_only=True)
class Config:
    scene: str
    restart: Restart = Restart.TRANSIENT
    max_restarts: int = 5
    slow_restart: bool = False
    start_deaths: int = 0
    marker: str = ""
    kills: bool = False


PATHS = [["a"], ["b", "a"], ["b", "b"], ["b", "c", "d", "a"], ["b", "c", "d", "c"], ["b", "c", "d"]]


def build(config: Config) -> Graph:
    graph = Graph("reports", max_restarts=config.max_restarts)
    if config.scene == "circles":
        for name in "dcba":
            graph.add(name, Link, PATHS if name == "a" else [])
    elif config.scene == "stillborn":
        child = graph.add("child", Stillborn, config.marker)
        graph.place(child, restart=config.restart)
        graph.until(graph.add("midwife", Midwife, child, kills=config.kills))
    elif config.scene == "queued_at_stop":
        asker = graph.add("asker", Asker, config.scene)
        graph.add("callee", Callee, config.slow_restart, config.start_deaths)  # added last, stopped first
        graph.until(asker)
    else:
        callee = graph.add("callee", Callee, config.slow_restart, config.start_deaths)
        graph.place(callee, restart=config.restart)
        graph.add("stranger", Stranger, callee)
        graph.until(graph.add("asker", Asker, config.scene))
    return graph
