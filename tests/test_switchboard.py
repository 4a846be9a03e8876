"""Nobody of a run talks the others down, and what somebody said last is heard before his death."""

from __future__ import annotations

import select
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
from msgspec.structs import replace
from rolecall.runtime.control import RunStatus, supervisor_path
from rolecall.runtime.runs import create_run
from rolecall.runtime.sockets import Connection, connect
from rolecall.runtime.switchboard import Switchboard

from .processes import Run

slow = pytest.mark.slow
pytestmark = pytest.mark.timeout(60)

WORDS = 300


@pytest.fixture
def sockets() -> Iterator[Path]:
    sockets = Path(tempfile.mkdtemp(prefix="rolecall-", dir="/tmp"))  # a socket's path must be short
    yield sockets
    shutil.rmtree(sockets)


@pytest.fixture
def poller() -> Iterator[select.epoll]:
    with select.epoll() as poller:
        yield poller


def caller(sockets: Path, poller: select.epoll, *words: bytes) -> Connection:
    connection = Connection(connect(supervisor_path(sockets)), poller)
    for word in words:
        connection.send(word)
    assert not connection.backlog
    return connection


def test_of_one_that_says_much_not_all_is_heard_before_the_others(sockets: Path, poller: select.epoll):
    board = Switchboard(sockets)
    flooder = caller(sockets, poller, *(b"%d." % number for number in range(WORDS)))
    quiet = caller(sockets, poller, b"quiet")
    heard: list[bytes] = []
    turns: list[int] = []
    while len(heard) < WORDS + 1:
        board.poll(10.0)
        words = [bytes(word) for _, word in board.heard()]
        turns += [len(words)] if words else []
        heard += words
    assert heard.index(b"quiet") < WORDS / 2
    assert max(turns) < WORDS / 2
    heard.remove(b"quiet")
    assert heard == [b"%d." % number for number in range(WORDS)]
    for connection in (flooder, quiet):
        connection.close()
    board.close()


def test_all_that_a_dead_one_said_is_heard_when_it_is_forgotten(sockets: Path, poller: select.epoll):
    board = Switchboard(sockets)
    actor = caller(sockets, poller, b"hello", *(b"%d." % number for number in range(WORDS)))
    heard: list[tuple[Connection, bytes | memoryview]] = []
    while not heard:
        board.poll(10.0)
        heard += board.heard()
    route = heard[0][0]
    board.introduce(route, "actor", 7)
    actor.close()
    board.forget("actor", 7)
    heard += board.heard()
    assert [bytes(word) for _, word in heard] == [b"hello", *(b"%d." % number for number in range(WORDS))]
    assert board.actor(route) == ("actor", 7)
    board.close()


@slow
def test_all_that_an_actor_reported_comes_before_its_death(tmp_path: Path):
    seen: list[int] = []  # reports at each death, and at the end

    def act(run: Run, kind: str, name: str, value: Any) -> None:
        if (kind, name) == ("death", "talker"):
            seen.append(len(run.reports["talker"]))
        if (kind, name, value) == ("state", "talker", "done"):
            seen.append(len(run.reports["talker"]))

    run = Run("flood", tmp_path, {"words": WORDS, "deaths": 2}, act)
    assert run.go().exit_code == 0
    assert seen == [WORDS, 2 * WORDS, 3 * WORDS]
    assert [report["word"] for report in run.reports["talker"]] == [*range(WORDS)] * 3


@slow
def test_a_flood_of_reports_hides_no_death_no_question_and_no_stop(tmp_path: Path):
    folder = create_run(tmp_path, "flood", {})
    asked: list[RunStatus] = []

    def ask_and_stop() -> None:
        asked.append(folder.status())
        run.supervisor.stop()

    asking = Thread(target=ask_and_stop)

    def act(run: Run, kind: str, name: str, value: Any) -> None:
        if kind == "state" and run.ups() == ["flooder", "idle"] and not run.deaths and value == "up":
            run.kill("idle")
        if (kind, value) == ("state", "up") and run.ups() == ["flooder", "idle", "idle"]:
            asking.start()

    run = Run("flood", folder.path, act=act)
    folder.write_info(replace(folder.info, sockets=str(run.supervisor.sockets)))
    assert run.go().exit_code == 130
    asking.join()
    assert run.deaths == [("idle", "killed by SIGKILL")]
    assert [(actor.name, actor.state) for actor in asked[0].actors] == [("flooder", "up"), ("idle", "up")]
    assert [name for name, state in run.states if state == "done"] == ["idle", "flooder"]
    words = [report["word"] for report in run.reports["flooder"]]
    assert words == [*range(100)] * (len(words) // 100)
