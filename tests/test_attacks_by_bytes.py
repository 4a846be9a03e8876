"""Attacks on the proxy with bodies, paths and connections that are made to break it."""

from __future__ import annotations

import asyncio
import gzip
import pickle
import re
import threading
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import uvicorn
import uvicorn.server
from msgspec import json, msgpack
from rolecall import Actor
from rolecall.runtime import gate
from rolecall.runtime.asks import Asks
from rolecall.runtime.line import Mail
from rolecall.runtime.proxy import build_app
from rolecall.runtime.ref import bind_transport
from rolecall.runtime.remote import TOKEN_HEADER
from rolecall.runtime.tokens import Ring

from .attackers import BODIES, NESTED, NOW, Attacker, Canary, Town
from .test_link import EMPTY, FAR, Door, batch
from .test_proxy import ITEM, Answering, Desk


@pytest.fixture
def town(tmp_path: Path) -> Iterator[Town]:
    made = Town(tmp_path)
    yield made
    bind_transport(None)
    made.door.close()


@pytest.fixture
def desk() -> Iterator[tuple[Attacker, Answering, str]]:
    """An app with one actor, and a worker's token."""
    asked, ring = Answering(), Ring.new("r1")
    asked.answer = 1
    bind_transport(asked)
    check = lambda text: ring.check(text, NOW)  # noqa: E731
    app = build_app({"desk": Desk}, {"run": "r1"}, check, threading.Event(), Asks())
    yield Attacker(app), asked, ring.issue("worker", None)[1]
    bind_transport(None)


class Others(Actor):
    def put(self, number: int) -> int: ...

    def advance(self, step: int) -> None: ...


@pytest.fixture
def door(tmp_path: Path) -> Iterator[Door]:
    made = Door(tmp_path, ("prompts", Others))
    yield made
    made.close()


# --- what is in them --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("what", BODIES)
def test_a_body_made_to_break_its_decoder(desk: tuple[Attacker, Answering, str], door: Door, what: str):
    attack, asked, token = desk
    as_json, as_msgpack = BODIES[what]
    assert attack("POST /v1/items", token, as_json)[0] == 422
    assert asked.asked == []
    door.join("a")
    session = door.open()
    assert door.post("", as_msgpack, session=session).status_code == 422
    assert door.post("", EMPTY, session=session).status_code == 200


def test_a_pickle_is_not_opened_wherever_it_comes(
    desk: tuple[Attacker, Answering, str], door: Door, tmp_path: Path
):
    attack, asked, token = desk
    canary = pickle.dumps(Canary(tmp_path / "canary"))
    in_json = json.encode({"item": ITEM | {"text": canary.decode("latin-1")}})
    for body in (
        canary,
        b"\x80\x05" + canary,
        json.encode({"item": canary}),
        json.encode({"item": ITEM, "x": canary}),
    ):
        assert attack("POST /v1/items", token, body)[0] == 422
    assert asked.asked == []
    assert attack("POST /v1/items", token, in_json)[0] == 200  # as a text it is one
    assert asked.asked[0][1].kwargs["item"].text == canary.decode("latin-1")
    door.join("a")
    session = door.open()
    for body in (
        canary,
        msgpack.encode(canary),
        msgpack.encode([1, 0, canary]),
        msgpack.encode([1, 0, [canary]]),
    ):
        assert door.post("", body, session=session).status_code == 422
    for path in ("/join", "/open", "/leave"):
        assert door.post(path, canary, session="1").status_code in (200, 403, 422)
    mail = batch(Mail("prompts", 1, True, 1, FAR, 1.0, ("a-1/desk",), "put", canary))
    assert door.post("", mail, session=session).status_code == 200
    assert not (tmp_path / "canary").exists()


@pytest.mark.parametrize("coding", ["gzip", "deflate", "br", "zstd", "identity, gzip", "GZIP", "x"])
def test_what_is_compressed_is_never_inflated(desk: tuple[Attacker, Answering, str], coding: str):
    attack, asked, token = desk
    bomb = gzip.compress(b"[" * NESTED)
    assert attack("POST /v1/items", token, bomb, content_encoding=coding)[0] == 415
    assert (attack.read, asked.asked) == (0, [])
    assert attack("POST /v1/items", token, bomb)[0] == 422  # without saying so it is no JSON


def test_a_gigabyte_is_refused_before_it_is_read(town: Town):
    token = town.token("trainer")
    for path in ("/v1/groups", "/v1/prompts", "/v1/relay/join"):
        assert town.attack(f"POST {path}", token, b"{", content_length=str(1 << 30))[0] == 413
    assert town.attack.read == 0


def test_the_bytes_of_all_bodies_at_once_are_bounded(
    desk: tuple[Attacker, Answering, str], monkeypatch: pytest.MonkeyPatch
):
    """As many large bodies as there are connections would fill any memory."""
    attack, asked, token = desk
    monkeypatch.setattr(gate, "MAX_HELD_BYTES", 1000)
    body = json.encode({"item": ITEM})
    assert attack("POST /v1/items", token, body + b" " * 1000)[0] == 503
    for _ in range(30):  # what was answered counts no more
        assert attack("POST /v1/items", token, body)[0] == 200
    assert len(asked.asked) == 30


@pytest.mark.parametrize(
    "path",
    ["/v1/../v1/run", "/v1/%2e%2e/run", "/v1/run\0", "/v1/run\n", "/v1/run/", "//v1/run", "/v1/" + "x" * 10_000,
     "/healthz/../v1/run", "/healthz/", "/healthz\0", "/v1/relay/../run"],
)  # fmt: skip
def test_a_path_is_a_route_or_nothing(town: Town, path: str):
    assert town.attack(f"GET {path}", None)[0] == 401
    assert town.attack(f"GET {path}", town.token())[0] in (307, 404)
    assert town.asked.asked == []


@pytest.mark.parametrize("worker", ["\0", "a\nb", "x" * 10_000, "\x7f"])
def test_a_workers_name_has_no_signs_that_nobody_sees(town: Town, worker: str):
    body = {"worker": worker, "incarnation": 1, "delivered": {}}
    status, answer = town.attack("POST /v1/prompts/leave", town.token(), json.encode(body))
    assert (status, "$.worker" in answer["error"]) == (422, True)
    assert town.asked.asked == []


# --- slowly --------------------------------------------------------------------------------------------------


Talk = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[bytes]]


def over_tcp(app: Any, *talks: Talk) -> list[bytes]:
    """What each talk over a connection of its own gave, with the server as the proxy has it."""

    async def visit() -> list[bytes]:
        config = uvicorn.Config(
            app, http=gate.impatient_protocol(), log_level="critical", ws="none", lifespan="off"
        )
        config.load()
        state, protocol = uvicorn.server.ServerState(), config.http_protocol_class
        loop = asyncio.get_running_loop()
        server = await loop.create_server(
            lambda: protocol(config=config, server_state=state, app_state={}),  # type: ignore[call-arg,operator]
            "127.0.0.1",
        )

        async def one(talk: Talk) -> bytes:
            reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
            try:
                return await asyncio.wait_for(talk(reader, writer), 20.0)
            finally:
                writer.close()

        async with server:
            return await asyncio.gather(*map(one, talks))

    return asyncio.run(visit())


async def drip(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, first: bytes, drop: bytes
) -> bytes:
    """Say `first`, then one drop after the other for as long as somebody listens; all that was heard."""
    writer.write(first)
    heard = asyncio.ensure_future(reader.read())
    while not heard.done():
        writer.write(drop)
        await asyncio.wait([heard], timeout=0.005)
    try:
        return heard.result()
    except ConnectionResetError:
        return b"reset"


GET = b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n"


def test_who_is_slow_is_hung_up_on(desk: tuple[Attacker, Answering, str], monkeypatch: pytest.MonkeyPatch):
    attack, asked, token = desk
    monkeypatch.setattr(gate, "HEADERS_S", 0.1)
    monkeypatch.setattr(gate, "BODY_S", 0.3)
    post = (
        f"POST /v1/items HTTP/1.1\r\nHost: x\r\n{TOKEN_HEADER}: {{}}\r\nContent-Length: 100000\r\n\r\n".format
    )

    def talk(first: bytes, drop: bytes) -> Talk:
        return lambda reader, writer: drip(reader, writer, first, drop)

    async def good(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bytes:
        writer.write(GET)
        heard = await reader.readline()
        writer.write(GET.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n"))
        return heard + await reader.read()

    silent, headers, second, nobody, somebody, quick = over_tcp(
        attack.app,
        talk(b"", b""),
        talk(b"GET /healthz HTTP/1.1\r\n", b"X: y\r\n"),
        talk(GET + GET[:10], b"z"),  # a first request buys no time for the next
        talk(post("nobody's").encode(), b"x"),
        talk(post(token).encode(), b" "),
        good,
    )
    assert silent == b""
    assert headers in (b"", b"reset")
    assert second.startswith(b"HTTP/1.1 200") or second == b"reset"
    assert nobody.startswith(b"HTTP/1.1 401") or nobody == b"reset"
    assert somebody.startswith(b"HTTP/1.1 408") or somebody == b"reset"
    assert quick.count(b"HTTP/1.1 200 OK") == 2
    assert asked.asked == []


@pytest.mark.parametrize(
    "request_",
    [
        b"\x16\x03\x01\x02\x00\x01\x00",  # TLS where there is none
        b"GET /v1/run FTP/1.1\r\n\r\n",
        b"POST /v1/items HTTP/1.1\r\nHost: x\r\nContent-Length: -1\r\n\r\n",
        b"POST /v1/items HTTP/1.1\r\nHost: x\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n",
        b"POST /v1/items HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: gzip, chunked\r\n\r\n",
        b"GET /v1/run\0 HTTP/1.1\r\nHost: x\r\n\r\n",
        b"GET /v1/run HTTP/1.1\r\nHost: x\r\nX: " + b"y" * (1 << 20) + b"\r\n\r\n",
        b"GET /v1/run HTTP/1.1\r\n" + b"X: y\r\n" * 100_000 + b"\r\n",
    ],
)
def test_what_is_no_http(desk: tuple[Attacker, Answering, str], request_: bytes):
    attack, asked, _ = desk
    [heard] = over_tcp(attack.app, lambda reader, writer: drip(reader, writer, request_, b""))
    assert re.match(rb"HTTP/1.1 (400|401|501)|reset", heard), heard[:100]
    assert asked.asked == []
