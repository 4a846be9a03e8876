"""How many requests wait for one actor: the turnstile of a route, and a thousand long polls at a real proxy."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from rolecall import ActorStopped, AskTimeout, Ref
from rolecall.runtime import asks
from rolecall.runtime.asks import Asks, Turnstile
from rolecall.runtime.peer import Pending
from rolecall.runtime.ref import bind_transport
from rolecall.runtime.remote import TOKEN_HEADER
from rolecall.runtime.wire import Kind, encode_body

from .test_proxy import TOKEN, Answering, Desk, Item, Visit


class Later(Answering):
    """A transport whose answers come when `come` is called."""

    def __init__(self) -> None:
        super().__init__()
        self.pending: list[Pending] = []

    def ask_soon(self, name: str, call: Any, timeout_s: float) -> Any:
        self.pending.append(Pending(name, 0.0, lambda pending: None))
        return self.pending[-1]

    def come(self, number: int, value: Any) -> None:
        self.pending[number].answer(Kind.ANSWER, *encode_body(value))


@pytest.fixture
def actor():
    transport = Later()
    bind_transport(transport)
    yield transport
    bind_transport(None)


def test_each_gets_the_answer_to_its_own_ask(actor: Later):
    async def scenario() -> list[Any]:
        waiting, desk = Asks(), Ref[Any]("desk", 10.0)
        tasks = [asyncio.create_task(waiting.ask(desk, Desk.take, id=id)) for id in range(3)]
        await asyncio.sleep(0)
        for number in (2, 0):
            actor.come(number, number)
        waiting.look()
        done, _ = await asyncio.wait(tasks[::2])
        assert len(done) == 2 and not tasks[1].done()
        actor.come(1, 1)
        waiting.look()
        return await asyncio.gather(*tasks)

    assert asyncio.run(scenario()) == [0, 1, 2]


def test_an_answer_that_does_not_come(actor: Later):
    async def scenario() -> None:
        waiting = Asks()
        with pytest.raises(AskTimeout):
            await waiting.ask(Ref[Any]("desk", 0.01), Desk.take, id=1)
        late = asyncio.create_task(waiting.ask(Ref[Any]("desk", 60.0), Desk.take, id=1))
        await asyncio.sleep(0)
        waiting.stop()
        with pytest.raises(ActorStopped):
            await late
        with pytest.raises(ActorStopped):
            await waiting.ask(Ref[Any]("desk", 60.0), Desk.take, id=1)

    asyncio.run(scenario())


async def enter(
    turnstile: Turnstile, log: list[int], number: int, leave: asyncio.Event, size: int = 1
) -> None:
    async with turnstile.entered(size, 60.0):
        log.append(number)
        await leave.wait()


async def settle() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


def test_only_so_many_wait_at_the_actor_and_the_others_in_their_order():
    async def scenario() -> None:
        turnstile, log = Turnstile(), list[int]()
        leaves = [asyncio.Event() for _ in range(asks.MAX_ASKS + 3)]
        tasks = [asyncio.create_task(enter(turnstile, log, i, leave)) for i, leave in enumerate(leaves)]
        await settle()
        assert log == list(range(asks.MAX_ASKS))
        for number in (5, 3):
            leaves[number].set()
        await settle()
        assert log[asks.MAX_ASKS :] == [asks.MAX_ASKS, asks.MAX_ASKS + 1]
        with pytest.raises(AskTimeout, match="1 others"):
            async with turnstile.entered(1, 0.01):
                pass
        for leave in leaves:
            leave.set()
        await asyncio.gather(*tasks)
        assert len(log) == len(leaves)

    asyncio.run(scenario())


def test_a_large_body_waits_for_room_but_alone_it_may_be_of_any_size():
    async def scenario() -> None:
        turnstile, log, leave = Turnstile(), list[int](), asyncio.Event()
        tasks = [asyncio.create_task(enter(turnstile, log, 0, leave, asks.MAX_BYTES * 2))]
        tasks += [asyncio.create_task(enter(turnstile, log, 1, leave))]
        await settle()
        assert log == [0]
        leave.set()
        await asyncio.gather(*tasks)
        leave.clear()
        tasks = [asyncio.create_task(enter(turnstile, log, 2, leave))]
        await settle()
        with pytest.raises(AskTimeout):
            async with turnstile.entered(asks.MAX_BYTES, 0.01):
                pass
        leave.set()
        await asyncio.gather(*tasks)
        async with turnstile.entered(asks.MAX_BYTES, 0.0):
            assert log == [0, 1, 2]

    asyncio.run(scenario())


def test_those_who_want_the_same_ask_once():
    async def scenario() -> None:
        turnstile, asked, leave = Turnstile(), list[str](), asyncio.Event()

        async def ask() -> int:
            asked.append("")
            await leave.wait()
            return len(asked)

        tasks = [asyncio.create_task(turnstile.shared(key, ask)) for key in ("a", "a", "b")]
        await settle()
        tasks[0].cancel()  # who leaves takes nobody with it
        leave.set()
        assert await asyncio.gather(*tasks[1:]) == [2, 2]
        assert await turnstile.shared("a", ask) == 3

    asyncio.run(scenario())


class Poll:
    """A request on a connection of its own, made again as long as the answer is 429. sent_away: it was."""

    def __init__(self, url: str, path: str, body: bytes = b"") -> None:
        self.address, verb = urlsplit(url), "POST" if body else "GET"
        head = f"{verb} {path} HTTP/1.1\r\nHost: run\r\n{TOKEN_HEADER}: {TOKEN}\r\nContent-Length: {len(body)}\r\n\r\n"
        self.request = head.encode() + body
        self.sent_away = asyncio.Event()

    async def answer(self) -> tuple[int, bytes]:
        reader, writer = await asyncio.open_connection(self.address.hostname, self.address.port)
        status, body = 429, b""
        while status == 429:
            writer.write(self.request)
            head = await reader.readuntil(b"\r\n\r\n")
            status = int(head.split()[1])
            length = int(head.lower().partition(b"content-length:")[2].split()[0])
            body = await reader.readexactly(length)
            if status == 429:
                self.sent_away.set()
        writer.close()
        return status, body


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_a_thousand_wait_and_hold_up_nobody(tmp_path: Path):
    def visit(here: Visit) -> Any:
        async def scenario() -> tuple[list[Any], float]:
            ids = range(100, 600)  # 500 wait for one item, and one each for 500 others
            everybody = [Poll(here.url, "/v1/items?id=99") for _ in ids]
            everybody += [Poll(here.url, "/v1/items/wanted", b'{"id": %d}' % id) for id in ids]
            waiting = [asyncio.create_task(poll.answer()) for poll in everybody]
            await asyncio.gather(*(poll.sent_away.wait() for poll in everybody))
            began = time.monotonic()
            await Poll(here.url, "/v1/items", b'{"item": {"id": 1, "scores": []}}').answer()
            assert (await Poll(here.url, "/v1/items?id=1").answer())[0] == 200
            took = time.monotonic() - began
            assert not any(task.done() for task in waiting)
            for id in (99, *ids):
                await Poll(here.url, "/v1/items", b'{"item": {"id": %d, "scores": []}}' % id).answer()
            return await asyncio.gather(*waiting), took

        answers, took = asyncio.run(scenario())
        here.ask(Desk.put, Item(id=2, scores=[]))
        return answers, took

    answers, took = Visit(tmp_path, visit).go()
    assert [status for status, _ in answers] == [200] * 1000
    assert took < 4.0
