"""Attacks on the proxy: what comes from nobody, from others, or from workers that want more than their part."""

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
from rolecall.actors.buffer import Buffer
from rolecall.actors.prompts import PromptSource
from rolecall.recipes import async_grpo, sync_grpo
from rolecall.runtime import gate
from rolecall.runtime.line import FarMember, Mail, Members
from rolecall.runtime.proxy import build_app
from rolecall.runtime.ref import bind_transport
from rolecall.runtime.remote import TOKEN_HEADER
from rolecall.runtime.tokens import Ring

from .test_link import EMPTY, FAR, Door, batch
from .test_proxy import ITEM, Answering, Desk

NOW = 1_000_000.0
WORKERS = {
    "GET /v1/run", "POST /v1/groups", "POST /v1/prompts", "POST /v1/prompts/hold", "POST /v1/prompts/leave",
    "GET /v1/policy", "POST /v1/relay", "POST /v1/relay/join", "POST /v1/relay/open", "POST /v1/relay/leave",
}  # fmt: skip
TRAINERS = {"GET /v1/batch"}
NESTED = 10 << 20


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
            roles, {"run": "r1"}, lambda text: self.ring.check(text, self.now), self.ended, self.door.relay
        )
        self.routes = {
            f"{verb} {route.path}" for route in app.routes for verb in route.methods - {"HEAD"}  # type: ignore[attr-defined]
        }  # fmt: skip
        self.attack = Attacker(app)

    def token(self, scope: Any = "worker", expires: float | None = None) -> str:
        return self.ring.issue(scope, expires)[1]


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
    app = build_app({"desk": Desk}, {"run": "r1"}, lambda text: ring.check(text, NOW), threading.Event())
    yield Attacker(app), asked, ring.issue("worker", None)[1]
    bind_transport(None)


# --- who is let in -------------------------------------------------------------------------------------------


def test_every_route_has_its_scope(town: Town):
    """A new route needs a line here."""
    assert town.routes == WORKERS | TRAINERS | {"GET /healthz"}
    body = pickle.dumps(Canary(Path("/nowhere/at-all")))
    for route in WORKERS | TRAINERS:
        read = town.attack.read
        status, answer = town.attack(route, town.token(), body)
        if route in TRAINERS:
            assert (status, town.attack.read) == (403, read), route
            assert answer == {"error": f"a worker's token does not allow {route}"}
        else:
            assert status != 403 or "this is not machine" in answer["error"], route
        assert town.attack(route, town.token("trainer"), body)[0] != 401, route
    assert town.asked.asked == []


@pytest.mark.parametrize(
    "route", sorted(WORKERS | TRAINERS | {"GET /nowhere", "PUT /v1/groups", "GET /v1/relay"})
)
def test_who_has_no_token_is_refused_before_anything_is_read(town: Town, route: str, tmp_path: Path):
    other = Ring.new("r1").issue("trainer", None)[1]
    good = town.token("trainer")
    expired = town.token("trainer", NOW)
    revoked, text = town.ring.issue("trainer", None)
    town.ring.revoked.append(revoked.id)
    unsigned = f"rc1.{other.split('.')[1]}.{good.split('.')[2]}"
    body = pickle.dumps(Canary(tmp_path / "canary"))
    for token in (
        None,
        "",
        "x",
        other,
        expired,
        text,
        unsigned,
        good[:-1],
        good + "A",
        "é" * 600,
        "A" * 60_000,
    ):
        status, answer = town.attack(route, token, body, content_encoding="gzip", content_length="9" * 12)
        assert status == 401, token
        assert answer["error"].startswith(f"wrong or missing {TOKEN_HEADER}: this ")
    town.now -= 1.0
    assert town.attack(route, expired, body)[0] != 401
    assert (town.asked.asked, (tmp_path / "canary").exists()) == ([], False)
    assert town.attack.read <= 1  # only with the token that held, a second earlier


def test_what_workers_may_say_is_what_their_actors_list():
    config = async_grpo.Config()
    assert async_grpo.build(config).open_to_workers() == {
        "prompts": ("next", "hold", "leave", "policy"),
        "buffer": ("put",),
    }
    assert sync_grpo.build(sync_grpo.Config()).open_to_workers() == {}  # it has no role that others run
    for actor in (PromptSource, Buffer):
        assert set(actor.for_workers) <= set(actor.http.values())


# --- who is in, and wants more -------------------------------------------------------------------------------


class Others(Actor):
    def put(self, number: int) -> int: ...

    def advance(self, step: int) -> None: ...


@pytest.fixture
def door(tmp_path: Path) -> Iterator[Door]:
    made = Door(tmp_path, ("prompts", Others))
    yield made
    made.close()


@pytest.mark.parametrize(
    ("receiver", "method"),
    [
        ("prompts", "advance"), ("prompts", "give_back"), ("prompts", "on_stop"), ("prompts", "__init__"),
        ("prompts", ""), ("trainer", "put"), ("proxy", "put"), ("rollout-1", "put"), ("b-2/desk", "put"),
        ("", "put"), ("../prompts", "put"), ("prompts\0", "put"), ("/prompts", "put"), ("prompts/", "put"),
    ],
)  # fmt: skip
def test_a_machine_says_only_what_workers_may(door: Door, receiver: str, method: str):
    door.join("a")
    session = door.open()
    for ask in (False, True):
        good = Mail("prompts", 1, ask, 1, FAR, 0.0, (), "put", b"\x80")
        bad = Mail(receiver, 1, ask, 2, FAR, 0.0, (), method, b"")
        response = door.post("", batch(good, bad), session=session)
        assert response.status_code == 403
        assert (
            "from machines with a worker's token: list it in the actor's for_workers"
            in response.json()["error"]
        )
    line = door.relay._nodes[1].line
    assert line is not None and line.heard == 0  # not even what stood before it is delivered
    assert door.post("", batch(good), session=session).status_code == 200


def test_a_machine_that_joined_with_a_trainers_token_says_more_and_goes_on_with_one(door: Door):
    door.join("a", "trainer")
    trainer = door.ring.issue("trainer", None)[1]
    opened = door.post("/open", session=door.proof(), token=trainer).json()
    session = f"1.{opened['session']}"
    mail = Mail("prompts", 1, False, 1, FAR, 0.0, (), "advance", b"\x80")
    assert door.post("", batch(mail), session=session, token=trainer).status_code == 200
    for path, who in (("", session), ("/open", door.proof()), ("/leave", door.proof())):
        response = door.post(path, batch(mail), session=who)
        assert (response.status_code, "joined with a trainer's" in response.json()["error"]) == (403, True)
    door.restart()  # it is remembered who joined with what
    assert door.post("/open", session=door.proof()).status_code == 403
    assert door.post("/open", session=door.proof(), token=trainer).status_code == 200


def test_no_machine_is_taken_for_another(door: Door):
    """All of them have the same token."""
    door.join("a")
    door.join("b")
    session = door.open(1)
    secret, name = door.joined[2].secret, session.partition(".")[2]
    for path in ("/open", "/leave"):
        for who in (f"1.{secret}", "1", "1.", f"1.{name}", f"1.{'0' * 32}"):
            assert door.post(path, session=who).status_code == 403, (path, who)
        for who in (f"3.{secret}", "0", f"0.{secret}"):
            assert door.post(path, session=who).status_code == 410, (path, who)
    for who in (f"2.{name}", f"1.{secret}", f"2.{secret}", "1.", "1", "2."):
        assert door.post("", b"\xc1", session=who).status_code == 409, who
    assert door.post("", EMPTY, session=session).status_code == 200
    door.restart()
    assert door.post("/open", session=f"1.{secret}").status_code == 403
    assert secret not in door.file.read_text()


def test_who_proves_nothing_keeps_no_machine_alive(door: Door):
    door.join("a")
    door.time = 29.0
    door.post("/open", session="1")
    door.post("", EMPTY, session="1.x")
    door.time = 31.0
    door.relay.look()
    assert door.post("/open", session=door.proof()).status_code == 410


@pytest.mark.parametrize("host", ["../../etc", "%2e%2e%2f", "a\0b", "a\nb", "/", "..", "x" * 4000, "é", " "])
def test_a_machines_name_is_a_plain_word(door: Door, host: str):
    name = json.decode(door.post("/join", host.encode()).content)["name"]
    assert re.fullmatch(r"[A-Za-z0-9.-]{1,16}-1", name)
    assert door.post("/join", b"\xff\xfe").status_code == 422
    assert door.post("/join", b"x" * 10_000).status_code == 413


@pytest.mark.parametrize(
    "name",
    ["a-1/../desk", "../a-1/desk", "a-1/desk\0", "a-1/desk\n", "a-1/%2e%2e", "a-1/desk-1e3", "x" * 10_000],
)
def test_an_actors_name_is_its_machines_and_its_roles(door: Door, name: str):
    door.join("a")
    frame = Members([FarMember(name, "desk", FAR, "up", "", [])])
    assert door.post("", batch(frame), session=door.open()).status_code == 422


@pytest.mark.parametrize("wait", ["nan", "inf", "-1", "x", "1e999", ""])
def test_a_wait_that_is_none(door: Door, wait: str):
    door.join("a")
    assert door.post(f"?wait={wait}", EMPTY, session=door.open()).status_code == 422


# --- bodies --------------------------------------------------------------------------------------------------

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
    mail = batch(Mail("prompts", 1, True, 1, FAR, 1.0, (), "put", canary))
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
