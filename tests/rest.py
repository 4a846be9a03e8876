"""A worker in another language: it knows the routes that a role lists in `http`, and JSON."""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_type_hints

import httpx
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
