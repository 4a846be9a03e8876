"""Joining a run from another machine: its recipe and settings come from the run, nothing is copied by hand."""

from __future__ import annotations

import socket
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from .errors import Unrecoverable
from .graph import Graph
from .link import Link, join
from .recipe import load_recipe
from .relay import Joined
from .remote import fetch_about
from .runs import RunFolder, create_run

__all__ = ["Joining", "part_of", "prepare"]


@dataclass(frozen=True)
class Joining:
    """What this machine will run: the Link first, which reaches the rest. node, number: its own in the run."""

    graph: Graph
    run: RunFolder
    recipe: ModuleType
    recipe_name: str
    node: str
    number: int


def prepare(url: str, token_file: Path, workers: int, root: Path) -> Joining:
    """Ask the run at `url` what it is, and make ready to run `workers` of its elastic roles here.

    Raises Unrecoverable (exit code 2) if it can't be reached, refuses the token, has no elastic role, keeps
    its weights in a folder of its own machine, or its recipe is not installed here.
    """
    if workers < 1:
        raise Unrecoverable(f"--workers {workers}: at least one", exit_code=2)
    try:
        about = fetch_about(url, token_file)
        name, config = about["recipe"], about["config"]
    except (ValueError, KeyError, TypeError) as error:
        raise Unrecoverable(
            f"what answers at {url} is no run: check the address against the one the run printed", exit_code=2
        ) from error
    if name.endswith(".py"):
        raise Unrecoverable(
            f"the run's recipe is a file on its own machine ({Path(name).name}): install it as a package on both",
            exit_code=2,
        )
    if str(config.get("store", "")).startswith("file:"):
        raise Unrecoverable(
            f"the run keeps its weights in {config['store']}, which this machine can't read: start the run with "
            "--set store=s3://bucket/prefix",
            exit_code=2,
        )
    recipe = load_recipe(name)
    try:
        whole = recipe.build(recipe.Config(**config))
    except (TypeError, ValueError) as error:
        raise Unrecoverable(
            f"the run's settings don't fit the {name} installed here ({error}): install the version of rolecall "
            "that the run has",
            exit_code=2,
        ) from error
    if not any(role.elastic for role in whole):
        raise Unrecoverable(f"recipe {name} has no role that other machines may run", exit_code=2)
    # The store's keys are below the run's id, so this machine's folder takes the run's own.
    run = create_run(root, f"join-{name}", config, id=about["run"])
    joined = join(url, token_file, socket.gethostname())
    graph = part_of(whole, workers, joined, url, token_file)
    return Joining(graph, run, recipe, name, joined.name, joined.number)


def part_of(whole: Graph, workers: int, joined: Joined, url: str, token_file: Path) -> Graph:
    """What a machine that has joined runs of a graph, until the run is over."""
    graph = Graph(
        whole.name, strategy=whole.strategy, max_restarts=whole.max_restarts, within_s=whole.within_s
    )
    link = graph.add(
        "link", Link, url=url, token_file=token_file, joined=joined,
        roles={role.name: role.actor for role in whole}, private=whole.private_parts(),
    )  # fmt: skip
    graph.supervise(link)  # its deaths take nobody down
    graph.until(link)
    whole.add_part_for_joining(graph, workers)
    return graph
