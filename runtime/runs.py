"""The run folder: what a run leaves behind, and how another terminal finds a run that is live.

runs/async_grpo-20260131-120000-7f3a/
    run.json        recipe, config, and where the supervisor listens while it lives
    events.jsonl    every report, state, death and dead letter, with its time
    dead_letters.jsonl  messages that nobody will handle, if there are any
    logs/           each role's output
    state/          what roles keep over a restart
    token           for `rolecall join`, mode 0600, if the run has a proxy; token-ID: others that were asked for
    keys            by which the proxy checks tokens, mode 0600
and what the recipe's own actors write there (metrics.jsonl, eval.jsonl, adapter/, curves.png, …)
"""

from __future__ import annotations

import contextlib
import difflib
import os
import re
import secrets
import select
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
from msgspec.structs import replace

from .control import ListActors, Restarting, RestartRole, RunStatus, StopRun, supervisor_path
from .errors import RolecallError, Unrecoverable
from .files import read_lines, write_whole
from .sockets import Connection, connect
from .store import Store

__all__ = ["RunFolder", "RunInfo", "create_run", "find_run", "named", "nobody", "resume_run", "run_to_resume"]

ANSWER_TIMEOUT_S = 3.0
_NAME = re.compile(r"[A-Za-z0-9._-]+", re.ASCII)


class RunInfo(msgspec.Struct, frozen=True, kw_only=True):
    """run.json. started: when the first command's process did, in seconds since 1970; sockets: the supervisor's folder;
    story: why it ended, if it did and not by finishing."""

    id: str
    recipe: str
    config: dict[str, Any]
    started: float
    pid: int
    sockets: str = ""
    story: str = ""


class RunFolder:
    """One run's folder. Raises Unrecoverable (exit code 2) for a folder that isn't one, or has a damaged run.json."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @property
    def info(self) -> RunInfo:
        try:
            return msgspec.json.decode((self.path / "run.json").read_bytes(), type=RunInfo)
        except OSError as error:
            raise Unrecoverable(f"{self.path} is no run folder: it has no run.json", exit_code=2) from error
        except ValueError as error:
            raise Unrecoverable(
                f"{self.path / 'run.json'} is damaged ({error}): choose another run", exit_code=2
            ) from error

    def write_info(self, info: RunInfo) -> None:
        write_whole(self.path / "run.json", msgspec.json.format(msgspec.json.encode(info), indent=2))

    @property
    def live(self) -> bool:
        return Path(self.info.sockets or "/nowhere").is_dir() and Path(f"/proc/{self.info.pid}").exists()

    def lines(self, name: str) -> list[dict[str, Any]]:
        """The objects of a .jsonl file in this folder; none if there is no such file."""
        return read_lines(self.path / name)

    def status(self) -> RunStatus:
        """The actors of a live run, as its supervisor sees them."""
        return msgspec.json.decode(self._ask_supervisor(ListActors(), answer=True), type=RunStatus)

    def restart(self, name: str) -> list[str]:
        """Have a live run stop a role, or one of its replicas, in order and start it again; who that is.

        Raises Unrecoverable (exit code 2) if nobody is called so, RolecallError if who is does not run.
        """
        actors = [actor.name for actor in self.status().actors]
        if not named(name, actors):
            raise nobody(f"run {self.path.name} has no role {name!r}", name, actors)
        answer = self._ask_supervisor(RestartRole(name), answer=True)
        restarting = msgspec.json.decode(answer, type=Restarting).names
        if not restarting:
            raise RolecallError(
                f"nobody is restarted: {name} has no process now, or the run is ending; `rolecall ps` says which"
            )
        return restarting

    def stop(self) -> None:
        """Ask a live run to end in order."""
        self._ask_supervisor(StopRun(), answer=False)

    def _ask_supervisor(self, message: ListActors | StopRun | RestartRole, *, answer: bool) -> bytes:
        if not self.live:
            raise Unrecoverable(f"run {self.path.name} is not live: it has ended", exit_code=2)
        with select.epoll() as poller:
            try:
                supervisor = Connection(connect(supervisor_path(Path(self.info.sockets))), poller)
            except (ConnectionRefusedError, FileNotFoundError) as error:
                raise self._no_answer(ended=isinstance(error, ConnectionRefusedError)) from None
            supervisor.send(msgspec.msgpack.encode(message))
            reply = None
            if answer and not (poller.poll(ANSWER_TIMEOUT_S) and (reply := supervisor.receive())):
                raise self._no_answer(ended=supervisor.ended)
            supervisor.close()
            return bytes(reply or b"")

    def _no_answer(self, *, ended: bool) -> Unrecoverable:
        if ended or not self.live:
            return Unrecoverable(f"run {self.path.name} ended before it could answer")
        return Unrecoverable(
            f"the supervisor of {self.path.name} (pid {self.info.pid}) does not answer: if it stays so, kill it, "
            "and all of the run ends with it"
        )


def named(name: str, actors: Sequence[str]) -> list[str]:
    """Those of `actors` that `name` means: one of them, or all replicas of a role."""
    return [actor for actor in actors if name in (actor, _role(actor))]


def _role(actor: str) -> str:
    """As in rollout-1, or gpu-3/rollout-1 on another machine."""
    return actor.rpartition("/")[2].partition("-")[0]


def nobody(what: str, name: str, actors: Sequence[str]) -> Unrecoverable:
    """`what`, and whom `name` could have meant instead."""
    known = list(dict.fromkeys(word for actor in actors for word in (_role(actor), actor)))
    close = difflib.get_close_matches(name, known, n=1)
    hint = f"; did you mean {close[0]!r}?" if close else "."
    return Unrecoverable(f"{what}{hint} There are: {', '.join(known) or 'none'}", exit_code=2)


def run_to_resume(root: Path, name: str, recipe: str) -> RunFolder:
    """A run by its path or its name below `root`. If there is no such folder here (it was another machine's, or is
    gone with it), the place for a new one, without run.json.

    Raises Unrecoverable (exit code 2) if the run is live, or of another recipe.
    """
    for path in (Path(name), root / name):
        if (path / "run.json").exists():
            run = RunFolder(path.resolve())
            if run.live:
                raise Unrecoverable(f"run {path.name} is live: there is nothing to resume", exit_code=2)
            if run.info.recipe != recipe:
                raise Unrecoverable(
                    f"run {path.name} is one of {run.info.recipe}, not of {recipe}", exit_code=2
                )
            return run
    if not _NAME.fullmatch(name):
        raise Unrecoverable(
            f"{name} is no run folder, for it has no run.json; of a run whose folder is gone give the name alone",
            exit_code=2,
        )
    return RunFolder((root / name).resolve())


def resume_run(run: RunFolder, recipe: str, config: dict[str, Any]) -> None:
    """Make the folder of `run_to_resume` that of a run which begins in this process.

    Raises Unrecoverable (exit code 2) if neither the folder nor the store that `config` names has anything of it.
    """
    if (run.path / "run.json").exists():
        run.write_info(replace(run.info, config=config, pid=os.getpid(), sockets="", story=""))
        return
    id, store = run.path.name, Store(config.get("store", "file://"))
    versions = None if store.url == "file://" else store.open(id, run.path)
    if versions is None or versions.head() is None:
        raise Unrecoverable(
            f"there is nothing of a run {id!r} to resume, neither in {run.path.parent} nor in the store {store.url}: "
            "give its name, and with --set store=... the one it had",
            exit_code=2,
        )
    # What its metrics tell is from before this process: from the first version on, or now, if that does not say when.
    _begin(run, id, recipe, config, started=versions.policy(0).time)


def create_run(
    root: Path, recipe: str, config: dict[str, Any], *, id: str | None = None, name: str | None = None
) -> RunFolder:
    """A new folder below `root`, named by recipe and time, or `name`. id: the run's, if it is another machine's.

    Raises Unrecoverable (exit code 2) for a name that can't be, or is taken.
    """
    if name is not None:
        return _create_named(root / name, recipe, config)
    stem = f"{Path(recipe.removesuffix('.py')).name}-{time.strftime('%Y%m%d-%H%M%S')}"
    # Drawn, because machines that share a store don't see each other's folders.
    while (path := root / f"{stem}-{secrets.token_hex(2)}").exists():
        continue
    _begin(RunFolder(path), id or path.name, recipe, config)
    return RunFolder(path.resolve())


def _create_named(path: Path, recipe: str, config: dict[str, Any]) -> RunFolder:
    if not _NAME.fullmatch(path.name) or path.name in (".", ".."):
        raise Unrecoverable(
            f"a run can't be called {path.name!r}: use letters, digits, and . _ -", exit_code=2
        )
    if path.exists():
        raise Unrecoverable(
            f"there is a run {path.name} already: choose another name, or go on with it by --resume",
            exit_code=2,
        )
    _begin(RunFolder(path), path.name, recipe, config)
    return RunFolder(path.resolve())


def _begin(run: RunFolder, id: str, recipe: str, config: dict[str, Any], started: float = 0.0) -> None:
    try:
        run.path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise Unrecoverable(
            f"can't make the run's folder {run.path}: {error.strerror}; choose another place with --runs",
            exit_code=2,
        ) from error
    run.write_info(
        RunInfo(id=id, recipe=recipe, config=config, started=started or _process_started(), pid=os.getpid())
    )


def _process_started() -> float:
    """When this process began, in seconds since 1970, to the kernel's hundredth (proc(5), field 22 of stat)."""
    ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    age_s = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    return time.time() - age_s


def find_run(root: Path, name: str | None, *, live: bool = False) -> RunFolder:
    """A run by its path or its name below `root`; without a name the newest (of the live ones)."""
    if name is not None:
        for path in (Path(name), root / name):
            if (path / "run.json").exists():
                return RunFolder(path.resolve())
        known = ", ".join(run.path.name for run in _runs(root)[-5:]) or "none"
        raise Unrecoverable(f"there is no run {name!r}; the newest in {root} are: {known}", exit_code=2)
    runs = [run for run in _runs(root) if run.live or not live]
    if not runs:
        kind = "live run" if live else "run"
        raise Unrecoverable(f"there is no {kind} in {root}: start one with `rolecall run`", exit_code=2)
    return runs[-1]


def _runs(root: Path) -> list[RunFolder]:
    """Those that can be read, from the oldest; one damaged run.json must not hide the others."""
    runs: list[tuple[float, RunFolder]] = []
    for path in root.glob("*/run.json"):
        run = RunFolder(path.parent.resolve())
        with contextlib.suppress(Unrecoverable):
            runs.append((run.info.started, run))
    return [run for _, run in sorted(runs, key=lambda pair: pair[0])]
