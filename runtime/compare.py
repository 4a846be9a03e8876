"""`rolecall compare`: recipes run one after the other here with the same seeds, or runs that there are; one report.

runs/compare-20260131-120000-7f3a/
    compare.json, compare.html    written anew after every run: whatever happens, they tell what there is
    sync_grpo-…/, async_grpo-…/   the runs, each as `rolecall run` leaves it
"""

from __future__ import annotations

import argparse
import ctypes
import dataclasses
import os
import secrets
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType, ModuleType

from msgspec import json
from msgspec.structs import replace

from .charts import Report, page, text_table
from .console import say
from .errors import Unrecoverable
from .files import write_whole
from .recipe import configure, from_saved, load_recipe, settings_of
from .runs import RunFolder, find_run
from .sides import Comparer, Price, Ran, comparer_of, settings_that_differ, sides_of

__all__ = ["add_compare_flags", "compare"]

GIVEN = (
    "as given"  # the condition of runs that were not made for this comparison, or of a user's own settings
)
_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None, use_errno=True)


def add_compare_flags(compare: argparse.ArgumentParser) -> None:
    compare.add_argument(
        "names", nargs="+", metavar="RECIPE|RUN", help="recipes to run, or runs that have ended"
    )
    compare.add_argument(
        "--seeds", type=int, default=3, help="runs of each recipe, from seed 0 up (default: 3)"
    )
    compare.add_argument(
        "--budget", metavar="WHAT=AMOUNT", help="of each run: steps=40, groups=640 or minutes=5"
    )
    compare.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="FIELD=VALUE",
        help="change a setting of all that have it",
    )
    compare.add_argument("--target", type=float, help="held-out accuracy to compare wall clocks at")
    compare.add_argument("--price", type=float, help="of a GPU in $ an hour; of the machine, if it has none")
    compare.add_argument("--runs", type=Path, default=Path("runs"), help="where runs lie (default: ./runs)")
    compare.add_argument("--json", action="store_true", help="print compare.json on stdout")


def compare(options: argparse.Namespace) -> int:
    """0: all runs are whole; 1: one has failed; 130: stopped by request. The report is there in each case."""
    found = [_ended_run(options.runs, name) for name in options.names]
    given = [run for run in found if run is not None]
    if 0 < len(given) < len(found):
        raise Unrecoverable("compare recipes or runs, not one with the other", exit_code=2)
    if len(found) < 2:
        raise Unrecoverable("one alone can't be compared: name two recipes, or two runs", exit_code=2)
    if given and (options.set or options.budget):
        raise Unrecoverable("--set and --budget are for recipes: these runs have ended", exit_code=2)
    if given:
        comparer, runs = _given(given)
        report = _Comparison(options, comparer, _new_folder(options.runs))
        report.runs = runs
        report.write()
    else:
        comparer, planned = _plan(options)
        report = _Comparison(options, comparer, _new_folder(options.runs))
        _run_all(report, planned, _limit_s(options.budget))
    report.show()
    if report.stopped:
        return 130
    return 1 if any(ran.failure for ran in report.runs) else 0


class _Comparison:
    """What there is so far, and the report of it."""

    def __init__(self, options: argparse.Namespace, comparer: Comparer, folder: Path) -> None:
        self.options, self.comparer, self.folder = options, comparer, folder
        self.runs: list[Ran] = []
        self.stopped = False
        self.gpus = len(list(Path("/dev").glob("nvidia[0-9]*")))
        self.load = os.getloadavg()[0]

    @property
    def price(self) -> Price:
        usd = self.options.price
        return Price("machine-seconds", 1.0) if usd is None else Price("$", usd * max(1, self.gpus) / 3600)

    def write(self) -> Report:
        sides = sides_of(self.runs)
        report = self.comparer.report(sides, target=self.options.target, price=self.price)
        tables, flags = settings_that_differ(sides, self.comparer.MUST_MATCH)
        failures = {
            f"{ran.recipe}, {ran.condition}, seed {ran.seed}": ran.failure for ran in self.runs if ran.failure
        }
        flags += [f"{which}: {failure}; it is in none of the numbers" for which, failure in failures.items()]
        flags += ["stopped before all runs were made"] if self.stopped else []
        cores = os.cpu_count() or 1
        if any(ran.condition != GIVEN for ran in self.runs) and self.load > cores / 2:
            flags.append(f"the machine was busy before it began (load {self.load:.1f} on {cores} cores)")
        values = {
            "recipes": list(dict.fromkeys(side.label for side in sides)),
            **report.values,
            "cost_unit": self.price.unit,
            "cost_per_s": self.price.per_s,
            "machine": {"cores": cores, "gpus": self.gpus, "load_before": round(self.load, 2)},
            "settings_that_differ": {
                t.title.partition(", ")[2]: {row[0]: row[1:] for row in t.rows} for t in tables
            },
            "flags": flags,
            "failures": failures,
            "runs": [dataclasses.asdict(ran) | {"path": str(ran.path or "")} for ran in self.runs],
        }
        report = replace(
            report, values=values, tables=[*report.tables, *tables], flags=[*report.flags, *flags]
        )
        write_whole(self.folder / "compare.json", json.format(json.encode(values), indent=2))
        title = " and ".join(dict.fromkeys(side.label for side in sides)) or "nothing"
        write_whole(self.folder / "compare.html", page(f"{title} compared", report).encode())
        return report

    def show(self) -> None:
        report = self.write()
        if self.options.json:
            say(json.encode(report.values).decode(), sys.stdout)
            return
        told = [textwrap.fill(text, 100) for text in [*report.flags, *report.notes]]
        texts = [*map(text_table, report.tables), *told]
        say("\n\n".join([*texts, f"the report: {self.folder / 'compare.html'}"]), sys.stdout)


# --- runs that there are -----------------------------------------------------------------------------------


def _ended_run(root: Path, name: str) -> RunFolder | None:
    """None: no run is called so, and it is to be a recipe."""
    if not any((path / "run.json").exists() for path in (Path(name), root / name)):
        return None
    run = find_run(root, name)
    if run.live:
        raise Unrecoverable(f"run {run.path.name} is live: compare it when it has ended", exit_code=2)
    return run


def _given(folders: Sequence[RunFolder]) -> tuple[Comparer, list[Ran]]:
    runs: list[Ran] = []
    comparers: list[Comparer] = []
    for folder in folders:
        name = folder.info.recipe
        recipe = load_recipe(name)
        comparers.append(comparer_of(recipe, name))
        settings = settings_of(from_saved(recipe.Config, folder.info.config))
        ran = Ran(_short(name), GIVEN, settings.get("seed", 0), settings, folder.path)
        runs.append(dataclasses.replace(ran, failure=comparers[-1].complete(ran)))
    return _one_of(comparers), runs


def _one_of(comparers: Sequence[Comparer]) -> Comparer:
    if any(comparer is not comparers[0] for comparer in comparers):
        raise Unrecoverable("these recipes measure different things, so they can't be compared", exit_code=2)
    return comparers[0]


def _short(recipe: str) -> str:
    return Path(recipe).stem if recipe.endswith(".py") else recipe


# --- runs to be made ---------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _Planned:
    """given: its recipe, as the user named it. texts: its settings, as `--set` has them."""

    given: str
    ran: Ran
    texts: list[str]


def _plan(options: argparse.Namespace) -> tuple[Comparer, list[_Planned]]:
    """Recipes take turns within a seed, so that what changes on a machine meanwhile meets them all."""
    if len({_short(name) for name in options.names}) < len(options.names):
        raise Unrecoverable("name each recipe once", exit_code=2)
    if options.seeds < 1:
        raise Unrecoverable(f"--seeds {options.seeds}: at least one is needed", exit_code=2)
    recipes = {name: load_recipe(name) for name in options.names}
    comparer = _one_of([comparer_of(recipe, name) for name, recipe in recipes.items()])
    _check_settings(options, recipes)
    conditions = comparer.CONDITIONS
    set_by_user = {setting.partition("=")[0] for setting in options.set}
    if set.intersection(set_by_user, *conditions.values()):
        conditions = {GIVEN: {}}  # what sets them apart is the user's own now
    planned = [
        _planned(options, comparer, name, recipe, condition, own, seed)
        for seed in range(options.seeds)
        for condition, own in conditions.items()
        for name, recipe in recipes.items()
    ]
    return comparer, planned


def _check_settings(options: argparse.Namespace, recipes: dict[str, ModuleType]) -> None:
    """Raises for a setting that no recipe has; `_planned` raises for a value that is none."""
    for setting in options.set:
        key = setting.partition("=")[0]
        if not any(key in settings_of(configure(recipe, name, [])) for name, recipe in recipes.items()):
            name, recipe = next(iter(recipes.items()))
            configure(recipe, name, [setting])


def _planned(
    options: argparse.Namespace, comparer: Comparer, name: str, recipe: ModuleType, condition: str,
    own: dict[str, str], seed: int,
) -> _Planned:  # fmt: skip
    has = settings_of(configure(recipe, name, []))

    def those_it_has(settings: dict[str, str]) -> list[str]:
        return [f"{key}={value}" for key, value in settings.items() if key in has]

    by_user = [setting for setting in options.set if setting.partition("=")[0] in has]
    texts = [*those_it_has(comparer.DEFAULTS | own), *by_user, *those_it_has({"seed": str(seed)})]
    if options.budget:
        kind, _, amount = options.budget.partition("=")
        settings = settings_of(configure(recipe, name, texts))
        texts += those_it_has(comparer.budget(kind, _amount(options.budget, amount), settings))
    config = configure(recipe, name, texts)
    try:
        recipe.build(config)
    except ValueError as error:
        raise Unrecoverable(f"{name} can't be built from these settings: {error}", exit_code=2) from error
    return _Planned(name, Ran(_short(name), condition, seed, settings_of(config)), texts)


def _amount(budget: str, text: str) -> float:
    try:
        amount = float(text)
    except ValueError:
        amount = 0.0
    if not 0 < amount < float("inf"):
        raise Unrecoverable(f"--budget {budget}: write it as steps=40, groups=640 or minutes=5", exit_code=2)
    return amount


def _limit_s(budget: str | None) -> float | None:
    kind, _, amount = (budget or "").partition("=")
    return 60 * float(amount) if kind == "minutes" else None


def _new_folder(root: Path) -> Path:
    folder = root.resolve() / f"compare-{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}"
    try:
        folder.mkdir(parents=True)
    except OSError as error:
        raise Unrecoverable(
            f"can't make the comparison's folder {folder}: {error.strerror}; choose another place with --runs",
            exit_code=2,
        ) from error
    return folder


def _run_all(report: _Comparison, planned: Sequence[_Planned], limit_s: float | None) -> None:
    with _signals_interrupt():
        try:
            for number, plan in enumerate(planned, 1):
                ran = plan.ran
                what = f"[{number}/{len(planned)}] {ran.recipe}, {ran.condition}, seed {ran.seed}"
                say(what, sys.stderr)
                report.runs.append(_run(report.comparer, plan, report.folder, limit_s))
                report.write()
        except KeyboardInterrupt:
            report.stopped = True


@contextmanager
def _signals_interrupt() -> Iterator[None]:
    """Those that ask for an end do so as Ctrl-C does."""

    def interrupt(signum: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    numbers = (signal.SIGTERM, signal.SIGHUP)
    heeded = [number for number in numbers if signal.getsignal(number) is not signal.SIG_IGN]
    before = {number: signal.signal(number, interrupt) for number in heeded}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _run(comparer: Comparer, plan: _Planned, folder: Path, limit_s: float | None) -> Ran:
    """As `rolecall run` does it, in a process of its own: each begins as cold as the others."""
    before = set(folder.iterdir())
    settings = [part for text in plan.texts for part in ("--set", text)]
    program = [sys.executable, "-P", "-m", "rolecall.runtime.cli", "run", plan.given]
    child = subprocess.Popen(
        [*program, "--json", "--runs", str(folder), *settings],
        stdout=subprocess.DEVNULL,
        process_group=0,  # a terminal's Ctrl-C comes here alone, and is handed on once
        preexec_fn=_die_with_parent,
    )
    code, in_time = _wait(child, limit_s)
    left = [path for path in folder.iterdir() if path not in before and (path / "run.json").exists()]
    ran = dataclasses.replace(plan.ran, path=left[0] if left else None)
    if not left:
        return dataclasses.replace(ran, failure=f"left nothing (exit code {code})")
    if code and in_time:
        return dataclasses.replace(ran, failure=ran.folder.info.story or f"exit code {code}")
    return dataclasses.replace(ran, failure=comparer.complete(ran))


def _die_with_parent() -> None:
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def _wait(child: subprocess.Popen[bytes], limit_s: float | None) -> tuple[int, bool]:
    """The exit code, and whether it ended by itself. Ctrl-C ends it in order, and goes on when it has ended."""
    try:
        return child.wait(limit_s), True
    except subprocess.TimeoutExpired:
        child.send_signal(signal.SIGINT)
        return child.wait(), False
    except KeyboardInterrupt:
        child.send_signal(signal.SIGINT)
        try:
            child.wait()
        except KeyboardInterrupt:
            child.send_signal(signal.SIGINT)  # twice: at once
            child.wait()
        raise
