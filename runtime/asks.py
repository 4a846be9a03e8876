"""How HTTP requests wait for actors: in one thread, however many there are.

    request ─▶ Turnstile of its route ─▶ ask_soon ─▶ … ─▶ the proxy's step ─▶ Asks.look wakes it

A thousand workers may wait for a prompt at once. A message that waits with NotYet is tried again after each change of
its actor, so only a few wait there, and the others in line here: what those few can't have, nobody behind them can.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from .errors import ActorStopped, AskTimeout
from .ref import Answer, Ref

__all__ = ["Asks", "Turnstile"]

MAX_ASKS = 16  # of one route that wait at their actor
MAX_BYTES = 16 << 20  # of their bodies, unless one alone is larger


class Asks:
    """Asks whose answers requests wait for, all in the thread of one event loop.

    sent: called after each ask, which nobody else may be about to send.
    """

    def __init__(self, sent: Callable[[], None] = lambda: None) -> None:
        self._sent = sent
        self._waiting: dict[Answer[Any], asyncio.Future[None]] = {}
        self._stopped = False

    async def ask(self, ref: Ref[Any], message: Callable[..., Any], /, **arguments: Any) -> Any:
        """As `Ref.ask`."""
        if self._stopped:
            raise ActorStopped("the proxy is being stopped")
        answer = ref.ask_soon(message, **arguments)
        if not answer.done:
            self._sent()
            woken = self._waiting[answer] = asyncio.get_running_loop().create_future()
            try:
                await _within(ref.timeout_s, woken)
            finally:
                del self._waiting[answer]
        if answer.done:
            return answer.result()
        if self._stopped:
            raise ActorStopped("the proxy is being stopped")
        raise AskTimeout(f"no answer from {ref.name} within the deadline")

    def look(self) -> None:
        """Wake those whose answer has come."""
        for answer, woken in self._waiting.items():
            if answer.done:
                _settle(woken)

    def stop(self) -> None:
        """Nobody waits here any longer: they raise ActorStopped."""
        self._stopped = True
        for woken in self._waiting.values():
            _settle(woken)


class Turnstile:
    """Lets the requests of one route through in their order, as many as may wait at the actor at once."""

    def __init__(self) -> None:
        self._asks = self._bytes = 0
        self._shared: dict[str, asyncio.Task[Any]] = {}
        self._line: deque[_Place] = deque()

    @asynccontextmanager
    async def entered(self, size: int, timeout_s: float) -> AsyncIterator[None]:
        """size: bytes of its body. Raises AskTimeout if its turn does not come in time."""
        if self._line or not self._has_room(size):
            place = _Place(size, asyncio.get_running_loop().create_future())
            self._line.append(place)
            await _within(timeout_s, place.turn)
            if not place.entered:
                self._line.remove(place)
                self._let_in()  # it may have been too large for the room there is
                raise AskTimeout(f"{len(self._line)} others are in line")
        else:
            self._enter(size)
        try:
            yield
        finally:
            self._asks -= 1
            self._bytes -= size
            self._let_in()

    async def shared(self, key: str, ask: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
        """What `ask` gives, asked once for all who want the same meanwhile: or a thousand who wait for version 6 would
        hold up one who has yet to hear of version 5."""
        task = self._shared.get(key)
        if task is None:
            task = self._shared[key] = asyncio.create_task(ask())
            task.add_done_callback(lambda _: self._shared.pop(key))
        return await asyncio.shield(task)

    def _has_room(self, size: int) -> bool:
        return self._asks < MAX_ASKS and (self._bytes + size <= MAX_BYTES or not self._asks)

    def _enter(self, size: int) -> None:
        self._asks += 1
        self._bytes += size

    def _let_in(self) -> None:
        while self._line and self._has_room(self._line[0].size):
            place = self._line.popleft()
            self._enter(place.size)
            place.entered = True
            _settle(place.turn)


@dataclass(eq=False, slots=True)
class _Place:
    """In the line."""

    size: int
    turn: asyncio.Future[None]
    entered: bool = False


async def _within(timeout_s: float, future: asyncio.Future[None]) -> None:
    """Wait for the future, which is settled if the time is over."""
    timer = asyncio.get_running_loop().call_later(timeout_s, _settle, future)
    await future
    timer.cancel()


def _settle(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
