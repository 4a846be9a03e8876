"""What other actor runtimes were reported to do wrong with messages: each must not happen here."""

from __future__ import annotations

import os
import random
import socket
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from rolecall.runtime.remote import TOKEN_HEADER

from .processes import Run
from .test_proxy import TOKEN, Visit

pytestmark = [pytest.mark.slow, pytest.mark.timeout(60)]

Act = Callable[[Run, str, str, Any], None]


def play(scene: str, folder: Path, act: Act = lambda *event: None, **settings: Any) -> tuple[Any, Run]:
    """What the asker of graphs/reports.py reports of a scene, and its run, which ended well."""
    os.mkfifo(folder / "gate")
    run = Run("reports", folder, {"scene": scene, **settings}, act)
    outcome = run.go()
    assert outcome.exit_code in (0, 130), outcome.story
    return run.reports["asker"][-1]["result"], run


def kill_when(*what: str) -> Act:
    """Kill the callee once each of these has been reported, by whomever."""
    seen: set[str] = set()

    def act(run: Run, kind: str, name: str, value: Any) -> None:
        if kind == "report" and seen < set(what):
            seen.update(set(what) & set(value))
            if seen == set(what):
                run.kill("callee")

    return act


def test_a_thousand_asks_in_flight_at_a_kill_are_all_answered_but_the_one_that_was_running(tmp_path: Path):
    """Reported of Ray: they hung for ever."""
    endings, run = play("in_flight", tmp_path, kill_when("flying", "hanging"))
    assert len(endings) == 1000
    assert Counter(endings)["ActorDied True"] == 1
    answered = {f"{thread}:{number}" for thread in range(4) for number in range(250)} & set(endings)
    assert len(answered) == 999
    journal = (tmp_path / "state" / "callee" / "journal").read_text().split()
    assert Counter(journal) == Counter([*answered, *["starting", "ready"] * 2])
    assert run.deaths == [("callee", "killed by SIGKILL")]


def test_a_thousand_asks_in_flight_to_an_actor_that_stays_dead_all_end(tmp_path: Path):
    endings, _ = play("in_flight", tmp_path, kill_when("flying", "hanging"), restart="never")
    assert Counter(endings) == {"ActorDied True": 1, "ActorDied False": 999}


def test_a_thousand_asks_in_flight_end_though_the_actor_dies_while_it_answers_them(tmp_path: Path):
    endings, run = play("in_flight_deaths", tmp_path)
    assert len(run.deaths) == 3
    assert len(endings) == 1000
    died = Counter(endings)["ActorDied True"]
    answered = [ending for ending in endings if ending[0].isdigit()]
    assert died >= 3
    assert died + len(answered) == 1000
    journal = Counter((tmp_path / "state" / "callee" / "journal").read_text().split())
    assert (journal.pop("starting"), journal.pop("ready")) == (4, 4)
    assert set(journal.values()) == {1}
    assert set(answered) < set(journal)


def test_nothing_is_handled_between_a_crash_and_ready(tmp_path: Path):
    """Reported of Akka.NET. And asks wait for a long on_start, as reported of Ray."""
    (died, early, answers, journal), _ = play("slow_restart", tmp_path, slow_restart=True)
    assert (died, early) == ("ActorDied True", False)
    asked = [f"asked-{number}" for number in range(20)]
    assert answers == asked
    told = [f"told-{number}" for number in range(20)]
    assert journal == ["starting", "ready", "before", "starting", "ready", *told, *asked]


def test_deaths_before_ready_cost_a_waiting_message_none_of_its_tries(tmp_path: Path):
    """Reported of Ray: retries were eaten while the actor was restarting."""
    result, run = play("spared_retries", tmp_path, kill_when("hanging"), start_deaths=4)
    assert result == "after all"
    assert run.deaths == [("callee", "killed by SIGKILL"), *[("callee", "exited with code 7")] * 4]
    assert run.dead_letters == []


def test_a_constructor_that_raises_after_a_restart_is_counted_and_backed_off_and_its_callers_told(
    tmp_path: Path,
):
    """Reported of Ray."""

    class Recorder(random.Random):
        def uniform(self, a: float, b: float) -> float:
            drawn.append((a, b))
            return a

    drawn: list[tuple[float, float]] = []
    settings = {"scene": "stillborn", "marker": tmp_path / "marker", "kills": True, "max_restarts": 3}
    run = Run("reports", tmp_path, settings, rng=Recorder())
    outcome = run.go()
    assert outcome.exit_code == 1
    assert "child died: ValueError: not constructed. That was death 4" in outcome.story
    assert run.deaths == [("child", "killed by SIGKILL"), *[("child", "ValueError: not constructed")] * 3]
    assert drawn == [(0.0, pytest.approx(0.4)), (0.0, pytest.approx(0.8))]
    assert run.reports["midwife"] == [{"endings": ["ActorDied True", "ActorDied False", "ActorDied False"]}]


def test_who_asks_an_actor_that_could_not_be_constructed_is_told(tmp_path: Path):
    (tmp_path / "marker").touch()
    run = Run("reports", tmp_path, {"scene": "stillborn", "marker": tmp_path / "marker", "restart": "never"})
    assert run.go().exit_code == 0
    assert run.deaths == [("child", "ValueError: not constructed")]
    assert run.reports["midwife"] == [{"endings": ["ActorDied False", "ActorDied False"]}]


def test_who_asks_an_actor_that_stays_dead_is_told_at_once(tmp_path: Path):
    (died, endings, took_s), _ = play("gone", tmp_path, restart="never")
    assert (died, endings) == ("ActorDied True", ["ActorDied False"] * 5)
    assert took_s < 1.0


@pytest.fixture(scope="module")
def circles(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A run in which one actor asks along every path, and then has a third one ask it back."""

    def act(run: Run, kind: str, name: str, value: Any) -> None:
        if kind == "report" and "back" in value:
            run.supervisor.stop()

    run = Run("reports", tmp_path_factory.mktemp("circles"), {"scene": "circles"}, act)
    assert run.go().exit_code == 130
    assert run.deaths == []
    return run


@pytest.mark.parametrize("soon", [False, True], ids=["ask", "ask_soon"])
def test_every_circle_of_asks_is_named_however_long(circles: Run, soon: bool):
    """Reported of Proto.Actor: a re-entrant ask waited for itself."""
    named = {tuple(one["path"]): one["circle"] for one in circles.reports["a"] if one["soon"] is soon}
    assert named == {
        ("a",): "a → a",
        ("b", "a"): "a → b → a",
        ("b", "b"): "b → b",
        ("b", "c", "d", "a"): "a → b → c → d → a",
        ("b", "c", "d", "c"): "c → d → c",
        ("b", "c", "d"): "the end",
    }


def test_a_tell_breaks_a_circle(circles: Run):
    """a asks b, b tells c, c asks a: nobody waits for c, so c has only to wait its turn."""
    assert circles.reports["c"][0] == {"back": "the end"}  # they may go round again until the run has stopped


def test_an_actor_that_finishes_tells_all_who_wait(tmp_path: Path):
    """Reported of Pykka: asks that were queued at a stop waited for ever."""
    endings, run = play("queued_at_finish", tmp_path)
    assert endings == ["ActorStopped"] * 100
    assert run.deaths == []


def test_an_actor_that_is_stopped_before_its_askers_tells_all_who_wait(tmp_path: Path):
    def act(run: Run, kind: str, name: str, value: Any) -> None:
        if kind == "report" and "asking" in value:
            run.supervisor.stop()

    endings, run = play("queued_at_stop", tmp_path, act)
    assert endings == ["ActorStopped"] * 100
    assert run.deaths == []


def test_a_name_never_leads_to_a_dead_incarnation(tmp_path: Path):
    """Reported of Ray: a name led to the dead actor, for those who had asked before and for those who had not."""
    (seen, strangers), run = play("names", tmp_path, max_restarts=6)
    incarnations, pids = zip(*seen, strict=True)
    assert len(run.deaths) == 6
    assert sorted(set(incarnations)) == list(incarnations)
    assert len(set(pids)) == 7
    assert strangers == seen[-1]


def test_work_that_is_longer_than_its_deadline_is_done_once(tmp_path: Path):
    """Reported of Celery: what ran for longer than it was reserved for was handed out again, idempotent or not."""
    (endings, journal), _ = play("long_work", tmp_path)
    assert endings == ["AskTimeout", "AskTimeout"]
    assert journal == ["starting", "ready", "work", "work_idempotent"]


def test_a_forged_request_is_refused_before_its_body_is_sent(tmp_path: Path):
    """Reported of SGLang: whoever reached the port had pickles opened."""
    opened = tmp_path / "opened"
    pickle = f"cos\nsystem\n(S'touch {opened}'\ntR.".encode()

    def visit(here: Visit) -> list[Any]:
        address = httpx.URL(here.url)
        assert address.port
        return [
            *(answer_to_headers(address.port, token) for token in ("", "forged", TOKEN + "x")),
            *(post(here, pickle, token).status_code for token in ("forged", TOKEN)),
        ]

    visited = Visit(tmp_path, visit)
    assert visited.go() == [401, 401, 401, 401, 422]
    assert not opened.exists()
    assert not (tmp_path / "state" / "desk" / "handled").exists()
    assert visited.run.deaths == []


def test_a_replayed_request_changes_nothing(tmp_path: Path):
    """What another machine may send is idempotent, so what was recorded on its way has no more to give."""

    def visit(here: Visit) -> list[Any]:
        body = b'{"item": {"id": 1, "scores": [0.5]}}'
        return [post(here, body, TOKEN).json() for _ in range(3)]

    assert Visit(tmp_path, visit).go() == [1, 1, 1]  # items on the desk


def post(here: Visit, body: bytes, token: str) -> httpx.Response:
    return httpx.post(f"{here.url}/v1/items", content=body, headers={TOKEN_HEADER: token})


def answer_to_headers(port: int, token: str) -> int:
    """The status that comes back although the body of 60 MB that was announced never does."""
    with socket.create_connection(("127.0.0.1", port), timeout=10.0) as connection:
        lines = [
            "POST /v1/items HTTP/1.1",
            "Host: x",
            f"Content-Length: {60 << 20}",
            f"{TOKEN_HEADER}: {token}",
        ]
        connection.sendall("\r\n".join([*lines, "", ""]).encode())
        return int(connection.makefile("rb").readline().split()[1])
