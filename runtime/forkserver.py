"""A process that imports what is heavy once and forks actors from there.

Importing torch, transformers and peft takes seconds; a fork takes milliseconds. The server stays
single-threaded and opens no ZeroMQ context and no CUDA device, so its children are as good as new.

Requests and replies are JSON datagrams on a socket pair:
    {"name", "spec", "log", "preloads"}  →  {"name", "spec", "pid"}
    {"forget": pid}                         its session is gone: the number may soon be somebody else's
Each actor is forked twice, so that it becomes a child of the supervisor (a subreaper), leads its own session,
and dies with the supervisor. When the supervisor is gone the server kills whatever their sessions left.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from msgspec import json

__all__ = ["become_subreaper", "main", "start"]

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_libc = ctypes.CDLL(None, use_errno=True)


def become_subreaper() -> None:
    """Orphans of this process's descendants become its own children, so that it can reap them."""
    if _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER) failed")


def start(log: Path) -> tuple[subprocess.Popen[bytes], socket.socket]:
    """Start a fork server; its end of the conversation is the returned socket."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    # One thread while importing: a BLAS that starts its pool would make every fork unsafe.
    environment = {**os.environ, "OPENBLAS_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    environment.setdefault("OMP_NUM_THREADS", "1")
    command = [sys.executable, "-m", "rolecall.runtime.forkserver", str(theirs.fileno()), str(os.getpid())]
    with theirs, log.open("ab") as output:
        process = subprocess.Popen(
            command,
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env=environment,
            start_new_session=True,
        )
    return process, ours


def main() -> None:
    connection = socket.socket(fileno=int(sys.argv[1]))
    supervisor = int(sys.argv[2])
    # Stopping is the supervisor's affair; a Ctrl-C or a kill of the group must not come first.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    children: set[int] = set()
    while data := connection.recv(1 << 16):
        request = json.decode(data)
        if "forget" in request:
            children.discard(request["forget"])
            continue
        for module in request["preloads"]:
            importlib.import_module(module)
        gc.freeze()
        pid = _fork(request, supervisor, connection)
        children.add(pid)
        connection.send(json.encode({"name": request["name"], "spec": request["spec"], "pid": pid}))
    for pid in children:
        _kill_session(pid)


def _kill_session(pid: int) -> None:
    try:
        os.killpg(pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        return  # nothing of it is left, or its number belongs to somebody else by now


def _fork(request: dict[str, Any], supervisor: int, connection: socket.socket) -> int:
    reading, writing = os.pipe()
    middle = os.fork()
    if middle == 0:
        pid = os.fork()
        if pid:
            os.write(writing, str(pid).encode())
            os._exit(0)
        os.close(reading)
        os.close(writing)
        connection.close()
        _be_actor(request, supervisor)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        pid = int(pipe.read())
    os.waitpid(middle, 0)
    return pid


def _be_actor(request: dict[str, Any], supervisor: int) -> None:
    code = 1
    try:
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
        from .process import run_actor

        run_actor(Path(request["spec"]))
        code = 0
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    main()
