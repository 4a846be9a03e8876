"""Attacks on the proxy by nobody, by others, and by workers that want more than their part."""

from __future__ import annotations

import pickle
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from msgspec import json
from rolecall import Actor
from rolecall.actors.buffer import Buffer
from rolecall.actors.prompts import PromptSource
from rolecall.recipes import async_grpo, sync_grpo
from rolecall.runtime.gate import OPEN
from rolecall.runtime.line import FarMember, Mail, Members
from rolecall.runtime.ref import bind_transport
from rolecall.runtime.remote import TOKEN_HEADER
from rolecall.runtime.tokens import Ring

from .attackers import NOW, Canary, Town
from .test_link import EMPTY, FAR, Door, batch

WORKERS = {
    "GET /v1/run", "GET /v1/policy/digest",
    "POST /v1/groups", "POST /v1/prompts", "POST /v1/prompts/hold", "POST /v1/prompts/leave",
    "GET /v1/policy", "POST /v1/relay", "POST /v1/relay/join", "POST /v1/relay/open", "POST /v1/relay/leave",
}  # fmt: skip
TRAINERS = {"GET /v1/batch"}


@pytest.fixture
def town(tmp_path: Path) -> Iterator[Town]:
    made = Town(tmp_path)
    yield made
    bind_transport(None)
    made.door.close()


# --- who is let in -------------------------------------------------------------------------------------------


def test_every_route_has_its_scope(town: Town):
    """A new route needs a line here."""
    assert town.routes == WORKERS | TRAINERS | {f"GET {path}" for path in OPEN}
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
        "buffer": ("put", "digest"),
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
        good = Mail("prompts", 1, ask, 1, FAR, 0.0, ("a-1/desk",), "put", b"\x80")
        bad = Mail(receiver, 1, ask, 2, FAR, 0.0, ("a-1/desk",), method, b"")
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
    mail = Mail("prompts", 1, False, 1, FAR, 0.0, ("a-1/desk",), "advance", b"\x80")
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
    door.open()
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
