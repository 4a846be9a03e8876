"""ask, tell, NotYet, errors and deadlines between real processes: every ask ends, and says how."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from .processes import Run

pytestmark = [pytest.mark.slow, pytest.mark.timeout(60)]


def kill_when_it_hangs(run: Run, kind: str, name: str, value: Any) -> None:
    if kind == "report" and value.get("hanging"):
        run.kill(name)


def stop_when_it_asks(run: Run, kind: str, name: str, value: Any) -> None:
    if kind == "report" and value.get("asking"):
        run.supervisor.stop()


def play(scene: str, folder: Path, act: Any = None, **settings: Any) -> tuple[Any, Run]:
    """The result of a scene of graphs/talk.py, and its run, which ended well."""
    run = Run("talk", folder, {"scene": scene, **settings}, **({"act": act} if act else {}))
    outcome = run.go()
    assert outcome.exit_code in (0, 130), outcome.story
    return run.reports["caller"][-1]["result"], run


def test_an_answer_comes_back_whole(tmp_path: Path):
    result, _ = play("array", tmp_path)
    assert result == {"same": True, "dtype": "float32", "words": ["a", None, 2.5]}


def test_the_handlers_own_exception_comes_back_with_its_traceback(tmp_path: Path):
    result, run = play("fails", tmp_path)
    assert (result["error"], result["text"]) == ("Broken", "on purpose")
    assert "(in target.fail)" in result["notes"]
    assert "raise Broken(text)" in result["notes"]
    assert run.deaths == []


def test_a_message_that_was_running_at_a_kill_is_not_repeated_but_told(tmp_path: Path):
    (died, next_answer), run = play("kill", tmp_path, kill_when_it_hangs)
    assert (died["error"], died["maybe_executed"]) == ("ActorDied", True)
    assert "target died while handling this message: killed by SIGKILL" in died["text"]
    assert next_answer == "next"
    assert run.deaths == [("target", "killed by SIGKILL")]


def test_a_death_reaches_its_caller_before_the_restart(tmp_path: Path):
    (died, next_answer), _ = play(
        "kill_told_before_restart", tmp_path, kill_when_it_hangs, slow_restart="true"
    )
    assert (died["error"], next_answer) == ("ActorDied", "next")


def test_an_idempotent_message_that_was_running_runs_again(tmp_path: Path):
    result, run = play("idempotent_kill", tmp_path, kill_when_it_hangs)
    assert result == ["after all", "next"]
    assert len(run.deaths) == 1


def test_an_ask_ends_with_its_deadline(tmp_path: Path):
    result, _ = play("timeout", tmp_path)
    assert result["error"] == "AskTimeout"
    assert "target" in result["text"]


def test_asks_made_while_answering_inherit_the_deadline(tmp_path: Path):
    (outer, hello), run = play("inherit_deadline", tmp_path)
    assert (outer["error"], hello) == ("AskTimeout", "hello")
    assert run.reports["relay"] == [{"inner": "AskTimeout"}]


def test_an_ask_ends_when_the_run_is_stopped(tmp_path: Path):
    result, _ = play("stopped", tmp_path, stop_when_it_asks)
    assert result["error"] == "ActorStopped"


def test_a_hundred_waiting_asks_all_end_when_the_run_is_stopped(tmp_path: Path):
    result, _ = play("stopped_with_many", tmp_path, stop_when_it_asks)
    assert result == ["ActorStopped"] * 100


def test_an_actor_that_stays_dead_is_named_to_all_who_ask(tmp_path: Path):
    (first, second), _ = play("gone", tmp_path, kill_when_it_hangs, target="never")
    assert (first["error"], first["maybe_executed"]) == ("ActorDied", True)
    assert (second["error"], second["maybe_executed"]) == ("ActorDied", False)
    assert "killed by SIGKILL" in second["text"]


def test_an_actor_that_has_finished_says_so(tmp_path: Path):
    (first, second), run = play("finished", tmp_path)
    assert (first["error"], second["error"]) == ("ActorStopped", "ActorStopped")
    assert run.deaths == []


def test_a_tell_whose_handler_raises_kills_its_actor_and_becomes_a_dead_letter(tmp_path: Path):
    journal, run = play("tell_fails", tmp_path)
    assert journal == ["before", "after"]
    assert run.deaths == [("target", "Broken: told")]
    [(receiver, method, reason)] = run.dead_letters
    assert (receiver, method) == ("target", "fail")
    assert "died while it handled fail" in reason
    assert '"message":"fail"' in (tmp_path / "dead_letters.jsonl").read_text()


def test_not_yet_is_overtaken_and_tried_again_when_the_state_has_changed(tmp_path: Path):
    journal, _ = play("overtaken", tmp_path)
    assert journal == ["overtakes", "opened:a", "passed:a", "opened:b", "passed:b"]


def test_a_message_set_aside_survives_its_actor(tmp_path: Path):
    (died, journal), run = play("set_aside_then_killed", tmp_path, kill_when_it_hangs)
    assert died == "ActorDied"
    assert journal == ["one", "opened:a", "passed:a"]
    assert run.dead_letters == []


def test_a_deadlock_is_named_at_once(tmp_path: Path):
    result, _ = play("deadlock", tmp_path)
    assert result["error"] == "DeadlockError"
    assert "caller → relay → target → caller" in result["text"]


@pytest.mark.parametrize(
    ("scene", "reason"), [("os_exit", "exited with code 3"), ("sys_exit", "SystemExit: 3")]
)
def test_leaving_in_a_handler_ends_the_process(tmp_path: Path, scene: str, reason: str):
    result, run = play(scene, tmp_path)
    assert (result["error"], result["maybe_executed"]) == ("ActorDied", True)
    assert run.deaths == [("target", reason)]


def test_a_message_that_killed_its_actor_twice_is_not_tried_again(tmp_path: Path):
    (died, journal), run = play("poison_ask", tmp_path)
    assert (died["error"], died["maybe_executed"]) == ("ActorDied", True)
    assert "poison killed target 2 times" in died["text"]
    assert journal == ["poison", "poison"]
    assert len(run.deaths) == 2


def test_a_told_message_that_killed_its_actor_twice_is_a_dead_letter(tmp_path: Path):
    (_, journal), run = play("poison_tell", tmp_path)
    assert journal == ["poison", "poison"]
    assert run.dead_letters == [("target", "poison", "poison killed target 2 times")]


def test_what_cannot_be_sent_back_becomes_an_error(tmp_path: Path):
    (answer, error, stubborn), run = play("unpicklable", tmp_path)
    assert "target.unpicklable_answer: its answer of type generator can't be sent" in answer["text"]
    assert "target.unpicklable_error: its exception of type Broken can't be sent" in error["text"]
    assert "target.stubborn_error: its exception of type Stubborn can't be sent" in stubborn["text"]
    assert {answer["error"], error["error"], stubborn["error"]} == {"RolecallError"}
    assert run.deaths == []


def test_a_message_that_cannot_be_sent_raises_where_it_was_made(tmp_path: Path):
    (error, next_answer), run = play("unpicklable_message", tmp_path)
    assert "lock" in error["text"]
    assert next_answer == "next"
    assert run.deaths == []


def test_a_full_mailbox_makes_its_senders_wait_and_loses_nothing(tmp_path: Path):
    def kill_when_full(run: Run, kind: str, name: str, value: Any) -> None:
        if kind == "report" and value.get("full"):
            run.kill("target")

    (refused, journal), run = play("full", tmp_path, kill_when_full)
    assert (refused["error"], "1024 messages to handle" in refused["text"]) == ("AskTimeout", True)
    assert journal == [str(number) for number in range(1024)]
    assert [method for _, method, _ in run.dead_letters] == ["hang"]


def test_replicas_are_asked_all_at_once_also_in_the_first_step(tmp_path: Path):
    (answers, error), _ = play("each", tmp_path, relays=3)
    assert answers == ["hello"] * 3
    assert "relay has 3 replicas" in error["text"]


def test_every_ask_of_four_threads_ends_while_the_actor_is_killed(tmp_path: Path):
    result, run = play("many_threads", tmp_path, kill_when_it_hangs)
    assert result["answered"] + result["died"] == 400
    assert len(run.deaths) == 3
    journal = result["journal"]
    assert len(journal) == len(set(journal)), "a message was handled twice"
    assert result["answered"] <= len(journal) <= result["answered"] + result["died"] - 3
    for thread in range(4):
        numbers = [int(line.split(":")[1]) for line in journal if line.startswith(f"{thread}:")]
        assert numbers == sorted(numbers)


# --- the mailbox survives its actor ----------------------------------------------------------------------


def mail(folder: Path, **settings: Any) -> tuple[Run, dict[str, list[int]]]:
    """A run of graphs/mail.py, and the lines of each sender."""

    def act(run: Run, kind: str, name: str, value: Any) -> None:
        if kind == "report" and value.get("hunted"):
            run.kill("ledger")

    run = Run("mail", folder, settings, act)
    outcome = run.go()
    assert (outcome.exit_code, outcome.story) == (0, "finished")
    assert len(run.deaths) >= 8
    lines: dict[str, list[int]] = {f"sender-{i}": [] for i in range(3)}
    for line in (folder / "state" / "ledger" / "lines").read_text().splitlines():
        sender, number = line.split()
        lines[sender].append(int(number))
    return run, lines


# Killed from outside at any moment, or by itself at the worst ones. Not both: a message that is running at
# two deaths is, rightly, not tried again.
DEATHS = pytest.mark.parametrize("deaths", [{"hunts": 8}, {"mortal": "true"}], ids=["hunted", "mortal"])


@DEATHS
def test_each_message_is_handled_once_and_in_order_whenever_the_actor_is_killed(
    tmp_path: Path, deaths: dict[str, Any]
):
    run, lines = mail(tmp_path, **deaths)
    missing = 0
    for numbers in lines.values():
        assert numbers == sorted(set(numbers)), "handled twice, or out of order"
        missing += 200 - len(numbers)
    # What is missing was running at a kill, and its sender knows. It also knows of asks whose answer was lost.
    died = sum(reports[-1]["died"] for name, reports in run.reports.items() if name in lines)
    assert len(run.dead_letters) <= len(run.deaths)
    assert missing <= len(run.dead_letters) + died <= len(run.deaths) * (1 + len(lines))
    assert {method for _, method, _ in run.dead_letters} <= {"note"}


@DEATHS
def test_idempotent_messages_are_all_handled_and_only_the_running_one_again(
    tmp_path: Path, deaths: dict[str, Any]
):
    run, lines = mail(tmp_path, **deaths, repeatable="true")
    repeated = 0
    for numbers in lines.values():
        assert numbers == sorted(numbers)
        assert set(numbers) == set(range(1, 201))
        repeated += len(numbers) - 200
    assert repeated <= len(run.deaths) * (1 + len(lines))  # an ask whose answer was lost is asked again, too
    assert run.dead_letters == []


def test_a_ring_turns_however_its_actors_are_killed(tmp_path: Path):
    victims = iter(["shelf", "producer", "consumer", "shelf", "consumer"])

    def act(run: Run, kind: str, name: str, value: Any) -> None:
        if kind == "report" and value["item"] % 25 == 0:
            victim = next(victims, None)
            if victim:
                run.kill(victim)

    run = Run("ring", tmp_path, {"count": 150, "capacity": 3, "max_restarts": 20}, act)
    assert run.go().exit_code == 0
    assert [name for name, _ in run.deaths] == ["shelf", "producer", "consumer", "shelf", "consumer"]
    taken = [int(line) for line in (tmp_path / "state" / "consumer" / "taken").read_text().split()]
    assert taken == list(range(1, 151))
    # A full shelf blocks its producer: it never got further ahead than what fits, and the one it waits with.
    made = int((tmp_path / "state" / "producer" / "next").read_text())
    assert made <= 150 + 3 + 2
