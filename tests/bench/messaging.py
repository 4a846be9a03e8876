"""Messages between two processes: ours against raw ZeroMQ (pickle 5, large buffers out of band), in one run.

    python -m tests.bench.messaging [--json] [--rounds 5] [--peers ray,xoscar,monarch --scripts FOLDER]

ask_p50_x     median round trip of a 32-byte ask, ours ÷ raw               goal ≤ 1.2
pipelined_x   asks/s with 1,000 in flight, ours ÷ raw                      goal ≥ 1.5
tell_x        tells/s until all are handled, ours ÷ raw                    goal ≥ 2
array64_x     a 64 MB array to an actor that touches every page, ours ÷ raw   goal ≥ 0.8
restart_s     seconds from SIGKILL to the first answer of the next incarnation   goal ≤ 0.1
spawn16_s     seconds until 16 actors have each answered a first ask       goal ≤ 0.6

Ours and raw take turns within each round; medians over the rounds. The raw actor is a bare loop without acks, dedupe
or supervision: the limit, not a peer. `--peers` runs the peers' own scripts, bench_<peer>.py in FOLDER, afterwards.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import pickle
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rolecall import Actor, Finished, Graph, Ref
from rolecall.runtime.supervisor import Supervisor

SMALL = b"x" * 32
ASKS, PIPELINED, IN_FLIGHT, TELLS, ARRAYS, ARRAY_BYTES = 1500, 10_000, 1000, 10_000, 4, 64_000_000
SPAWNED, RESTARTS = 16, 5


def touch(array: Any) -> int:
    """Read a byte of every page, so that a lazily mapped one is not free."""
    return sum(memoryview(array)[::4096])


def _array() -> Any:
    import numpy as np  # here, because every actor imports this file and most need no arrays

    return np.ones(ARRAY_BYTES, np.uint8)


class Echo(Actor):
    def echo(self, value: Any) -> Any:
        return value

    def drop(self, value: Any) -> None:
        pass

    def touch(self, array: Any) -> int:
        return touch(array)

    def pid(self) -> int:
        return os.getpid()


class Caller(Actor):
    """Runs the workloads in turns, ours and raw, and reports medians."""

    def __init__(self, echo: Ref[Echo], rounds: int) -> None:
        self.echo, self.rounds = echo, rounds

    def step(self) -> float | None:
        raw = Raw()
        ours: dict[str, Callable[[], float]] = {
            "ask": self._ask, "pipelined": self._pipelined, "tell": self._tell, "array64": self._array,
        }  # fmt: skip
        theirs = {"ask": raw.ask, "pipelined": raw.pipelined, "tell": raw.tell, "array64": raw.array}
        seen: dict[str, list[float]] = {f"{who} {what}": [] for who in ("ours", "raw") for what in ours}
        for number in range(self.rounds + 1):
            for what in ours:
                for who, work in (("ours", ours[what]), ("raw", theirs[what])):
                    value = work()
                    if number:  # the first round warms up
                        seen[f"{who} {what}"].append(value)
        raw.stop()
        self.report(
            **{name: statistics.median(values) for name, values in seen.items()}, restart=self._restart()
        )
        raise Finished

    def _ask(self) -> float:
        times = []
        for _ in range(ASKS):
            began = time.perf_counter()
            self.echo.ask(Echo.echo, SMALL)
            times.append(time.perf_counter() - began)
        return statistics.median(times)

    def _pipelined(self) -> float:
        began = time.perf_counter()
        for _ in range(PIPELINED // IN_FLIGHT):
            for answer in [self.echo.ask_soon(Echo.echo, SMALL) for _ in range(IN_FLIGHT)]:
                answer.result()
        return PIPELINED / (time.perf_counter() - began)

    def _tell(self) -> float:
        began = time.perf_counter()
        for _ in range(TELLS):
            self.echo.tell(Echo.drop, SMALL)
        self.echo.ask(Echo.pid)
        return TELLS / (time.perf_counter() - began)

    def _array(self) -> float:
        array = _array()
        began = time.perf_counter()
        for _ in range(ARRAYS):
            self.echo.ask(Echo.touch, array)
        return ARRAYS * ARRAY_BYTES / (time.perf_counter() - began)

    def _restart(self) -> float:
        times = []
        for _ in range(RESTARTS):
            pid = self.echo.ask(Echo.pid)
            began = time.perf_counter()
            os.kill(pid, signal.SIGKILL)
            while self.echo.ask(Echo.pid) == pid:  # the kill may come a moment after an answer
                pass
            times.append(time.perf_counter() - began)
        return statistics.median(times)


class Raw:
    """A DEALER and, in a fresh process, a ROUTER that answers: no more than pickle and ZeroMQ."""

    def __init__(self) -> None:
        import zmq

        self.folder = tempfile.TemporaryDirectory(prefix="raw-")
        address = f"ipc://{self.folder.name}/echo"
        self.process = subprocess.Popen([sys.executable, __file__, "--raw-actor", address])
        self.context = zmq.Context()
        self.socket = _raw_socket(self.context, zmq.DEALER)
        self.socket.connect(address)
        self._send("echo", SMALL)
        self._receive()

    def ask(self) -> float:
        times = []
        for _ in range(ASKS):
            began = time.perf_counter()
            self._send("echo", SMALL)
            self._receive()
            times.append(time.perf_counter() - began)
        return statistics.median(times)

    def pipelined(self) -> float:
        began = time.perf_counter()
        for _ in range(PIPELINED // IN_FLIGHT):
            for _ in range(IN_FLIGHT):
                self._send("echo", SMALL)
            for _ in range(IN_FLIGHT):
                self._receive()
        return PIPELINED / (time.perf_counter() - began)

    def tell(self) -> float:
        began = time.perf_counter()
        for _ in range(TELLS):
            self._send("drop", SMALL)
        self._send("echo", SMALL)
        self._receive()
        return TELLS / (time.perf_counter() - began)

    def array(self) -> float:
        array = _array()
        began = time.perf_counter()
        for _ in range(ARRAYS):
            self._send("touch", array)
            self._receive()
        return ARRAYS * ARRAY_BYTES / (time.perf_counter() - began)

    def stop(self) -> None:
        self.process.kill()
        self.process.wait()
        self.context.destroy(linger=0)
        self.folder.cleanup()

    def _send(self, method: str, value: Any) -> None:
        self.socket.send_multipart(_dumps((method, value)), copy=False)

    def _receive(self) -> Any:
        return _loads(self.socket.recv_multipart(copy=False))


def _raw_socket(context: Any, kind: int) -> Any:
    import zmq

    socket = context.socket(kind)
    for option in (zmq.SNDHWM, zmq.RCVHWM, zmq.LINGER):
        socket.setsockopt(option, 0)
    return socket


def _dumps(value: Any) -> list[Any]:
    buffers: list[pickle.PickleBuffer] = []
    return [pickle.dumps(value, 5, buffer_callback=buffers.append), *(buffer.raw() for buffer in buffers)]


def _loads(frames: list[Any]) -> Any:
    return pickle.loads(frames[0].buffer, buffers=[frame.buffer for frame in frames[1:]])


def _raw_actor(address: str) -> None:
    import zmq

    socket = _raw_socket(zmq.Context(), zmq.ROUTER)
    socket.bind(address)
    while True:
        sender, *frames = socket.recv_multipart(copy=False)
        method, value = _loads(frames)
        if method != "drop":
            socket.send_multipart(
                [sender.bytes, *_dumps(touch(value) if method == "touch" else value)], copy=False
            )


@dataclass(frozen=True, kw_only=True)
class Config:
    rounds: int = 5
    spawn: bool = False


def build(config: Config) -> Graph:
    graph = Graph("messaging", max_restarts=100, within_s=0.001)  # each death is a first one: no back-off
    echo = graph.add("echo", Echo)
    if config.spawn:
        graph.place(echo, replicas=SPAWNED)
        graph.until(graph.add("first_asker", FirstAsker, echo=echo))
    else:
        graph.until(graph.add("caller", Caller, echo=echo, rounds=config.rounds))
    return graph


class FirstAsker(Actor):
    def __init__(self, echo: Ref[Echo]) -> None:
        self.echo = echo

    def step(self) -> float | None:
        self.report(answered=len(self.echo.ask_each(Echo.pid)))
        raise Finished


class _Reports:
    """An Observer that keeps what was reported, and when the first actor was asked for."""

    def __init__(self) -> None:
        self.values: dict[str, Any] = {}
        self.first_up = self.answered = 0.0

    def on_report(self, name: str, values: dict[str, Any]) -> None:
        self.values |= values
        self.answered = time.perf_counter()

    def on_state(self, name: str, state: str) -> None:
        pass

    def on_death(self, name: str, reason: str, restart_in_s: float | None) -> None:
        pass

    def on_dead_letter(self, receiver: str, method: str, reason: str) -> None:
        pass


def _run(config: Config) -> tuple[_Reports, float]:
    """What was reported, and the seconds from the start of the run to the last report."""
    from rolecall.runtime.recipe import load_recipe

    recipe = load_recipe(str(Path(__file__).resolve()))
    reports = _Reports()
    with tempfile.TemporaryDirectory() as folder:
        began = time.perf_counter()
        graph = recipe.build(recipe.Config(rounds=config.rounds, spawn=config.spawn))
        outcome = Supervisor(graph, "messaging", Path(folder), str(Path(__file__).resolve()), reports).run()
        assert outcome.exit_code == 0, outcome.story
    return reports, reports.answered - began


def _peer(name: str, scripts: Path, raw: dict[str, float]) -> dict[str, Any]:
    """The same ratios for a peer, by its own script; `raw` is what the bare loop needed in this run."""
    only = "latency,pipeline,tell,payload,recover"  # 16 of their processes take minutes
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out.json"
        command = [sys.executable, str(scripts / f"bench_{name}.py"), "--only", only, "--out", str(out)]
        done = subprocess.run(command, capture_output=True, text=True, cwd=scripts)
        if not out.exists():
            return {"error": done.stderr[-500:]}
        metrics = json.loads(out.read_text())["metrics"]
    found = {
        "ask_p50_x": metrics.get("lat_p50_us", math.nan) / 1e6 / raw["raw ask"],
        "pipelined_x": metrics.get("pipe_calls_s", math.nan) / raw["raw pipelined"],
        "tell_x": metrics.get("tell_msgs_s", math.nan) / raw["raw tell"],
        "array64_x": metrics.get("numpy_64MB_MBs", math.nan) * 1e6 / raw["raw array64"],
        "restart_s": metrics.get("recover_s", math.nan),
    }
    return {key: round(value, 3) for key, value in found.items() if not math.isnan(value)}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--peers", default="")
    parser.add_argument("--scripts", type=Path)
    options = parser.parse_args()
    values = _run(Config(rounds=options.rounds))[0].values
    result: dict[str, Any] = {
        "ask_p50_x": values["ours ask"] / values["raw ask"],
        **{
            f"{what}_x": values[f"ours {what}"] / values[f"raw {what}"]
            for what in ("pipelined", "tell", "array64")
        },
        "restart_s": values["restart"],
        "spawn16_s": statistics.median(_run(Config(spawn=True))[1] for _ in range(3)),
    }
    result = {name: round(value, 3) for name, value in result.items()}
    result["peers"] = {
        name: _peer(name, options.scripts, values) for name in options.peers.split(",") if name
    }
    if options.json:
        print(json.dumps({**result, "raw_ask_us": round(values["raw ask"] * 1e6, 1)}))
    else:
        for name, value in result.items():
            print(f"{name:<12} {value}")


if __name__ == "__main__":
    if "--raw-actor" in sys.argv:
        _raw_actor(sys.argv[-1])
    else:
        main()
