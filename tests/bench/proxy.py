"""The proxy's REST face: groups in and out through its real process, beside a bare echo of the same bytes, in one run.

    python -m tests.bench.proxy [--json] [--groups 4000] [--hour 20000]

echo_x            groups/s into the run ÷ requests/s of a bare Starlette echo, 100 workers   goal ≥ 0.5
p99_ms            of POST /v1/groups, 100 workers that never pause
rss_flat          the proxy's memory after an hour's worth of groups ÷ before them           goal ≤ 1.1
cpu_ms_per_group  the proxy's CPU time, with 1, 100 and 1,000 workers                        goal: the same

`alone` has a sink that only counts behind the proxy: it is what the proxy costs. `buffer` has the run's real Buffer,
which writes each group to disk, and a trainer that takes them out again over HTTP meanwhile, in batches of 64. The
echo has the proxy's server settings and answers with the body. Workers are connections of one process with a group
under way on each.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import random
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar
from urllib.parse import urlsplit

import msgspec
from rolecall import Actor, Graph, idempotent
from rolecall.actors.buffer import Buffer
from rolecall.actors.types import Completion, Group, Prompt
from rolecall.runtime.gate import impatient_protocol
from rolecall.runtime.proxy import IDLE_S, MAX_CONNECTIONS, add_proxy
from rolecall.runtime.recipe import load_recipe
from rolecall.runtime.ref import Ref
from rolecall.runtime.remote import TOKEN_HEADER
from rolecall.runtime.store import Store
from rolecall.runtime.supervisor import Supervisor
from rolecall.runtime.tokens import change, prepare

WORKERS = (1, 100, 1000)
BATCH, CAPACITY = 64, 4096
TICKS = os.sysconf("SC_CLK_TCK")


class Sink(Actor):
    """Counts groups."""

    http: ClassVar = {"POST /v1/groups": "put"}

    def on_start(self) -> None:
        self.count = 0

    @idempotent
    def put(self, group: Group) -> str:
        self.count += 1
        return "accepted"


class Publisher(Actor):
    """Publishes the version that all groups are of, and says its digest."""

    def __init__(self, weights: Store) -> None:
        self.weights = weights

    def on_start(self) -> None:
        store = self.weights.open(self.context.run, self.context.folder)
        files = {"adapter.bin": b"weights"}
        self.report(digest=store.publish(files, version=0, step=0, epoch=store.take_epoch()).digest)

    def lent_under(self, version: int) -> list[int]:
        """As of a PromptSource that lends nothing: the buffer waits for nobody."""
        return []


@dataclass(frozen=True, kw_only=True)
class Config:
    token_file: str
    buffer: bool


def build(config: Config) -> Graph:
    graph, weights = Graph("bench"), Store()
    publisher = graph.add("publisher", Publisher, weights=weights)
    if config.buffer:
        prompts: Ref[Any] = Ref(publisher.name)  # which it asks whom to wait for
        graph.add("buffer", Buffer, capacity=CAPACITY, max_staleness=0, prompts=prompts, weights=weights)
    else:
        graph.add("sink", Sink)
    add_proxy(graph, host="127.0.0.1", port=0, token_file=Path(config.token_file), about={})
    return graph


class Observer:
    """Waits for what the clients need to know."""

    def __init__(self) -> None:
        self.known: dict[str, Any] = {}
        self.changed = threading.Condition()

    def on_report(self, name: str, values: dict[str, Any]) -> None:
        with self.changed:
            self.known |= values
            self.changed.notify_all()

    def on_state(self, name: str, state: str) -> None:
        with self.changed:
            self.known[name] = state
            self.changed.notify_all()

    def on_death(self, name: str, reason: str, restart_in_s: float | None) -> None:
        print(f"{name} died: {reason}", file=sys.stderr)

    def on_dead_letter(self, receiver: str, method: str, reason: str) -> None: ...

    def wait_for(self, *names: str) -> list[Any]:
        with self.changed:
            if not self.changed.wait_for(lambda: set(names) <= self.known.keys(), timeout=60.0):
                raise TimeoutError(f"only {self.known} of {names} after 60 s")
            return [self.known[name] for name in names]


def group(id: int, digest: str) -> bytes:
    """The body of one POST /v1/groups: 4 completions of 64 tokens, 8 KB."""
    rng = random.Random(id)
    completions = [
        Completion(
            ids=[rng.randrange(50_000) for _ in range(64)],
            logprobs=[-rng.random() for _ in range(64)],
            versions=[0] * 64,
            finish_reason="stop",
            text="x" * 200,
            reward=rng.random(),
        )
        for _ in range(4)
    ]
    prompt = Prompt(id=id, text="y" * 100, answer="1")
    whole = Group(
        prompt=prompt, prompt_ids=[1] * 32, completions=completions, digests={0: digest}, worker="bench"
    )
    return msgspec.json.encode({"group": whole})


class Connection(asyncio.Protocol):
    """One worker: a request under way at a time."""

    def __init__(self) -> None:
        self.heard, self.missing = b"", 0
        self.answer: asyncio.Future[tuple[int, bytes]] | None = None

    def connection_made(self, transport: Any) -> None:
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        self.heard += data
        head, _, body = self.heard.partition(b"\r\n\r\n")
        length = int(head.lower().partition(b"content-length:")[2].split(b"\r", 1)[0] or 0)
        if b"\r\n\r\n" in self.heard and len(body) >= length and self.answer is not None:
            self.heard = b""
            self.answer.set_result((int(head[9:12]), body))

    async def ask(self, request: bytes) -> tuple[int, bytes]:
        self.answer = asyncio.get_running_loop().create_future()
        self.transport.write(request)
        return await self.answer

    @staticmethod
    async def open(url: str) -> Connection:
        where = urlsplit(url)
        loop = asyncio.get_running_loop()
        return (await loop.create_connection(Connection, str(where.hostname), where.port or 80))[1]


tokens = list[str]()  # of the run that is measured, the last


def request(verb: str, path: str, body: bytes = b"") -> bytes:
    token, size = f"{TOKEN_HEADER}: {tokens[-1]}", f"Content-Length: {len(body)}"
    head = f"{verb} {path} HTTP/1.1\r\nHost: bench\r\n{token}\r\n{size}\r\n\r\n"
    return head.encode() + body


@dataclass(frozen=True)
class Measured:
    per_s: float
    p99_ms: float
    cpu_ms: float
    rss_mb: float


async def load(url: str, pid: int, workers: int, bodies: list[bytes]) -> Measured:
    """All of these groups, from so many workers."""
    requests = [request("POST", "/v1/groups", body) for body in bodies]
    connections = [await Connection.open(url) for _ in range(workers)]
    for connection in connections[:8]:
        await connection.ask(request("GET", "/healthz"))
    took: list[float] = []

    async def work(connection: Connection) -> None:
        while requests:
            mine = requests.pop()
            began = time.perf_counter()
            while (status := (await connection.ask(mine))[0]) == 429:
                pass
            if status != 200:
                raise RuntimeError(f"a group was answered with {status}")
            took.append(time.perf_counter() - began)

    cpu, began = cpu_s(pid), time.perf_counter()
    await asyncio.gather(*map(work, connections))
    wall, cpu = time.perf_counter() - began, cpu_s(pid) - cpu
    rss = rss_mb(pid)
    for connection in connections:
        connection.transport.close()
    count = len(bodies)
    p99 = statistics.quantiles(took, n=100)[98] * 1e3
    return Measured(count / wall, p99, cpu / count * 1e3, rss)


async def drain(url: str, groups: int) -> None:
    """The trainer: takes these groups out, batch by batch."""
    connection = await Connection.open(url)
    for step in range(1, groups // BATCH + 1):
        query = f"step={step}&groups={BATCH}&version=0&durable={step - 1}"
        while (answer := await connection.ask(request("GET", f"/v1/batch?{query}")))[0] == 429:
            pass
        if answer[0] != 200:
            raise RuntimeError(f"a batch was answered with {answer}")
    connection.transport.close()


def cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS


def rss_mb(pid: int) -> float:
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.partition("VmRSS:")[2].split()[0]) / 1024


def serve_echo(url: Any) -> None:
    """A process of its own: the bare server."""
    import socket

    import uvicorn
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import Response
    from starlette.routing import Route

    async def echo(request: Request) -> Response:
        return Response(await request.body(), media_type="application/json")

    listener = socket.create_server(("127.0.0.1", 0), backlog=2048)
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    url.send(f"http://127.0.0.1:{listener.getsockname()[1]}")
    routes = [Route("/v1/groups", echo, methods=["POST"]), Route("/healthz", echo)]
    config = uvicorn.Config(
        Starlette(routes=routes), http=impatient_protocol(), log_level="warning", access_log=False,
        limit_concurrency=MAX_CONNECTIONS, timeout_keep_alive=IDLE_S,
    )  # fmt: skip
    uvicorn.Server(config).run([listener])


def with_run(buffer: bool, measure: Callable[[str, int, str], Awaitable[Any]]) -> Any:
    """What `measure` gives for (url, the proxy's pid, the digest) of a run."""
    file = str(Path(__file__).resolve())
    recipe = load_recipe(file)  # as the children will: its classes are not this module's own
    with tempfile.TemporaryDirectory() as folder:
        token_file = Path(folder) / "token"
        prepare(token_file, "run")
        with change(Path(folder)) as ring:
            tokens.append(ring.issue("trainer", None)[1])
        observer = Observer()
        graph = recipe.build(recipe.Config(token_file=str(token_file), buffer=buffer))
        supervisor = Supervisor(graph, "run", Path(folder), file, observer)
        results: list[Any] = []

        def clients() -> None:
            try:
                url, digest, _ = observer.wait_for("url", "digest", "proxy")
                pid = next(child.pid for child in supervisor.children if child.name == "proxy")
                results.append(asyncio.run(measure(url, pid, digest)))  # type: ignore[arg-type]
            finally:
                supervisor.stop()

        thread = threading.Thread(target=clients)
        thread.start()
        supervisor.run()
        thread.join()
        return results[0]


def measure(groups: int, hour: int) -> dict[str, Any]:
    here, there = multiprocessing.Pipe()
    echo = multiprocessing.get_context("spawn").Process(target=serve_echo, args=(there,), daemon=True)
    echo.start()
    echo_url, result = here.recv(), dict[str, Any]()

    async def alone(url: str, pid: int, digest: str) -> None:
        bodies = [group(id, digest) for id in range(groups)]
        await load(url, pid, 1, bodies[:200])  # warm
        await load(echo_url, echo.pid or 0, 1, bodies[:200])
        result["alone"], result["echo"] = {}, {}
        for workers in WORKERS:
            some = bodies if workers > 1 else bodies[: groups // 4]
            result["alone"][workers] = await load(url, pid, workers, some)
            result["echo"][workers] = await load(echo_url, echo.pid or 0, workers, some)
        before = rss_mb(pid)
        for _ in range(hour // groups):
            await load(url, pid, 100, bodies)
        result["rss_mb"] = before, rss_mb(pid)

    async def buffered(url: str, pid: int, digest: str) -> None:
        bodies = [group(id, digest) for id in range(groups // BATCH * BATCH)]
        draining = asyncio.create_task(drain(url, len(bodies)))
        result["buffer"] = {100: await load(url, pid, 100, bodies)}
        await draining

    with_run(False, alone)
    with_run(True, buffered)
    echo.terminate()
    return summary(result)


def summary(result: dict[str, Any]) -> dict[str, Any]:
    alone, echo, buffer = result["alone"], result["echo"], result["buffer"]
    before, after = result["rss_mb"]
    rounded = {
        name: {
            workers: {key: round(value, 2) for key, value in msgspec.to_builtins(measured).items()}
            for workers, measured in measurements.items()
        }
        for name, measurements in (("alone", alone), ("echo", echo), ("buffer", buffer))
    }
    return {
        "echo_x": round(alone[100].per_s / echo[100].per_s, 3),
        "p99_ms": round(alone[100].p99_ms, 2),
        "rss_flat": round(after / before, 3),
        "cpu_ms_per_group": {workers: round(measured.cpu_ms, 3) for workers, measured in alone.items()},
        **rounded,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--groups", type=int, default=4000)
    parser.add_argument("--hour", type=int, default=20_000)
    options = parser.parse_args()
    result = measure(options.groups, options.hour)
    if options.json:
        print(json.dumps(result))
        return
    for name, value in result.items():
        print(f"{name:18} {value}")


if __name__ == "__main__":
    main()
