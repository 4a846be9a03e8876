"""`rolecall compare`: what it says of runs, whole or not, and how it makes them."""

from __future__ import annotations

import dataclasses
import json
import re
import signal
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from rolecall.actors.compare import budget, report
from rolecall.actors.measures import Measures, band, reached_s, running_mean
from rolecall.recipes import async_grpo, sync_grpo
from rolecall.runtime.charts import Chart, Line, Report, Table, page, text_table
from rolecall.runtime.cli import main
from rolecall.runtime.runs import RunFolder, RunInfo
from rolecall.runtime.sides import Price

from .commands import Command, until
from .test_cli import refused

STARTED = 1000.0
RECIPES = {"sync_grpo": sync_grpo, "async_grpo": async_grpo}


def past_run(
    root: Path, recipe: str, *, seed: int = 0, pace_s: float = 1.0, waits: float = 0.5, made: int = 10,
    end: float = 0.9, deaths: int = 0, **settings: Any,
) -> str:  # fmt: skip
    """The folder of a run of 10 steps of 4 groups, `pace_s` each, whose accuracy grew evenly from 0.3 to `end`."""
    config = RECIPES[recipe].Config(steps=10, batch=4, eval_every=5, eval_problems=100, seed=seed, **settings)
    name = f"{recipe}-{seed}-{made}-{len(list(root.glob('*')))}"
    run = RunFolder(root / name)
    run.path.mkdir(parents=True)
    values = dataclasses.asdict(config)
    run.write_info(RunInfo(id=name, recipe=recipe, config=values, started=STARTED, pid=0))
    steps = [
        {
            "step": step, "time": STARTED + 5 + pace_s * step, "reward": step / 10, "staleness/mean": 1.0,
            "staleness/max": 2, "perf/step_s": pace_s,
            "perf/rollout_wait_s": (waits if 1 < step < made else 1.0) * pace_s,
            "dropped": {"stale": 1}, "groups": list(range(4 * step - 4, 4 * step)),
        }
        for step in range(1, made + 1)
    ]  # fmt: skip
    evaluations = [
        {"step": step, "version": step, "time": STARTED + 7777 if step else STARTED + 5, "greedy": 0.0,
         "accuracy": 0.3 + (end - 0.3) * step / 10}
        for step in (0, 5, 10)
    ]  # fmt: skip
    events: list[dict[str, Any]] = [
        {"time": STARTED, "event": "report", "actor": "rollout-0",
         "values": {"sample_s": 3.0, "lease_wait_s": 0.5, "put_wait_s": 0.5}},
        {"time": STARTED, "event": "state", "actor": "rollout-0", "state": "up"},
    ]  # fmt: skip
    death = {"time": STARTED, "event": "death", "actor": "trainer", "reason": "killed", "restart_in_s": 0.1}
    for file, lines in (("metrics", steps), ("eval", evaluations), ("events", events + [death] * deaths)):
        (run.path / f"{file}.jsonl").write_bytes(
            b"".join(json.dumps(line).encode() + b"\n" for line in lines)
        )
    return name


def compared(root: Path, *arguments: str, code: int = 0) -> dict[str, Any]:
    """compare.json."""
    assert main(["compare", *arguments, "--runs", str(root)]) == code
    (path,) = root.glob("compare-*/compare.json")
    return json.loads(path.read_text())


# --- one run, and several ------------------------------------------------------------------------------------


def test_a_run_in_numbers(tmp_path: Path):
    measures = Measures.of(RunFolder(tmp_path / past_run(tmp_path, "async_grpo", pace_s=2.0, deaths=3)))
    assert measures.steps[:2] == [(7.0, 4), (9.0, 8)]
    # Of the step that was evaluated, however late the evaluator was.
    assert [(at, groups) for at, groups, _ in measures.evaluations] == [(5.0, 0), (15.0, 20), (25.0, 40)]
    assert (measures.trainer_wait_share, measures.rollout_wait_share) == (0.5, 0.25)
    assert (measures.wall_s, measures.groups_per_s) == (25.0, 2.0)
    assert (measures.restarts, measures.dropped, measures.staleness_max) == (3, 1, 2)


def test_a_run_that_left_nothing_is_no_error(tmp_path: Path):
    run = RunFolder(tmp_path)
    config = {"steps": 10, "eval_problems": 100}
    run.write_info(RunInfo(id="x", recipe="sync_grpo", config=config, started=0.0, pid=0))
    measures = Measures.of(run)
    assert (measures.final, measures.wall_s, measures.groups_per_s) == (None, 0.0, 0.0)
    assert reached_s(measures, 0.5) is None


def test_accuracy_grows_evenly_between_two_evaluations(tmp_path: Path):
    measures = Measures.of(RunFolder(tmp_path / past_run(tmp_path, "sync_grpo")))
    # 0.3 at 5 s, 0.6 at 10 s, 0.9 at 15 s
    assert reached_s(measures, 0.2) == 5.0
    assert reached_s(measures, 0.45) == pytest.approx(7.5)
    assert reached_s(measures, 0.9) == pytest.approx(15.0)
    assert reached_s(measures, 0.91) is None


def test_mean_and_band_over_seeds():
    """As far as all curves go."""
    line = band("x", 2, [[(0.0, 0.0), (10.0, 1.0)], [(2.0, 0.0), (6.0, 0.0), (8.0, 0.4)]])
    assert line.points[0] == (2.0, pytest.approx(0.1), 0.0, pytest.approx(0.2))
    assert line.points[-1] == (8.0, pytest.approx(0.6), pytest.approx(0.4), pytest.approx(0.8))
    assert all(low <= mean <= high for _, mean, low, high in line.points)
    assert band("x", 0, [[(1.0, 5.0)], []]).points == [(1.0, 5.0, 5.0, 5.0)]
    assert band("x", 0, []).points == []
    assert running_mean([1.0, 2.0, 6.0], 2) == [1.0, 1.5, 4.0]


# --- runs that there are ---------------------------------------------------------------------------------------


def test_two_recipes_and_two_seeds(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    sync = [past_run(tmp_path, "sync_grpo", seed=seed, pace_s=4.0, end=0.9 + 0.02 * seed) for seed in (0, 1)]
    other = [past_run(tmp_path, "async_grpo", seed=seed, waits=0.03) for seed in (0, 1)]
    values = compared(tmp_path, *sync, *other, "--target", "0.6")
    assert values["recipes"] == ["sync_grpo", "async_grpo"]
    assert values["accuracy"] == {"sync_grpo": [0.9, 0.92], "async_grpo": [0.9, 0.9]}
    assert values["trainer_wait_share"] == {"sync_grpo": 0.5, "async_grpo": 0.03}
    numbers = values["conditions"]["as given"]
    times = numbers["wall_s_to_target"]
    assert times["sync_grpo"] == pytest.approx([25.0, 24.3548], abs=1e-3) and times["async_grpo"] == [
        10.0,
        10.0,
    ]
    assert values["wall_ratio"]["as given"] == pytest.approx(10 / 24.6774, abs=1e-3)
    # From the end of the first step, at 9 s and 6 s.
    assert numbers["wall_ratios_after_first_step"]["async_grpo"] == pytest.approx(4 / 15.6774, abs=1e-3)
    gap = numbers["accuracy_gap"]["async_grpo"]
    assert (gap["mean"], gap["noise"]) == (-0.01, pytest.approx(0.02, abs=1e-4))
    assert (values["flags"], values["failures"], values["cost_unit"]) == ([], {}, "machine-seconds")
    out = capsys.readouterr().out
    row = next(line for line in out.splitlines() if line.strip().startswith("async_grpo"))
    assert re.split(r"\s{2,}", row.strip()) == [
        "async_grpo", "0.90 (0.90–0.90)", "10.0", "0.41", "10", "3%", "25%", "1.0, at most 2", "4.0", "0",
    ]  # fmt: skip
    assert "settings that differ" in out and "max_staleness" in out  # sync has none


def test_without_a_target_the_weaker_recipe_sets_it(tmp_path: Path):
    names = [past_run(tmp_path, "sync_grpo", end=0.9), past_run(tmp_path, "async_grpo", end=0.7)]
    values = compared(tmp_path, *names)
    assert values["target"] == pytest.approx(0.68)
    assert values["target_is"] == "0.02 below the lowest median of final accuracies"
    # One seed: the noise is that of 100 problems.
    noise = values["conditions"]["as given"]["accuracy_gap"]["async_grpo"]["noise"]
    assert noise == pytest.approx(2 * ((0.9 * 0.1 + 0.7 * 0.3) / 100) ** 0.5, abs=1e-4)


def test_who_never_gets_there_has_no_ratio(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    names = [past_run(tmp_path, "sync_grpo", end=0.9), past_run(tmp_path, "async_grpo", end=0.7)]
    values = compared(tmp_path, *names, "--target", "0.8")
    assert values["wall_ratio"] == {"as given": None}
    assert "–" in capsys.readouterr().out


def test_budgets_become_settings():
    assert budget("steps", 1e7, {}) == {"steps": "10000000"}
    assert budget("groups", 641.0, {"batch": 16}) == {"steps": "41"}
    assert int(budget("minutes", 0.5, {})["steps"]) > 10**5


def test_a_price_is_for_an_hour(tmp_path: Path):
    names = [past_run(tmp_path, "sync_grpo"), past_run(tmp_path, "async_grpo")]
    values = compared(tmp_path, *names, "--price", "7.2")
    assert (values["cost_unit"], values["cost_per_s"]) == ("$", 0.002 * max(1, values["machine"]["gpus"]))


def test_what_should_be_the_same_is_flagged(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    names = [
        past_run(tmp_path, "sync_grpo", train_set="a.jsonl", lr=0.1),
        past_run(tmp_path, "sync_grpo", seed=1, train_set="a.jsonl", lr=0.1),
        past_run(tmp_path, "async_grpo", train_set="b.jsonl"),
    ]
    values = compared(tmp_path, *names)
    assert values["flags"] == [
        "as given: train_set should be the same: 'a.jsonl' for sync_grpo, 'b.jsonl' for async_grpo",
        "as given: the seeds of whole runs should be the same: [0, 1] for sync_grpo, [0] for async_grpo",
    ]
    assert values["settings_that_differ"]["as given"]["lr"] == ["0.1", "0.001"]
    out = capsys.readouterr().out
    assert all(flag in out for flag in values["flags"])
    (html,) = tmp_path.glob("compare-*/compare.html")
    assert "train_set should be the same" in html.read_text()


def test_runs_of_one_recipe_are_told_apart_by_their_settings(tmp_path: Path):
    names = [
        past_run(tmp_path, "async_grpo", seed=seed, max_staleness=most) for most in (1, 4) for seed in (0, 1)
    ]
    assert compared(tmp_path, *names)["recipes"] == [
        "async_grpo max_staleness=1",
        "async_grpo max_staleness=4",
    ]


def test_a_run_that_is_not_whole_is_said_and_not_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    names = [
        past_run(tmp_path, "sync_grpo"),
        past_run(tmp_path, "sync_grpo", seed=1, made=6),
        past_run(tmp_path, "async_grpo"),
    ]
    values = compared(tmp_path, *names, code=1)
    assert values["failures"] == {"sync_grpo, as given, seed 1": "made 6 of 10 steps"}
    assert values["accuracy"]["sync_grpo"] == [0.9]
    assert "made 6 of 10 steps; it is in none of the numbers" in capsys.readouterr().out


def test_before_the_first_run_has_ended_there_is_a_report():
    made = report([], target=None, price=Price("$", 1.0))
    assert made.values["wall_ratio"] == {} and made.tables == [] and page("t", made)


def test_whoever_failed_alone_has_no_numbers_and_no_others_suffer(tmp_path: Path):
    names = [past_run(tmp_path, "sync_grpo", made=2), past_run(tmp_path, "async_grpo")]
    values = compared(tmp_path, *names, code=1)
    assert values["accuracy"] == {"sync_grpo": [], "async_grpo": [0.9]}
    assert values["wall_ratio"] == {"as given": None}


def test_json_is_the_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    values = compared(tmp_path, past_run(tmp_path, "sync_grpo"), past_run(tmp_path, "async_grpo"), "--json")
    assert json.loads(capsys.readouterr().out) == values


# --- the page ---------------------------------------------------------------------------------------------------


class Tags(HTMLParser):
    def __init__(self, text: str) -> None:
        super().__init__()
        self.names: list[str] = []
        self.attributes: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.names.append(tag)
        self.attributes += [name for name, _ in attrs]


def test_the_page_needs_nothing_from_anywhere(tmp_path: Path):
    compared(tmp_path, past_run(tmp_path, "sync_grpo", pace_s=3.0), past_run(tmp_path, "async_grpo"))
    (path,) = tmp_path.glob("compare-*/compare.html")
    text = path.read_text()
    tags = Tags(text)
    assert "http:" not in text and "https:" not in text and "url(" not in text and "@import" not in text
    assert not {"src", "href"} & set(tags.attributes) and not {"link", "img", "iframe"} & set(tags.names)
    assert tags.names.count("svg") == 8 and tags.names.count("polyline") == 16
    for title in (
        "Held-out accuracy",
        "Reward",
        "Staleness",
        "Trainer waits",
        "groups trained",
        "machine-seconds",
    ):
        assert title in text
    assert "NaN" not in text and "nan," not in text


def test_a_page_says_things_as_they_are():
    chart = Chart("<b>", "x", "y", [Line("a & b", [(0.0, 1.0, 1.0, 1.0)], 0)], level=1.0)
    text = page(
        "<t>", Report({}, [Table("<c>", ["", "<i>"], [["r", "<u>"]])], [chart, Chart("none", "x", "y", [])])
    )
    assert "<b>" not in text and "<u>" not in text and "a &amp; b" in text and "nothing to draw" in text


def test_a_table_in_a_terminal():
    assert (
        text_table(Table("t", ["", "long"], [["row", "1"], ["r", "22"]]))
        == "t\n       long\n  row     1\n  r      22"
    )


# --- making runs --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["sync_grpo"], "one alone can't be compared: name two recipes, or two runs"),
        (["sync_grpo", "sync_grpo"], "name each recipe once"),
        (["sync_grpo", "asink"], "there is no recipe 'asink'"),
        (["old", "old", "--set", "steps=3"], "--set and --budget are for recipes: these runs have ended"),
        (["sync_grpo", "old"], "compare recipes or runs, not one with the other"),
        (["sync_grpo", "async_grpo", "--seeds", "0"], "--seeds 0: at least one is needed"),
        (["sync_grpo", "async_grpo", "--set", "stepz=3"], "sync_grpo has no setting 'stepz'; did you mean 'steps'?"),
        (["sync_grpo", "async_grpo", "--set", "max_staleness=x"], "async_grpo: max_staleness='x' is not a whole"),
        (["sync_grpo", "async_grpo", "--set", "rollout_delay=2"], "rollout_delay='2' is no delay: write none,"),
        (["sync_grpo", "async_grpo", "--budget", "steps"], "--budget steps: write it as steps=40"),
        (["sync_grpo", "async_grpo", "--budget", "steps=0"], "--budget steps=0: write it as steps=40"),
        (["sync_grpo", "async_grpo", "--budget", "steps=1.5"], "sync_grpo: steps='1.5' is not a whole number"),
        (["sync_grpo", "async_grpo", "--budget", "tokens=3"], "a budget of 'tokens': give steps=…, groups=… or"),
        (["sync_grpo", "bare.py"], "recipe bare.py has no `outcome.compare` that says what to compare"),
    ],
)  # fmt: skip
def test_a_mistake_is_one_sentence_and_starts_nothing(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    arguments: list[str], text: str,
):  # fmt: skip
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bare.py").write_text("from rolecall.recipes.sync_grpo import Config, build\n")
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / past_run(tmp_path / "runs", "sync_grpo")).rename(tmp_path / "runs" / "old")
    assert refused(capsys, "compare", *arguments).startswith(text)
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["old"]


COUNTER = """
import time
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

from rolecall import Actor, Finished, Graph, Unrecoverable
from rolecall.runtime.charts import Report

class Counter(Actor):
    def __init__(self, config):
        self.config = config

    def on_start(self):
        (self.context.folder / "began").touch()

    def step(self):
        if self.config.seed == self.config.broken:
            raise Unrecoverable("this seed is broken")
        if self.config.endless:
            return 0.1
        raise Finished

@dataclass(frozen=True)
class Config:
    seed: int = 0
    broken: int = -1
    endless: bool = False

def build(config):
    graph = Graph("counter")
    graph.until(graph.add("counter", Counter, config))
    return graph

def report(sides, target, price):
    return Report({"whole": {f"{s.label}, {s.condition}": [r.seed for r in s.whole] for s in sides}})
"""
OUTCOME = """
from types import SimpleNamespace
from counter import Config, build, report
from shared import compare

outcome = SimpleNamespace(compare=compare, progress=lambda reports: "", report=lambda run: {})
"""
SHARED = """
from types import SimpleNamespace
from counter import report

compare = SimpleNamespace(
    DEFAULTS={"nowhere": "1"}, CONDITIONS={"calm": {"broken": "-1"}, "odd": {"broken": "-2"}}, MUST_MATCH=("endless",),
    budget=lambda kind, amount, settings: {}, complete=lambda ran: "", report=report,
)
"""


@pytest.fixture
def counters(tmp_path: Path) -> Path:
    """A folder with two recipes that learn nothing: what makes runs knows no better."""
    (tmp_path / "counter.py").write_text(COUNTER)
    (tmp_path / "shared.py").write_text(SHARED)
    for name in ("one", "two"):
        (tmp_path / f"{name}.py").write_text(OUTCOME)
    return tmp_path


def made(folder: Path) -> dict[str, Any]:
    (path,) = folder.glob("runs/compare-*/compare.json")
    return json.loads(path.read_text())


@pytest.mark.slow
def test_recipes_take_turns_within_a_seed(counters: Path):
    code, out, err = Command(["compare", "one.py", "two.py", "--seeds", "2", "--json"], counters).finish()
    assert code == 0, err
    values = json.loads(out)
    assert values == made(counters)
    order = [(run["seed"], run["condition"], run["recipe"]) for run in values["runs"]]
    assert order == [(s, c, r) for s in (0, 1) for c in ("calm", "odd") for r in ("one", "two")]
    assert values["whole"] == {f"{r}, {c}": [0, 1] for c in ("calm", "odd") for r in ("one", "two")}
    assert next(line for line in err.splitlines() if line.startswith("[")) == "[1/8] one, calm, seed 0"
    assert (counters / "runs").is_dir() and len(list(counters.glob("runs/compare-*/*/run.json"))) == 8


@pytest.mark.slow
def test_it_survives_a_run_that_fails(counters: Path):
    command = ["compare", "one.py", "two.py", "--seeds", "2", "--set", "broken=1"]
    code, out, err = Command(command, counters).finish()
    assert code == 1, err
    values = made(counters)
    assert values["whole"] == {"one, as given": [0], "two, as given": [0]}
    assert values["failures"].keys() == {"one, as given, seed 1", "two, as given, seed 1"}
    assert "this seed is broken" in values["failures"]["one, as given, seed 1"]
    assert "it is in none of the numbers" in out


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_reports_what_there_is(counters: Path, number: signal.Signals):
    command = Command(["compare", "one.py", "two.py", "--set", "endless=true"], counters)
    until(lambda: list(counters.glob("runs/compare-*/one-*/began")))
    command.process.send_signal(number)
    code, out, _ = command.finish(30)
    assert code == 130
    assert "stopped before all runs were made" in out
    assert made(counters)["runs"] == []
    assert command.processes() == []


@pytest.mark.slow
def test_a_budget_of_minutes_ends_each_run(counters: Path):
    command = ["compare", "one.py", "two.py", "--seeds", "1", "--budget", "minutes=0.05"]
    code, _, err = Command([*command, "--set", "endless=true", "--set", "broken=-2"], counters).finish()
    assert code == 0, err
    assert made(counters)["whole"] == {"one, as given": [0], "two, as given": [0]}


@pytest.mark.slow
def test_nobody_is_left_when_it_is_killed(counters: Path):
    command = Command(["compare", "one.py", "two.py", "--set", "endless=true"], counters)
    until(lambda: list(counters.glob("runs/compare-*/one-*/began")))
    command.process.kill()
    command.process.wait()
    until(lambda: command.processes() == [], timeout_s=20)
