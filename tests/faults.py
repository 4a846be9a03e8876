"""A proxy before a real S3 server that goes wrong where a script says so, and writes down what went by."""

from __future__ import annotations

import http.client
import os
import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Literal

from .s3 import S3Server

__all__ = ["Fault", "FaultProxy", "Seen"]

Kind = Literal[
    "cut after headers",  # the server gets the request's headers, and then the line breaks
    "cut in the body",  # the same, 1000 bytes later
    "drop the answer",  # carried out, but the client never learns of it: the line breaks instead
    "cut the answer",  # the line breaks 1000 bytes into the answer's body
    "garble the answer",  # one byte of the body comes out changed
    "hold",  # nothing is answered until `release`, and then the request goes on its way
    "reset",  # refused with a TCP reset, unread
    "500",
    "503",  # SlowDown
    "strip conditions",  # If-Match and If-None-Match don't reach the server, as some gateways have it on GET
]

_ERRORS = {"500": (500, "InternalError"), "503": (503, "SlowDown")}
_CONDITIONS = ("if-match", "if-none-match")
_CUT = 1000  # bytes of a body that pass before the line breaks
_PIECE = 1 << 18


@dataclass(frozen=True)
class Fault:
    """What happens to the first `times` requests of this method whose path ends in `key`."""

    kind: Kind
    method: str = "PUT"
    key: str = ""
    times: int = 1


@dataclass
class Seen:
    """A request that came by. status: the server's answer, which the client may not have got.

    sent, received: bytes of the request and of its answer, headers included.
    """

    method: str
    path: str
    fault: Kind | None = None
    status: int | None = None
    sent: int = 0
    received: int = 0
    headers: dict[str, str] = field(default_factory=dict)


class FaultProxy:
    """Listens on loopback, passes requests on to the server, and goes wrong as the script of faults has it."""

    def __init__(self, server: S3Server, *script: Fault) -> None:
        self.server = server
        self.requests: list[Seen] = []
        self.held = threading.Event()  # a request is being held
        self._released = threading.Event()
        self._script = [(fault, iter(range(fault.times))) for fault in script]
        self._lock = threading.Lock()
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), _handler_of(self))
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"

    def __enter__(self) -> FaultProxy:
        threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.release()
        self._server.shutdown()
        self._server.server_close()

    def release(self) -> None:
        """Let what is held go on its way."""
        self._released.set()

    def of(self, method: str, key: str = "") -> list[Seen]:
        """The requests of this method whose path ends in `key`, in their order."""
        return [seen for seen in self.requests if _matches(seen, method, key)]

    def take(self, seen: Seen) -> Kind | None:
        """Note the request, and say what is to happen to it."""
        with self._lock:
            self.requests.append(seen)
            for fault, left in self._script:
                if _matches(seen, fault.method, fault.key) and next(left, None) is not None:
                    seen.fault = fault.kind
                    break
        return seen.fault

    def hold(self) -> None:
        self.held.set()
        self._released.wait()


def _matches(seen: Seen, method: str, key: str) -> bool:
    return seen.method == method and seen.path.split("?")[0].endswith(key)


class _LineBroken(Exception):
    """The fault has broken the connection to the client."""


def _handler_of(proxy: FaultProxy) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True  # else each answer's body is 40 ms late

        def handle_expect_100(self) -> bool:
            return True  # said below, once it is known that the request is to be read

        def log_message(self, format: str, *args: object) -> None:
            """Nothing: `requests` is the log."""

        def do_GET(self) -> None:
            try:
                _Exchange(proxy, self).run()
            except (
                _LineBroken,
                OSError,
            ):  # either end has gone, as the fault or the server's end would have it
                self.close_connection = True

        do_PUT = do_POST = do_DELETE = do_HEAD = do_GET

    return Handler


class _Exchange:
    """One request on its way through."""

    def __init__(self, proxy: FaultProxy, handler: BaseHTTPRequestHandler) -> None:
        self.proxy, self.handler = proxy, handler
        self.length = int(handler.headers.get("Content-Length") or 0)
        self.seen = Seen(handler.command, handler.path, headers=dict(handler.headers.items()))
        self.fault = proxy.take(self.seen)

    def run(self) -> None:
        if self.fault == "reset":
            self._break(reset=True)
        if self.fault == "hold":
            self.proxy.hold()
        self.seen.sent = _size_of_head(self.handler.requestline, self.seen.headers) + self.length
        if self.handler.headers.get("Expect"):
            self.handler.wfile.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        if self.fault in _ERRORS:
            for _ in self._body(self.length):
                pass
            self._refuse(*_ERRORS[self.fault])
            return
        server = http.client.HTTPConnection("127.0.0.1", self.proxy.server.ports[0])
        try:
            self._pass_on(server)
            self._answer(server.getresponse())
        finally:
            server.close()

    def _pass_on(self, server: http.client.HTTPConnection) -> None:
        headers = [item for item in self.handler.headers.items() if item[0].lower() != "expect"]
        passed = _CUT if self.fault == "cut in the body" else self.length
        body = self._body(passed)
        if self.fault == "strip conditions":
            data = b"".join(body)
            headers, body = self._signed_anew(headers, data), iter([data])
        server.putrequest(self.seen.method, self.seen.path, skip_host=True, skip_accept_encoding=True)
        for name, value in headers:
            server.putheader(name, value)
        server.endheaders()
        if self.fault == "cut after headers":
            self._break()
        for piece in body:
            server.send(piece)
        if self.fault == "cut in the body":
            self._break()

    def _signed_anew(self, headers: list[tuple[str, str]], data: bytes) -> list[tuple[str, str]]:
        """The headers without conditions; they were signed, so the rest gets another signature."""
        from botocore.auth import S3SigV4Auth
        from botocore.awsrequest import AWSRequest
        from botocore.credentials import Credentials

        kept = {name: value for name, value in headers if name.lower() not in (*_CONDITIONS, "authorization")}
        server, url = self.proxy.server, f"{self.proxy.url}{self.seen.path}"
        request = AWSRequest(self.seen.method, url, kept, data)
        keys = Credentials(server.access_key, server.secret_key)
        S3SigV4Auth(keys, "s3", server.environment()["AWS_DEFAULT_REGION"]).add_auth(request)
        return list(request.headers.items())

    def _answer(self, answer: http.client.HTTPResponse) -> None:
        self.seen.status = answer.status
        data = answer.read()
        head = dict(answer.getheaders())
        self.seen.received = _size_of_head(f"HTTP/1.1 {answer.status} {answer.reason}", head) + len(data)
        if self.fault == "drop the answer":
            self._break()
        if self.fault == "garble the answer":
            data = bytes([data[0] ^ 1]) + data[1:]
        self.handler.send_response_only(answer.status, answer.reason)
        for name, value in answer.getheaders():
            if name.lower() not in ("transfer-encoding", "content-length", "connection"):
                self.handler.send_header(name, value)
        if answer.status not in (204, 304):
            size = head.get("Content-Length", "0") if self.seen.method == "HEAD" else str(len(data))
            self.handler.send_header("Content-Length", size)
        self.handler.end_headers()
        if self.fault == "cut the answer":
            self.handler.wfile.write(data[:_CUT])
            self._break()
        self.handler.wfile.write(data)

    def _body(self, length: int) -> Iterator[bytes]:
        while length:
            piece = self.handler.rfile.read1(min(length, _PIECE))  # type: ignore[attr-defined]
            if not piece:
                raise ConnectionResetError("the client has gone")
            length -= len(piece)
            yield piece

    def _refuse(self, status: int, code: str) -> None:
        body = f"<Error><Code>{code}</Code><Message>as the script has it</Message></Error>".encode()
        self.handler.send_response_only(status)
        self.handler.send_header("Content-Type", "application/xml")
        self.handler.send_header("Content-Length", str(len(body)))
        self.handler.end_headers()
        if self.seen.method != "HEAD":
            self.handler.wfile.write(body)

    def _break(self, *, reset: bool = False) -> None:
        connection = self.handler.connection
        if reset:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            os.close(connection.detach())  # close() would wait for the files made of it
        else:
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        raise _LineBroken


def _size_of_head(first_line: str, headers: dict[str, str]) -> int:
    return len(first_line) + 2 + sum(len(name) + len(value) + 4 for name, value in headers.items()) + 2
