"""Joining over HTTP: who is let in, what is refused, who is dead for the run, and when a link gives up."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from msgspec import msgpack
from rolecall import Actor, Finished, Unrecoverable
from rolecall.runtime import link as link_module
from rolecall.runtime import proxy
from rolecall.runtime import relay as relay_module
from rolecall.runtime.asks import Asks
from rolecall.runtime.control import NODE_BITS
from rolecall.runtime.line import Batch, Done, FarMember, Frame, Heard, Line, Mail, Members
from rolecall.runtime.link import Dialer
from rolecall.runtime.page import Memory
from rolecall.runtime.proxy import build_app
from rolecall.runtime.relay import START_S, Fenced, Joined, Relay, Stale
from rolecall.runtime.remote import SESSION_HEADER, TOKEN_HEADER
from rolecall.runtime.switchboard import Switchboard
from rolecall.runtime.tokens import Ring, Scope

TOKEN = "the-token"
LEASE_S = 30.0
EMPTY = msgpack.encode(Batch(1, 0, []))


class Desk(Actor):
    def put(self, number: int) -> int: ...


class InProcess(httpx.BaseTransport):
    """Requests to an ASGI app, each in a loop of its own; those that find a failure in `failures` get that instead."""

    def __init__(self, app: Any, failures: list[httpx.Response | Exception]) -> None:
        self.app, self.failures, self.lock = app, failures, threading.Lock()

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        with self.lock:
            failure = self.failures.pop() if self.failures else None
        if isinstance(failure, Exception):
            raise failure
        return failure or asyncio.run(self._send(request))

    async def _send(self, request: httpx.Request) -> httpx.Response:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(self.app)) as client:
            answer = await client.request(
                request.method, request.url, headers=request.headers, content=request.read()
            )
        return httpx.Response(answer.status_code, headers=answer.headers, content=answer.content)


class Door:
    """A relay behind its routes, on a clock of its own, in a run where nobody else is."""

    def __init__(
        self,
        folder: Path,
        role: tuple[str, type[Actor]] = ("desk", Desk),
        may_send: tuple[str, ...] = ("put",),
    ) -> None:
        self.role, self.may_send = role, may_send
        self.file = folder / "machines"
        self.sockets = Path(tempfile.mkdtemp(prefix="rolecall-", dir="/tmp"))
        self.switchboard = Switchboard(self.sockets)
        self.time = 0.0
        self.ended = threading.Event()
        self.ring = Ring.new("r1", given=TOKEN)
        self.joined: dict[int, Joined] = {}
        self.restart()

    def restart(self) -> None:
        """As the proxy does after it was killed."""
        self.relay = Relay(
            "proxy", 1, self.sockets, dict([self.role]), ["desk"], {self.role[0]: self.may_send}, self.file, LEASE_S,
            clock=lambda: self.time,
        )  # fmt: skip
        check = lambda text: self.ring.check(text, 0.0)  # noqa: E731
        self.app = build_app({}, {}, check, self.ended, Asks(), self.relay)

    def client(self, failures: list[httpx.Response | Exception] | None = None) -> httpx.Client:
        transport = InProcess(self.app, [] if failures is None else failures)
        return httpx.Client(transport=transport, base_url="http://run", timeout=60.0)

    def post(self, path: str, body: bytes = b"", *, session: str = "0", token: str = TOKEN) -> httpx.Response:
        headers = {TOKEN_HEADER: token, SESSION_HEADER: session}
        with self.client() as client:
            return client.post(f"/v1/relay{path}", content=body, headers=headers)

    def join(self, host: str, scope: Scope = "worker") -> Joined:
        joined = self.relay.join(host, scope)
        self.joined[joined.number] = joined
        return joined

    def proof(self, number: int = 1) -> str:
        """By which a machine is known."""
        return f"{number}.{self.joined[number].secret}"

    def open(self, number: int = 1) -> str:
        """A session as requests name it."""
        return f"{number}.{self.post('/open', session=self.proof(number)).json()['session']}"

    def close(self) -> None:
        self.relay.close()
        self.switchboard.close()
        shutil.rmtree(self.sockets)


@pytest.fixture
def door(tmp_path: Path) -> Iterator[Door]:
    made = Door(tmp_path)
    yield made
    made.close()


def batch(*frames: Frame, first: int = 1, heard: int = 0) -> bytes:
    return msgpack.encode(Batch(first, heard, list(frames)))


def test_numbers_are_never_used_again(door: Door):
    first = door.join("gpu.example.org")
    assert first == Joined("gpu.example.org-1", 1, LEASE_S, first.secret)
    assert door.join("a strange/name of a host, too").name == "a-strange-name-o-2"
    door.relay.leave(1)
    assert door.join("").name == "machine-3"
    door.restart()
    assert door.join("x").number == 4
    with pytest.raises(Fenced):
        door.relay.open(1)
    door.relay.open(3)


def test_a_lease_runs_out(door: Door):
    door.join("a")
    door.join("b")
    session = door.relay.open(1).session
    door.relay.open(2)
    door.time = LEASE_S
    door.relay.look()
    door.relay.exchange(1, session, EMPTY, None)  # any request renews it
    door.time += 0.1
    door.relay.look()
    door.relay.exchange(1, session, EMPTY, None)
    with pytest.raises(
        Fenced, match="machine 2 is dead for this run: it was not heard of for too long, or has left"
    ):
        door.relay.open(2)
    door.restart()  # a machine that was there may be back within a lease
    door.time += LEASE_S
    door.relay.look()
    door.relay.open(1)
    with pytest.raises(Fenced):
        door.relay.open(2)


def test_a_machine_that_has_joined_starts_its_processes_first(door: Door):
    door.join("a")
    door.join("b")
    door.time = START_S
    door.relay.look()
    door.relay.open(1)
    door.time += LEASE_S
    door.relay.look()
    assert door.relay.machines == ["a-1"]  # the other has not come
    door.time += 0.1
    door.relay.look()
    assert door.relay.machines == []
    door.join("c")
    door.restart()  # nobody knows any more whether it had come
    door.time += START_S
    door.relay.look()
    assert door.relay.machines == ["c-3"]
    door.time += 0.1
    door.relay.look()
    assert [why for _, why in door.relay._remembered.lost.values()] == [
        "machine b-2 has not been heard of for 60 s",
        "machine a-1 has not been heard of for 30 s",
        "machine c-3 has not been heard of for 60 s",
    ]


@pytest.mark.parametrize("path", ["", "/join", "/open", "/leave"])
def test_a_wrong_token(door: Door, path: str):
    door.join("a")
    for token in ("", "the-toke", "another"):
        assert door.post(path, EMPTY, session="1", token=token).status_code == 401
    assert door.join("b").number == 2


def test_a_session_that_has_ended_is_refused_before_its_body_is_read(door: Door):
    door.join("a")
    old = door.open()
    assert door.post("", EMPTY, session=old).status_code == 200
    new = door.open()
    for session in (old, "1.", "1", "1.x", "0"):
        assert door.post("", b"\x80", session=session).status_code in (409, 410, 422), session
    assert door.post("", b"\x80", session=old).status_code == 409
    assert door.post("", EMPTY, session=new).status_code == 200
    door.restart()
    assert door.post("", EMPTY, session=new).status_code == 409


def test_frames_that_are_missing_end_the_session(door: Door):
    door.join("a")
    assert door.post("", batch(Done("desk", 1, [1]), first=2), session=door.open()).status_code == 409
    assert door.post("", batch(heard=7), session=door.open()).status_code == 409


def test_a_machine_that_is_dead_for_the_run(door: Door):
    door.join("a")
    session = door.open()
    door.time = LEASE_S + 0.1
    door.relay.look()
    for path in ("", "/open", "/leave"):
        response = door.post(path, EMPTY, session=door.proof() if path else session)
        assert (response.status_code, response.json()["fenced"]) == (410, True)


def test_a_run_that_has_ended(door: Door):
    door.ended.set()
    response = door.post("/join", b"a")
    assert (response.status_code, "fenced" in response.json()) == (410, False)


FAR = (1 << NODE_BITS) + 1


@pytest.mark.parametrize(
    "frame",
    [
        Mail("desk", 1, False, 1, 5, 0.0, ("a-1/desk",), "put", b""),
        Mail("desk", 1, False, 1, (2 << NODE_BITS) + 1, 0.0, ("a-1/desk",), "put", b""),
        *(
            Mail("desk", 1, False, 1, FAR, 0.0, chain, "put", b"")
            for chain in [
                (),
                ("b-2/desk",),
                ("desk",),
                ("a-1/desk", "proxy"),
                ("a-1/desk\n",),
                ("a-1/../desk",),
            ]
        ),
        Heard("desk", 5, [1]),
        Members([FarMember("desk", "desk", FAR, "up", "", [])]),
        Members([FarMember("a-1/desk", "desk", 5, "up", "", [])]),
        Members([FarMember("a-1/../desk", "desk", FAR, "up", "", [])]),
        Members([FarMember("a-1/desk-x", "desk", FAR, "up", "", [])]),
        Members([FarMember("a-1/desk", "other", FAR, "up", "", [])]),
    ],
)
def test_a_machine_speaks_only_for_its_own_actors(door: Door, frame: Frame):
    door.join("a")
    session = door.open()
    response = door.post("", batch(frame), session=session)
    assert response.status_code == 422, frame
    assert "is not of machine" in response.json()["error"]
    assert door.post("", batch(Heard("desk", FAR, [1])), session=session).status_code == 200


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"\x80\x05K\x01.",
        msgpack.encode([1, 0, [["mail"]]]),
        msgpack.encode([1, 0, [["other", 1]]]),
    ],
)
def test_a_body_that_is_no_batch(door: Door, body: bytes):
    door.join("a")
    assert door.post("", body, session=door.open()).status_code == 422


def test_a_role_that_no_other_machine_runs(door: Door):
    door.join("a")
    member = FarMember("a-1/trainer", "trainer", FAR, "up", "", [])
    response = door.post("", batch(Members([member])), session=door.open())
    assert response.status_code == 422
    assert response.json()["error"] == "a-1/trainer: machines that join run no trainer"


def test_more_than_a_page_holds(door: Door):
    door.join("a")
    member = FarMember("a-1/desk", "desk", FAR, "down", "", [Memory(1, 1, [], list(range(1, 66)))])
    response = door.post("", batch(Members([member])), session=door.open())
    assert response.status_code == 422
    assert "more than a page holds" in response.json()["error"]


@pytest.mark.parametrize(
    "frame",
    [
        ["mail", "desk", -1, False, 1, FAR, 0.0, [], "put", b""],
        ["mail", "desk", 1, False, 2**63, FAR, 0.0, [], "put", b""],
        ["mail", "desk", 1, False, 1, FAR, float("nan"), [], "put", b""],
        ["mail", "desk", 1, False, 1, FAR, 0.0, ["x"] * 65, "put", b""],
        ["mail", "desk", 1, False, 1, FAR, 0.0, [], "x" * 201, b""],
        ["done", "desk", FAR, [-1]],
        ["members", [["a-1/desk", "desk", FAR, "cut", "", []]]],
    ],
)
def test_frames_with_more_than_any_page_or_header_holds(door: Door, frame: list[Any]):
    door.join("a")
    assert door.post("", msgpack.encode([1, 0, [frame]]), session=door.open()).status_code == 422


def test_no_more_machines(door: Door, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(relay_module, "MAX_MACHINES", 1)
    assert door.post("/join", b"a").status_code == 200
    response = door.post("/join", b"b")
    assert response.status_code == 503
    assert response.json()["error"] == "1 machines are in this run, and it takes no more"


@pytest.mark.parametrize("session", ["x", "-1.a", "1e3.a", "99999999.a", "²"])
def test_a_session_that_is_none(door: Door, session: str):
    headers = httpx.Headers(
        [(TOKEN_HEADER.encode(), TOKEN.encode()), (SESSION_HEADER.encode(), session.encode())]
    )
    with door.client() as client:
        assert client.post("/v1/relay/open", headers=headers).status_code == 422


def test_a_body_too_large(door: Door, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(proxy, "MAX_BODY_BYTES", 100)
    door.join("a")
    assert door.post("", b"\xc1" * 101, session=door.open()).status_code == 413


# --- the machine that joins ------------------------------------------------------------------------------------


class Dialing:
    """A Dialer whose requests go to `respond`; what it delivers, and its lines."""

    def __init__(self, make_client: Callable[[], httpx.Client], secret: str = "") -> None:
        self.got: list[Frame] = []
        self.lines: list[Line] = []
        self.came = threading.Condition()
        joined = Joined("a-1", 1, 0.6, secret)
        self.dialer = Dialer("http://run", lambda: TOKEN, joined, self.new_line, make_client)

    def new_line(self) -> Line:
        line = Line(self.deliver)
        with self.came:
            self.lines.append(line)
            self.came.notify_all()
        return line

    def deliver(self, line: Line, frames: Any) -> None:
        with self.came:
            self.got += frames
            self.came.notify_all()

    def wait(self, condition: Callable[[], Any]) -> None:
        with self.came:
            assert self.came.wait_for(condition, 20.0)

    def ending(self) -> Exception | None:
        for thread in self.dialer._threads:
            thread.join(20.0)
        return self.dialer.ending


def dialing(*responses: httpx.Response | Exception) -> Dialing:
    """The responses to its requests, the last one for ever."""
    left = list(responses)
    lock = threading.Lock()

    def respond(request: httpx.Request) -> httpx.Response:
        with lock:
            response = left.pop(0) if len(left) > 1 else left[0]
        if isinstance(response, Exception):
            raise response
        return response

    made = Dialing(lambda: httpx.Client(transport=httpx.MockTransport(respond)))
    made.dialer.start()
    return made


@pytest.mark.parametrize(
    ("response", "kind", "code", "words"),
    [
        (httpx.Response(401), Unrecoverable, 2, "refused the token"),
        (
            httpx.Response(410, json={"error": "dead", "fenced": True}),
            Unrecoverable,
            3,
            "goes on without this machine",
        ),
        (httpx.Response(422, text="no"), Unrecoverable, 1, "refused a request with 422: no"),
        (httpx.Response(410, json={"error": "the run has ended"}), Finished, None, ""),
    ],
)
def test_answers_that_end_the_link(response: httpx.Response, kind: type, code: int | None, words: str):
    ending = dialing(response).ending()
    assert isinstance(ending, kind)
    assert words in str(ending)
    assert getattr(ending, "exit_code", None) == code


def test_a_run_that_stays_away_is_given_up(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(link_module, "GIVE_UP_S", 0.3)
    for away in (httpx.ConnectError("refused"), httpx.Response(502), httpx.Response(503, text="desk")):
        ending = dialing(away).ending()
        assert isinstance(ending, Unrecoverable)
        assert "was there and has not been" in str(ending)


def test_a_gateway_without_its_run_for_a_while(door: Door):
    door.join("a")
    away: list[httpx.Response | Exception] = [
        httpx.Response(502),
        httpx.ConnectError("refused"),
        httpx.Response(429),
    ]
    here = Dialing(lambda: door.client(away), door.joined[1].secret)
    here.dialer.start()
    here.wait(lambda: here.lines)
    there = door.relay._nodes[1]
    for number in range(5):
        assert there.line is not None
        there.line.post(Done("desk", number, []))
        here.lines[-1].post(Heard("desk", FAR, [number]))
    here.wait(lambda: len(here.got) == 5)
    assert here.got == [Done("desk", number, []) for number in range(5)]
    here.dialer.stop(10.0)
    assert there.line is not None and there.line.heard == 5
    assert here.lines[-1].idle
    with pytest.raises(Fenced):
        door.relay.open(1)  # it has said goodbye


def test_a_goodbye_that_does_not_arrive(door: Door):
    door.join("a")
    here = Dialing(door.client, door.joined[1].secret)
    here.dialer.start()
    here.wait(lambda: here.lines)
    here.dialer._make_client = lambda: door.client([httpx.ConnectError("refused")])
    here.dialer.stop(10.0)
    door.relay.open(1)  # until its lease has run out


def test_when_the_relay_is_new_a_new_line_begins(door: Door):
    door.join("a")
    here = Dialing(door.client, door.joined[1].secret)
    here.dialer.start()
    here.wait(lambda: here.lines)
    door.relay.open(1)  # as another link would
    here.wait(lambda: len(here.lines) == 2)
    assert here.lines[0].closed
    there = door.relay._nodes[1].line
    assert there is not None
    there.post(Done("desk", 1, []))
    here.wait(lambda: here.got)
    here.dialer.stop(10.0)


def test_a_request_that_is_lost_is_made_again_before_the_lease_is_over(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(link_module, "MIN_ANSWER_S", 0.0)
    asked: dict[str, float] = {}
    both = threading.Event()

    def respond(request: httpx.Request) -> httpx.Response:
        if request.url.path.endswith("/open"):
            return httpx.Response(200, content=b'{"session": "s"}')
        asked[request.url.params.get("wait", "")] = request.extensions["timeout"]["read"]
        if len(asked) == 2:
            both.set()
        return httpx.Response(200, content=EMPTY)

    joined = Joined("a-1", 1, 0.6, "secret")
    make_client = lambda: httpx.Client(transport=httpx.MockTransport(respond))  # noqa: E731
    dialer = Dialer("http://run", lambda: TOKEN, joined, lambda: Line(lambda line, frames: None), make_client)
    dialer.start()
    assert both.wait(20.0)
    dialer.stop(10.0)
    assert asked == pytest.approx({"": 0.6 / 3, "0.2": 2 * 0.6 / 3})


def test_a_stale_session_is_said(door: Door):
    door.join("a")
    old = door.relay.open(1).session
    door.relay.open(1)
    with pytest.raises(Stale):
        door.relay.exchange(1, old, EMPTY, 0.0)
    with pytest.raises(Stale):
        door.relay.renew(1, old)
