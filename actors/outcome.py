"""What a GRPO run says of itself: the progress line, the result, the curves, and samples to read."""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from ..runtime.errors import Unrecoverable
from ..runtime.runs import RunFolder
from ..runtime.store import Store
from . import compare
from .measures import bottleneck, rollout_wait_share
from .types import Prompt

if TYPE_CHECKING:
    from .episode import Judge

__all__ = ["compare", "describe", "progress", "report", "sample", "side_by_side"]

SAMPLES = 4


def progress(reports: Mapping[str, Mapping[str, Any]]) -> str:
    """One line from each actor's newest report; empty before the first optimizer step."""
    trainer, evaluator = reports.get("trainer"), reports.get("evaluator")
    parts = []
    if trainer:
        parts.append(f"step {trainer['step']}/{trainer['of']}")
        parts.append(f"reward {trainer['reward']:.2f}")
    if evaluator:
        parts.append(f"held-out accuracy {evaluator['accuracy']:.2f} (step {evaluator['step']})")
    if trainer:
        step_s = trainer["perf/step_s"]
        parts.append(f"staleness {trainer['staleness/mean']:.1f}")
        parts.append(f"{sum(trainer['workers'].values()) / step_s:.1f} groups/s")
        parts.append(f"trainer waits {trainer['perf/rollout_wait_s'] / step_s:.0%}")
        workers = [values for name, values in reports.items() if name.startswith("rollout")]
        waits = [_share_waited(values) for values in workers if "sample_s" in values]
        if waits:
            parts.append(f"rollout waits {sum(waits) / len(waits):.0%}")
    return " · ".join(parts)


def _share_waited(worker: Mapping[str, float]) -> float:
    waited = worker["lease_wait_s"] + worker["put_wait_s"]
    return waited / max(waited + worker["sample_s"], 1e-9)


def report(run: RunFolder, *, now: Callable[[], float] = time.time) -> dict[str, Any]:
    """The result of a finished run, with stable names; draws curves.png and fetches the adapter.

    wall_s and first_step_s: seconds from the start of the command, to this result and to the first optimizer
    step. now: seconds since 1970. trainer_wait_share: the share of its time the
    trainer waited for groups, the first step apart, which waits for everybody to start. bottleneck: see `bottleneck`.
    """
    from .curves import draw

    info = run.info
    steps, evaluations = run.lines("metrics.jsonl"), run.lines("eval.jsonl")
    adapter = run.path / "adapter"
    versions = Store(info.config["store"]).open(info.id, run.path)
    head = versions.head()
    assert head is not None, "a run that finished has published"
    shutil.copytree(versions.fetch(head.version), adapter, dirs_exist_ok=True)
    later = steps[1:]
    events = run.lines("events.jsonl")
    workers_wait = rollout_wait_share([event["values"] for event in events if event["event"] == "report"])
    waited = sum(step["perf/rollout_wait_s"] for step in later)
    worked = sum(step["perf/step_s"] for step in later)
    draw(run.path / "curves.png", steps, evaluations, events, started=info.started)
    wait_share = waited / worked if worked else 0.0
    return {
        "steps": len(steps),
        "accuracy_before": evaluations[0]["accuracy"],
        "accuracy_after": evaluations[-1]["accuracy"],
        "wall_s": round(now() - info.started, 2),
        "first_step_s": round(steps[0]["time"] - info.started, 2),
        "adapter": str(adapter),
        "groups_trained": sum(len(step["groups"]) for step in steps),
        "groups_dropped": steps[-1]["dropped"],
        "trainer_wait_share": round(wait_share, 4),
        "bottleneck": bottleneck(wait_share, workers_wait or 0.0),
    }


def describe(run: RunFolder, result: Mapping[str, Any]) -> str:
    """The result for people, and what to do next."""
    prompt = "Ann has 3 pens, buys 4 and loses 2. How many pens now?"
    dropped = result["groups_dropped"]
    return "\n".join(
        [
            f"held-out accuracy {result['accuracy_before']:.2f} → {result['accuracy_after']:.2f} in "
            f"{result['steps']} steps, {result['wall_s']:.0f} s (first step after {result['first_step_s']:.0f} s), "
            f"{result['restarts']} restarts",
            f"groups trained: {result['groups_trained']}; dropped: "
            + (", ".join(f"{count} {reason}" for reason, count in dropped.items()) or "none")
            + f"; the trainer waited {result['trainer_wait_share']:.0%} of its time: {result['bottleneck']}",
            f"  adapter  {result['adapter']}",
            f"  metrics  {run.path / 'metrics.jsonl'}",
            f"  logs     {run.path / 'logs'}",
            f"  curves   {run.path / 'curves.png'}",
            f'try it: rolecall sample {run.path} "{prompt}"',
        ]
    )


def sample(run: RunFolder, prompt: str) -> str:
    """Completions of the base model and of the trained one, side by side, at the run's temperature.

    Raises Unrecoverable (exit code 2) if the run has not come to its end.
    """
    if not (run.path / "adapter").is_dir():
        raise Unrecoverable(
            f"run {run.path.name} has no adapter to sample from: only one that has finished leaves one",
            exit_code=2,
        )
    from .engines import Sampling
    from .engines.transformers import load_engine
    from .episode import Episode, play

    config = run.info.config
    engine, judge = load_engine(config["model"]), _judge(config)
    stop = (config["stop"],) if config.get("stop") else ()
    sampling = Sampling(temperature=config["temperature"], max_tokens=config["max_tokens"], stop=stop)
    text = prompt if prompt.endswith("\n") or config["model"] != "tiny" else prompt + "\n"
    asked = Prompt(id=0, text=text, answer="")
    prompt_ids = engine.encode(text + judge.open([asked])[0])
    columns = []
    with tempfile.TemporaryDirectory() as folder:
        for version, adapter in enumerate([_untrained(config, Path(folder)), run.path / "adapter"]):
            engine.load(version, "", adapter)
            episodes = [Episode(asked, prompt_ids, seed, sampling) for seed in range(SAMPLES)]
            play(engine, judge, episodes)
            columns.append([episode.text for episode in episodes])
    return side_by_side(prompt.strip(), columns)


def _judge(config: Mapping[str, Any]) -> Judge:
    """The run's environment, if it has one: what it gives for an answer nobody knows is not looked at."""
    from .environment import EnvironmentHost
    from .reward import Reward

    environment = config.get("environment")
    judge = EnvironmentHost(environment=environment) if environment else Reward(fn=lambda prompt, text: 0.0)
    judge.on_start()
    return judge


def side_by_side(title: str, columns: Sequence[Sequence[str]]) -> str:
    """A table of the base model's and the trained one's completions, below its title."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    # As Text: to rich, a "[/INST]" in a plain string would be markup.
    table = Table("base", "trained", show_lines=True)
    for row in zip(*columns, strict=True):
        table.add_row(*map(Text, row))
    console = Console(width=100)
    with console.capture() as capture:
        console.print(Text(title), table, sep="\n")
    return capture.get()


def _untrained(config: Mapping[str, Any], folder: Path) -> Path:
    """The adapter every run starts from, which changes nothing."""
    import torch

    from .lora import Lora
    from .model import adapter_files, add_lora, load_model

    base = load_model(config["model"], device="cpu", dtype=torch.float32)
    policy = add_lora(base, msgspec.convert(config["lora"], Lora), seed=config["seed"])
    for name, data in adapter_files(policy).items():
        (folder / name).write_bytes(data)
    return folder
