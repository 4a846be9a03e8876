"""Workers and trainers that know only HTTP and JSON: a whole run, a full buffer, two trainers of one step."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest
from rolecall.actors.tiny import BASE
from rolecall.runtime import proxy
from rolecall.runtime.remote import TOKEN_HEADER
from rolecall.runtime.tokens import change

from .commands import Command, proxy_url, until
from .processes import Run
from .test_recipes import check_ledger

WORKER = Path(__file__).parent / "workers" / "plain_worker.py"
TOKEN = "the-token"
SMALL = {"steps": 2, "batch": 4, "group_size": 2, "max_tokens": 8, "eval_problems": 8, "rollout_workers": 0}


def start_worker(url: str, token_file: Path, name: str = "plain") -> subprocess.Popen[str]:
    """Isolated: it can't import this package, nor anything that is not the standard library's."""
    command = [
        sys.executable,
        "-I",
        "-S",
        str(WORKER),
        url,
        str(token_file),
        str(BASE / "tokenizer.json"),
        name,
    ]
    return subprocess.Popen(command, stderr=subprocess.PIPE, text=True)


def ended(worker: subprocess.Popen[str]) -> tuple[int, str]:
    try:
        error = worker.communicate(timeout=60.0)[1]
    except subprocess.TimeoutExpired:
        worker.kill()
        raise
    return worker.returncode, error


@pytest.fixture
def token_file(tmp_path: Path) -> Path:
    path = tmp_path / "token"
    path.write_text(TOKEN + "\n")
    return path


@pytest.fixture
def scripted() -> Iterator[ThreadingHTTPServer]:
    """A run that answers what `script` says, in that order, and then that it has ended; `asked`: path and time."""

    class Handler(BaseHTTPRequestHandler):
        def answer(self) -> None:
            self.rfile.read(int(self.headers.get("Content-Length", 0)))
            server: Any = self.server
            server.asked.append((self.path, time.monotonic()))
            status, headers, body = server.script.pop(0) if server.script else (410, {}, b"{}")
            self.send_response(status)
            for name, value in {**headers, "Content-Length": str(len(body))}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(body)

        do_GET = do_POST = answer

        def log_message(self, format: str, *args: Any) -> None: ...

    server: Any = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.asked, server.script = [], []
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


def test_the_worker_comes_again_when_it_is_told_to(scripted: Any, token_file: Path):
    scripted.script = [
        (200, {}, b'{"config": {}}'),
        (429, {"Retry-After": "1"}, b""),
        (503, {"Retry-After": "0"}, b"{}"),
        (200, {}, b'{"fini'),
    ]
    worker = start_worker(f"http://127.0.0.1:{scripted.server_port}", token_file)
    assert ended(worker) == (0, "")
    paths, times = zip(*scripted.asked, strict=True)
    assert paths == ("/v1/run", *["/v1/prompts"] * 4)
    assert times[2] - times[1] >= 1.0


def test_the_worker_says_why_it_gives_up(scripted: Any, token_file: Path):
    scripted.script = [(401, {}, b'{"error": "wrong token"}')]
    code, error = ended(start_worker(f"http://127.0.0.1:{scripted.server_port}", token_file))
    assert (code, error) == (1, 'GET /v1/run: 401 {"error": "wrong token"}\n')


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_a_run_trains_on_what_a_plain_worker_samples(tmp_path: Path):
    settings = [word for name, value in SMALL.items() for word in ("--set", f"{name}={value}")]
    run = Command(["run", "async_grpo", *settings, "--proxy", "127.0.0.1:0"], tmp_path)
    try:
        folder = run.run_folder()
        workers = [start_worker(proxy_url(folder), folder / "token", name) for name in ("one", "two")]
        code, _, err = run.finish()
    finally:
        run.process.kill()
    assert code == 0, err
    assert [ended(worker) for worker in workers] == [(0, "")] * 2
    check_ledger(folder, steps=2, batch=4, max_staleness=2)


class Visitor:
    """A client of a run of graphs/rest.py, in a thread of its own."""

    def __init__(self, url: str, folder: Path, token_file: Path) -> None:
        self.url, self.folder, self.token_file = url, folder, token_file
        self.turns = 0
        with change(token_file.parent) as ring:
            _, trainer = ring.issue("trainer", None)
        self.client = httpx.Client(base_url=url, headers={TOKEN_HEADER: trainer}, timeout=30.0)

    def take(self, step: int, durable: int = 0) -> httpx.Response:
        query = [("step", step), ("groups", 2), ("version", 0), ("durable", durable)]
        # Of two that are alike only one would reach the buffer.
        self.turns += 1
        return self.client.get("/v1/batch", params=dict(query if self.turns % 2 else reversed(query)))

    def ids(self, step: int, durable: int = 0) -> list[int]:
        while (response := self.take(step, durable)).status_code == 429:
            pass
        return [group["prompt"]["id"] for group in response.raise_for_status().json()["groups"]]

    def fill(self) -> None:
        """Let a worker fill the buffer."""
        self.worker = start_worker(self.url, self.token_file)
        buffer = self.folder / "state" / "buffer"
        until(lambda: len(list(buffer.glob("*.group"))) == 2)


def visited(tmp_path: Path, token_file: Path, visit: Any) -> Any:
    """What `visit` returns for a Visitor."""
    with ThreadPoolExecutor(1) as pool:
        results = []

        def act(run: Run, kind: str, name: str, value: Any) -> None:
            if kind == "report" and "url" in value:
                visitor = Visitor(value["url"], tmp_path, token_file)
                results.append(pool.submit(go, run, visitor))

        def go(run: Run, visitor: Visitor) -> Any:
            try:
                return visit(visitor)
            finally:
                visitor.client.close()
                run.supervisor.stop()

        Run("rest", tmp_path, {"token_file": token_file}, act).go()
        return results[0].result()


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_a_full_buffer_makes_workers_wait_and_loses_nothing(tmp_path: Path, token_file: Path):
    def visit(here: Visitor) -> Any:
        here.fill()
        ids = here.ids(1)
        until(lambda: len(list((tmp_path / "state" / "buffer").glob("*.group"))) == 4)
        # Two wait and two are handed out, so the worker's next waits, and so does this one.
        batch = here.take(1).json()
        group = batch["groups"][0]
        group["prompt"]["id"] = 5
        began = time.monotonic()
        refused = here.client.post("/v1/groups", json={"group": group})
        waited = time.monotonic() - began
        ids += here.ids(2, durable=1) + here.ids(3, durable=2)
        here.client.close()
        return ids, refused, waited, here.worker

    ids, refused, waited, worker = visited(tmp_path, token_file, visit)
    assert sorted(ids) == list(range(6))
    assert refused.status_code == 429
    assert float(refused.headers["Retry-After"]) >= 0.0
    assert waited >= proxy.WAIT_S * 0.9
    assert ended(worker) == (0, "")  # it heard that the run has ended


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_two_trainers_of_one_step_get_the_same_groups(tmp_path: Path, token_file: Path):
    def visit(here: Visitor) -> Any:
        here.fill()
        with ThreadPoolExecutor(2) as rivals:
            first = list(rivals.map(here.ids, (1, 1)))
            second = list(rivals.map(here.ids, (2, 2)))
        again = here.ids(1)
        third = here.ids(3, durable=1)
        return first, second, again, third, here.take(1, durable=1), here.worker

    first, second, again, third, gone, worker = visited(tmp_path, token_file, visit)
    assert first[0] == first[1] == again
    assert second[0] == second[1]
    assert sorted(first[0] + second[0] + third) == list(range(6))  # nobody got another's
    assert gone.status_code == 500
    assert "the last step that was given groups is 3" in gone.text
    ended(worker)
