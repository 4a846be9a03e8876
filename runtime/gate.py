"""What every request at the proxy must pass before an actor hears of it: in time, by whom, how much.

A token is checked before anything else of a request is looked at, and no body is read before that.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

from .errors import RolecallError
from .remote import TOKEN_HEADER
from .tokens import Token, Unauthorized

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response
    from starlette.types import ASGIApp, Message, Receive, Send
    from starlette.types import Scope as ASGIScope

__all__ = ["Gate", "gone", "impatient_protocol", "note_caller", "read_body", "refused"]

HEADERS_S = 10.0  # how long a connection may take to make a request, or to end one that is answered already
BODY_S = 120.0  # and a request to bring its body
OPEN = {"/healthz", "/v1/docs", "/v1/openapi.json"}  # what tells nothing of the run, and takes no body
MAX_HELD_BYTES = 512 << 20  # of the bodies of all requests that are not answered yet


def impatient_protocol() -> type[asyncio.Protocol]:
    """HTTP/1.1 that hangs up on a connection whose request does not come, or does not end though it is answered:
    uvicorn itself waits for ever. Its requests know it, so that `note_caller` can tell it who is at its other end."""
    import h11
    from uvicorn.protocols.http.h11_impl import H11Protocol

    class Impatient(H11Protocol):
        _patience: asyncio.TimerHandle | None = None
        caller: int | None = None

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            self.app_state = {**self.app_state, "connection": self}
            self._patience = self.loop.call_later(HEADERS_S, transport.close)

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            theirs, ours = self.conn.their_state, self.conn.our_state
            owes = theirs is h11.IDLE or (theirs is h11.SEND_BODY and ours in (h11.DONE, h11.MUST_CLOSE))
            if self._patience is not None and not owes:
                self._patience.cancel()
                self._patience = None
            elif self._patience is None and owes:
                self._patience = self.loop.call_later(HEADERS_S, self.transport.close)

        def connection_lost(self, exc: Exception | None) -> None:
            super().connection_lost(exc)
            if self._patience is not None:
                self._patience.cancel()

    return Impatient


def note_caller(scope: ASGIScope, machine: int = 0) -> None:
    """Who this request has proved to be: the machine of that number, or somebody with a token."""
    if (connection := scope.get("state", {}).get("connection")) is not None:
        connection.caller = machine or connection.caller or 0


class Full(RolecallError):
    """Too many bytes are being read at once."""


class Gate:
    """Whose a request is, before anything else of it is looked at; what its token says is left in its scope.

    check: gives that, or raises Unauthorized. ended: the run has. Without a token only OPEN is there.
    """

    def __init__(self, app: ASGIApp, *, check: Callable[[str], Token], ended: threading.Event) -> None:
        self._app, self._check, self._ended = app, check, ended
        self._held = 0  # bytes of bodies

    async def __call__(self, scope: ASGIScope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in OPEN:
            return await self._app(scope, receive, send)
        if (refusal := self._refusal(scope)) is not None:
            return await refusal(scope, receive, send)
        note_caller(scope)
        mine = 0

        async def counted() -> Message:
            nonlocal mine
            message = await receive()
            size = len(message.get("body", b""))
            mine += size
            self._held += size
            if self._held > MAX_HELD_BYTES:
                raise Full(f"more than {MAX_HELD_BYTES} bytes are being read: come again")
            return message

        try:
            await self._app(scope, counted, send)
        except Full as error:
            await refused(503, str(error))(scope, receive, send)
        finally:
            self._held -= mine

    def _refusal(self, scope: ASGIScope) -> Response | None:
        from starlette.datastructures import Headers

        headers = Headers(scope=scope)
        try:
            scope["token"] = self._check(headers.get(TOKEN_HEADER, ""))
        except Unauthorized as error:
            return refused(401, f"wrong or missing {TOKEN_HEADER}: {error}")
        if self._ended.is_set():
            return gone()
        if not scope["path"].isprintable():  # "/v1/run\n" would pass for a route
            return refused(404, "no such path")
        if headers.get("Content-Encoding", "identity") != "identity":
            return refused(415, "a body must come as it is, without Content-Encoding")
        return None


def refused(status: int, why: str) -> Response:
    from starlette.responses import JSONResponse

    return JSONResponse({"error": why}, status_code=status)


def gone() -> Response:
    from starlette.responses import JSONResponse

    return JSONResponse({"error": "the run has ended"}, status_code=410, headers={"Connection": "close"})


async def read_body(request: Request, limit: int) -> bytes | Response:
    """The body, or why there is none."""
    from starlette.requests import ClientDisconnect
    from starlette.responses import JSONResponse, Response

    try:
        async with asyncio.timeout(BODY_S):
            body = await _read(request, limit)
    except ClientDisconnect:
        return Response(status_code=400)  # which nobody reads
    except TimeoutError:
        return JSONResponse({"error": f"no whole body within {BODY_S:.0f} s"}, status_code=408)
    if body is None:
        return JSONResponse({"error": f"more than {limit} bytes"}, status_code=413)
    return body


async def _read(request: Request, limit: int) -> bytes | None:
    """The body, or None if it is too large; a body that lies about its size is cut off as well."""
    if int(request.headers.get("Content-Length", "0")) > limit:
        return None
    chunks: list[bytes] = []
    size = 0
    async for chunk in request.stream():
        size += len(chunk)
        if size > limit:
            return None
        chunks.append(chunk)
    return b"".join(chunks)
