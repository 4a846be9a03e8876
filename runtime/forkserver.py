"""A process that imports what is heavy once and forks actors from there.

Importing torch, transformers and peft takes seconds; a fork takes milliseconds. The server opens no sockets
but the one it listens on and no CUDA device, so its children are as good as new, as long as it has one thread.
If an import has started others, an actor's class says that it is not `fork_safe`, or its role has an interpreter
of its own, the child replaces itself by a fresh interpreter, and says so in its log.

Requests and replies are JSON datagrams on a socket pair:
    {"name", "spec", "log", "preloads", "fresh", "python", "environment"}  →  {"name", "pid"}
        fresh: why not a fork; empty: a fork. python: whose path the fresh interpreter has. environment: of its own
    {"forget": pid}                         its session is gone: the number may soon be somebody else's
Each actor is forked twice, so that it becomes a child of the supervisor (a subreaper). It goes on only when the
reply has been sent, so there is none that the supervisor can't know of; then it leads its own session, and
dies with the supervisor. When the supervisor is gone the server kills whatever their sessions left and removes
its folder of sockets. It hears of that by the socket pair, and by a signal while it is busy importing.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import Any, BinaryIO, NoReturn

from msgspec import json

from .errors import Unrecoverable
from .leftovers import MARK, kill_marked

__all__ = ["ForkServer", "become_subreaper", "check_interpreter", "main"]

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_SUPERVISOR_DIED = signal.SIGUSR1  # nobody else sends it, and a SIGTERM from a user must not end the actors
LEFTOVERS_TIMEOUT_S = 2.0
TRIAL_TIMEOUT_S = 60.0
LAST_BREATH_S = 2.0
_libc = ctypes.CDLL(None, use_errno=True)


def become_subreaper() -> None:
    """Orphans of this process's descendants become its own children, so that it can reap them."""
    if _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER) failed")


def check_interpreter(python: str, role: str) -> None:
    """Raise Unrecoverable (exit code 2) for one that can't run an actor."""
    command = [python, "-P", "-c", "import rolecall.runtime.process"]
    try:
        tried = subprocess.run(
            command,
            check=False,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=TRIAL_TIMEOUT_S,
        )
    except OSError as error:
        reason, way_out = error.strerror, "give the path of a Python interpreter"
    except subprocess.TimeoutExpired:
        reason, way_out = f"no answer in {TRIAL_TIMEOUT_S:g} s", "give the path of a Python interpreter"
    else:
        if tried.returncode == 0:
            return
        reason = next(iter(tried.stderr.strip().splitlines()[-1:]), f"it exits with code {tried.returncode}")
        way_out = "install this package in its environment, too"
    raise Unrecoverable(f"{role} can't run in the interpreter {python} ({reason}): {way_out}", exit_code=2)


class ForkServer:
    """The supervisor's side: starts the process and talks to it.

    sockets: the supervisor's folder, removed should the supervisor be killed. sessions: actors another one has
    started.
    """

    def __init__(self, log: Path, sockets: Path, sessions: Sequence[int] = ()) -> None:
        self._requests: deque[bytes] = deque()
        self._hung_up = False
        self._connection, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        # One thread while importing: a BLAS that starts its pool would make every fork unsafe.
        environment = {**os.environ, "OPENBLAS_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
        environment.setdefault("OMP_NUM_THREADS", "1")
        environment[MARK] = str(sockets)
        arguments = map(str, [theirs.fileno(), os.getpid(), sockets, *sessions])
        # -P: nothing in the working directory may shadow a module.
        command = [sys.executable, "-P", "-m", "rolecall.runtime.forkserver", *arguments]
        with theirs, log.open("ab") as output:
            self._process = subprocess.Popen(
                command,
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=environment,
                start_new_session=True,
            )
        self.pid = self._process.pid
        self.hung = ""  # why it counts as hung

    def fileno(self) -> int:
        return self._connection.fileno()

    def send(self, request: dict[str, Any]) -> None:
        """Without waiting: it may be importing for long, or be waiting itself to be heard."""
        self._requests.append(json.encode(request))
        self.flush()

    def flush(self) -> None:
        """Send what there is room for; each reply makes some."""
        with contextlib.suppress(BlockingIOError, BrokenPipeError, ConnectionResetError):
            while self._requests:  # whoever reads its replies learns there that it has died
                self._connection.send(self._requests[0], socket.MSG_DONTWAIT)
                self._requests.popleft()

    def reply(self) -> dict[str, Any] | None:
        """The next reply; waits for it. None if it has died."""
        try:
            data = self._connection.recv(1 << 16)
        except ConnectionResetError:
            data = b""
        self._hung_up = not data
        return json.decode(data) if data else None

    def kill(self) -> int:
        """Returns its exit status, as `Popen.returncode`. What it has replied can still be read."""
        if self._hung_up:  # it is ending by itself: let it say why
            with contextlib.suppress(subprocess.TimeoutExpired):
                return self._process.wait(LAST_BREATH_S)
        self._process.kill()
        return self._process.wait()

    def close(self) -> None:
        self._connection.close()


def main() -> None:
    connection = socket.socket(fileno=int(sys.argv[1]))
    supervisor, sockets, sessions = int(sys.argv[2]), Path(sys.argv[3]), set(map(int, sys.argv[4:]))

    def clean_up(signum: int = 0, frame: FrameType | None = None) -> None:
        for pid in sessions:
            _kill_session(pid)
        kill_marked(sockets, LEFTOVERS_TIMEOUT_S)
        shutil.rmtree(sockets, ignore_errors=True)  # the supervisor may have come that far itself
        os._exit(0)  # an import that this interrupts must not go on

    # Stopping is the supervisor's affair; a Ctrl-C or a kill of the group must not come first.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(_SUPERVISOR_DIED, clean_up)
    _libc.prctl(_PR_SET_PDEATHSIG, _SUPERVISOR_DIED)
    if os.getppid() == supervisor:  # otherwise it died before the line above could tie us to it
        importlib.import_module("rolecall.runtime.process")  # what every actor needs
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # the supervisor died meanwhile
            _serve(connection, supervisor, sessions)
    clean_up()


def _serve(connection: socket.socket, supervisor: int, sessions: set[int]) -> None:
    """Until the supervisor is gone. `sessions` are the actors it has, by pid."""
    gc.disable()  # imports make little garbage, and a sixth of their time would go into looking for it
    started: dict[str, int] = {}  # threads, by the module whose import did it
    while data := connection.recv(1 << 16):
        request = json.decode(data)
        if "forget" in request:
            sessions.discard(request["forget"])
        else:
            if not request["fresh"]:
                _preload(request["preloads"], started)
                request["fresh"] = _why_not_fork(started)
                if request["fresh"]:
                    _note(request)
            gc.freeze()
            pid, gate = _fork(request, supervisor, connection)
            sessions.add(pid)
            with gate:
                connection.send(json.encode({"name": request["name"], "pid": pid}))
                with contextlib.suppress(BrokenPipeError):  # the supervisor has killed it already
                    gate.write(b"!")


def _preload(modules: list[str], started: dict[str, int]) -> None:
    for module in modules:
        before = _threads()
        importlib.import_module(module)
        if _threads() > before:
            started[module] = _threads() - before


def _threads() -> int:
    return len(list(Path("/proc/self/task").iterdir()))


def _why_not_fork(started: dict[str, int]) -> str:
    """Empty if it is safe: a child has only the thread that forks, and the locks that others held stay locked."""
    if _threads() == 1:
        return ""
    culprits = " and ".join(f"{module} ({count})" for module, count in started.items())
    by = f", started by importing {culprits}" if culprits else ""
    return f"forking is not safe because the fork server has {_threads()} threads{by}"


def _note(request: dict[str, Any]) -> None:
    text = f"{request['name']} runs in a fresh interpreter: {request['fresh']}"
    print(text, file=sys.stderr, flush=True)


def _kill_session(pid: int) -> None:
    try:
        os.killpg(pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        return  # nothing of it is left, or its number belongs to somebody else by now


def _fork(request: dict[str, Any], supervisor: int, connection: socket.socket) -> tuple[int, BinaryIO]:
    """An actor's pid, and the gate it waits at: it goes on when a byte comes, and ends when none can come."""
    gate, opens = os.pipe()
    reading, writing = os.pipe()
    middle = os.fork()
    if middle == 0:
        pid = os.fork()
        if pid:
            os.write(writing, str(pid).encode())
            os._exit(0)
        for fd in (reading, writing, opens):
            os.close(fd)
        connection.close()
        if not os.read(gate, 1):
            os._exit(1)
        os.close(gate)
        _be_actor(request, supervisor)
    os.close(writing)
    os.close(gate)
    with os.fdopen(reading, "rb") as pipe:
        pid = int(pipe.read())
    os.waitpid(middle, 0)
    return pid, os.fdopen(opens, "wb", buffering=0)


def _be_actor(request: dict[str, Any], supervisor: int) -> NoReturn:
    try:
        gc.enable()
        signal.signal(_SUPERVISOR_DIED, signal.SIG_DFL)
        os.setsid()
        while os.getppid() != supervisor:
            if not Path(f"/proc/{supervisor}").exists():
                os._exit(1)
            time.sleep(0.0002)
        _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != supervisor:
            os._exit(1)  # it died before the line above could tie us to it
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        log = os.open(request["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.close(log)
        os.environ.update(request["environment"])
        if request["fresh"]:
            _note(request)
            # All that was set up above survives it, the tie to the supervisor too.
            command = [request["python"], "-P", "-m", "rolecall.runtime.process", request["spec"]]
            os.execvp(request["python"], command)  # noqa: S606  no shell: it is to be this very process
        from .process import be_actor

        be_actor(Path(request["spec"]))
    finally:
        traceback.print_exc()  # be_actor does not return, so this is what went wrong before it
        os._exit(1)


if __name__ == "__main__":
    main()
