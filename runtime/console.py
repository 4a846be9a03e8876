"""What the command line shows of a run: one live line, and a line for every restart."""

from __future__ import annotations

import time
from collections.abc import Mapping
from types import ModuleType, TracebackType
from typing import Any

import rich.console
from msgspec import json
from rich.live import Live
from rich.text import Text

from .runs import RunFolder

__all__ = ["Console"]

PLAIN_EVERY_S = 5.0  # without a terminal the line is printed anew this often


class Console:
    """Observes a run, shows it, and writes everything observed to events.jsonl.

    The recipe's `outcome.progress(reports)`, if it has one, makes the line from each actor's newest report.
    """

    def __init__(self, run: RunFolder, recipe: ModuleType, *, to_stderr: bool = False) -> None:
        self.run, self.recipe = run, recipe
        self.reports: dict[str, dict[str, Any]] = {}
        self._states: dict[str, str] = {}
        self._out = rich.console.Console(stderr=to_stderr, highlight=False, soft_wrap=True)
        self._live = Live(console=self._out, auto_refresh=False, transient=True)
        self._printed = 0.0

    def __enter__(self) -> Console:
        self._events = (self.run.path / "events.jsonl").open("ab")
        self._out.print(f"run {self.run.path.name}, in {self.run.path}")
        if self._out.is_terminal:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live.is_started:
            self._live.stop()
        self._out.print(self._line())
        self._events.close()

    # --- Observer ----------------------------------------------------------------------------------------

    def on_report(self, name: str, values: dict[str, Any]) -> None:
        self.reports[name] = values
        self._note(actor=name, event="report", **values)
        if "url" in values:
            self._out.print(
                f"other machines join with: rolecall join {values['url']} --token-file {self.run.path / 'token'}"
            )
        self._refresh()

    def on_state(self, name: str, state: str) -> None:
        self._states[name] = state
        self._note(actor=name, event="state", state=state)
        self._refresh()

    def on_death(self, name: str, reason: str, restart_in_s: float | None) -> None:
        self._note(actor=name, event="death", reason=reason, restart_in_s=restart_in_s)
        if restart_in_s is None:
            self._out.print(f"{name} died: {reason}")
        else:
            self._out.print(f"{name} died: {reason}; restarting it in {restart_in_s:.1f} s")

    def on_dead_letter(self, receiver: str, method: str, reason: str) -> None:
        self._note(actor=receiver, event="dead_letter", method=method, reason=reason)

    # --- showing -----------------------------------------------------------------------------------------

    def show_result(self, result: Mapping[str, Any]) -> None:
        """Whatever the recipe has to say at the end: its `text`, or the values one by one."""
        outcome = getattr(self.recipe, "outcome", None)
        if outcome is not None:
            self._out.print(outcome.describe(self.run, result))
        else:
            for key, value in result.items():
                self._out.print(f"{key}: {value}")

    def _note(self, **event: Any) -> None:
        self._events.write(json.encode({"time": time.time(), **event}) + b"\n")
        self._events.flush()

    def _refresh(self) -> None:
        if self._live.is_started:
            self._live.update(Text(self._line(), no_wrap=True, overflow="ellipsis"), refresh=True)
        elif time.monotonic() - self._printed > PLAIN_EVERY_S:
            self._printed = time.monotonic()
            self._out.print(self._line())

    def _line(self) -> str:
        outcome = getattr(self.recipe, "outcome", None)
        line = outcome.progress(self.reports) if outcome is not None else ""
        if line:
            return line
        return "starting: " + ", ".join(f"{name} {state}" for name, state in self._states.items())
