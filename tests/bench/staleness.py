"""What staleness does to learning: held-out accuracy by max_staleness, without and with a correction, over seeds.

    python -m tests.bench.staleness --seeds 3 --json [--real]

Without `--real` nothing but the order of data is simulated: a run of async_grpo in one process, in which every group
is as stale as it may be, for always as much is under way as may be. With it, runs as users make them, on this machine;
there staleness is what the trainer's pace makes it, and only bounded. Prints for each the accuracies of the seeds and
the mean staleness, and the ratio of each mean accuracy to that of sync_grpo in the same place. With max_staleness=0 and
no correction the weights of both are compared bit for bit.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import statistics
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rolecall.actors.buffer import Buffer
from rolecall.actors.prompts import PromptSource
from rolecall.runtime.recipe import configure, load_recipe
from rolecall.runtime.store import Store
from rolecall.runtime.testing import LocalRun

from ..commands import Command, lines

STALENESS = (0, 1, 2, 4, 8, 16)
CORRECTIONS = ("none", "tis")
EVERYTHING = 10**6


class AsStaleAsMayBe(Buffer):
    """Whatever waits here, more is asked for."""

    def _tell(self, step: int, spare: int) -> None:
        self.prompts.tell(PromptSource.spare, -EVERYTHING)


@dataclass(frozen=True)
class Case:
    """A run. correction: empty for the synchronous recipe."""

    seed: int
    max_staleness: int = 0
    correction: str = ""

    @property
    def recipe(self) -> str:
        return "async_grpo" if self.correction else "sync_grpo"

    @property
    def settings(self) -> list[str]:
        settings = [f"seed={self.seed}"]
        if self.correction:
            settings += [f"max_staleness={self.max_staleness}", f"loss.correction={self.correction}"]
        return settings


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--real", action="store_true", help="real runs, one after the other")
    parser.add_argument("--json", action="store_true", help="JSON without line breaks")
    options = parser.parse_args()
    seeds = range(options.seeds)
    cases = [Case(seed) for seed in seeds]
    cases += [Case(seed, bound, how) for how in CORRECTIONS for bound in STALENESS for seed in seeds]
    extra = [f"steps={options.steps}", f"eval_every={options.steps}"]
    if options.real:
        found = [real_run(case, extra) for case in cases]
    else:
        context = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(mp_context=context) as pool:
            found = list(pool.map(local_run, cases, [extra] * len(cases)))
    result = {"steps": options.steps, "seeds": options.seeds, "real": options.real, **summary(cases, found)}
    print(json.dumps(result, indent=None if options.json else 1))


def summary(cases: Sequence[Case], found: Sequence[dict[str, Any]]) -> dict[str, Any]:
    rows: dict[str, dict[str, Any]] = {}
    for case, run in zip(cases, found, strict=True):
        name = f"{case.correction}, at most {case.max_staleness}" if case.correction else "sync"
        row = rows.setdefault(name, {"accuracy": [], "staleness_mean": [], "digests": []})
        row["accuracy"].append(run["accuracy"])
        row["staleness_mean"].append(run["staleness"])
        row["digests"].append(run["digest"])
    sync = rows["sync"]
    for row in rows.values():
        row["of_sync_x"] = round(statistics.fmean(row["accuracy"]) / statistics.fmean(sync["accuracy"]), 4)
    equal = rows["none, at most 0"]["digests"] == sync["digests"]
    for row in rows.values():
        row["staleness_mean"] = round(statistics.fmean(row["staleness_mean"]), 2)
        del row["digests"]
    return {"zero_equals_sync": equal, "rows": rows}


def local_run(case: Case, extra: Sequence[str]) -> dict[str, Any]:
    """In this process, all of it."""
    import torch

    torch.set_num_threads(1)
    module = load_recipe(case.recipe)
    graph = module.build(configure(module, case.recipe, [*case.settings, *extra]))
    if case.correction:
        graph.recast("buffer", AsStaleAsMayBe)
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        LocalRun(graph, folder=folder, run=folder.name).run()
        return _found(folder)


def real_run(case: Case, extra: Sequence[str]) -> dict[str, Any]:
    """As a user makes it."""
    flags = [word for setting in [*case.settings, *extra] for word in ("--set", setting)]
    with tempfile.TemporaryDirectory() as place:
        command = Command(["run", case.recipe, "--json", *flags], Path(place))
        code, _, err = command.finish(600)
        if code:
            raise SystemExit(f"{case} ended with code {code}: {err}")
        found = _found(command.run_folder())
        print(case, found, file=sys.stderr, flush=True)
        return found


def _found(folder: Path) -> dict[str, Any]:
    head = Store("file://").open(folder.name, folder).head()
    assert head is not None
    metrics = lines(folder / "metrics.jsonl")
    return {
        "accuracy": lines(folder / "eval.jsonl")[-1]["accuracy"],
        "staleness": statistics.fmean(line["staleness/mean"] for line in metrics),
        "digest": head.digest,
    }


if __name__ == "__main__":
    main()
