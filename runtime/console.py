"""What the command line shows of a run: one live line, a line for every restart, and the table of `rolecall ps`."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType, TracebackType
from typing import IO, Any

import rich.console
from msgspec import json
from rich.live import Live
from rich.text import Text

from .control import ActorStatus
from .runs import RunFolder

__all__ = ["Console", "actors_table", "say", "terminal_width"]

PROXY = "proxy"  # the role that lets other machines join
PLAIN_EVERY_S = 5.0  # without a terminal the line is printed anew this often


def say(text: str, stream: IO[str] | None) -> bool:
    """Print a line; a reader that has gone costs nothing but the line. Whether there is a reader."""
    if stream is None:
        return False  # the command was started with it closed
    try:
        print(text, file=stream, flush=True)
    except OSError as error:
        if error.errno not in (errno.EPIPE, errno.EIO):  # a pipe's or a terminal's other end
            raise
        _silence(stream)
        return False
    return True


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
    awaited: roles that only machines that join run; ca: the certificate they must be given. Nothing that goes wrong in
    showing ends the run.
    """

    def __init__(
        self,
        run: RunFolder,
        recipe: ModuleType,
        *,
        to_stderr: bool = False,
        awaited: Sequence[str] = (),
        ca: Path | None = None,
    ) -> None:
        self.run, self.recipe, self.awaited, self.ca = run, recipe, awaited, ca
        self._join, self._machines = "", -1
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
            ca = f" --ca {self.ca}" if self.ca else ""
            self._join = f"rolecall join {values['url']} --token-file {self.run.path / 'token'}{ca}"
            if not self.awaited:
                self._print(f"other machines join with: {self._join}")
        if name == PROXY and "machines" in values:
            self._say_who_is_missing(len(values["machines"]))
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

    def _say_who_is_missing(self, machines: int) -> None:
        """When it begins, and when the last machine has left: a run that waits would look like one that hangs."""
        if self.awaited and machines == 0 and self._machines != 0:
            what = "no {} worker yet" if self._machines < 0 else "the last {} worker has left"
            roles = " or ".join(self.awaited)
            self._print(f"{what.format(roles)}: waiting for a machine to join with: {self._join}")
        self._machines = machines

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


def terminal_width(stream: IO[str] | None) -> int | None:
    """In characters. None: `stream` is no terminal, or one that does not say."""
    if stream is None or not stream.isatty():
        return None
    return os.get_terminal_size(stream.fileno()).columns or None


_COLUMNS: dict[str, Callable[[ActorStatus], str]] = {
    "ROLE": lambda actor: actor.name,
    "PID": lambda actor: str(actor.pid or "-"),
    "STATE": lambda actor: actor.state,
    "INCARNATION": lambda actor: str(actor.incarnation or "-"),
    "RESTARTS": lambda actor: str(actor.restarts),
    "WAITING": lambda actor: str(actor.waiting),
    "OLDEST": lambda actor: _time(actor.oldest_s),
    "HANDLING": lambda actor: _time(actor.handling_s),
    "MEMORY": lambda actor: _memory(actor.rss),
}
_TEXT = ("ROLE", "STATE")  # to the left; numbers to the right
_LEAST_FIRST = ("INCARNATION", "OLDEST", "MEMORY", "PID", "RESTARTS", "HANDLING", "WAITING")


def actors_table(actors: Sequence[ActorStatus], width: int | None = None) -> str:
    """A line for each actor, below a line of titles.

    width: in characters; columns that don't fit are left out, and a last line says which.
    """
    columns = {title: [title, *map(cell, actors)] for title, cell in _COLUMNS.items()}
    widths = {title: max(map(len, cells)) for title, cells in columns.items()}
    left_out = []
    for title in _LEAST_FIRST:
        if width is None or sum(widths.values()) + len(widths) - 1 <= width:
            break
        del columns[title], widths[title]
        left_out.append(title)
    padded = [
        [cell.ljust(widths[title]) if title in _TEXT else cell.rjust(widths[title]) for cell in cells]
        for title, cells in columns.items()
    ]
    lines = [" ".join(row).rstrip() for row in zip(*padded, strict=True)]
    if left_out:
        lines.append(f"no room for {', '.join(left_out)}")
    return "\n".join(lines)


def _time(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    if seconds < 100:
        return f"{seconds:.1f} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"


def _memory(size: int) -> str:
    if not size:
        return "-"
    return f"{size / 2**20:.0f} MiB" if size < 2**30 else f"{size / 2**30:.1f} GiB"
