"""The HTTP door between machines: who is let in, what is refused, and what survives its death."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn
import uvicorn.server
from rolecall import Actor, ActorDied, ActorStopped, AskTimeout, Finished, RolecallError, Unrecoverable
from rolecall.actors.buffer import Buffer
from rolecall.actors.prompts import PromptSource
from rolecall.runtime import gate, proxy
from rolecall.runtime.asks import Asks
from rolecall.runtime.openapi import describe
from rolecall.runtime.proxy import build_app
from rolecall.runtime.recipe import load_recipe
from rolecall.runtime.ref import Call, bind_transport
from rolecall.runtime.remote import TOKEN_HEADER, fetch_about
from rolecall.runtime.tokens import Ring

from .fakes import Parked
from .processes import GRAPHS, Run
from .rest import Rest, checked

door = load_recipe(str(GRAPHS / "door.py"))
Desk, Item = door.Desk, door.Item
TOKEN = "the-token"
ITEM = {"id": 1, "scores": [0.5, 1.0], "text": "π"}


class Answering:
    """A transport whose actor answers, or raises, what it is given."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, Call, float]] = []
        self.answer: Any = None

    def ask(self, names: Sequence[str], call: Call, timeout_s: float) -> list[Any]:
        self.asked.append((names[0], call, timeout_s))
        if isinstance(self.answer, Exception):
            raise self.answer
        return [self.answer]

    def ask_soon(self, name: str, call: Call, timeout_s: float) -> Parked:
        return Parked(lambda: self.ask([name], call, timeout_s)[0])

    def tell(self, name: str, call: Call) -> None:
        raise NotImplementedError

    def replicas(self, name: str) -> Sequence[str]:
        return [name]

    def pick(self, name: str) -> str:
        return self.replicas(name)[0]

    def watch(self, name: str) -> None:
        raise NotImplementedError


@pytest.fixture
def actor() -> Iterator[Answering]:
    transport = Answering()
    bind_transport(transport)
    yield transport
    bind_transport(None)


class Client:
    """Requests to the app in this process, with a trainer's token."""

    def __init__(self, role: tuple[str, type[Actor]] = ("desk", Desk)) -> None:
        self.ended = threading.Event()
        ring = Ring.new("r1", given=TOKEN)
        self.app = build_app(
            dict([role]), {"run": "r1"}, lambda text: ring.check(text, 0.0), self.ended, Asks()
        )
        self.document = describe(dict([role]), proxy.WAIT_S, proxy.OTHERS)
        self.headers = httpx.Headers({TOKEN_HEADER: ring.issue("trainer", None)[1]})

    def request(
        self, verb: str, path: str, *, headers: dict[str, Any] | None = None, **body: Any
    ) -> httpx.Response:
        sent = self.headers.copy()
        sent.update(headers)

        async def send() -> httpx.Response:
            transport = httpx.ASGITransport(self.app)
            async with httpx.AsyncClient(transport=transport, base_url="http://run") as client:
                response = await client.request(verb, path, headers=sent, **body)
                return checked(self.document, verb, path, response)

        return asyncio.run(send())

    def get(self, path: str) -> httpx.Response:
        return self.request("GET", path)

    def post(self, path: str, **body: Any) -> httpx.Response:
        return self.request("POST", path, **body)


@pytest.fixture
def client(actor: Answering) -> Client:
    return Client()


async def in_chunks(*chunks: bytes) -> AsyncIterator[bytes]:
    """A body without a declared size."""
    for chunk in chunks:
        yield chunk


def test_a_message_is_checked_and_handed_on(actor: Answering, client: Client):
    actor.answer = 3
    response = client.post("/v1/items", json={"item": ITEM, "worker": "w1"})
    assert (response.status_code, response.json()) == (200, 3)
    [(name, call, timeout_s)] = actor.asked
    assert (name, call.method, timeout_s) == ("desk", "put", proxy.WAIT_S)
    assert call.kwargs == {"item": Item(id=1, scores=[0.5, 1.0], text="π"), "worker": "w1"}
    assert call.idempotent


def test_a_get_takes_its_arguments_from_the_query(actor: Answering, client: Client):
    actor.answer = Item(id=7, scores=[])
    response = client.get("/v1/items?id=7")
    assert (response.status_code, response.json()) == (200, {"id": 7, "scores": [], "text": ""})
    assert actor.asked[0][1].kwargs == {"id": 7}


@pytest.mark.parametrize("token", ["", "the-toke", "the-token2", "tHe-token", "é"])
@pytest.mark.parametrize(
    ("verb", "path"), [("POST", "/v1/items"), ("GET", "/v1/items?id=1"), ("GET", "/v1/run")]
)
def test_a_wrong_token(actor: Answering, client: Client, verb: str, path: str, token: str):
    response = client.request(verb, path, headers={TOKEN_HEADER: token.encode()}, json={"item": ITEM})
    assert response.status_code == 401
    assert actor.asked == []


def test_no_token(actor: Answering, client: Client):
    del client.headers[TOKEN_HEADER]
    assert client.post("/v1/items", json={"item": ITEM}).status_code == 401
    assert client.get("/healthz").json() == {"ok": True}
    assert actor.asked == []


def test_what_the_run_says_of_itself(client: Client):
    assert client.get("/v1/run").json() == {"run": "r1"}


@pytest.mark.parametrize("declared", [True, False])
def test_a_body_too_large_is_refused_before_it_is_read(
    actor: Answering, client: Client, monkeypatch: pytest.MonkeyPatch, declared: bool
):
    monkeypatch.setattr(proxy, "MAX_BODY_BYTES", 1000)
    body = b"{" * 1001  # not JSON: had it been parsed, the answer would be 422
    response = client.post("/v1/items", content=body if declared else in_chunks(body[:500], body[500:]))
    assert response.status_code == 413
    assert "1000 bytes" in response.json()["error"]
    assert client.post("/v1/items", content=body[:1000]).status_code == 422
    assert actor.asked == []


def test_a_body_too_large_is_refused_by_its_declared_size_alone(client: Client):
    async def never() -> AsyncIterator[bytes]:
        raise AssertionError("the body was read")
        yield b""

    headers = {"Content-Length": str(proxy.MAX_BODY_BYTES + 1)}
    assert client.post("/v1/items", content=never(), headers=headers).status_code == 413


@pytest.mark.parametrize(
    ("body", "complaint"),
    [
        (b"{", "truncated"),
        (b"\x80\x05K\x01.", "malformed"),  # a pickle
        (b"[]", "Expected `object`"),
        (b"{}", "missing required field `item`"),
        (b'{"item": 3}', "Expected `object`, got `int` - at `$.item`"),
        (b'{"item": {"id": "1", "scores": []}}', "Expected `int`, got `str` - at `$.item.id`"),
        (b'{"item": {"id": 1}}', "missing required field `scores`"),
        (b'{"item": {"id": 1, "scores": ["a"]}}', "Expected `float`, got `str`"),
        (b'{"item": {"id": 1, "scores": []}, "method": "secret"}', "unknown field `method`"),
    ],
)
def test_a_body_that_is_not_the_handlers_arguments(
    actor: Answering, client: Client, body: bytes, complaint: str
):
    response = client.post("/v1/items", content=body)
    assert response.status_code == 422
    assert complaint in response.json()["error"]
    assert actor.asked == []


@pytest.mark.parametrize(
    ("changed", "complaint"),
    [
        ({"count": -5}, "$.count"),
        ({"count": 4097}, "$.count"),
        ({"incarnation": 2**64}, "$.incarnation"),
        ({"holding": {"-1": 1}}, "$.holding"),
        ({"delivered": {"1": 2**63}}, "$.delivered"),
    ],
)
def test_numbers_out_of_their_bounds(actor: Answering, changed: dict[str, int], complaint: str):
    client = Client(("prompts", PromptSource))
    body = {
        "worker": "w",
        "incarnation": 1,
        "lease": 0,
        "holding": {},
        "delivered": {},
        "count": 2,
        "wait": False,
    }
    response = client.post("/v1/prompts", json=body | changed)
    assert response.status_code == 422
    assert complaint in response.json()["error"]
    assert actor.asked == []


@pytest.mark.parametrize("query", ["step=-1&durable=0", "step=1&durable=-1"])
def test_a_step_below_0(actor: Answering, query: str):
    response = Client(("buffer", Buffer)).get(f"/v1/batch?groups=1&version=0&{query}")
    assert response.status_code == 422
    assert actor.asked == []


@pytest.mark.parametrize(("query", "complaint"), [("", "id"), ("id=x", "id"), ("id=1&after=2", "after")])
def test_a_query_that_is_not_the_handlers_arguments(
    actor: Answering, client: Client, query: str, complaint: str
):
    response = client.get(f"/v1/items?{query}")
    assert response.status_code == 422
    assert complaint in response.json()["error"]
    assert actor.asked == []


def test_a_body_that_never_ends(actor: Answering, client: Client, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(gate, "BODY_S", 0.02)

    async def endless() -> AsyncIterator[bytes]:
        yield b"{"
        await asyncio.Event().wait()

    response = client.post("/v1/items", content=endless())
    assert (response.status_code, actor.asked) == (408, [])


def test_a_client_that_leaves_in_the_middle_of_its_body(actor: Answering, client: Client):
    """It is no error of the run's: nothing is raised, which the server would write into the log."""
    received = [
        {"type": "http.request", "body": b'{"item": ', "more_body": True},
        {"type": "http.disconnect"},
    ]
    scope = {
        "type": "http", "method": "POST", "path": "/v1/items", "raw_path": b"/v1/items", "query_string": b"",
        "headers": [(TOKEN_HEADER.lower().encode(), TOKEN.encode())], "http_version": "1.1",
    }  # fmt: skip

    async def receive() -> Any:
        return received.pop(0)

    async def send(message: Any) -> None: ...

    asyncio.run(client.app(scope, receive, send))
    assert (received, actor.asked) == ([], [])


def test_a_connection_without_a_request_is_closed(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(gate, "HEADERS_S", 0.02)

    async def visit() -> tuple[bytes, bytes]:
        config = uvicorn.Config(Client().app, http=gate.impatient_protocol(), log_level="warning")
        config.load()
        state = uvicorn.server.ServerState()
        loop = asyncio.get_running_loop()
        protocol: Any = config.http_protocol_class
        server = await loop.create_server(
            lambda: protocol(config=config, server_state=state, app_state={}), "127.0.0.1"
        )
        host, port = server.sockets[0].getsockname()
        async with server:
            reader, silent = await asyncio.open_connection(host, port)
            silent.write(b"GET /healthz HT")
            cut_off = await reader.read()
            reader, quick = await asyncio.open_connection(host, port)
            quick.write(b"GET /healthz HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
            answer = await reader.read()
            silent.close()
            quick.close()
        return cut_off, answer

    cut_off, answer = asyncio.run(visit())
    assert cut_off == b""
    assert answer.startswith(b"HTTP/1.1 200")


def test_only_what_a_role_lists_is_there(client: Client):
    assert client.post("/v1/secret", json={}).status_code == 404
    assert client.get("/").status_code == 404
    assert client.request("DELETE", "/v1/items").status_code == 405


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (AskTimeout("not yet"), 429),
        (ActorDied("desk", "killed by SIGKILL", maybe_executed=True), 503),
    ],
)
def test_what_the_client_should_try_again(actor: Answering, client: Client, error: Exception, status: int):
    actor.answer = error
    response = client.get("/v1/items?id=1")
    assert response.status_code == status
    assert float(response.headers["Retry-After"]) >= 0.0


def test_a_run_that_has_ended_says_so(actor: Answering, client: Client):
    actor.answer = ActorStopped("desk has stopped")
    response = client.get("/v1/items?id=1")
    assert (response.status_code, response.json()) == (410, {"error": "the run has ended"})
    asked = len(actor.asked)
    client.ended.set()
    assert [client.get(path).status_code for path in ("/v1/items?id=1", "/v1/run")] == [410, 410]
    assert len(actor.asked) == asked
    assert client.request("GET", "/v1/run", headers={TOKEN_HEADER: "another"}).status_code == 401


# --- over real processes -------------------------------------------------------------------------------------


class Visit:
    """A run of graphs/door.py and a client in a thread of its own, which ends the run when it is done."""

    def __init__(self, folder: Path, visit: Callable[[Visit], Any], *, hangs_up: bool = True) -> None:
        self.hangs_up = hangs_up
        self.token_file = folder / "token"
        self.token_file.touch(mode=0o600)
        self.token_file.write_text(TOKEN + "\n")
        self.visit = visit
        self.url = ""
        self.rest: Rest | None = None
        self.result: Any = None
        self.thread: threading.Thread | None = None
        self.restarted = threading.Event()
        self.run = Run("door", folder, {"token_file": self.token_file}, self.act)

    def go(self) -> Any:
        outcome = self.run.go()
        assert outcome.exit_code == 130, outcome.story
        assert self.thread is not None
        self.thread.join()
        if isinstance(self.result, BaseException):
            raise self.result
        return self.result

    def act(self, run: Run, kind: str, name: str, value: Any) -> None:
        if kind == "report" and "url" in value:
            if self.thread is None:
                self.url = value["url"]
                self.thread = threading.Thread(target=self.body)
                self.thread.start()
            else:
                assert value["url"] == self.url, "clients must find the proxy where it was"
                self.restarted.set()

    def body(self) -> None:
        try:
            self.result = self.visit(self)
        except BaseException as error:  # noqa: BLE001  raised by `go`
            self.result = error
        finally:
            self.run.supervisor.stop()
            if self.hangs_up and self.rest is not None:
                self.rest.client.close()  # or the run waits for it, to tell it of its end

    def ask(self, message: Any, *args: Any, between: Callable[[], None] = lambda: None, **kwargs: Any) -> Any:
        if self.rest is None:
            self.rest = Rest(self.url, self.token_file, Desk)
        return self.rest.ask(message, *args, between=between, **kwargs)


@pytest.mark.slow
@pytest.mark.timeout(60)
def test_another_machine_asks(tmp_path: Path):
    def visit(here: Visit) -> Any:
        about = fetch_about(here.url, here.token_file)
        count = here.ask(Desk.put, Item(id=4, scores=[0.25]), worker="w")
        return about, count, here.ask(Desk.take, 4)

    about, count, item = Visit(tmp_path, visit).go()
    assert about == {"run": "r1", "recipe": "door"}
    assert (count, item) == (1, Item(id=4, scores=[0.25]))


@pytest.mark.slow
@pytest.mark.timeout(60)
def test_what_is_refused_comes_back_as_an_error_that_says_why(tmp_path: Path):
    def visit(here: Visit) -> dict[str, Exception]:
        wrong = tmp_path / "wrong"
        wrong.write_text("another")
        tries = {
            "token": lambda: fetch_about(here.url, wrong),
            "type": lambda: here.ask(Desk.put, "no item"),
            "handler": lambda: here.ask(Desk.fail),
        }
        errors: dict[str, Exception] = {}
        for name, function in tries.items():
            try:
                function()
            except RolecallError as error:
                errors[name] = error
        return errors

    errors = Visit(tmp_path, visit).go()
    assert isinstance(errors["token"], Unrecoverable)
    assert "refused the token" in str(errors["token"])
    assert "422" in str(errors["type"])
    assert "$.item" in str(errors["type"])
    assert "the desk is broken" in str(errors["handler"])


@pytest.mark.slow
@pytest.mark.timeout(60)
def test_nothing_is_lost_when_the_proxy_is_killed(tmp_path: Path):
    def visit(here: Visit) -> list[int]:
        counts = []
        for id in range(30):
            if id in (5, 20):
                here.restarted.clear()
                here.run.kill("proxy")
            counts.append(here.ask(Desk.put, Item(id=id, scores=[])))
            if id in (5, 20):
                assert here.restarted.wait(20.0)
        return counts

    visited = Visit(tmp_path, visit)
    assert visited.go() == list(range(1, 31))
    assert [name for name, _ in visited.run.deaths] == ["proxy", "proxy"]
    handled = [int(line) for line in (tmp_path / "state" / "desk" / "handled").read_text().split()]
    assert sorted(set(handled)) == list(range(30))


@pytest.mark.slow
@pytest.mark.timeout(60)
def test_an_item_that_is_not_there_yet_is_waited_for(tmp_path: Path):
    def visit(here: Visit) -> Any:
        tries: list[float] = []

        def between() -> None:
            tries.append(time.monotonic())
            if len(tries) == 2:  # the first request was told to come again
                here.ask(Desk.put, Item(id=9, scores=[1.0]))

        return here.ask(Desk.take, 9, between=between), len(tries)

    item, tries = Visit(tmp_path, visit).go()
    assert (item.id, tries) == (9, 2)


@pytest.mark.slow
@pytest.mark.timeout(60)
def test_a_large_body_is_refused_over_a_real_connection(tmp_path: Path):
    def visit(here: Visit) -> int:
        content = b" " * (proxy.MAX_BODY_BYTES + 1)
        return httpx.post(
            f"{here.url}/v1/items", content=content, headers={TOKEN_HEADER: TOKEN}, timeout=30.0
        ).status_code

    assert Visit(tmp_path, visit).go() == 413


@pytest.mark.slow
@pytest.mark.timeout(60)
def test_a_client_still_at_work_hears_that_the_run_has_ended(tmp_path: Path):
    def visit(here: Visit) -> str:
        here.ask(Desk.put, Item(id=1, scores=[]))
        here.run.supervisor.stop()
        try:
            while True:
                here.ask(Desk.put, Item(id=2, scores=[]))
        except Finished:
            return "finished"

    assert Visit(tmp_path, visit, hangs_up=False).go() == "finished"
