"""A stand-in for Hugging Face's Jobs: the part of its HTTP API that a launch uses, and the gateway to exposed ports.

The real client talks to it by HF_ENDPOINT. Jobs are processes of this machine in folders of their own, or, with
`processes=False`, only records whose stage a test sets. The shape of each answer is that of
huggingface_hub's JobInfo.
"""

from __future__ import annotations

import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx
import uvicorn
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

USER = "ann"
PAGE = 3  # jobs a page: so few that a list has several
FLAVORS = {"cpu-basic": 0.01, "l4x1": 0.8, "l4x4": 3.8, "a100-large": 2.5}  # $/h, given by the minute
GPUS = {"l4x1": 1, "l4x4": 4, "a100-large": 1}
LIVE = ("SCHEDULING", "RUNNING")


@dataclass
class HubJob:
    """spec: the body of the request that started it. port: where its exposed one is on this machine."""

    id: str
    spec: dict[str, Any]
    folder: Path
    stage: str = "SCHEDULING"
    message: str | None = None
    began: float = field(default_factory=time.time)
    ended: float | None = None
    port: int = 0
    process: subprocess.Popen[bytes] | None = None

    @property
    def role(self) -> str:
        return self.spec["labels"]["role"]

    def look(self) -> None:
        """Note what has become of its process."""
        if self.process is None or self.stage not in LIVE:
            return
        code = self.process.poll()
        if code is None:
            self.stage = "RUNNING"
            if time.time() - self.began > self.spec["timeoutSeconds"]:
                self._signal(signal.SIGKILL)
                self.end("ERROR", "Job timeout")
        else:
            self.end(
                "ERROR" if code else "COMPLETED",
                f"exit code {code if code > 0 else 128 - code}" if code else None,
            )

    def end(self, stage: str, message: str | None = None) -> None:
        self.stage, self.message, self.ended = stage, message, time.time()

    def kill(self) -> None:
        """As a machine that is taken away: no process of it gets to say anything."""
        self._signal(signal.SIGKILL)
        assert self.process is not None
        self.process.wait()

    def cancel(self) -> None:
        if self.process is not None:
            self._signal(signal.SIGTERM)
            try:
                self.process.wait(20)
            except subprocess.TimeoutExpired:
                self._signal(signal.SIGKILL)
                self.process.wait()
        self.end("CANCELED")

    def _signal(self, number: int) -> None:
        assert self.process is not None
        try:
            os.killpg(self.process.pid, number)
        except ProcessLookupError:
            return


class Hub:
    """The platform. `with Hub(folder) as hub:` serves it on loopback.

    asked: every request, as (method, path, body). fail: statuses for the next requests of the API, e.g. 503.
    """

    def __init__(self, folder: Path, *, processes: bool = True) -> None:
        self.folder, self.processes = folder, processes
        self.token = f"hf_{secrets.token_hex(16)}"
        self.reader = f"hf_{secrets.token_hex(16)}"  # a token that may only read: for the gateway
        self.jobs: dict[str, HubJob] = {}
        self.asked: list[tuple[str, str, bytes]] = []
        self.fail: list[int] = []
        self.lag: set[str] = set()  # jobs that the list does not have yet
        self.lost_answers = 0  # so many jobs are started of which the client does not hear
        self.asleep = False  # the door of a record's trainer does not answer
        self._changed = threading.Condition()

    def __enter__(self) -> Hub:
        listener = socket.create_server(("127.0.0.1", 0))
        listener.setsockopt(
            socket.IPPROTO_TCP, socket.TCP_NODELAY, 1
        )  # else each answer's body is 40 ms late
        self.endpoint = f"http://127.0.0.1:{listener.getsockname()[1]}"
        config = uvicorn.Config(self._app(), log_level="error", lifespan="off")
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._server.run, args=([listener],))
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        for job in self.jobs.values():
            if job.process is not None and job.process.poll() is None:
                job.kill()
        self._server.should_exit = True
        self._thread.join()

    def environment(self) -> dict[str, str]:
        return {"HF_ENDPOINT": self.endpoint, "HF_TOKEN": self.token, "HF_HUB_DISABLE_TELEMETRY": "1"}

    def of(self, role: str) -> list[HubJob]:
        return [job for job in self.jobs.values() if job.role == role]

    def wait_for(self, role: str, timeout_s: float = 60.0) -> HubJob:
        """The first job of this role, as soon as there is one."""
        with self._changed:
            assert self._changed.wait_for(lambda: self.of(role), timeout_s), f"no {role} was started"
            return self.of(role)[0]

    def live(self) -> list[str]:
        for job in self.jobs.values():
            job.look()
        return [job.role for job in self.jobs.values() if job.stage in LIVE]

    # --- the API -----------------------------------------------------------------------------------------

    def _app(self) -> Starlette:
        base = f"/api/jobs/{USER}"
        return Starlette(
            routes=[
                Route("/api/whoami-v2", self._api(lambda request: {"name": USER, "type": "user"})),
                Route("/api/jobs/hardware", self._api(lambda request: _hardware())),
                Route(base, self._api(self._start), methods=["POST"]),
                Route(base, self._api(self._list)),
                Route(f"{base}/{{id}}", self._api(self._inspect)),
                Route(f"{base}/{{id}}/cancel", self._api(self._cancel), methods=["POST"]),
                Route(f"{base}/{{id}}/logs", self._api(self._logs)),
                Route("/gateway/{to}/{path:path}", self._gateway, methods=["GET", "POST"]),
            ]
        )

    def _api(self, answer: Callable[[Request], Any]) -> Callable[..., Any]:
        async def endpoint(request: Request) -> Response:
            body = await request.body()
            self.asked.append((request.method, str(request.url), body))
            if request.headers.get("Authorization") != f"Bearer {self.token}":
                return JSONResponse({"error": "Invalid credentials"}, status_code=401)
            if self.fail:
                return JSONResponse({"error": "as the test wants it"}, status_code=self.fail.pop(0))
            request.state.body = body
            given = await run_in_threadpool(answer, request)
            return given if isinstance(given, Response) else JSONResponse(given)

        return endpoint

    def _start(self, request: Request) -> Any:
        spec = json.loads(request.state.body)
        if spec["flavor"] not in FLAVORS or not set(spec["labels"]["rolecall"]) <= set(_LABEL):
            return JSONResponse({"error": "bad request"}, status_code=400)
        id = secrets.token_hex(12)
        job = HubJob(id, spec, self.folder / id)
        if self.processes:
            self._spawn(job)
        else:
            job.stage = "RUNNING"
        with self._changed:
            self.jobs[id] = job
            self._changed.notify_all()
        if self.lost_answers:
            self.lost_answers -= 1
            return JSONResponse({"error": "as the test wants it"}, status_code=504)
        return self._info(job)

    def _spawn(self, job: HubJob) -> None:
        """In a folder of its own; its port, which only itself has in a container, is a free one here."""
        command = job.spec["command"]
        for port in job.spec.get("expose", {}).get("ports", []):
            job.port = _free_port()
            command = [word.replace(f"0.0.0.0:{port}", f"127.0.0.1:{job.port}") for word in command]
        job.folder.mkdir(parents=True)
        kept = {name: os.environ[name] for name in ("PYTHONPATH", "ROLECALL_TEST_MARK") if name in os.environ}
        path = f"{Path(sys.executable).parent}:/usr/bin:/bin"
        own = {
            "PATH": path,
            "HOME": str(job.folder),
            "TMPDIR": str(job.folder),
            "JOB_ID": job.id,
            "OMP_NUM_THREADS": "1",
        }
        with (job.folder / "log").open("wb") as log:
            job.process = subprocess.Popen(
                command,
                cwd=job.folder,
                env=kept | own | job.spec["environment"] | job.spec.get("secrets", {}),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def _list(self, request: Request) -> Any:
        wanted = dict(label.split("=") for label in request.query_params.getlist("label"))
        found = [job for job in self.jobs.values() if wanted.items() <= job.spec["labels"].items()]
        found = [job for job in found if job.id not in self.lag][::-1]  # the newest first
        skip = int(request.query_params.get("skip", 0))
        page = JSONResponse([self._info(job) for job in found[skip : skip + PAGE]])
        if len(found) > skip + PAGE:
            page.headers["Link"] = f'<{request.url.include_query_params(skip=skip + PAGE)}>; rel="next"'
        return page

    def _inspect(self, request: Request) -> Any:
        job = self.jobs.get(request.path_params["id"])
        return self._info(job) if job else JSONResponse({"error": "Job not found"}, status_code=404)

    def _cancel(self, request: Request) -> Any:
        job = self.jobs[request.path_params["id"]]
        job.look()
        if job.stage not in LIVE:
            return JSONResponse({"error": "Job is not running"}, status_code=400)
        job.cancel()
        return self._info(job)

    def _logs(self, request: Request) -> Any:
        log = self.jobs[request.path_params["id"]].folder / "log"
        lines = log.read_text().splitlines() if log.exists() else []
        lines = lines[-int(request.query_params.get("tail", 1000)) :]
        events = [json.dumps({"data": line, "timestamp": _time(time.time() - 5)}) for line in lines]
        return StreamingResponse(
            iter(f"data: {event}\n\n" for event in events), media_type="text/event-stream"
        )

    def _info(self, job: HubJob) -> dict[str, Any]:
        job.look()
        urls = [
            f"{self.endpoint}/gateway/{job.id}--{port}"
            for port in job.spec.get("expose", {}).get("ports", [])
        ]
        ran_s = int((job.ended or time.time()) - job.began)
        return {
            "id": job.id,
            "createdAt": _time(job.began),
            "startedAt": _time(job.began),
            "finishedAt": _time(job.ended) if job.ended else None,
            "dockerImage": job.spec["dockerImage"],
            "command": job.spec["command"],
            "arguments": job.spec["arguments"],
            "environment": job.spec["environment"],
            "flavor": job.spec["flavor"],
            "labels": job.spec["labels"],
            "status": {"stage": job.stage, "message": job.message, "exposeUrls": urls or None},
            "durations": {"schedulingSecs": 0, "runningSecs": ran_s, "totalSecs": ran_s},
            "owner": {"id": "1", "name": USER, "type": "user"},
        }

    # --- the gateway -------------------------------------------------------------------------------------

    async def _gateway(self, request: Request) -> Response:
        """Forward to a job's exposed port whoever may read the namespace; Authorization ends here."""
        given = request.headers.get("Authorization", "").removeprefix("Bearer ")
        if given not in (self.token, self.reader):
            return Response("Unauthorized", status_code=401)
        job = self.jobs.get(request.path_params["to"].partition("--")[0])
        if job is None or job.stage not in LIVE:
            return Response("Not Found", status_code=404)
        if job.process is None:
            return Response(status_code=503 if self.asleep else 200)
        dropped = ("host", "authorization", "content-length", "connection")
        headers = {name: value for name, value in request.headers.items() if name not in dropped}
        url = f"http://127.0.0.1:{job.port}/{request.path_params['path']}?{request.url.query}".rstrip("?")
        try:
            async with httpx.AsyncClient(timeout=60.0) as client:
                answer = await client.request(
                    request.method, url, headers=headers, content=await request.body()
                )
        except httpx.TransportError as error:
            return Response(f"Bad Gateway: {error}", status_code=502)
        kept = ("content-type", "retry-after")
        passed = {name: value for name, value in answer.headers.items() if name in kept}
        return Response(answer.content, status_code=answer.status_code, headers=passed)


_LABEL = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-_"


def _hardware() -> list[dict[str, Any]]:
    return [
        {
            "name": name, "prettyName": name, "cpu": "2 vCPU", "ram": "16 GB", "accelerator": _gpus(name),
            "unitCostMicroUSD": round(price / 60 * 1e6), "unitCostUSD": price / 60, "unitLabel": "minute",
        }
        for name, price in FLAVORS.items()
    ]  # fmt: skip


def _gpus(flavor: str) -> dict[str, str] | None:
    if flavor not in GPUS:
        return None
    return {
        "type": "gpu",
        "model": "X",
        "quantity": str(GPUS[flavor]),
        "vram": "24 GB",
        "manufacturer": "Nvidia",
    }


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]
