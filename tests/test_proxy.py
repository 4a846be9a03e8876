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
from rolecall import ActorDied, ActorStopped, AskTimeout, RolecallError, Unrecoverable
from rolecall.runtime import proxy
from rolecall.runtime.peer import Heard
from rolecall.runtime.proxy import build_app
from rolecall.runtime.recipe import load_recipe
from rolecall.runtime.ref import Call, bind_transport
from rolecall.runtime.remote import TOKEN_HEADER, RemoteActor, fetch_about

from .processes import GRAPHS, Run

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

    def ask_soon(self, name: str, call: Call, timeout_s: float) -> Heard:
        return Heard(self.ask([name], call, timeout_s)[0])

    def tell(self, name: str, call: Call) -> None:
        raise NotImplementedError

    def replicas(self, name: str) -> Sequence[str]:
        return [name]


@pytest.fixture
def actor() -> Iterator[Answering]:
    transport = Answering()
    bind_transport(transport)
    yield transport
    bind_transport(None)


class Client:
    """Requests to the app in this process, with the run's token."""

    def __init__(self) -> None:
        self.app = build_app([("desk", Desk)], {"run": "r1"}, TOKEN)
        self.headers = httpx.Headers({TOKEN_HEADER: TOKEN})

    def request(
        self, verb: str, path: str, *, headers: dict[str, Any] | None = None, **body: Any
    ) -> httpx.Response:
        sent = self.headers.copy()
        sent.update(headers)

        async def send() -> httpx.Response:
            transport = httpx.ASGITransport(self.app)
            async with httpx.AsyncClient(transport=transport, base_url="http://run") as client:
                return await client.request(verb, path, headers=sent, **body)

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


@pytest.mark.parametrize(("query", "complaint"), [("", "id"), ("id=x", "id"), ("id=1&after=2", "after")])
def test_a_query_that_is_not_the_handlers_arguments(
    actor: Answering, client: Client, query: str, complaint: str
):
    response = client.get(f"/v1/items?{query}")
    assert response.status_code == 422
    assert complaint in response.json()["error"]
    assert actor.asked == []


def test_only_what_a_role_lists_is_there(client: Client):
    assert client.post("/v1/secret", json={}).status_code == 404
    assert client.get("/").status_code == 404
    assert client.request("DELETE", "/v1/items").status_code == 405


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (AskTimeout("not yet"), 429),
        (ActorDied("desk", "killed by SIGKILL", maybe_executed=True), 503),
        (ActorStopped("desk has stopped"), 503),
    ],
)
def test_what_the_client_should_try_again(actor: Answering, client: Client, error: Exception, status: int):
    actor.answer = error
    response = client.get("/v1/items?id=1")
    assert response.status_code == status
    assert float(response.headers["Retry-After"]) >= 0.0


# --- over real processes -------------------------------------------------------------------------------------


class Visit:
    """A run of graphs/door.py and a client in a thread of its own, which ends the run when it is done."""

    def __init__(self, folder: Path, visit: Callable[[Visit], Any]) -> None:
        self.token_file = folder / "token"
        self.token_file.touch(mode=0o600)
        self.token_file.write_text(TOKEN + "\n")
        self.visit = visit
        self.url = ""
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

    def desk(self) -> RemoteActor:
        return RemoteActor("desk", self.url, self.token_file, Desk)

    def ask(self, message: Any, *args: Any, between: Callable[[], None] = lambda: None, **kwargs: Any) -> Any:
        return self.desk().ask(Call.of(message, args, kwargs), time.monotonic() + 60.0, between)


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
            "message": lambda: here.ask(Desk.secret),
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
    assert "Desk.secret can't be asked from another machine" in str(errors["message"])
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
