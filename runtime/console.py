"""What the command line shows of a run: one live line, and a line for every restart."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable, Mapping
from types import ModuleType, TracebackType
from typing import IO, Any

import rich.console
from msgspec import json
from rich.live import Live
from rich.text import Text

from .runs import RunFolder

__all__ = ["Console", "say"]

PROXY = "proxy"  # the role that lets other machines join
PLAIN_EVERY_S = 5.0  # without a terminal the line is printed anew this often


def say(text: str, stream: IO[str] | None) -> None:
    """Print a line; a reader that has gone costs nothing but the line."""
    if stream is None:
        return  # the command was started with it closed
    try:
        print(text, file=stream, flush=True)
    except OSError as error:
        if error.errno not in (errno.EPIPE, errno.EIO):  # a pipe's or a terminal's other end
            raise
        _silence(stream)


def _silence(stream: IO[str]) -> None:
    """Nobody reads it any more: what is printed there from now on is lost, and raises nothing."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, stream.fileno())
    os.close(nowhere)


class _Output(rich.console.Console):
    def on_broken_pipe(self) -> None:
        raise  # rich itself would end the process


class Console:
    """Observes a run, shows it, and writes everything observed to events.jsonl.

    The recipe's `outcome.progress(reports)`, if it has one, makes the line from each actor's newest report.
    Nothing that goes wrong in showing ends the run.
    """

    def __init__(self, run: RunFolder, recipe: ModuleType, *, to_stderr: bool = False) -> None:
        self.run, self.recipe = run, recipe
        self.reports: dict[str, dict[str, Any]] = {}
        self._states: dict[str, str] = {}
        # Paths and reasons are printed as they are: to rich, "[/INST]" would be markup.
        self._out = _Output(stderr=to_stderr, highlight=False, soft_wrap=True, markup=False, emoji=False)
        self._live = Live(console=self._out, auto_refresh=False, transient=True)
        self._printed = 0.0

    def __enter__(self) -> Console:
        self._events = (self.run.path / "events.jsonl").open("ab")
        self._print(f"run {self.run.path.name}, in {self.run.path}")
        if self._out.is_terminal:
            self._show(self._live.start)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live.is_started:
            self._show(self._live.stop)
        self._print(self._line())
        self._events.close()

    # --- Observer ----------------------------------------------------------------------------------------

    def on_report(self, name: str, values: dict[str, Any]) -> None:
        self.reports[name] = values
        self._note(name, "report", values=values)
        if name == PROXY and "url" in values:
            self._print(
                f"other machines join with: rolecall join {values['url']} --token-file {self.run.path / 'token'}"
            )
        self._refresh()

    def on_state(self, name: str, state: str) -> None:
        self._states[name] = state
        self._note(name, "state", state=state)
        self._refresh()

    def on_death(self, name: str, reason: str, restart_in_s: float | None) -> None:
        self._note(name, "death", reason=reason, restart_in_s=restart_in_s)
        if restart_in_s is None:
            self._print(f"{name} died: {reason}")
        else:
            self._print(f"{name} died: {reason}; restarting it in {restart_in_s:.1f} s")

    def on_dead_letter(self, receiver: str, method: str, reason: str) -> None:
        self._note(receiver, "dead_letter", method=method, reason=reason)

    # --- showing -----------------------------------------------------------------------------------------

    def show_result(self, result: Mapping[str, Any]) -> None:
        """What the recipe's `outcome.describe(run, result)` says, or the values one by one."""
        outcome = getattr(self.recipe, "outcome", None)
        if outcome is not None:
            self._print(outcome.describe(self.run, result))
        else:
            for key, value in result.items():
                self._print(f"{key}: {value}")

    def _note(self, actor: str, event: str, **more: Any) -> None:
        head = {"time": time.time(), "actor": actor, "event": event}
        try:
            line = json.encode(head | more)
        except (TypeError, ValueError):  # a report may hold what JSON can't: a tuple as a key
            line = json.encode(head | {"as_text": ascii(more)})
        self._events.write(line + b"\n")
        self._events.flush()

    def _refresh(self) -> None:
        if self._live.is_started:
            line = Text(self._line(), no_wrap=True, overflow="ellipsis")
            self._show(lambda: self._live.update(line, refresh=True))
        elif time.monotonic() - self._printed > PLAIN_EVERY_S:
            self._printed = time.monotonic()
            self._print(self._line())

    def _print(self, text: str) -> None:
        self._show(lambda: self._out.print(text))

    def _show(self, action: Callable[[], None]) -> None:
        try:
            action()
        except OSError:  # the terminal or the pipe's reader has gone
            _silence(self._out.file)

    def _line(self) -> str:
        outcome = getattr(self.recipe, "outcome", None)
        try:
            line = outcome.progress(self.reports) if outcome is not None else ""
        except Exception as error:  # noqa: BLE001  the recipe's own code, given the reports of any actor
            line = f"the recipe's outcome.progress raised {type(error).__name__}: {error}"
        if line:
            return line
        return "starting: " + ", ".join(f"{name} {state}" for name, state in self._states.items())
