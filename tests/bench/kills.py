"""Whole runs of the main job, killed (SIGKILL) at a random moment: the trainer, some role, everybody at once.

    python -m tests.bench.kills --runs 20 --seed 0 --json

Runs of both recipes take turns. When everybody was killed the run is resumed, as after the loss of its machine. Prints
how many ended well and learnt, and over all of them how many groups were trained twice or never, how many processes
were left, and how many synchronous ones ended with the very weights of one that ran undisturbed, in a single process
(`LocalRun`). The ratio is the wall clock of runs of which a part was killed to that of undisturbed ones.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from rolecall.recipes import sync_grpo
from rolecall.runtime.errors import Unrecoverable
from rolecall.runtime.runs import RunFolder
from rolecall.runtime.store import Store
from rolecall.runtime.testing import LocalRun

from ..commands import Command, lines, until

STEPS, BATCH = 40, 16
RECIPES = ("sync_grpo", "async_grpo")
VICTIMS = ("trainer", "everybody", "a role")
LEARNT = 0.85


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true", help="nothing but the result on stdout")
    options = parser.parse_args()
    rng = random.Random(options.seed)
    undisturbed = {recipe: _run(recipe, "", rng) for recipe in RECIPES}
    expected = _digest_in_one_process()
    killed: list[dict[str, Any]] = []
    for number in range(options.runs):
        victim = VICTIMS[number // len(RECIPES) % len(VICTIMS)]
        killed.append(_run(RECIPES[number % len(RECIPES)], victim, rng))
        print(json.dumps(killed[-1]), file=sys.stderr if options.json else sys.stdout, flush=True)
    ratios = [
        run["wall_s"] / undisturbed[run["recipe"]]["wall_s"]
        for run in killed
        if not run["resumed"] and run["ok"]
    ]
    sync = [run for run in killed if run["recipe"] == "sync_grpo"]
    result = {
        "runs": len(killed),
        "kills": {victim: sum(run["victim"] == victim for run in killed) for victim in VICTIMS},
        "ended_well": sum(run["ok"] for run in killed),
        "accuracy_min": min(run["accuracy"] for run in killed),
        "trained_twice": sum(run["twice"] for run in killed),
        "never_trained": sum(run["never"] for run in killed),
        "processes_left": sum(run["left"] for run in killed),
        "sync_runs": len(sync),
        "sync_bit_identical": sum(run["digest"] == expected for run in sync),
        "wall_x": round(statistics.median(ratios), 2) if ratios else None,
    }
    print(json.dumps(result))


def _digest_in_one_process() -> str:
    import torch

    torch.set_num_threads(1)  # as the processes of a run have
    with tempfile.TemporaryDirectory() as folder:
        graph = sync_grpo.build(sync_grpo.Config(steps=STEPS, batch=BATCH))
        LocalRun(graph, folder=Path(folder), run=Path(folder).name).run()
        return _digest(Path(folder))


def _digest(folder: Path) -> str:
    """Of the last version in a run's folder."""
    head = Store("file://").open(folder.name, folder).head()
    return head.digest if head is not None else ""


def _run(recipe: str, victim: str, rng: random.Random) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as place:
        command = Command(["run", recipe, "--json"], Path(place))
        folder = command.run_folder()
        said = _kill(command, folder, victim, rng) if victim else "nobody"
        code, out, err = command.finish(300)
        if resumed := victim == "everybody" and code != 0:
            until(lambda: not command.processes())
            command = Command(["run", recipe, "--json", "--resume", folder.name], Path(place))
            code, out, err = command.finish(300)
        if code:
            print(err[-2000:], file=sys.stderr)
        trained = [id for line in lines(folder / "metrics.jsonl") for id in line["groups"]]
        found = json.loads(out) if code == 0 else {"accuracy_after": 0.0, "wall_s": float("nan")}
        return {
            "recipe": recipe,
            "victim": victim,
            "killed": said,
            "resumed": resumed,
            "ok": code == 0 and found["accuracy_after"] >= LEARNT,
            "accuracy": found["accuracy_after"],
            "wall_s": found["wall_s"],
            "twice": len(trained) - len(set(trained)),
            "never": STEPS * BATCH - len(set(trained)),
            "left": len(command.processes()),
            "digest": _digest(folder),
        }


def _kill(command: Command, run: Path, victim: str, rng: random.Random) -> str:
    """At a moment between two steps or within one, wherever in the run it is; names whom and when."""
    steps, fraction = rng.randrange(STEPS), rng.random()
    until(lambda: len(lines(run / "metrics.jsonl")) >= steps or command.process.poll() is not None)
    _pause(fraction)
    if victim == "everybody":
        pids = [command.process.pid, *command.processes()]
        names = f"all {len(pids)} processes"
    else:
        try:
            alive = [actor for actor in RunFolder(run).status().actors if actor.pid]
        except Unrecoverable:
            return "nobody: the run had ended"
        chosen = rng.choice([actor for actor in alive if victim in ("a role", actor.name)] or alive)
        pids, names = [chosen.pid], chosen.name
    for pid in pids:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue  # with its supervisor
    return f"{names}, {fraction:.2f} s after step {steps}"


def _pause(seconds: float) -> None:
    """Somewhere in a step: any moment is as good as another."""
    signal.sigtimedwait([], seconds)


if __name__ == "__main__":
    main()
