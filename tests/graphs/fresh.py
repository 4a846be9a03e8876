"""Actors that say what process they are: forked, or a fresh interpreter."""

from __future__ import annotations

import ctypes
import os
import signal
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from rolecall import Actor, Finished, Graph, Ref
from rolecall.actors.evaluator import Evaluator
from rolecall.actors.rollout import RolloutWorker
from rolecall.actors.trainer import Trainer
from rolecall.runtime.proxy import Proxy


class Forked(Actor):
    def __init__(self, double: Ref[Forked] | None = None) -> None:
        self.other = double

    def on_start(self) -> None:
        pdeathsig = ctypes.c_int()
        ctypes.CDLL(None).prctl(2, ctypes.byref(pdeathsig))  # PR_GET_PDEATHSIG
        self.report(
            command=Path("/proc/self/cmdline").read_text().split("\0")[:-1],
            parent=os.getppid(),
            leads_session=os.getsid(0) == os.getpid(),
            dies_with_parent=pdeathsig.value == signal.SIGKILL,
            ignores_sigint=signal.getsignal(signal.SIGINT) is signal.SIG_IGN,
            threads=threading.active_count(),
        )

    def double(self, number: int) -> int:
        return 2 * number


class Fresh(Forked):
    fork_safe: ClassVar[bool] = False
    preloads: ClassVar[tuple[str, ...]] = ("rolecall.no_such_module",)  # nobody need import it for this one


class Threaded(Forked):
    """The module is the test's: it must be found by PYTHONPATH."""

    preloads: ClassVar[tuple[str, ...]] = ("starts_threads",)


class Heavy(Forked):
    """With all that the recipes' actors have preloaded."""

    preloads: ClassVar[tuple[str, ...]] = tuple(
        dict.fromkeys((*RolloutWorker.preloads, *Trainer.preloads, *Evaluator.preloads, *Proxy.preloads))
    )


class Asker(Actor):
    def __init__(self, middle: Ref[Forked]) -> None:
        self.middle = middle

    def step(self) -> None:
        self.report(doubled=self.middle.ask(Forked.double, 21))
        raise Finished


@dataclass(frozen=True, kw_only=True)
class Config:
    kind: str = "Fresh"


def build(config: Config) -> Graph:
    kinds: dict[str, Any] = {"Fresh": Fresh, "Threaded": Threaded, "Heavy": Heavy}
    graph = Graph("fresh")
    graph.add("before", Forked)
    middle = graph.add("middle", kinds[config.kind])
    graph.add("after", Forked)
    graph.until(graph.add("asker", Asker, middle))
    return graph
