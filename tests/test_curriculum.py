"""The curriculum: which rows are left out, and that a prompt keeps its row."""

from __future__ import annotations

from pathlib import Path

from rolecall.actors.curriculum import KEPT, LEAST, Curriculum
from rolecall.actors.data import Row

from .fakes import fake_ring
from .test_recipes import lines, run


class Rows:
    """Ten, again and again."""

    def __getitem__(self, index: int) -> Row:
        return f"row {index % 10}", str(index % 10)


def started(folder: Path, seed: int = 0) -> Curriculum:
    return Curriculum(Rows(), folder / "curriculum.json", seed=seed)


def test_without_experience_it_is_the_data_set_itself(tmp_path: Path):
    curriculum = started(tmp_path)
    curriculum.plan(25)
    assert [curriculum[id] for id in range(25)] == [Rows()[id] for id in range(25)]


def test_what_is_now_and_then_solved_comes_more_often(tmp_path: Path):
    """Row 0 always, row 1 never, row 2 in half of the times; of the others nobody knows, or three of four times."""
    curriculum = started(tmp_path)
    curriculum.plan(10)
    curriculum.learn({0: 1.0, 1: 0.0, 2: 0.5} | dict.fromkeys(range(3, 10), 0.75))
    curriculum.plan(2010)
    counts = {text: 0 for text, _ in map(Rows().__getitem__, range(10))}
    for id in range(10, 2010):
        counts[curriculum[id][0]] += 1
    passes = counts["row 2"]
    assert 0.6 * LEAST < counts["row 0"] / passes < 1.5 * LEAST
    assert 0.6 * LEAST < counts["row 1"] / passes < 1.5 * LEAST
    assert 0.65 < counts["row 5"] / passes < 0.85


def test_what_was_hard_comes_back_once_it_is_not(tmp_path: Path):
    curriculum = started(tmp_path)
    curriculum.plan(10)
    curriculum.learn(dict.fromkeys(range(10), 0.0))
    for _ in range(3):
        curriculum.learn({1: 0.5})
    curriculum.plan(110)
    assert sum(curriculum[id][0] == "row 1" for id in range(10, 110)) > 30


def test_a_row_once_planned_stays_over_a_restart_and_a_move(tmp_path: Path):
    curriculum = started(tmp_path)
    curriculum.plan(10)
    curriculum.learn(dict.fromkeys(range(10), 1.0))
    curriculum.plan(40)
    planned = [curriculum[id] for id in range(40)]
    assert [started(tmp_path)[id] for id in range(40)] == planned
    (tmp_path / "other").mkdir()
    other = started(tmp_path / "other")
    other.restore(curriculum.snapshot())
    for one in (curriculum, other):
        one.plan(80)
    assert [other[id] for id in range(80)] == [curriculum[id] for id in range(80)]


def test_it_does_not_grow_for_ever(tmp_path: Path):
    curriculum = started(tmp_path)
    for start in range(0, 3 * KEPT, 1000):
        curriculum.plan(start + 1000)
        curriculum.learn(dict.fromkeys(range(start, start + 1000), 0.5))
    assert len(curriculum.snapshot()) < 40 * KEPT


def test_a_run_with_one_trains_as_many_groups_and_repeats(tmp_path: Path):
    for name in ("first", "second"):
        run(fake_ring(steps=6, batch=4, max_staleness=1, curriculum=True), tmp_path / name)
    ids = [id for line in lines(tmp_path / "first", "metrics.jsonl") for id in line["groups"]]
    assert sorted(ids) == list(range(24))
    assert len(list((tmp_path / "first").rglob("curriculum.json"))) == 1
