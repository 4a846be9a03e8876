"""Whoever is killed or stopped, and when: no message is lost, none runs twice, each ask ends, and nobody is left."""

from __future__ import annotations

from pathlib import Path

import pytest

from .bench.chaos import TARGETS, ZEROS, play
from .judge import Begun, Sent, judge

RECEIVER = "lone"
LIVES, KILLED = "steady-0.5", "mortal-0.6"


def sent(
    number: int, method: str = "note", how: str = "tell", outcome: str = "", sender: str = LIVES
) -> Sent:
    """A message sent at time `number`, whose outcome its sender knew at time 100 + number."""
    outcome = outcome or ("told" if how == "tell" else "answered")
    return Sent(sender, number, RECEIVER, method, how, number, outcome, 100 + number)


def begun(number: int, fate: str = "end", incarnation: int = 1, sender: str = LIVES, at: int = 0) -> Begun:
    return Begun(RECEIVER, incarnation, sender, number, fate, at or 10 * incarnation + number)


def judged(messages: list[Sent], tries: list[Begun], dead_letters: int = 0) -> dict[str, int]:
    """How many there are of each, without the zeros. dead_letters: of `note`."""
    verdict = judge(messages, tries, {(RECEIVER, "note"): dead_letters}, {LIVES})
    return {name: len(found) for name, found in verdict._asdict().items() if found}


def test_what_is_as_it_should_be_is_not_blamed():
    messages = [
        sent(1),
        sent(2, "keep"),
        sent(3, "wait"),
        sent(4, how="ask"),
        sent(5, how="ask", outcome="died"),
        sent(6, "keep", how="ask", outcome="answered"),
        sent(7),
        sent(8, "keep", how="ask"),
    ]
    tries = [
        begun(1),
        begun(2, "begin"),
        begun(2, incarnation=2),  # idempotent, and was running
        begun(3, "aside", incarnation=2),
        begun(4, incarnation=2),  # overtakes what was set aside
        begun(3, incarnation=2),
        begun(5, "begin", incarnation=2),
        begun(6, incarnation=3),  # ended, and was the last: its actor died before it could note that
        begun(6, incarnation=4),
        begun(7, "begin", incarnation=4),  # a dead letter
        begun(8, incarnation=5),
    ]
    assert judged(messages, tries, dead_letters=1) == {"ran_again": 2}


def test_a_tell_that_was_never_handled_is_lost():
    assert judged([sent(1), sent(2)], [begun(1)]) == {"lost": 1}


def test_a_tell_that_was_begun_and_not_finished_is_lost_unless_it_is_a_dead_letter():
    messages, tries = [sent(1), sent(2)], [begun(1, "begin"), begun(2, incarnation=2)]
    assert judged(messages, tries) == {"lost": 1}
    assert judged(messages, tries, dead_letters=1) == {}


def test_an_ask_that_was_answered_and_not_handled_is_lost():
    assert judged([sent(1, how="ask")], []) == {"lost": 1}


def test_what_notyet_set_aside_is_lost_if_it_is_never_tried_again():
    messages = [sent(1, "wait"), sent(2)]
    assert judged(messages, [begun(1, "aside"), begun(2)]) == {"lost": 1}


def test_a_killed_sender_may_take_with_it_only_what_it_did_not_know_to_have_left():
    messages = [sent(1, sender=KILLED), sent(2, how="ask", sender=KILLED), sent(3, sender=KILLED)]
    answered = [begun(2, sender=KILLED)]
    assert judged(messages, answered) == {"lost": 1}
    assert judged([messages[0], messages[2]], []) == {}


def test_what_is_not_idempotent_must_not_run_again_also_if_it_was_running():
    assert judged([sent(1)], [begun(1), begun(1)]) == {"twice_not_running": 1, "out_of_order": 1}
    assert judged([sent(1)], [begun(1, "begin"), begun(1, incarnation=2)]) == {"twice_not_running": 1}


def test_what_is_idempotent_runs_again_only_if_it_was_running():
    messages = [sent(1, "keep"), sent(2, "keep")]
    running = [begun(1), begun(2, "begin"), begun(2, incarnation=2)]
    assert judged(messages, running) == {"ran_again": 1}
    not_running = [begun(1), begun(2, "begin"), begun(1, incarnation=2), begun(2, incarnation=2)]
    assert judged(messages, not_running) == {"twice_not_running": 1, "ran_again": 1}
    assert judged(messages[:1], [begun(1), begun(1)]) == {"twice_not_running": 1, "out_of_order": 1}


def test_an_idempotent_ask_runs_again_only_until_its_answer_is_known():
    messages = [sent(1, "keep", how="ask"), sent(2, "keep", how="ask")]
    tries = [begun(1), begun(2), begun(1, incarnation=2, at=50), begun(2, incarnation=2)]
    assert judged(messages, tries) == {"answers_lost": 1, "ran_again": 1}
    tries[2] = begun(1, incarnation=2, at=150)
    assert judged(messages, tries) == {"twice_not_running": 1, "ran_again": 1}


@pytest.mark.parametrize("outcome", ["AskTimeout", "ActorStopped"])
def test_an_ask_without_an_answer_is_unresolved(outcome: str):
    assert judged([sent(1, how="ask", outcome=outcome)], [begun(1)]) == {"unresolved": 1}


def test_an_ask_without_any_end_is_unresolved_unless_its_sender_was_killed():
    for sender, found in ((LIVES, {"unresolved": 1}), (KILLED, {})):
        assert judged([Sent(sender, 1, RECEIVER, "note", "ask", 1)], [begun(1, sender=sender)]) == found


def test_a_message_that_overtakes_is_out_of_order_within_a_life_and_across_a_death():
    messages = [sent(1), sent(2)]
    assert judged(messages, [begun(2), begun(1)]) == {"out_of_order": 1}
    assert judged(messages, [begun(2), begun(1, incarnation=2)]) == {"out_of_order": 1}
    assert judged(messages, [begun(1), begun(2, incarnation=2)]) == {}


def test_what_runs_again_must_keep_its_place():
    messages = [sent(number, "keep", how="ask") for number in (1, 2)]
    tries = [begun(1), begun(2), begun(2, incarnation=2), begun(1, incarnation=2)]
    assert judged(messages, tries) == {"out_of_order": 1, "answers_lost": 1, "ran_again": 1}


def test_the_senders_are_not_to_be_told_what_is_not_true():
    unbegun = [sent(1, how="ask", outcome="unbegun")]
    assert judged(unbegun, []) == {}
    assert judged(unbegun, [begun(1, "begin")]) == {"misreported": 1}
    assert judged([sent(1), sent(2)], [begun(1), begun(2)], dead_letters=2) == {"misreported": 1}


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_a_run_in_which_everybody_is_killed_again_and_again(tmp_path: Path):
    result = play(8.0, 0, tmp_path)
    assert {name: result[name] for name in ZEROS} == {name: [] for name in ZEROS}
    signals, targets = result["kills"]["by_signal"], result["kills"]["by_target"]
    assert signals["SIGKILL"] >= 8 and signals["SIGSEGV"] >= 2 and signals["SIGSTOP, SIGCONT"] >= 4
    assert set(targets) == set(TARGETS)
    assert result["deaths"] >= 10
    assert result["sent"] >= 1000 and result["handled"] >= 1000
