"""Another machine: `python -m … joining.py RECIPE URL TOKEN_FILE FOLDER` joins a run with one worker.

It prints each state and death as a line of JSON, and exits as `rolecall join` does.
"""

from __future__ import annotations

import json
import signal
import sys
from pathlib import Path
from typing import Any

from rolecall.runtime.join import part_of
from rolecall.runtime.link import join
from rolecall.runtime.recipe import load_recipe
from rolecall.runtime.supervisor import Supervisor


class Printing:
    """supervisor: whose actors' process ids are printed with their states."""

    supervisor: Supervisor

    def _print(self, **values: Any) -> None:
        print(json.dumps(values), flush=True)

    def on_report(self, name: str, values: dict[str, Any]) -> None: ...

    def on_state(self, name: str, state: str) -> None:
        pid = next((child.pid for child in self.supervisor.children if child.name == name), 0)
        self._print(name=name, state=state, pid=pid)

    def on_death(self, name: str, reason: str, restart_in_s: float | None) -> None:
        self._print(name=name, death=reason)

    def on_dead_letter(self, receiver: str, method: str, reason: str) -> None:
        self._print(name=receiver, dead_letter=method, reason=reason)


def main(recipe: str, url: str, token_file: Path, folder: Path) -> int:
    module = load_recipe(recipe)
    joined = join(url, token_file, "gpu")
    graph = part_of(module.build(module.Config()), 1, joined, url, token_file)
    observer = Printing()
    observer.supervisor = Supervisor(
        graph, "run", folder, recipe, observer, node=joined.name, number=joined.number
    )
    signal.signal(signal.SIGTERM, lambda signum, frame: observer.supervisor.stop())
    outcome = observer.supervisor.run()
    print(json.dumps({"story": outcome.story}), flush=True)
    return outcome.exit_code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2], Path(sys.argv[3]), Path(sys.argv[4])))
