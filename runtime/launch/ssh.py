"""`rolecall launch ssh`: workers on hosts of one's own, by the system's ssh client.

What a host is told comes through ssh's stdin as a shell script, secrets included: no command line shows them,
here or there, and only the token is written down, readable by its owner, beside the run's certificate if that
needs one to be checked by.
"""

from __future__ import annotations

import argparse
import os
import shlex
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from ..console import say
from ..errors import RolecallError, Unrecoverable
from ..remote import CA, read_token
from .credentials import BEARER, aws_keys, model_token
from .state import OnHosts, launch_name, save
from .workers import join_flags

__all__ = ["launch", "status", "stop"]

_SSH = ("ssh", "-o", "BatchMode=yes", "-o", "ConnectTimeout=10")
PATIENCE_S = 120  # for one host's answer

# $! is the worker itself: setsid becomes it. It has joined when it names its run's folder.
_START = """\
umask 077
folder="$HOME/.rolecall/"{name}
mkdir -p "$folder" && cd "$folder" || exit 1
printf '%s\\n' {token} > token
{certificates}
{exports}
setsid nohup {rolecall} join {url} --token-file "$folder/token" {flags} > log 2>&1 < /dev/null &
echo $! > pid
for _ in $(seq 60); do
    kill -0 "$(cat pid)" 2> /dev/null || {{ tail -n 3 log; exit 1; }}
    grep -q '^run ' log && exit 0
    sleep 0.5
done
echo 'it has not joined within 30 s'; tail -n 3 log; exit 1
"""
# A pid may be another's by now: it is the worker only while its command line names this launch.
_IS_UP = """\
cd "$HOME/.rolecall/"{name} 2> /dev/null || {{ echo 'never started'; exit 0; }}
up() {{ grep -aqs -- {name} "/proc/$(cat pid)/cmdline"; }}
"""
_STATUS = _IS_UP + 'up && echo -n "running: " || echo -n "ended: "; tail -n 1 log\n'
_STOP = (
    _IS_UP
    + """\
up && kill -TERM "$(cat pid)"
for _ in $(seq 60); do up || break; sleep 0.5; done
up && kill -s KILL -- "-$(cat pid)"
rm -f token
echo ended
"""
)


def launch(options: argparse.Namespace) -> int:
    """Start `rolecall join` on each host; it goes on when this command has ended."""
    if options.workers is not None and options.workers < 1:
        raise Unrecoverable(f"--workers {options.workers}: at least one", exit_code=2)
    token = read_token(options.token_file)
    now = time.time()
    record = OnHosts(name=launch_name("ssh", now), started=now, hosts=options.hosts)
    told = aws_keys(os.environ) | model_token(os.environ)
    told |= {name: os.environ[name] for name in (BEARER,) if os.environ.get(name)}
    certificates = _certificates(options.ca)
    flags = shlex.join(join_flags(options, gpus=options.gpus, workers=options.workers))
    script = _START.format(
        name=record.name,
        token=shlex.quote(token),
        certificates=f"printf '%s\\n' {shlex.quote(certificates)} > ca.pem" if certificates else "",
        exports="\n".join(f"export {name}={shlex.quote(value)}" for name, value in told.items()),
        rolecall=shlex.quote(options.rolecall),
        url=shlex.quote(options.url.rstrip("/")),
        flags=f'{flags} --ca "$folder/ca.pem"' if certificates else flags,
    )
    save(options.runs, record)
    say(f"launch {record.name}", sys.stdout)
    return _on_all(record.hosts, script, "joined", "did not join")


def _certificates(file: Path | None) -> str:
    """Of --ca, or of the variable that stands for it; empty for neither."""
    file = file or (Path(os.environ[CA]) if os.environ.get(CA) else None)
    if file is None:
        return ""
    try:
        return file.read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise Unrecoverable(f"can't read certificates from {file}: {error}", exit_code=2) from error


def status(record: OnHosts) -> int:
    return _on_all(record.hosts, _STATUS.format(name=record.name), "", "no answer")


def stop(record: OnHosts) -> int:
    """Let each host's workers leave the run in order; after 30 s they are killed."""
    return _on_all(record.hosts, _STOP.format(name=record.name), "", "may still be running")


def _on_all(hosts: list[str], script: str, good: str, bad: str) -> int:
    """Run the script on every host at once and say how it went, in the hosts' order. Raises if one failed."""
    with ThreadPoolExecutor(max_workers=min(32, len(hosts))) as pool:
        answers = list(pool.map(lambda host: _on(host, script), hosts))
    failed = []
    for host, (code, text) in zip(hosts, answers, strict=True):
        say(f"{host}: {': '.join(filter(None, [bad if code else good, text]))}", sys.stdout)
        failed += [host] if code else []
    if failed:
        raise RolecallError(f"{', '.join(failed)}: {bad}; the lines above say why")
    return 0


def _on(host: str, script: str) -> tuple[int, str]:
    """(ssh's exit code, what it said on one line)."""
    if host.startswith("-"):
        raise Unrecoverable(f"{host} is no host: it would be an option of ssh", exit_code=2)
    try:
        ran = subprocess.run(
            [*_SSH, host, "sh -s"],
            input=script,
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return 255, f"no answer within {PATIENCE_S} s"
    except FileNotFoundError as error:
        raise Unrecoverable("there is no ssh client on this machine: install one", exit_code=2) from error
    return ran.returncode, " · ".join((ran.stdout + ran.stderr).split("\n")).strip(" ·")
