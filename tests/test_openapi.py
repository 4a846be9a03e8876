"""The description of the REST routes: whole, valid, and what the proxy does.

Each response in test_proxy.py is held against it, too.
"""

from __future__ import annotations

import asyncio
import html
import json
import re
import threading
from typing import Any, cast

import httpx
import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from openapi_spec_validator import validate
from rolecall import Actor
from rolecall.actors.buffer import Buffer
from rolecall.actors.prompts import PromptSource
from rolecall.runtime.asks import Asks
from rolecall.runtime.docs import page
from rolecall.runtime.openapi import arguments_type, describe
from rolecall.runtime.proxy import OTHERS, WAIT_S, build_app
from rolecall.runtime.relay import Relay
from rolecall.runtime.tokens import Ring

from .rest import is_as_described, operation

ROLES: dict[str, type[Actor]] = {"prompts": PromptSource, "buffer": Buffer}
ROUTES = {route: getattr(role, method) for role in ROLES.values() for route, method in role.http.items()}


DOCUMENT = describe(ROLES, WAIT_S, OTHERS)


@pytest.fixture
def document() -> dict[str, Any]:
    return DOCUMENT


@pytest.fixture(scope="module")
def app() -> Any:
    return build_app(
        ROLES,
        {},
        lambda text: Ring.new("r", given="token").check(text, 0.0),
        threading.Event(),
        Asks(),
        cast(Relay, object()),
    )


def get(app: Any, path: str) -> httpx.Response:
    async def send() -> httpx.Response:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://run") as client:
            return await client.get(path)

    return asyncio.run(send())


def test_it_is_valid_and_served_without_a_token(app: Any, document: dict[str, Any]):
    served = get(app, "/v1/openapi.json").json()
    assert served == json.loads(json.dumps(document, allow_nan=False))
    validate(served)


def test_it_has_every_route(app: Any, document: dict[str, Any]):
    there = {(verb, route.path) for route in app.routes for verb in route.methods - {"HEAD"}}
    described = {
        (verb.upper(), path) for path, operations in document["paths"].items() for verb in operations
    }
    assert described == there


@pytest.mark.parametrize("route", ROUTES)
def test_it_has_every_argument(document: dict[str, Any], route: str):
    described = operation(document, *route.split())
    assert described is not None
    fields = set(arguments_type(ROUTES[route]).__struct_fields__)
    if route.startswith("GET"):
        assert {parameter["name"] for parameter in described["parameters"]} == fields
    else:
        schema = described["requestBody"]["content"]["application/json"]["schema"]
        assert schema["properties"].keys() == fields
        assert schema["additionalProperties"] is False


def test_only_what_tells_nothing_of_the_run_needs_no_token(app: Any, document: dict[str, Any]):
    for path, operations in document["paths"].items():
        for verb, described in operations.items():
            response = asyncio.run(_ask(app, verb, path))
            assert (response.status_code == 401) == (described.get("security") is None), path


async def _ask(app: Any, verb: str, path: str) -> httpx.Response:
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://run") as client:
        return await client.request(verb, path)


def test_the_page_shows_it_all_and_loads_nothing(app: Any, document: dict[str, Any]):
    response = get(app, "/v1/docs")
    assert response.text == page(document)
    assert "default-src 'none'" in response.headers["Content-Security-Policy"]
    for path, operations in document["paths"].items():
        for verb, described in operations.items():
            assert f"{verb.upper()} {path}" in response.text
            assert html.escape(described["summary"]).replace("`", "") in re.sub("</?code>", "", response.text)
    links, places = (set(re.findall(rf'{kind}"([^"]+)"', response.text)) for kind in ("href=", "id="))
    assert links <= {f"#{place}" for place in places}
    assert document["components"]["schemas"].keys() <= places
    assert not re.search(r"<script|src=|https?:|url\(", response.text)


def test_what_a_docstring_says_is_shown_as_text():
    class Odd(Actor):
        http = {"GET /v1/odd": "odd"}  # noqa: RUF012

        def odd(self) -> int:
            """<script>alert(1)</script>"""
            return 1

    assert "<script>" not in page(describe({"odd": Odd}, WAIT_S, {}))


wrong = st.one_of(
    st.none(), st.booleans(), st.text(max_size=3), st.integers(), st.lists(st.integers(), max_size=2)
)
count = st.one_of(st.integers(-2, 2), st.integers(2**62 - 2, 2**62 + 2), wrong)
lent = st.one_of(st.dictionaries(st.integers(0, 9).map(str), count, max_size=2), wrong)
word = {
    "worker": st.one_of(st.text(max_size=3), wrong),
    "incarnation": count,
    "lease": count,
    "holding": lent,
    "delivered": lent,
    "count": st.one_of(st.integers(4094, 4098), count),
    "wait": st.one_of(st.booleans(), wrong),
}


@given(st.fixed_dictionaries({}, optional={**word, "other": wrong}))
def test_the_proxy_takes_what_is_described_and_nothing_else(body: dict[str, Any]):
    described = operation(DOCUMENT, "POST", "/v1/prompts")
    assert described is not None
    schema = described["requestBody"]["content"]["application/json"]["schema"]
    try:
        msgspec.json.decode(json.dumps(body), type=arguments_type(PromptSource.next))
        taken = True
    except msgspec.DecodeError:
        taken = False
    assert is_as_described(DOCUMENT, schema, body) == taken
