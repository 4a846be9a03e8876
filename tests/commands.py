"""Running `rolecall` as a user does, and finding every process it leaves."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROLECALL = [str(Path(sys.executable).parent / "rolecall")]
LOOK_EVERY_S = 0.005


@dataclass
class Command:
    """A running `rolecall …` and all its descendants, marked by a variable in their environment."""

    arguments: list[str]
    folder: Path
    environment: Mapping[str, str] = field(default_factory=dict)
    through: Sequence[str] = ()  # the start of a command line that runs the rest of it: somewhere else
    program: Sequence[str] = tuple(ROLECALL)

    def __post_init__(self) -> None:
        self.mark = uuid.uuid4().hex
        self.process = subprocess.Popen(
            [*self.through, *self.program, *self.arguments],
            cwd=self.folder,
            env={**os.environ, **self.environment, "ROLECALL_TEST_MARK": self.mark},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def finish(self, timeout_s: float = 120.0) -> tuple[int, str, str]:
        """Exit code, stdout and stderr; a command that takes too long is killed, and the test fails."""
        try:
            out, err = self.process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            for pid in self.processes():
                os.kill(pid, 9)
            raise
        return self.process.returncode, out, err

    def processes(self) -> list[int]:
        """Every live process that this command started, however far removed."""
        entries = Path("/proc").iterdir()
        return [int(entry.name) for entry in entries if entry.name.isdigit() and self._is_ours(entry)]

    def _is_ours(self, entry: Path) -> bool:
        try:
            ours = f"ROLECALL_TEST_MARK={self.mark}".encode() in (entry / "environ").read_bytes()
            return ours and (entry / "stat").read_text().rpartition(")")[2].split()[0] != "Z"
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            return False  # it has just ended

    def signal(self, number: signal.Signals) -> None:
        """To all of them at once, as what happens to a machine does."""
        for pid in self.processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def run_folder(self) -> Path:
        """The folder of the run it started (waits for it)."""
        return until(lambda: next(iter((self.folder / "runs").glob("*/run.json")), None)).parent


def until(condition: Callable[[], Any], timeout_s: float = 60.0) -> Any:
    """What `condition` gives, once it is true: for what happens in other processes."""
    deadline = time.monotonic() + timeout_s
    while not (value := condition()):
        assert time.monotonic() < deadline, "the condition never came true"
        select.select([], [], [], LOOK_EVERY_S)  # they need the cores
    return value


def lines(path: Path) -> list[dict[str, Any]]:
    """The whole lines of a .jsonl file, which may be growing."""
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]


def proxy_url(folder: Path) -> str:
    """Where the proxy of the run in `folder` listens (waits for it)."""

    def reported() -> list[str]:
        events = lines(folder / "events.jsonl")
        reports = [event["values"] for event in events if event["event"] == "report"]
        return [values["url"] for values in reports if "url" in values]

    return until(reported)[0]
