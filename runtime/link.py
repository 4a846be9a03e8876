"""The Link: what makes a machine that has joined a part of the run, though it only dials out.

It is the first actor of its machine. Its process has the bridge to the run's actors, and two threads that exchange
frames with the run's own bridge: one request always waits there for what comes, and one is made when something goes.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
from msgspec import json, msgpack

from .actor import Actor
from .bridge import Bridge
from .codec import Codec
from .directory import Machine
from .errors import Finished, RolecallError, Unrecoverable
from .line import Batch, Gap, Line
from .relay import Joined, Opened
from .remote import GIVE_UP_S, SESSION_HEADER, NoAnswer, authorized, read_token, trusted

if TYPE_CHECKING:
    import httpx

__all__ = ["FENCED", "Link", "join"]

FENCED = 3  # exit code of a machine that the run has given up
MAX_PAUSE_S = 5.0  # between two tries
MIN_ANSWER_S = 5.0  # that a busy run is given
GOODBYE_S = 2.0
NOBODY_S = 5.0  # after which a gateway that knows of no run is believed


def join(url: str, token_file: Path, host: str) -> Joined:
    """Be given a name and a number in the run at `url`. Raises Unrecoverable if it is not to be had, NoAnswer if nobody
    answers."""
    import httpx

    headers = authorized(read_token(token_file))
    try:
        response = httpx.post(
            f"{url}/v1/relay/join", content=host.encode(), headers=headers, timeout=30.0, verify=trusted()
        )
        response.raise_for_status()
        return json.decode(response.content, type=Joined)
    except httpx.TransportError as error:
        raise NoAnswer(
            f"the run at {url} has just been there and does not answer any more ({error})"
        ) from error
    except (httpx.HTTPError, msgspec.DecodeError) as error:
        raise Unrecoverable(
            f"the run at {url} lets nobody join ({error}): is it of the same version?"
        ) from error


class Link(Actor):
    """Stands in for the actors of the run at `url` on a machine that has joined. roles: of the recipe; private: those
    of which this machine has its own."""

    preloads = ("httpx",)

    def __init__(
        self,
        *,
        url: str,
        token_file: Path,
        joined: Joined,
        roles: Mapping[str, type[Actor]],
        private: Sequence[str],
    ) -> None:
        self.url, self.token_file, self.joined = url, token_file, joined
        self.roles, self.private = roles, private

    def on_start(self) -> None:
        context = self.context
        codec, here = Codec(self.roles), Machine(self.joined.name, self.joined.number)
        self._bridge = Bridge(
            self.name, context.incarnation, context.sockets, codec, here, Machine(), self.private
        )
        self._thread = threading.Thread(target=self._bridge.run, name="bridge", daemon=True)
        self._thread.start()
        read = partial(read_token, self.token_file)
        self._dialer = Dialer(self.url, read, self.joined, self._bridge.open)
        self._dialer.start()
        while not self._bridge.introduced.wait(0.1):  # those that start next must find the others
            self._look()

    def step(self) -> float | None:
        self._look()
        return 0.2

    def on_stop(self) -> None:
        self._dialer.stop(GOODBYE_S)

    def _look(self) -> None:
        if self._dialer.ending is not None:
            raise self._dialer.ending
        if not self._thread.is_alive():
            raise RuntimeError("the bridge has died: its traceback is above")


@dataclass(eq=False)
class _Session:
    """heard: how many of our frames the other end has."""

    name: str
    line: Line
    heard: int = 0


class Dialer:
    """Makes the requests. read: the token, again when it is refused, for a new one may have been put in its place.
    `ending`: why there is nothing more to do: Finished, or Unrecoverable."""

    def __init__(
        self,
        url: str,
        read: Callable[[], str],
        joined: Joined,
        new_line: Callable[[], Line],
        client: Callable[[], httpx.Client] | None = None,
    ) -> None:
        self._url, self._read, self._token = url, read, read()
        self._number, self._lease_s = joined.number, joined.lease_s
        self._proof = f"{joined.number}.{joined.secret}"
        self._new_line, self._make_client = new_line, client or _client
        self.ending: Exception | None = None
        self._stopping = threading.Event()
        self._lock = threading.Lock()
        self._session: _Session | None = None
        self._answered = time.monotonic()  # when the run was last heard of
        self._threads = [
            threading.Thread(target=self._run, args=(exchange,), name=exchange.__name__, daemon=True)
            for exchange in (self._bring, self._fetch)
        ]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def stop(self, timeout_s: float) -> None:
        """Let what was said last arrive, and say goodbye."""
        until = time.monotonic() + timeout_s
        while self.ending is None and not self._all_heard() and time.monotonic() < until:
            self._stopping.wait(0.01)
        self._stopping.set()
        if self.ending is None:
            # If it does not arrive the lease runs out, and who is fenced or late has left already.
            with self._make_client() as client, contextlib.suppress(_Again, _Stale, Finished, Unrecoverable):
                self._post(client, "/leave", b"", self._proof)
        if (session := self._session) is not None:
            session.line.close()

    def _all_heard(self) -> bool:
        return (session := self._session) is None or session.line.idle

    def _run(self, exchange: Callable[[httpx.Client, _Session], None]) -> None:
        pause_s = 0.1
        try:
            with self._make_client() as client:
                while self.ending is None and not self._stopping.is_set():
                    session = None
                    try:
                        session = self._current(client)
                        exchange(client, session)
                    except (_Stale, Gap):
                        self._forget(session)
                    except _Again as error:
                        self._despair(error)
                        self._stopping.wait(pause_s)
                        pause_s = min(2 * pause_s, MAX_PAUSE_S, self._lease_s / 6)
                        continue
                    pause_s = 0.1
                    self._answered = time.monotonic()
        except (Finished, Unrecoverable) as error:
            self.ending = self.ending or error  # the other thread's may be why
        except Exception as error:
            self.ending = RolecallError(f"the link has died of {type(error).__name__}: {error}")
            raise  # its traceback belongs in the log

    def _current(self, client: httpx.Client) -> _Session:
        with self._lock:
            if self._session is None:
                opened = json.decode(self._post(client, "/open", b"", self._proof), type=Opened)
                self._session = _Session(opened.session, self._new_line())
            return self._session

    def _forget(self, session: _Session | None) -> None:
        """One of the bridges is new, so another session must begin."""
        with self._lock:
            if session is not None and self._session is session:
                session.line.close()
                self._session = None

    def _bring(self, client: httpx.Client, session: _Session) -> None:
        """Send what there is, or after a while nothing: it renews the lease."""
        body = session.line.after(session.heard, min(5.0, self._lease_s / 6))
        self._take(session, self._post(client, "", body, f"{self._number}.{session.name}"))

    def _fetch(self, client: httpx.Client, session: _Session) -> None:
        """Wait there for what comes."""
        body = msgpack.encode(Batch(1, session.line.heard, []))
        wait_s = self._lease_s / 3
        name = f"{self._number}.{session.name}"
        self._take(session, self._post(client, f"?wait={wait_s:g}", body, name, wait_s))

    def _take(self, session: _Session, response: bytes) -> None:
        batch = msgpack.decode(response, type=Batch)
        session.heard = max(session.heard, batch.heard)
        session.line.receive(batch)

    def _despair(self, why: _Again) -> None:
        silent_s = time.monotonic() - self._answered
        if isinstance(why, _Nobody) and silent_s > NOBODY_S:
            raise Finished
        if silent_s > GIVE_UP_S:
            raise Unrecoverable(
                f"the run at {self._url} was there and has not been for {GIVE_UP_S:.0f} s ({why}): it has ended, or "
                "this machine has lost its connection; join again when it is back"
            )

    def _post(self, client: httpx.Client, path: str, body: bytes, session: str, wait_s: float = 0.0) -> bytes:
        """wait_s: how long the run may wait before it answers."""
        import httpx

        # A connection that was cut off may say so only when the lease is over: a new one is tried before.
        timeout_s = max(MIN_ANSWER_S, self._lease_s / 3) + wait_s
        token = self._token
        headers = authorized(token) | {SESSION_HEADER: session}
        try:
            response = client.post(
                f"{self._url}/v1/relay{path}", content=body, headers=headers, timeout=timeout_s
            )
        except httpx.TransportError as error:
            raise _Again(str(error) or type(error).__name__) from error
        match response.status_code:
            case 200:
                return response.content
            case 401 if (new := self._read()) != token:
                self._token = new
                raise _Again("the run refused a token in whose place there is a new one")
            case 401:
                raise Unrecoverable(
                    f"the run at {self._url} refused the token: copy its token file again (it is named when the run "
                    "starts)",
                    exit_code=2,
                )
            case 409:
                raise _Stale
            case 410 if b'"fenced"' in response.content:
                raise Unrecoverable(
                    f"the run at {self._url} goes on without this machine ({response.text[:200]}): join again to take "
                    "part",
                    exit_code=FENCED,
                )
            case 410:
                raise Finished
            case 404:
                raise _Nobody(f"404: {response.text[:200]}")
            case code if 400 <= code < 500 and code not in (408, 429):
                raise Unrecoverable(
                    f"the run at {self._url} refused a request with {code}: {response.text[:500]}"
                )
            case code:
                raise _Again(f"{code}: {response.text[:200]}")  # a gateway's, or of a proxy that restarts


class _Again(Exception):
    """No answer of the run's own: the same request may fare better in a while."""


class _Nobody(_Again):
    """A gateway's word, for the run itself has all these routes: there is no run behind it, or not yet again."""


class _Stale(Exception):
    """The run's bridge does not know this session."""


def _client() -> httpx.Client:
    import httpx

    return httpx.Client(verify=trusted())
