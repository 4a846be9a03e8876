"""Who attacks the proxy, and with what."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any

from msgspec import json
from rolecall.recipes import async_grpo
from rolecall.runtime.asks import Asks
from rolecall.runtime.proxy import build_app
from rolecall.runtime.ref import bind_transport
from rolecall.runtime.remote import TOKEN_HEADER
from rolecall.runtime.tokens import Ring

from .test_link import Door
from .test_proxy import Answering

NOW = 1_000_000.0
NESTED = 10 << 20
BODIES = {
    "arrays": (b"[" * NESTED, b"\x91" * NESTED),
    "objects": (b'{"a":' * (NESTED // 5), b"\x81\xa1a" * (NESTED // 3)),
    "arrays in an unknown field": (
        b'{"item": {"id": 1, "scores": [], "x": ' + b"[" * NESTED,
        b"\x94\x01\x00\x90" + b"\x91" * NESTED,
    ),
    "arrays where numbers belong": (
        b'{"item": {"id": 1, "scores": ' + b"[" * NESTED,
        b"\x91\x01" + b"\x91" * NESTED,
    ),
    "a number without an end": (b'{"item": {"id": ' + b"9" * NESTED, b"\xc6\xff\xff\xff\xff"),
    "text that is no text": (
        b'{"item": {"id": 1, "scores": [], "text": "\xff"}}',
        b"\x93\x01\x00\x91\x91\xa1\xff",
    ),
    "a length beyond its end": (b'"', b"\xdd\xff\xff\xff\xff"),
}


class Canary:
    """Unpickling it makes a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return open, (str(self.path), "w")


class Attacker:
    """Requests to an app in this process, straight to ASGI: what is read of their bodies is counted."""

    def __init__(self, app: Any) -> None:
        self.app = app
        self.read = 0

    def __call__(
        self, route: str, token: str | None, body: bytes = b"", **headers: str
    ) -> tuple[int, dict[str, Any]]:
        """The status of GET /path or POST /path, and the answer."""
        sent = [(name.replace("_", "-").lower().encode(), value.encode()) for name, value in headers.items()]
        if token is not None:
            sent.append((TOKEN_HEADER.lower().encode(), token.encode()))
        verb, _, path = route.partition(" ")
        scope = {
            "type": "http", "method": verb, "path": path, "raw_path": path.encode(), "query_string": b"",
            "headers": sent, "http_version": "1.1", "scheme": "http", "server": ("run", 80), "root_path": "",
        }  # fmt: skip
        answer: list[Any] = []

        async def receive() -> dict[str, Any]:
            self.read += 1
            return {"type": "http.request", "body": body}

        async def send(message: Any) -> None:
            answer.append(message)

        asyncio.run(self.app(scope, receive, send))
        content = b"".join(message.get("body", b"") for message in answer)
        return answer[0]["status"], json.decode(content) if content.startswith(b"{") else {}


class Town:
    """A run of the asynchronous recipe's roles, as the proxy sees it, and who is after it."""

    def __init__(self, folder: Path) -> None:
        self.asked = Answering()
        self.asked.answer = 1
        bind_transport(self.asked)
        self.now = NOW
        self.ring = Ring.new("r1")
        self.ended = threading.Event()
        graph = async_grpo.build(async_grpo.Config(store=f"file:{folder}/store"))
        roles = {role.name: role.actor for role in graph}
        self.door = Door(folder)
        app = build_app(
            roles,
            {"run": "r1"},
            lambda text: self.ring.check(text, self.now),
            self.ended,
            Asks(),
            self.door.relay,
        )
        self.routes = {
            f"{verb} {route.path}" for route in app.routes for verb in route.methods - {"HEAD"}  # type: ignore[attr-defined]
        }  # fmt: skip
        self.attack = Attacker(app)

    def token(self, scope: Any = "worker", expires: float | None = None) -> str:
        return self.ring.issue(scope, expires)[1]
