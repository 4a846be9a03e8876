"""Joining a run from another machine: its recipe and settings come from the run, nothing is copied by hand."""

from __future__ import annotations

import dataclasses
import os
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType, ModuleType

from .errors import Unrecoverable
from .graph import Graph
from .link import Link, join
from .recipe import from_saved, load_recipe
from .relay import Joined
from .remote import GIVE_UP_S, NoAnswer, fetch_about
from .runs import RunFolder, create_run

__all__ = ["Joining", "chosen_gpus", "own_settings", "part_of", "prepare", "prepare_again"]

MAX_GPUS = 128  # of one machine
AGAIN_S = 1.0  # between two tries of a machine that was given up


@dataclass(frozen=True)
class Joining:
    """What this machine will run: the Link first, which reaches the rest. node, number: its own in the run."""

    graph: Graph
    run: RunFolder
    recipe: ModuleType
    recipe_name: str
    node: str
    number: int


def prepare(
    url: str,
    token_file: Path,
    root: Path,
    *,
    workers: int | None = None,
    gpus: tuple[str, ...] = (),
    settings: Mapping[str, str | None] = MappingProxyType({}),
) -> Joining:
    """Ask the run at `url` what it is, and make ready to run `workers` of its elastic roles here.

    workers: None: one, or one for each of `gpus`, of which each then sees its own. settings: of the run's Config
    what is otherwise on this machine; None: as the run has it.
    Raises Unrecoverable (exit code 2) if it can't be reached, refuses the token, has no elastic role, keeps
    its weights in a folder of its own machine, its recipe is not installed here, or has no such setting.
    """
    workers = workers if workers is not None else max(1, len(gpus))
    if workers < 1:
        raise Unrecoverable(f"--workers {workers}: at least one", exit_code=2)
    if gpus and workers > len(gpus):
        raise Unrecoverable(
            f"--workers {workers} with --gpus {','.join(gpus)}: each needs one of its own: name more or start fewer",
            exit_code=2,
        )
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
    config |= own_settings(recipe, name, settings)
    try:
        whole = recipe.build(from_saved(recipe.Config, config))
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
    graph = part_of(whole, workers, joined, url, token_file, gpus[:workers])
    return Joining(graph, run, recipe, name, joined.name, joined.number)


def prepare_again(
    prepared: Callable[[], Joining], clock: Callable[[], float], pause: Callable[[float], None]
) -> Joining:
    """The same for a machine that the run has given up: what cut it off may do so again, so it tries for GIVE_UP_S."""
    until = clock() + GIVE_UP_S
    while True:
        try:
            return prepared()
        except NoAnswer:
            if clock() > until:
                raise
        pause(AGAIN_S)


def chosen_gpus(text: str) -> tuple[str, ...]:
    """What --gpus means, in CUDA's own names: the first so many of those that this process sees, or those named.

    Raises Unrecoverable (exit code 2) for what is neither, or more than there are to see.
    """
    if not text.isdecimal():
        names = tuple(filter(None, text.split(",")))
        if any(name != name.strip() or names.count(name) > 1 for name in names):
            raise Unrecoverable(f"--gpus {text}: write how many, or each once, as in 0,1,3", exit_code=2)
        return names
    count, seen = int(text), os.environ.get("CUDA_VISIBLE_DEVICES")
    names = tuple(map(str, range(min(count, MAX_GPUS))) if seen is None else seen.split(",")[:count])
    if count < 1 or len(names) < count or "" in names:
        raise Unrecoverable(
            f"--gpus {text}: at least one, and no more than there are (CUDA_VISIBLE_DEVICES is {seen!r})",
            exit_code=2,
        )
    return names


def own_settings(recipe: ModuleType, name: str, settings: Mapping[str, str | None]) -> dict[str, str]:
    """Those that are given. Raises Unrecoverable (exit code 2) for one that the recipe does not have."""
    own = {key: value for key, value in settings.items() if value is not None}
    fields = [field.name for field in dataclasses.fields(recipe.Config)]
    for key in own:
        if key not in fields:
            raise Unrecoverable(
                f"--{key.replace('_', '-')}: recipe {name} has no setting {key!r}: leave it out", exit_code=2
            )
    return own


def part_of(
    whole: Graph, workers: int, joined: Joined, url: str, token_file: Path, gpus: tuple[str, ...] = ()
) -> Graph:
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
    whole.add_part_for_joining(graph, workers, gpus)
    return graph
