"""How HTTP requests wait for actors: in one thread, however many there are.

    request ─▶ Gate of its route ─▶ ask_soon ─▶ … ─▶ the proxy's step ─▶ Asks.look wakes it

A thousand workers may wait for a prompt at once. A message that waits with NotYet is tried again after each change of
its actor, so only a few wait there, and the others in line here: what those few can't have, nobody behind them can.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

from .errors import ActorStopped, AskTimeout
from .ref import Answer, Ref

__all__ = ["Asks", "Gate"]

MAX_ASKS = 16  # of one route that wait at their actor
MAX_BYTES = 16 << 20  # of their bodies, unless one alone is larger


class Asks:
    """Asks whose answers requests wait for. `look` and `stop` may be called in any thread.

    sent: called after each ask, which nobody else may be about to send.
    """

    def __init__(self, sent: Callable[[], None] = lambda: None) -> None:
        self._sent = sent
        self._waiting: dict[Answer[Any], tuple[asyncio.AbstractEventLoop, asyncio.Future[None]]] = {}
        self._stopped = False

    async def ask(self, ref: Ref[Any], message: Callable[..., Any], /, **arguments: Any) -> Any:
        """As `Ref.ask`."""
        if self._stopped:
            raise ActorStopped("the proxy is being stopped")
        answer = ref.ask_soon(message, **arguments)
        if not answer.done:
            self._sent()
            await self._wait(answer, ref)
        return answer.result()

    async def _wait(self, answer: Answer[Any], ref: Ref[Any]) -> None:
        loop = asyncio.get_running_loop()
        woken = loop.create_future()
        self._waiting[answer] = loop, woken
        try:
            # Only now: what came before it was entered woke nobody.
            if not answer.done and not self._stopped:
                await asyncio.wait({woken}, timeout=ref.timeout_s)
        finally:
            del self._waiting[answer]
        if not answer.done:
            if self._stopped:
                raise ActorStopped("the proxy is being stopped")
            raise AskTimeout(f"no answer from {ref.name} within the deadline")

    def look(self) -> None:
        """Wake those whose answer has come."""
        self._wake(lambda answer: answer.done)

    def stop(self) -> None:
        """Nobody waits here any longer: they raise ActorStopped."""
        self._stopped = True
        self._wake(lambda answer: True)

    def _wake(self, which: Callable[[Answer[Any]], bool]) -> None:
        ready: dict[asyncio.AbstractEventLoop, list[asyncio.Future[None]]] = {}
        for answer, (loop, woken) in list(self._waiting.items()):
            if which(answer):
                ready.setdefault(loop, []).append(woken)
        for loop, futures in ready.items():
            loop.call_soon_threadsafe(_settle, futures)


class Gate:
    """Lets the requests of one route through in their order, as many as may wait at the actor at once."""

    def __init__(self) -> None:
        self._asks = self._bytes = 0
        self._shared: dict[str, asyncio.Task[Any]] = {}
        self._line: deque[tuple[int, asyncio.Future[None]]] = deque()

    @asynccontextmanager
    async def entered(self, size: int, timeout_s: float) -> AsyncIterator[None]:
        """size: bytes of its body. Raises AskTimeout if its turn does not come in time."""
        if self._line or not self._has_room(size):
            place = size, asyncio.get_running_loop().create_future()
            self._line.append(place)
            await asyncio.wait({place[1]}, timeout=timeout_s)
            if not place[1].done():
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
        while self._line and self._has_room(self._line[0][0]):
            size, turn = self._line.popleft()
            self._enter(size)
            turn.set_result(None)


def _settle(futures: list[asyncio.Future[None]]) -> None:
    for future in futures:
        if not future.done():
            future.set_result(None)
