"""Who is started, restarted and stopped, in which order, how often, and how a run ends."""

from __future__ import annotations

import gc
import os
import random
import signal
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from .processes import Run

pytestmark = [pytest.mark.slow, pytest.mark.timeout(60)]

Act = Callable[[Run, str, str, Any], None]


def tree(folder: Path, act: Act = lambda run, kind, name, value: None, **settings: Any) -> Run:
    return Run("tree", folder, settings, act)


def events(run: Run, kind: str) -> list[str]:
    """Who reported "start" or "stop", in no order between actors."""
    return [name for name, reports in run.reports.items() for report in reports if report["event"] == kind]


def done(run: Run) -> list[str]:
    return [name for name, state in run.states if state == "done"]


def after_ups(count: int, act: Callable[[Run], None]) -> Act:
    """Act once, when actors have come up `count` times in all."""

    def wait(run: Run, kind: str, name: str, value: Any) -> None:
        if kind == "state" and value == "up" and len(run.ups()) == count:
            act(run)

    return wait


def stop(run: Run) -> None:
    run.supervisor.stop()


def test_start_in_order_stop_in_reverse(tmp_path: Path):
    run = tree(tmp_path, after_ups(3, stop))
    outcome = run.go()
    assert (outcome.exit_code, outcome.story, outcome.restarts) == (130, "stopped by request", 0)
    assert run.ups() == ["a", "b", "c"]
    assert done(run) == ["c", "b", "a"]
    assert sorted(events(run, "stop")) == ["a", "b", "c"]
    assert run.deaths == []


@pytest.mark.parametrize(
    ("strategy", "stopped", "started"),
    [
        ("ONE_FOR_ONE", [], ["b"]),
        ("REST_FOR_ONE", ["c"], ["b", "c"]),
        ("ONE_FOR_ALL", ["c", "a"], ["a", "b", "c"]),
    ],
)
def test_strategies(tmp_path: Path, strategy: str, stopped: list[str], started: list[str]):
    marks: list[int] = []

    def act(run: Run, kind: str, name: str, value: Any) -> None:
        if kind == "state" and value == "up" and len(run.ups()) == 3:
            run.kill("b")
        if kind == "state" and value == "up" and len(run.ups()) == 3 + len(started):
            marks.append(len(run.states))
            run.supervisor.stop()

    run = tree(tmp_path, act, strategy=strategy)
    outcome = run.go()
    assert (outcome.exit_code, outcome.restarts) == (130, 1)
    assert run.deaths == [("b", "killed by SIGKILL")]
    assert run.ups() == ["a", "b", "c", *started]
    waiting = [name for name, state in run.states[: marks[0]] if state == "waiting"]
    assert waiting == ["b", *stopped]
    assert sorted(events(run, "stop")) == sorted([*stopped, "a", "b", "c"])
    incarnations = [
        report["incarnation"]
        for reports in run.reports.values()
        for report in reports
        if "incarnation" in report
    ]
    assert len(incarnations) == len(set(incarnations)) == 3 + len(started)


def test_a_subtree_is_restarted_by_its_own_supervisor(tmp_path: Path):
    def act(run: Run, kind: str, name: str, value: Any) -> None:
        if kind == "state" and value == "up" and len(run.ups()) == 3:
            run.kill("b")
        if kind == "state" and value == "up" and len(run.ups()) == 5:
            run.supervisor.stop()

    run = tree(tmp_path, act, apart=1, max_restarts=0)
    assert run.go().exit_code == 130
    assert run.ups() == ["a", "b", "c", "b", "c"]
    assert run.deaths == [("b", "killed by SIGKILL")]


def test_a_subtree_that_gives_up_is_one_death_and_ends_the_run_when_there_are_too_many(tmp_path: Path):
    run = tree(tmp_path, does="raise in step", apart=2, max_restarts=1)
    outcome = run.go()
    story = "b died 3 times (ValueError: a bad step) within 60 s, and 2 restarts are allowed"
    assert outcome.exit_code == 1
    assert run.deaths == [*[("b", "ValueError: a bad step")] * 3, ("subtree b+c", story)] * 2
    assert outcome.story.startswith(
        f"subtree b+c died: {story}. That was death 2 within 60 s and 1 restarts are allowed, so the run ends."
    )
    assert "the last words of b" in outcome.story
    assert events(run, "start").count("b") == 6
    assert events(run, "start").count("a") == 1


def test_a_transient_actor_that_has_finished_is_not_restarted(tmp_path: Path):
    def act(run: Run, kind: str, name: str, value: Any) -> None:
        if kind == "state" and ("b", "done") in run.states and ("c", "up") in run.states:
            run.supervisor.stop()

    run = tree(tmp_path, act, does="finish")
    assert run.go().exit_code == 130
    assert run.ups().count("b") == 1
    assert run.deaths == []


def test_a_permanent_actor_that_has_finished_is_restarted(tmp_path: Path):
    run = tree(tmp_path, after_ups(4, stop), does="finish", restart="always, also when it has finished")
    assert run.go().exit_code == 130
    assert run.ups().count("b") >= 2
    assert run.deaths[0] == ("b", "exited with code 0")


def test_a_temporary_actor_that_dies_stays_dead(tmp_path: Path):
    def act(run: Run, kind: str, name: str, value: Any) -> None:
        if kind == "state" and value == "up" and len(run.ups()) == 3:
            run.kill("b")
        if (kind, name) == ("death", "b"):
            run.kill("c")  # whoever is restarted after it shows that the run went on
        if kind == "state" and value == "up" and len(run.ups()) == 4:
            run.supervisor.stop()

    run = tree(tmp_path, act, restart="never")
    assert run.go().exit_code == 130
    assert run.ups() == ["a", "b", "c", "c"]
    assert ("b", "gone") in run.states
    assert run.delays[0] is None


def test_a_run_that_waits_for_a_temporary_actor_ends_with_its_death(tmp_path: Path):
    run = tree(tmp_path, after_ups(3, lambda run: run.kill("b")), restart="never", until="b")
    outcome = run.go()
    assert outcome.exit_code == 1
    assert "b died: killed by SIGKILL" in outcome.story


@pytest.mark.parametrize(
    ("does", "reason"),
    [
        ("raise in constructor", "ValueError: not constructed"),
        ("raise in on_start", "ValueError: not started"),
        ("exit in on_start", "exited with code 7"),
        ("raise in step", "ValueError: a bad step"),
    ],
)
def test_an_actor_that_dies_again_and_again_ends_the_run_with_its_last_output(
    tmp_path: Path, does: str, reason: str
):
    run = tree(tmp_path, does=does, max_restarts=3)
    outcome = run.go()
    assert (outcome.exit_code, outcome.restarts) == (1, 3)
    assert run.deaths == [("b", reason)] * 4
    assert f"b died: {reason}. That was death 4 within 60 s and 3 restarts are allowed" in outcome.story
    assert str(tmp_path / "logs" / "b.log") in outcome.story
    assert ("not constructed" if "constructor" in does else "the last words of b") in outcome.story
    assert ("Traceback" in outcome.story) == ("exit" not in does)
    assert done(run)[-1] == "a"


def test_the_count_of_deaths_falls_with_time(tmp_path: Path):
    now = [0.0]

    def act(run: Run, kind: str, name: str, value: Any) -> None:
        if kind == "death":
            now[0] += 31.0  # two within a minute, never three
            if len(run.deaths) == 8:
                run.supervisor.stop()

    run = tree(tmp_path, act, does="raise in on_start", max_restarts=2)
    run.supervisor.clock = lambda: now[0]
    assert run.go().exit_code == 130
    assert len(run.deaths) == 8


def test_back_off_is_at_once_then_doubles_with_full_jitter_up_to_half_a_minute(tmp_path: Path):
    class Recorder(random.Random):
        def uniform(self, a: float, b: float) -> float:
            drawn.append((a, b))
            return a

    drawn: list[tuple[float, float]] = []
    run = Run("tree", tmp_path, {"does": "raise in on_start", "max_restarts": 10}, rng=Recorder())
    assert run.go().exit_code == 1
    assert run.delays == [0.0] * 10 + [None]
    assert drawn == [(0.0, pytest.approx(min(30.0, 0.1 * 2**n))) for n in range(2, 11)]


@pytest.mark.parametrize(
    ("does", "exit_code", "story"),
    [
        ("give up in on_start", 2, "there is no model 'x': check the name"),
        ("give up in step", 1, "the data ended early"),
    ],
)
def test_what_a_restart_cannot_help_ends_the_run_at_once(
    tmp_path: Path, does: str, exit_code: int, story: str
):
    run = tree(tmp_path, does=does)
    outcome = run.go()
    assert (outcome.exit_code, outcome.story, outcome.restarts) == (exit_code, story, 0)
    assert events(run, "start").count("b") == 1
    assert "a" in done(run)


def test_a_told_message_that_gives_up_ends_the_run(tmp_path: Path):
    outcome = Run("talk", tmp_path, {"scene": "give_up"}).go()
    assert (outcome.exit_code, outcome.story) == (2, "there is no such model")


def test_the_run_ends_when_who_it_waits_for_has_finished(tmp_path: Path):
    run = tree(tmp_path, does="finish", until="b")
    outcome = run.go()
    assert (outcome.exit_code, outcome.story) == (0, "finished")
    assert [name for name in done(run) if name != "c"] == ["b", "a"]  # c may not even have started
    assert {"a", "b"} <= set(events(run, "stop"))


def test_an_actor_that_does_not_stop_is_killed(tmp_path: Path):
    def act(run: Run, kind: str, name: str, value: Any) -> None:
        if kind == "report" and value["event"] == "hang":
            run.supervisor.stop()

    run = tree(tmp_path, act, does="hang", kind="Impatient")
    assert run.go().exit_code == 130
    assert "b" not in events(run, "stop")
    assert done(run)[-2:] == ["b", "a"]


def test_asked_twice_to_stop_it_kills_everybody(tmp_path: Path):
    def act(run: Run, kind: str, name: str, value: Any) -> None:
        if kind == "report" and value["event"] == "hang":
            run.supervisor.stop()
            run.supervisor.stop()

    run = tree(tmp_path, act, does="hang")
    assert run.go().exit_code == 130
    assert "b" not in events(run, "stop")


def kill_forkserver(run: Run) -> None:
    assert run.supervisor._forks is not None
    os.kill(run.supervisor._forks.pid, signal.SIGKILL)


def test_a_fork_server_that_dies_is_replaced(tmp_path: Path):
    def act(run: Run, kind: str, name: str, value: Any) -> None:
        if kind == "state" and value == "up" and run.ups() in (["a"], ["a", "b", "c"]):
            # Once while it is asked for b, and once between two forks.
            kill_forkserver(run)
        if (kind, name) == ("death", "forkserver") and len(run.ups()) == 3:
            run.kill("b")
        if kind == "state" and value == "up" and len(run.ups()) == 4:
            run.supervisor.stop()

    run = tree(tmp_path, act)
    assert run.go().exit_code == 130
    assert run.ups() == ["a", "b", "c", "b"]
    assert [name for name, _ in run.deaths] == ["forkserver", "forkserver", "b"]


def test_a_fork_server_that_dies_again_is_replaced_after_a_wait(tmp_path: Path):
    class Longest(random.Random):
        def uniform(self, a: float, b: float) -> float:
            return b

    def act(run: Run, kind: str, name: str, value: Any) -> None:
        nonlocal waited
        if kind == "state" and value == "up" and run.ups() in (["a"], ["a", "b", "c"]):
            kill_forkserver(run)
        if (kind, name) == ("death", "forkserver") and len(run.deaths) == 2:
            now[0] = 100.0
            run.kill("b")
        if (kind, name) == ("death", "b"):
            assert run.supervisor._forks is None
            waited = True
            now[0] = 101.0
        if kind == "state" and value == "up" and len(run.ups()) == 4:
            run.supervisor.stop()

    now, waited = [0.0], False
    run = Run("tree", tmp_path, act=act, rng=Longest())
    run.supervisor.clock = lambda: now[0]
    assert run.go().exit_code == 130
    assert waited
    assert run.delays == [0.0, pytest.approx(0.4), pytest.approx(0.0)]


def test_the_sockets_are_in_a_short_folder_whatever_tmpdir_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / ("x" * 100)))
    run = tree(tmp_path, after_ups(3, stop))
    assert run.go().exit_code == 130
    assert run.supervisor.sockets.parent == Path("/tmp")


def test_a_module_that_cannot_be_preloaded_ends_the_run_with_the_reason(tmp_path: Path):
    run = tree(tmp_path, kind="Importer", max_restarts=2)
    outcome = run.go()
    assert outcome.exit_code == 1
    assert "No module named 'rolecall.no_such_module'" in outcome.story
    assert "forkserver died: exited with code 1" in outcome.story


def test_an_observer_that_fails_leaves_nobody(tmp_path: Path):
    pids: list[int] = []

    def fail(run: Run) -> None:
        pids.extend(child.pid for child in run.supervisor.children)
        raise KeyError("the observer's own mistake")

    run = tree(tmp_path, after_ups(3, fail))
    with pytest.raises(KeyError):
        run.go()
    assert len(pids) == 3
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)
    assert not run.supervisor.sockets.exists()


def test_a_role_is_restarted_by_request_in_order_and_nothing_is_counted(tmp_path: Path):
    answers: list[list[str]] = []

    def act(run: Run, kind: str, name: str, value: Any) -> None:
        if kind == "state" and value == "up":
            if len(run.ups()) in (3, 4):
                answers.append(run.supervisor.restart("b").names)
            elif len(run.ups()) == 5:
                run.supervisor.stop()
                run.supervisor._check_end()
                answers.append(run.supervisor.restart("b").names)

    run = tree(tmp_path, act, max_restarts=0)
    outcome = run.go()
    assert (outcome.exit_code, outcome.restarts) == (130, 0)
    assert answers == [["b"], ["b"], []]
    assert run.ups() == ["a", "b", "c", "b", "b"]
    assert events(run, "stop").count("b") == 3
    assert run.deaths == []


def test_nobody_has_the_name_that_is_to_be_restarted(tmp_path: Path):
    def act(run: Run) -> None:
        answers.append(run.supervisor.restart("d").names)
        run.supervisor.stop()

    answers: list[list[str]] = []
    run = tree(tmp_path, after_ups(3, act))
    assert run.go().exit_code == 130
    assert answers == [[]]


def test_runs_leave_no_file_descriptor_and_no_zombie(tmp_path: Path):
    def descriptors() -> int:
        gc.collect()  # what earlier tests left in cycles is not this one's
        return len(os.listdir("/proc/self/fd"))

    def zombies() -> set[str]:
        children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
        states = {
            pid: Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] for pid in children
        }
        return {pid for pid, state in states.items() if state == "Z"}

    tree(tmp_path / "0", after_ups(3, stop)).go()
    before, zombies_before = descriptors(), zombies()
    for number in range(1, 6):
        tree(tmp_path / str(number), after_ups(3, stop)).go()
    assert descriptors() == before
    assert zombies() <= zombies_before
