"""A worker in another language: it knows the routes that a role lists in `http`, and JSON; and what these promise."""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_type_hints

import httpx
import jsonschema
import msgspec
from rolecall import Actor, Finished, RolecallError
from rolecall.runtime.remote import TOKEN_HEADER, read_token


class Rest:
    """Asks `actor` behind the proxy at `url`. An idempotent request without an answer is made again."""

    def __init__(self, url: str, token_file: Path, actor: type[Actor]) -> None:
        self.url, self.actor = url, actor
        headers = {TOKEN_HEADER: read_token(token_file), "Content-Type": "application/json"}
        self.client = httpx.Client(headers=headers, timeout=30.0)

    def ask(
        self,
        message: Callable[..., Any],
        *args: Any,
        between: Callable[[], None] = lambda: None,
        **kwargs: Any,
    ) -> Any:
        """Raises Finished when the run has ended, RolecallError for what is refused. `between`: before each try."""
        verb, path = next(
            route.split() for route, method in self.actor.http.items() if method == message.__name__
        )
        bound = inspect.signature(message).bind(None, *args, **kwargs)
        body = msgspec.json.encode(dict(list(bound.arguments.items())[1:]))
        until = time.monotonic() + 60.0
        while True:
            between()
            assert time.monotonic() < until, "the request was never answered"
            try:
                response = self.client.request(verb, self.url + path, content=body)
            except httpx.TransportError:
                continue
            if response.status_code == 410:
                raise Finished
            if response.status_code == 200:
                answer = get_type_hints(message).get("return", Any)
                return msgspec.json.decode(response.content, type=answer)
            if response.status_code not in (429, 503):
                raise RolecallError(f"{response.status_code}: {response.text}")


def operation(document: dict[str, Any], verb: str, path: str) -> dict[str, Any] | None:
    """What the run's OpenAPI document says of a route, without what follows a question mark."""
    return document["paths"].get(path.partition("?")[0], {}).get(verb.lower())


def is_as_described(document: dict[str, Any], schema: dict[str, Any], value: Any) -> bool:
    whole = {**schema, "components": document["components"]}
    return jsonschema.Draft202012Validator(whole).is_valid(value)


def checked(document: dict[str, Any], verb: str, path: str, response: httpx.Response) -> httpx.Response:
    """The same response; fails if the document does not describe it. Of routes that it has none of, 404 or 405."""
    described = operation(document, verb, path)
    if described is None:
        assert response.status_code in (404, 405)
        return response
    expected = described["responses"][str(response.status_code)]
    assert expected.get("headers", {}).keys() <= {name.title() for name in response.headers}
    if "content" not in expected:
        assert response.content == b""
        return response
    content = expected["content"][response.headers["Content-Type"].partition(";")[0]]
    value = response.json() if "json" in response.headers["Content-Type"] else response.text
    assert is_as_described(document, content["schema"], value), (value, content)
    return response
