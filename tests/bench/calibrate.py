"""How well a simulation predicts real runs: measured on this machine, as JSON.

    python tests/bench/calibrate.py [--runs FOLDER] [--steps 25] [--tries 3]

Each recipe is run with two settings. The first is profiled, and with that profile both are simulated: "itself" says how
well a profile describes its own run, "other" how well it predicts one that nobody has made. Of `--tries` runs of each
setting the one with the median of groups a second is taken, since whatever else the machine does is in them, too.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from rolecall.actors.profile import Profile, measure
from rolecall.actors.simulation import simulate
from rolecall.runtime.recipe import configure, load_recipe
from rolecall.runtime.runs import RunFolder

CASES = {
    "async_grpo": (["batch=16"], ["batch=32", "max_tokens=48"]),
    "sync_grpo": (["batch=16"], ["batch=32", "max_tokens=48"]),
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=Path, help="keep the runs here (default: nowhere)")
    parser.add_argument("--steps", type=int, default=25)
    parser.add_argument("--tries", type=int, default=3)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        runs = options.runs or Path(folder)
        found = {recipe: _calibrate(recipe, runs, options.steps, options.tries) for recipe in CASES}
    print(json.dumps(found, indent=1))


def _calibrate(recipe: str, runs: Path, steps: int, tries: int) -> dict[str, Any]:
    first, second = CASES[recipe]
    made = [
        _median(
            [_run(recipe, [*settings, f"steps={steps}", f"eval_every={steps}"], runs) for _ in range(tries)]
        )
        for settings in (first, second)
    ]
    profile = measure(made[0])
    return {
        "itself": {"settings": first} | _compare(recipe, made[0], profile),
        "other": {"settings": second} | _compare(recipe, made[1], profile),
    }


def _run(recipe: str, settings: list[str], runs: Path) -> RunFolder:
    given = [word for setting in settings for word in ("--set", setting)]
    before = set(runs.glob("*"))
    command = [
        sys.executable,
        "-m",
        "rolecall.runtime.cli",
        "run",
        recipe,
        *given,
        "--runs",
        str(runs),
        "--json",
    ]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    (folder,) = set(runs.glob("*")) - before
    return RunFolder(folder)


def _median(made: list[RunFolder]) -> RunFolder:
    return sorted(made, key=lambda run: _measured(run)["groups_per_s"])[len(made) // 2]


def _measured(run: RunFolder) -> dict[str, float]:
    steps = run.lines("metrics.jsonl")
    later = steps[1:]
    took = sum(step["perf/step_s"] for step in later)
    return {
        "groups_per_s": sum(len(step["groups"]) for step in later) / took,
        "trainer_wait_share": sum(step["perf/rollout_wait_s"] for step in later) / took,
        "staleness_mean": sum(step["staleness/mean"] for step in steps) / len(steps),
    }


def _compare(recipe: str, run: RunFolder, profile: Profile) -> dict[str, Any]:
    module = load_recipe(recipe)
    graph = module.build(configure(module, recipe, [], run.info.config))
    predicted = simulate(graph, profile)
    measured = _measured(run)
    return {
        name: {
            "predicted": round(getattr(predicted, name), 3),
            "measured": round(value, 3),
            "ratio": round(getattr(predicted, name) / value, 3) if value else None,
        }
        for name, value in measured.items()
    }


if __name__ == "__main__":
    main()
