"""Sending messages to actors of another machine, over HTTP, from a machine that only dials out.

Every message an actor class lists in `http` is idempotent, so a request whose answer was lost is simply made
again. Bodies are JSON of known types: nothing from another machine is ever unpickled.
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_type_hints

import msgspec

from .actor import Actor
from .errors import AskTimeout, RolecallError, Unrecoverable

if TYPE_CHECKING:
    import httpx

    from .ref import Call

__all__ = ["TOKEN_HEADER", "RemoteActor", "fetch_about", "read_token"]

TOKEN_HEADER = "X-Rolecall-Token"  # noqa: S105  the header's name, not a secret; gateways need Authorization
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


def fetch_about(url: str, token_file: Path) -> dict[str, Any]:
    """What a run says of itself: recipe, config. Raises Unrecoverable (exit code 2) if there is none."""
    import httpx

    headers = {TOKEN_HEADER: read_token(token_file)}
    try:
        response = httpx.get(f"{url}/v1/run", headers=headers, timeout=10.0)
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise Unrecoverable(
            f"no run answers at {url} ({error}): check the address, and that the run was started with --proxy",
            exit_code=2,
        ) from error
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


@dataclass(frozen=True)
class RemoteActor:
    """An actor behind a proxy. The token stays in its file: it is never part of a pickle."""

    name: str
    url: str
    token_file: Path
    actor: type[Actor]

    def ask(self, call: Call, deadline: float, between: Callable[[], None]) -> Any:
        """Send `call` as the HTTP request its actor declares, until it is answered.

        `between` runs between two tries. Raises AskTimeout after `deadline`; RolecallError for a refused
        request; Unrecoverable if the token is wrong or the proxy stays unreachable.
        """
        import httpx

        verb, path, body = self._request(call)
        answer_type = get_type_hints(getattr(self.actor, call.method)).get("return", Any)
        unreachable_since: float | None = None
        pause_s = 0.1
        while True:
            between()
            if time.monotonic() > deadline:
                raise AskTimeout(f"no answer from {self.name} at {self.url} within the deadline")
            try:
                response = self._client().request(verb, self.url + path, content=body)
            except httpx.TransportError as error:
                unreachable_since = unreachable_since or time.monotonic()
                if time.monotonic() - unreachable_since > GIVE_UP_S:
                    raise Unrecoverable(
                        f"the run at {self.url} has been unreachable for {GIVE_UP_S:.0f} s ({error}): it has "
                        "ended, or this machine has lost its connection; join again when it is back"
                    ) from error
                time.sleep(pause_s)
                pause_s = min(2 * pause_s, 5.0)
                continue
            unreachable_since, pause_s = None, 0.1
            if response.status_code not in (429, 502, 503, 504):
                _check(response, self.url)
                return msgspec.json.decode(response.content, type=answer_type)
            time.sleep(min(float(response.headers.get("Retry-After", "0")), 1.0))

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
            headers = {TOKEN_HEADER: read_token(self.token_file), "Content-Type": "application/json"}
            _clients[self.url] = httpx.Client(headers=headers, timeout=30.0)
        return _clients[self.url]
