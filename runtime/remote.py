"""Sending messages to actors of another machine, over HTTP, from a machine that only dials out.

Every message an actor class lists in `http` is idempotent, so a request whose answer was lost is simply made
again. Bodies are JSON of known types: nothing from another machine is ever unpickled.
"""

from __future__ import annotations

import inspect
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_type_hints

import msgspec

from .actor import Actor
from .errors import AskTimeout, Finished, RolecallError, Unrecoverable

if TYPE_CHECKING:
    import httpx

    from .ref import Call

__all__ = ["BEARER", "TOKEN_HEADER", "RemoteActor", "fetch_about", "read_token"]

TOKEN_HEADER = "X-Rolecall-Token"  # noqa: S105  the header's name, not a secret; gateways need Authorization
BEARER = "ROLECALL_BEARER"  # the variable with what a platform's gateway wants as Authorization: Bearer
GIVE_UP_S = 120.0  # a proxy that restarts is back within seconds; a run that has ended never is
_clients: dict[str, httpx.Client] = {}


def read_token(path: Path) -> str:
    """The run's token. Raises Unrecoverable (exit code 2) if the file can't be read or is empty."""
    try:
        token = path.read_text().strip()
    except OSError as error:
        raise Unrecoverable(
            f"can't read the token file {path}: {error.strerror}; copy it from the machine the run was started on",
            exit_code=2,
        ) from error
    if not token:
        raise Unrecoverable(f"the token file {path} is empty: copy it again", exit_code=2)
    return token


def _headers(token_file: Path) -> dict[str, str]:
    """The run's own token and, if the run is behind a platform's gateway, what that asks for."""
    bearer = os.environ.get(BEARER)
    return {TOKEN_HEADER: read_token(token_file)} | ({"Authorization": f"Bearer {bearer}"} if bearer else {})


def fetch_about(url: str, token_file: Path) -> dict[str, Any]:
    """What a run says of itself: recipe, config. Raises Unrecoverable (exit code 2) if there is none."""
    import httpx

    try:
        response = httpx.get(f"{url}/v1/run", headers=_headers(token_file), timeout=10.0)
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise Unrecoverable(
            f"no run answers at {url} ({error}): check the address, and that the run was started with --proxy",
            exit_code=2,
        ) from error
    if response.status_code == 410:
        raise Unrecoverable(f"the run at {url} has ended: there is nothing left to join", exit_code=2)
    _check(response, url)
    return response.json()


def _check(response: httpx.Response, url: str) -> None:
    if response.status_code == 401:
        raise Unrecoverable(
            f"the run at {url} refused the token: copy its token file again (it is named when the run starts)",
            exit_code=2,
        )
    if response.status_code >= 400:
        raise RolecallError(f"{url} refused the request with {response.status_code}: {response.text[:500]}")


def _retry_after_s(response: httpx.Response) -> float | None:
    """None if there is none in seconds: it may also be a date, which only a gateway gives."""
    given = response.headers.get("Retry-After", "")
    return float(given) if given.isascii() and given.isdigit() else None


@dataclass(frozen=True)
class RemoteActor:
    """An actor behind a proxy. The token stays in its file: it is never part of a pickle."""

    name: str
    url: str
    token_file: Path
    actor: type[Actor]
    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep

    def ask(self, call: Call, deadline: float, between: Callable[[], None]) -> Any:
        """Send `call` as the HTTP request its actor declares, until it is answered.

        `between` runs between two tries. Raises AskTimeout after `deadline`; Finished when the run says that
        it has ended; RolecallError for a refused request; Unrecoverable if the token is wrong or the proxy
        stays unreachable.
        """
        verb, path, body = self._request(call)
        answer_type = get_type_hints(getattr(self.actor, call.method)).get("return", Any)
        failing_since: float | None = None
        pause_s = 0.1
        while True:
            between()
            if self.clock() > deadline:
                raise AskTimeout(f"no answer from {self.name} at {self.url} within the deadline")
            response = self._send(verb, path, body)
            if isinstance(response, str):
                failing_since = self.clock() if failing_since is None else failing_since
                if self.clock() - failing_since > GIVE_UP_S:
                    raise Unrecoverable(
                        f"the run at {self.url} was there and has not been for {GIVE_UP_S:.0f} s ({response}): it "
                        "has ended, or this machine has lost its connection; join again when it is back"
                    )
                self.sleep(pause_s)
                pause_s = min(2 * pause_s, 5.0)
                continue
            failing_since, pause_s = None, 0.1
            if response.status_code == 410:
                raise Finished
            if response.status_code != 429:
                _check(response, self.url)
                return msgspec.json.decode(response.content, type=answer_type)
            self.sleep(min(_retry_after_s(response) or 0.0, 5.0))

    def _send(self, verb: str, path: str, body: bytes) -> httpx.Response | str:
        """The run's own response, or what stood between: no connection, or a gateway that answers for it."""
        import httpx

        try:
            response = self._client().request(verb, self.url + path, content=body)
        except httpx.TransportError as error:
            return str(error) or type(error).__name__
        asks_again = response.status_code == 429 and _retry_after_s(response) is not None
        if response.status_code in (429, 502, 503, 504) and not asks_again:
            return f"{response.status_code}: {response.text[:200]}"
        return response

    def _request(self, call: Call) -> tuple[str, str, bytes]:
        for route, method in self.actor.http.items():
            if method == call.method:
                verb, path = route.split()
                bound = inspect.signature(getattr(self.actor, method)).bind(None, *call.args, **call.kwargs)
                arguments = dict(list(bound.arguments.items())[1:])
                return verb, path, msgspec.json.encode(arguments)
        raise RolecallError(
            f"{self.actor.__name__}.{call.method} can't be asked from another machine: "
            f"{self.actor.__name__}.http has {', '.join(self.actor.http.values())}"
        )

    def _client(self) -> httpx.Client:
        import httpx

        if self.url not in _clients:
            headers = {**_headers(self.token_file), "Content-Type": "application/json"}
            _clients[self.url] = httpx.Client(headers=headers, timeout=30.0)
        return _clients[self.url]
