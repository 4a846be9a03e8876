"""Whole runs of the main job, in each of which one role is killed (SIGKILL) at a random moment.

    python -m tests.bench.kills --runs 10 --seed 0

Prints one JSON object: how many runs ended well and learnt, and over all of them how many groups were trained
twice or never, and how many processes were left. The ratio is the wall clock of these runs to that of undisturbed
ones in between.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from rolecall.runtime.errors import Unrecoverable
from rolecall.runtime.runs import RunFolder

from ..commands import Command, lines

GROUPS = 640
LATEST_KILL_S = 14.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    rng = random.Random(options.seed)
    disturbed, undisturbed = [], []
    for number in range(options.runs):
        disturbed.append(_run(number, rng))
        print(json.dumps(disturbed[-1]), flush=True)
        if number % 4 == 0:
            undisturbed.append(_run(number, None))
    wall = statistics.median(run["wall_s"] for run in undisturbed)
    print(
        json.dumps(
            {
                "runs": len(disturbed),
                "ended_well": sum(run["ok"] for run in disturbed),
                "accuracy_min": min(run["accuracy"] for run in disturbed),
                "trained_twice": sum(run["twice"] for run in disturbed),
                "never_trained": sum(run["never"] for run in disturbed),
                "processes_left": sum(run["left"] for run in disturbed),
                "wall_x": round(statistics.median(run["wall_s"] for run in disturbed) / wall, 2),
            }
        )
    )


def _run(seed: int, rng: random.Random | None) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        command = Command(["run", "async_grpo", "--json", "--set", f"seed={seed}"], Path(folder))
        killed = _kill_one(command.run_folder(), rng) if rng else ""
        code, out, _ = command.finish(300)
        trained = [id for line in lines(command.run_folder() / "metrics.jsonl") for id in line["groups"]]
        result = json.loads(out) if code == 0 else {"accuracy_after": 0.0, "wall_s": float("nan")}
        return {
            "seed": seed,
            "killed": killed,
            "ok": code == 0 and result["accuracy_after"] >= 0.85,
            "accuracy": result["accuracy_after"],
            "wall_s": result["wall_s"],
            "twice": len(trained) - len(set(trained)),
            "never": GROUPS - len(set(trained)),
            "left": len(command.processes()),
        }


def _kill_one(run: Path, rng: random.Random) -> str:
    """Wait a random while, then kill a random live role; names it and when."""
    after_s = rng.uniform(0.5, LATEST_KILL_S)
    time.sleep(after_s)
    while True:
        try:
            alive = [actor for actor in RunFolder(run).status().actors if actor.pid]
        except Unrecoverable:
            return f"nobody: the run had ended after {after_s:.1f} s"
        if alive:
            actor = rng.choice(alive)
            os.kill(actor.pid, signal.SIGKILL)
            return f"{actor.name} after {after_s:.1f} s"


if __name__ == "__main__":
    main()
