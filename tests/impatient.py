"""A run that gives machines up sooner: `python -m … impatient.py RECIPE LEASE_S FIELD=VALUE…`, as `rolecall run` with a
proxy on loopback does in the folder it is called in."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

from msgspec.structs import replace
from rolecall.runtime.console import Console
from rolecall.runtime.proxy import add_proxy
from rolecall.runtime.recipe import configure, load_recipe
from rolecall.runtime.runs import create_run
from rolecall.runtime.supervisor import Supervisor


def main(recipe: str, lease_s: float, settings: list[str]) -> int:
    module = load_recipe(recipe)
    config = configure(module, recipe, settings)
    graph = module.build(config)
    run = create_run(Path("runs"), recipe, dataclasses.asdict(config))
    about = {"run": run.info.id, "recipe": recipe, "config": run.info.config}
    add_proxy(graph, host="127.0.0.1", port=0, token_file=run.path / "token", about=about, lease_s=lease_s)
    with Console(run, module, awaited=["rollout"]) as console:
        supervisor = Supervisor(graph, run.info.id, run.path, recipe, console)
        run.write_info(replace(run.info, sockets=str(supervisor.sockets)))
        return supervisor.run().exit_code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], float(sys.argv[2]), sys.argv[3:]))
