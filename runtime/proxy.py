"""The HTTP door of a run: what machines that only dial out need, and nothing else.

Each role may list messages in `http`, for example Buffer's {"POST /v1/groups": "put"}. The proxy checks the
token, checks the JSON body against the handler's own types, asks the actor, and answers with JSON. Unbounded
waits are cut: an actor that says NotYet for WAIT_S becomes 429 with Retry-After, and the client asks again.
"""

from __future__ import annotations

import errno
import hmac
import inspect
import socket
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_type_hints

import msgspec

from .actor import Actor
from .errors import ActorDied, ActorStopped, AskTimeout, Unrecoverable
from .graph import Graph, Role
from .ref import Ref
from .remote import TOKEN_HEADER, read_token

if TYPE_CHECKING:
    import uvicorn
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import Response

__all__ = ["Proxy", "add_proxy", "build_app"]

WAIT_S = 5.0  # how long a request waits for an actor before the client is told to ask again
MAX_BODY_BYTES = 64 << 20
MAX_WAITING_REQUESTS = 256


def add_proxy(graph: Graph, *, host: str, port: int, token_file: Path, about: dict[str, Any]) -> Ref[Proxy]:
    """Add a proxy to a graph; it serves what the graph's roles list in `http`, and GET /v1/run = `about`."""
    roles = [role for role in graph if role.actor.http]
    return graph.add("proxy", Proxy, host=host, port=port, token_file=token_file, roles=roles, about=about)


class Proxy(Actor):
    """Serves HTTP in a thread of its own; its handlers ask the other actors like anybody else."""

    preloads = ("starlette.applications", "uvicorn")

    def __init__(
        self, *, host: str, port: int, token_file: Path, roles: list[Role], about: dict[str, Any]
    ) -> None:
        self.host, self.port, self.token_file = host, port, token_file
        self.roles = [(role.name, role.actor) for role in roles]
        self.about = about

    def on_start(self) -> None:
        import uvicorn

        app = build_app(self.roles, self.about, read_token(self.token_file))
        self._socket = self._listen()
        host, port = self._socket.getsockname()[:2]
        config = uvicorn.Config(app, log_level="warning", access_log=False, lifespan="on")
        self._server: uvicorn.Server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._server.run, args=([self._socket],), daemon=True)
        self._thread.start()
        self.report(url=f"http://{host}:{port}")

    def step(self) -> float | None:
        if not self._thread.is_alive():
            raise RuntimeError("the HTTP server has ended: its output is above")
        return 1.0

    def on_stop(self) -> None:
        self._server.should_exit = True
        self._thread.join(timeout=3.0)

    def _listen(self) -> socket.socket:
        # After a restart clients must find it where it was, also when the port was chosen by the system.
        remembered = self.state_folder / "port"
        port = int(remembered.read_text()) if remembered.exists() else self.port
        try:
            listener = socket.create_server((self.host, port), backlog=256)
        except OSError as error:
            mistakes = (errno.EADDRINUSE, errno.EADDRNOTAVAIL, errno.EACCES)
            if error.errno not in mistakes and not isinstance(error, socket.gaierror):
                raise
            raise Unrecoverable(
                f"the proxy can't listen on {self.host}:{port} ({error.strerror}): choose another with --proxy",
                exit_code=2,
            ) from error
        remembered.write_text(str(listener.getsockname()[1]))
        return listener


def build_app(roles: list[tuple[str, type[Actor]]], about: dict[str, Any], token: str) -> Starlette:
    """The ASGI app. `roles` are (name in the graph, class) with `http` messages."""
    from starlette.applications import Starlette
    from starlette.responses import JSONResponse
    from starlette.routing import Route

    async def healthz(request: Request) -> Response:
        return JSONResponse({"ok": True})

    async def run(request: Request) -> Response:
        return _refusal(request, token) or JSONResponse(about)

    routes = [Route("/healthz", healthz), Route("/v1/run", run)]
    for name, actor in roles:
        for route, method in actor.http.items():
            verb, path = route.split()
            routes.append(Route(path, _endpoint(name, actor, method, token), methods=[verb]))
    return Starlette(routes=routes, lifespan=_lifespan)


def _lifespan(app: Starlette) -> Any:
    import anyio.to_thread

    @asynccontextmanager
    async def more_threads(app: Starlette) -> AsyncIterator[None]:
        # Each request that waits for an actor holds a thread.
        anyio.to_thread.current_default_thread_limiter().total_tokens = MAX_WAITING_REQUESTS
        yield

    return more_threads(app)


def _refusal(request: Request, token: str) -> Response | None:
    from starlette.responses import JSONResponse

    given = request.headers.get(TOKEN_HEADER, "")
    if hmac.compare_digest(given.encode(), token.encode()):
        return None
    return JSONResponse({"error": f"wrong or missing {TOKEN_HEADER}"}, status_code=401)


def _endpoint(name: str, actor: type[Actor], method: str, token: str) -> Callable[..., Any]:
    from starlette.concurrency import run_in_threadpool
    from starlette.responses import JSONResponse, Response

    handler = getattr(actor, method)
    arguments_type = _arguments_type(handler)
    decoder = msgspec.json.Decoder(arguments_type)
    ref: Ref[Any] = Ref(name, WAIT_S)

    async def endpoint(request: Request) -> Response:
        refused = _refusal(request, token)
        if refused is not None:
            return refused
        body = await _read(request)
        if body is None:
            return JSONResponse({"error": f"more than {MAX_BODY_BYTES} bytes"}, status_code=413)
        try:
            arguments = decoder.decode(body) if body else msgspec.convert(
                dict(request.query_params), arguments_type, strict=False
            )  # fmt: skip
        except msgspec.DecodeError as error:
            return JSONResponse({"error": str(error)}, status_code=422)
        try:
            answer = await run_in_threadpool(ref.ask, handler, **msgspec.structs.asdict(arguments))
        except AskTimeout:
            return Response(status_code=429, headers={"Retry-After": "0"})
        except (ActorDied, ActorStopped) as error:
            return JSONResponse({"error": str(error)}, status_code=503, headers={"Retry-After": "1"})
        except Exception as error:  # noqa: BLE001  the handler's own, whatever it is, goes to who asked
            return JSONResponse({"error": f"{type(error).__name__}: {error}"}, status_code=500)
        return Response(msgspec.json.encode(answer), media_type="application/json")

    return endpoint


async def _read(request: Request) -> bytes | None:
    """The body, or None if it is too large; a body that lies about its size is cut off as well."""
    if int(request.headers.get("Content-Length", "0")) > MAX_BODY_BYTES:
        return None
    chunks: list[bytes] = []
    size = 0
    async for chunk in request.stream():
        size += len(chunk)
        if size > MAX_BODY_BYTES:
            return None
        chunks.append(chunk)
    return b"".join(chunks)


def _arguments_type(handler: Callable[..., Any]) -> type[msgspec.Struct]:
    """A strict type for the handler's arguments, so that a body is checked before anything sees it."""
    hints = get_type_hints(handler)
    fields: list[Any] = []
    for name, parameter in list(inspect.signature(handler).parameters.items())[1:]:
        default = () if parameter.default is parameter.empty else (parameter.default,)
        fields.append((name, hints[name], *default))
    return msgspec.defstruct(
        f"{handler.__qualname__} arguments", fields, forbid_unknown_fields=True, kw_only=True
    )
