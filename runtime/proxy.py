"""The HTTP door of a run: what machines that only dial out need, and nothing else.

Each role may list messages in `http`, for example Buffer's {"POST /v1/groups": "put"}. The proxy checks the token
before it looks at anything else (see tokens.py), then what that allows, checks the JSON body against the handler's own
types, asks the actor, and answers with JSON. Unbounded waits are cut: an actor that says NotYet for WAIT_S becomes 429
with Retry-After, and the client asks again. Machines that run actors of their own are reached through bridges, whose
frames POST /v1/relay carries (see relay.py). When the run ends every request is answered with 410, for a while, so
that whoever still works hears of it.
"""

from __future__ import annotations

import errno
import inspect
import math
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_type_hints

import msgspec

from .actor import Actor
from .errors import ActorDied, ActorStopped, AskTimeout, RolecallError, Unrecoverable
from .gate import Gate, gone, impatient_protocol, read_body, refused
from .graph import Graph
from .ref import Ref
from .relay import LEASE_S, Fenced, Relay, Stale
from .remote import SESSION_HEADER
from .tokens import Forbidden, Keys, Scope, Token, prepare

if TYPE_CHECKING:
    import uvicorn
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import Response
    from starlette.routing import Route

__all__ = ["Proxy", "add_proxy", "build_app"]

WAIT_S = 5.0  # how long a request waits for an actor before the client is told to ask again
MAX_BODY_BYTES = 64 << 20
MAX_SMALL_BYTES = 4096  # of a request that joins, opens or leaves
MAX_WAITING_REQUESTS = 256
MAX_CONNECTIONS = 1024  # beyond it: 503
IDLE_S = 75  # between two requests: a worker that samples stays connected, to be told of the run's end
FAREWELL_S = 10.0  # how long a run that has ended stays to tell those that are still connected


def add_proxy(
    graph: Graph, *, host: str, port: int, token_file: Path, about: dict[str, Any], lease_s: float = LEASE_S,
    tls: tuple[Path, Path] | None = None,
) -> Ref[Proxy]:  # fmt: skip
    """Add a proxy to a graph: it serves what the graph's roles list in `http`, GET /v1/run = `about`, and machines that
    join, which are dead for the run when they were not heard of for `lease_s`.

    token_file: a worker's token, made when the proxy starts if there is none; the run's keys lie beside it. tls: the
    files with certificate and key, for HTTPS.
    """
    roles = {role.name: role.actor for role in graph}
    elastic = [role.name for role in graph if role.elastic]
    proxy = graph.add(
        "proxy", Proxy, host=host, port=port, token_file=token_file, roles=roles, elastic=elastic,
        may_send=graph.open_to_workers(), about=about, lease_s=lease_s, tls=tls,
    )  # fmt: skip
    graph.supervise(proxy)  # its deaths take nobody down
    return proxy


class Proxy(Actor):
    """Serves HTTP in a thread of its own; its handlers ask the other actors like anybody else."""

    preloads = ("starlette.applications", "uvicorn")
    stop_timeout_s = FAREWELL_S + 5.0

    def __init__(
        self, *, host: str, port: int, token_file: Path, roles: dict[str, type[Actor]], elastic: list[str],
        may_send: dict[str, tuple[str, ...]], about: dict[str, Any], lease_s: float, tls: tuple[Path, Path] | None,
    ) -> None:  # fmt: skip
        self.host, self.port, self.token_file, self.tls = host, port, token_file, tls
        self.roles, self.elastic, self.may_send = roles, elastic, may_send
        self.about, self.lease_s = about, lease_s

    def on_start(self) -> None:
        import uvicorn

        self._ended = threading.Event()
        context, file = self.context, self.state_folder / "machines"
        self._relay = Relay(
            self.name, context.incarnation, context.sockets, self.roles, self.elastic, self.may_send, file,
            self.lease_s,
        )  # fmt: skip
        check = Keys(prepare(self.token_file, context.run)).check
        app = build_app(self.roles, self.about, check, self._ended, self._relay)
        self._socket = self._listen()
        host, port = self._socket.getsockname()[:2]
        config = uvicorn.Config(
            app, http=impatient_protocol(), log_level="warning", access_log=False, lifespan="on",
            ws="none", limit_concurrency=MAX_CONNECTIONS, timeout_keep_alive=IDLE_S, **_tls(self.tls),
        )  # fmt: skip
        self._server: uvicorn.Server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._server.run, args=([self._socket],), daemon=True)
        self._thread.start()
        self.report(url=f"{'https' if self.tls else 'http'}://{host}:{port}")

    def step(self) -> float | None:
        if not self._thread.is_alive():
            raise RuntimeError("the HTTP server has ended: its output is above")
        self._relay.look()
        return min(1.0, self.lease_s / 10)

    def on_stop(self) -> None:
        self._ended.set()
        self._relay.close()
        until = time.monotonic() + FAREWELL_S
        while self._server.server_state.connections and time.monotonic() < until:
            time.sleep(0.05)
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
        # Accepted connections inherit it; asyncio sets it only on sockets that were made with TCP's number. Without it
        # each answer waits for a delayed ack, 40 ms.
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        remembered.write_text(str(listener.getsockname()[1]))
        return listener


def _tls(files: tuple[Path, Path] | None) -> dict[str, Any]:
    return {} if files is None else {"ssl_certfile": str(files[0]), "ssl_keyfile": str(files[1])}


def build_app(
    roles: Mapping[str, type[Actor]], about: dict[str, Any], check: Callable[[str], Token], ended: threading.Event,
    relay: Relay | None = None,
) -> Starlette:  # fmt: skip
    """The ASGI app. `roles`: classes by name in the graph; `check`: what a token says, or it raises Unauthorized;
    `ended`: the run has; `relay`: of machines that join."""
    from starlette.applications import Starlette
    from starlette.middleware import Middleware
    from starlette.responses import JSONResponse
    from starlette.routing import Route

    async def healthz(request: Request) -> Response:
        return JSONResponse({"ok": True})

    async def run(request: Request) -> Response:
        return JSONResponse(about)

    routes = [Route("/healthz", healthz), Route("/v1/run", run)]
    routes += [] if relay is None else _relay_routes(relay, ended)
    for name, actor in roles.items():
        for route, method in actor.http.items():
            verb, path = route.split()
            routes.append(Route(path, _endpoint(name, actor, method), methods=[verb]))
    gate = Middleware(Gate, check=check, ended=ended)
    return Starlette(routes=routes, lifespan=_lifespan, middleware=[gate])


def _lifespan(app: Starlette) -> Any:
    import anyio.to_thread

    @asynccontextmanager
    async def more_threads(app: Starlette) -> AsyncIterator[None]:
        # Each request that waits for an actor holds a thread.
        anyio.to_thread.current_default_thread_limiter().total_tokens = MAX_WAITING_REQUESTS
        yield

    return more_threads(app)


def _endpoint(name: str, actor: type[Actor], method: str) -> Callable[..., Any]:
    from starlette.concurrency import run_in_threadpool
    from starlette.responses import JSONResponse, Response

    needed: Scope = "worker" if method in actor.for_workers else "trainer"

    handler = getattr(actor, method)
    arguments_type = _arguments_type(handler)
    decoder = msgspec.json.Decoder(arguments_type)
    ref: Ref[Any] = Ref(name, WAIT_S)

    async def endpoint(request: Request) -> Response:
        if not request.scope["token"].may(needed):
            return refused(403, f"a worker's token does not allow {request.method} {request.url.path}")
        body = await read_body(request, MAX_BODY_BYTES)
        if isinstance(body, Response):
            return body
        try:
            arguments = decoder.decode(body) if body else msgspec.convert(
                dict(request.query_params), arguments_type, strict=False
            )  # fmt: skip
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            return refused(422, str(error))
        try:
            answer = await run_in_threadpool(ref.ask, handler, **msgspec.structs.asdict(arguments))
        except AskTimeout:
            return Response(status_code=429, headers={"Retry-After": "0"})
        except ActorStopped:
            return gone()
        except ActorDied as error:
            return JSONResponse({"error": str(error)}, status_code=503, headers={"Retry-After": "1"})
        except Exception as error:  # noqa: BLE001  the handler's own, whatever it is, goes to who asked
            return JSONResponse({"error": f"{type(error).__name__}: {error}"}, status_code=500)
        return Response(msgspec.json.encode(answer), media_type="application/json")

    return endpoint


def _relay_routes(relay: Relay, ended: threading.Event) -> list[Route]:
    """Joining, opening a session, exchanging frames, and leaving."""
    from starlette.concurrency import run_in_threadpool
    from starlette.responses import JSONResponse, Response
    from starlette.routing import Route

    def route(path: str, answer: Callable[[Request, bytes, int, str], bytes]) -> Route:
        async def endpoint(request: Request) -> Response:
            number, _, session = request.headers.get(SESSION_HEADER, "0").partition(".")
            if not (number.isascii() and number.isdigit() and len(number) < 8):
                return JSONResponse({"error": f"{SESSION_HEADER} is no session"}, status_code=422)
            try:
                if path != "/join":  # refused before its body is read
                    joined_as = (relay.prove if path else relay.renew)(int(number), session)
                    if not request.scope["token"].may(joined_as):
                        raise Forbidden("this machine joined with a trainer's token: go on with one")
                body = await read_body(request, MAX_SMALL_BYTES if path else MAX_BODY_BYTES)
                if isinstance(body, Response):
                    return body
                return Response(await run_in_threadpool(answer, request, body, int(number), session))
            except Fenced as error:
                return JSONResponse({"error": str(error), "fenced": True}, status_code=410)
            except Stale as error:  # also because the run has ended meanwhile: then it is time to say so
                return gone() if ended.is_set() else refused(409, str(error))
            except Forbidden as error:
                return refused(403, str(error))
            except RolecallError as error:
                return refused(503, str(error))
            except (ValueError, RecursionError) as error:  # msgspec's are ValueErrors, too
                return refused(422, str(error))

        return Route(f"/v1/relay{path}", endpoint, methods=["POST"])

    def exchange(request: Request, body: bytes, number: int, session: str) -> bytes:
        wait = request.query_params.get("wait")
        wait_s = None if wait is None else float(wait)
        if wait_s is not None and not (math.isfinite(wait_s) and wait_s >= 0.0):
            raise ValueError(f"wait={wait_s}: seconds from 0 up")
        return relay.exchange(number, session, body, wait_s)

    def join(request: Request, body: bytes, number: int, session: str) -> bytes:
        return msgspec.json.encode(relay.join(body.decode(), request.scope["token"].scope))

    def open(request: Request, body: bytes, number: int, session: str) -> bytes:
        return msgspec.json.encode(relay.open(number))

    def leave(request: Request, body: bytes, number: int, session: str) -> bytes:
        relay.leave(number)
        return b""

    answers = {"": exchange, "/join": join, "/open": open, "/leave": leave}
    return [route(path, answer) for path, answer in answers.items()]


def _arguments_type(handler: Callable[..., Any]) -> type[msgspec.Struct]:
    """A strict type for the handler's arguments, so that a body is checked before anything sees it."""
    hints = get_type_hints(handler, include_extras=True)  # a bound of a number is a part of its type
    fields: list[Any] = []
    for name, parameter in list(inspect.signature(handler).parameters.items())[1:]:
        default = () if parameter.default is parameter.empty else (parameter.default,)
        fields.append((name, hints[name], *default))
    return msgspec.defstruct(
        f"{handler.__qualname__} arguments", fields, forbid_unknown_fields=True, kw_only=True
    )
