"""Asks whose answers are waited for later, and what is sent while its sender computes."""

from __future__ import annotations

from pathlib import Path

import pytest
from rolecall.runtime.recipe import load_recipe
from rolecall.runtime.testing import LocalRun

from .processes import GRAPHS, Run

pytestmark = pytest.mark.timeout(60)


def _reported(reports: list[dict[str, object]]) -> dict[str, object]:
    return {key: value for report in reports for key, value in report.items()}


def test_waits_overlap_in_a_local_run(tmp_path: Path):
    module = load_recipe(str(GRAPHS / "soon.py"))
    run = LocalRun(module.build(module.Config()), folder=tmp_path)
    run.run()
    assert _reported(run.reports["walker"]) == {"passed": [0, 1, 2, 3, 4], "again": 0, "failed": "no"}


@pytest.mark.slow
def test_waits_overlap_between_processes(tmp_path: Path):
    run = Run("soon", tmp_path)
    assert run.go().exit_code == 0
    assert _reported(run.reports["walker"]) == {"passed": [0, 1, 2, 3, 4], "again": 0, "failed": "no"}


@pytest.mark.slow
def test_answers_still_come_when_the_one_that_was_asked_dies_meanwhile(tmp_path: Path):
    run = Run("soon", tmp_path, {"kill": True})
    assert run.go().exit_code == 0
    assert _reported(run.reports["walker"])["passed"] == [0, 1, 2, 3, 4]
    assert _reported(run.reports["walker"])["died"] is True
    assert run.deaths == [("gate", "killed by SIGKILL")]


@pytest.mark.slow
def test_a_tell_does_not_wait_for_its_senders_computation(tmp_path: Path):
    run = Run("soon", tmp_path, {"busy": True})
    assert run.go().exit_code == 0


def _look(reports: list[dict[str, object]]) -> None:
    assert reports == [{"passed": 7, "steps": 2}]


@pytest.mark.slow
def test_an_answer_calls_the_step_of_an_actor_that_has_gone_on(tmp_path: Path):
    run = Run("soon", tmp_path, {"patient": True})
    assert run.go().exit_code == 0
    _look(run.reports["patient"])


def test_it_does_so_in_a_local_run(tmp_path: Path):
    module = load_recipe(str(GRAPHS / "soon.py"))
    run = LocalRun(module.build(module.Config(patient=True)), folder=tmp_path)
    run.run()
    _look(run.reports["patient"])
    assert run.now < 1.0


@pytest.mark.slow
def test_an_ask_whose_time_is_over_is_done_though_nobody_waits_in_it(tmp_path: Path):
    run = Run("soon", tmp_path, {"impatient": True})
    assert run.go().exit_code == 0
    assert run.reports["impatient"] == [{"late": "no answer from gate within the deadline"}]


def test_it_is_in_a_local_run(tmp_path: Path):
    module = load_recipe(str(GRAPHS / "soon.py"))
    run = LocalRun(module.build(module.Config(impatient=True)), folder=tmp_path)
    run.run()
    assert run.reports["impatient"] == [{"late": "no answer from gate within the deadline"}]
    assert run.now == 1.5


def test_answers_that_an_actor_without_steps_never_looks_at_hold_up_nobody(tmp_path: Path):
    module = load_recipe(str(GRAPHS / "soon.py"))
    run = LocalRun(module.build(module.Config(stepless=True)), folder=tmp_path)
    run.run()
    assert len(run.turns) < 60
