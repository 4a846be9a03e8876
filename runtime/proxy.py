"""The HTTP door of a run: what machines that only dial out need, and nothing else.

Each role may list messages in `http`, for example Buffer's {"POST /v1/groups": "put"}. The proxy checks the token
before it looks at anything else (see tokens.py), then what that allows, checks the JSON body against the handler's own
types, asks the actor, and answers with JSON. Unbounded waits are cut: an actor that says NotYet for WAIT_S becomes 429
with Retry-After, and the client asks again. Machines that run actors of their own are reached through bridges, whose
frames POST /v1/relay carries (see relay.py). When the run ends every request is answered with 410, for a while, so
that whoever still works hears of it.
"""

from __future__ import annotations

import asyncio
import errno
import math
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from .actor import Actor
from .asks import Asks, Turnstile
from .docs import page
from .errors import ActorDied, ActorStopped, AskTimeout, RolecallError, Unrecoverable
from .gate import Gate, gone, impatient_protocol, note_caller, read_body, refused
from .graph import Graph
from .openapi import arguments_type, describe
from .ref import Ref, bound_transport
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
MAX_WAITING_REQUESTS = 256  # of machines, each in a thread
MAX_CONNECTIONS = 4096  # beyond it: 503
IDLE_S = 75  # between two requests: a worker that samples stays connected, to be told of the run's end
OTHERS = {
    "GET /healthz": "Whether the proxy is there.",
    "GET /v1/run": "What the run says of itself: its id, its recipe, and the recipe's settings.",
    "GET /v1/docs": "This, to read.",
    "GET /v1/openapi.json": "This, for programs.",
    "POST /v1/relay": "Frames of a machine that has joined, in a format of its own: `rolecall join` speaks it.",
    "POST /v1/relay/join": "A machine joins.",
    "POST /v1/relay/open": "It opens a session.",
    "POST /v1/relay/leave": "It leaves.",
}  # routes that no role lists
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
    """Serves HTTP in its steps, so that requests and answers need no threads: each step is over when there is mail."""

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
        self._loop = asyncio.new_event_loop()
        self._loop.add_reader(bound_transport(), self._loop.stop)  # type: ignore[arg-type]  an Endpoint
        self._asks = Asks(sent=self._loop.stop)
        check = Keys(prepare(self.token_file, context.run)).check
        app = build_app(self.roles, self.about, check, self._ended, self._asks, self._relay)
        self._socket = self._listen()
        host, port = self._socket.getsockname()[:2]
        config = uvicorn.Config(
            app, http=impatient_protocol(), log_level="warning", access_log=False, lifespan="on",
            ws="none", limit_concurrency=MAX_CONNECTIONS, timeout_keep_alive=IDLE_S, **_tls(self.tls),
        )  # fmt: skip
        self._server: uvicorn.Server = uvicorn.Server(config)
        # Not `serve`, which would take this process's signals.
        self._serving = self._loop.create_task(self._server._serve([self._socket]))
        self._look_at = 0.0
        self.report(url=f"{'https' if self.tls else 'http'}://{host}:{port}")
        self._machines: list[str] | None = None

    def step(self) -> float | None:
        if self._serving.done():
            raise RuntimeError("the HTTP server has ended: its output is above")
        self._asks.look()
        if time.monotonic() >= self._look_at:
            self._relay.look()
            if self._machines != (machines := self._relay.machines):
                self._machines = machines
                self.report(machines=machines)
            self._look_at = time.monotonic() + min(1.0, self.lease_s / 10)
        pause = self._loop.call_at(self._look_at, self._loop.stop)
        self._loop.run_forever()
        pause.cancel()
        return 0.0

    def on_stop(self) -> None:
        self._ended.set()
        self._loop.remove_reader(bound_transport())  # type: ignore[arg-type]
        self._asks.stop()
        self._relay.close()
        self._loop.run_until_complete(self._say_goodbye())

    async def _say_goodbye(self) -> None:
        connections: set[Any] = self._server.server_state.connections  # of impatient_protocol
        until = time.monotonic() + FAREWELL_S
        for connection in list(connections):
            if (machine := connection.caller) and not self._relay.knows(machine):
                connection.transport.abort()  # nobody may be there to close it
        # Nobody waits for those that never showed a token.
        while any(one.caller is not None for one in connections) and time.monotonic() < until:
            await asyncio.sleep(0.05)
        self._server.should_exit = True
        await asyncio.wait({self._serving}, timeout=3.0)

    def _listen(self) -> socket.socket:
        # After a restart clients must find it where it was, also when the port was chosen by the system.
        remembered = self.state_folder / "port"
        port = int(remembered.read_text()) if remembered.exists() else self.port
        try:
            listener = socket.create_server((self.host, port), backlog=2048)
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
    asks: Asks, relay: Relay | None = None,
) -> Starlette:  # fmt: skip
    """The ASGI app. `roles`: classes by name in the graph; `check`: what a token says, or it raises Unauthorized;
    `ended`: the run has; `asks`: whose `look` is called whenever an answer may have come; `relay`: of machines that
    join."""
    from starlette.applications import Starlette
    from starlette.middleware import Middleware
    from starlette.responses import JSONResponse
    from starlette.routing import Route

    async def healthz(request: Request) -> Response:
        return JSONResponse({"ok": True})

    async def run(request: Request) -> Response:
        return JSONResponse(about)

    routes = [Route("/healthz", healthz), Route("/v1/run", run), *_documentation(roles)]
    routes += [] if relay is None else _relay_routes(relay, ended)
    for name, actor in roles.items():
        for route, method in actor.http.items():
            verb, path = route.split()
            routes.append(Route(path, _endpoint(name, actor, method, asks), methods=[verb]))
    gate = Middleware(Gate, check=check, ended=ended)
    return Starlette(routes=routes, lifespan=_lifespan, middleware=[gate])


def _documentation(roles: Mapping[str, type[Actor]]) -> list[Route]:
    """Without a token, so that a browser shows it: it tells what the routes take, and nothing of the run."""
    from starlette.responses import Response
    from starlette.routing import Route

    document = describe(roles, WAIT_S, OTHERS)
    html, data = page(document).encode(), msgspec.json.encode(document)
    alone = {"Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'"}

    async def docs(request: Request) -> Response:
        return Response(html, media_type="text/html", headers=alone)

    async def openapi(request: Request) -> Response:
        return Response(data, media_type="application/json")

    return [Route("/v1/docs", docs), Route("/v1/openapi.json", openapi)]


def _lifespan(app: Starlette) -> Any:
    import anyio.to_thread

    @asynccontextmanager
    async def more_threads(app: Starlette) -> AsyncIterator[None]:
        # Each request of a machine that has joined holds a thread.
        anyio.to_thread.current_default_thread_limiter().total_tokens = MAX_WAITING_REQUESTS
        yield

    return more_threads(app)


def _endpoint(name: str, actor: type[Actor], method: str, asks: Asks) -> Callable[..., Any]:
    from starlette.responses import JSONResponse, Response

    needed: Scope = "worker" if method in actor.for_workers else "trainer"

    handler = getattr(actor, method)
    takes = arguments_type(handler)
    decoder = msgspec.json.Decoder(takes)
    ref: Ref[Any] = Ref(name, WAIT_S)
    turnstile = Turnstile()

    async def endpoint(request: Request) -> Response:
        if not request.scope["token"].may(needed):
            return refused(403, f"a worker's token does not allow {request.method} {request.url.path}")
        body = await read_body(request, MAX_BODY_BYTES)
        if isinstance(body, Response):
            return body
        query = request.query_params

        async def ask() -> Any:
            async with turnstile.entered(len(body), WAIT_S):
                # Only now: those in line are bytes, not objects of many times their size.
                arguments = (
                    decoder.decode(body) if body else msgspec.convert(dict(query), takes, strict=False)
                )
                return await asks.ask(ref, handler, **msgspec.structs.asdict(arguments))

        try:
            alike = request.method == "GET" and not body
            answer = await (turnstile.shared(str(query), ask) if alike else ask())
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            return refused(422, str(error))
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
                    note_caller(request.scope, int(number))
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
