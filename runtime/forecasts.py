"""The flags of `rolecall profile`, `simulate` and `plan`. What they do belongs to the recipes' own `forecast`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

from .console import say
from .errors import Unrecoverable
from .recipe import configure, load_recipe
from .runs import find_run

__all__ = ["add_forecast_commands"]

Command = Callable[[str, Callable[[argparse.Namespace], int], str], argparse.ArgumentParser]


def add_forecast_commands(command: Command) -> None:
    """command: adds one of that name."""
    profile = command("profile", _profile, "measure what the parts of a finished run take")
    profile.add_argument("run", help="a run's folder, or its name in --runs")
    profile.add_argument("--runs", type=Path, default=Path("runs"), help="where runs lie (default: ./runs)")
    profile.add_argument("-o", "--output", type=Path, default=Path("profile.json"), metavar="FILE",
                         help="where to write it (default: profile.json)")  # fmt: skip
    simulate = command("simulate", _simulate, "what a recipe would do with so many workers, in virtual time")
    simulate.add_argument("recipe", help="a recipe's name, or the path of a .py file")
    simulate.add_argument(
        "--set", action="append", default=[], metavar="FIELD=VALUE", help="change a setting"
    )
    simulate.add_argument("--profile", type=Path, required=True, metavar="FILE", help="what its parts take")
    simulate.add_argument("--workers", type=int, help="rollout workers, in place of the recipe's")
    simulate.add_argument("--steps", type=int, help="optimizer steps, in place of the recipe's")
    simulate.add_argument("--preempt", type=float, default=0.0, metavar="PER_HOUR",
                          help="how often a worker's machine is lost, on average (default: 0)")  # fmt: skip
    simulate.add_argument("--away", type=float, default=60.0, metavar="SECONDS",
                          help="until another machine is there (default: 60)")  # fmt: skip
    simulate.add_argument("--seed", type=int, default=0, help="of all that is drawn (default: 0)")
    plan = command("plan", _plan, "what training costs, by recipe and by who rents out the machines")
    plan.add_argument(
        "--profile", type=Path, metavar="FILE", help="default: one of an 8B model, from publications"
    )
    plan.add_argument(
        "--prices", type=Path, metavar="FILE", help="default: a dated list that comes with the package"
    )
    plan.add_argument("--groups", type=int, default=32000, help="groups to train on (default: 32000)")
    for added in (simulate, plan):
        added.add_argument("--json", action="store_true", help="print it as one JSON object")


def _forecast(recipe: Any, name: str) -> Any:
    if not hasattr(recipe, "forecast"):
        raise Unrecoverable(
            f"recipe {name} has no `forecast` that could measure or simulate its runs", exit_code=2
        )
    return recipe.forecast


def _profile(options: argparse.Namespace) -> int:
    run = find_run(options.runs, options.run)
    forecast = _forecast(load_recipe(run.info.recipe), run.info.recipe)
    say(forecast.profile(run, options.output), sys.stdout)
    return 0


def _simulate(options: argparse.Namespace) -> int:
    recipe = load_recipe(options.recipe)
    forecast = _forecast(recipe, options.recipe)
    settings = list(options.set)
    known = {field.name for field in fields(recipe.Config)}
    for name, value in (("rollout_workers", options.workers), ("steps", options.steps)):
        if value is not None and name not in known:
            raise Unrecoverable(
                f"{options.recipe} has no setting {name!r}: change what it has with --set", exit_code=2
            )
        settings += [] if value is None else [f"{name}={value}"]
    try:
        graph = recipe.build(configure(recipe, options.recipe, settings))
    except ValueError as error:
        raise Unrecoverable(
            f"{options.recipe} can't be built from these settings: {error}", exit_code=2
        ) from error
    told = forecast.simulate(
        graph,
        options.profile,
        seed=options.seed,
        lost_per_h=options.preempt,
        away_s=options.away,
        as_json=options.json,
    )
    say(told, sys.stdout)
    return 0


def _plan(options: argparse.Namespace) -> int:
    recipes = {name: load_recipe(name) for name in ("async_grpo", "sync_grpo")}
    forecast = _forecast(recipes["async_grpo"], "async_grpo")
    told = forecast.plan(
        recipes, options.profile, options.prices, groups=options.groups, as_json=options.json
    )
    say(told, sys.stdout)
    return 0
