"""Stand-ins for ssh, for `rolecall join` on its hosts, and for kubectl: programs for the front of the path."""

from __future__ import annotations

from pathlib import Path

# It notes what it was called with, and runs the command here, in a home of the host's own.
SSH = """\
#!/bin/sh
while [ "$1" = -o ]; do shift 2; done
host=$1; shift
echo "$host" "$@" >> {here}/ssh.log
[ "$host" = down ] && { echo "ssh: connect to host down port 22: No route to host" >&2; exit 255; }
export HOME={here}/"$host"; mkdir -p "$HOME"; cd "$HOME"; exec sh -c "$*"
"""
# `rolecall join`, as far as a host can tell; the host called `old` has none that works.
ROLECALL = """\
#!/bin/sh
echo "$0" "$@" > "$HOME/called"
env > "$HOME/environment"
case "$HOME" in *old) echo "rolecall: the run at $2 refused the token"; exit 2;; esac
echo "run join-async_grpo, in $HOME"
trap 'kill $!; echo "left the run"; exit 0' TERM
sleep 1000 & wait
"""
KUBECTL = """\
#!/bin/sh
echo "$@" >> {here}/kubectl.log
[ "$1" = apply ] && cat > {here}/applied.yaml
exit 0
"""


def install(here: Path) -> Path:
    """Put them into `here`/bin, which is returned. Each host is a folder in `here`; so are the logs of calls."""
    bin = here / "bin"
    bin.mkdir()
    for name, text in (("ssh", SSH), ("rolecall", ROLECALL), ("kubectl", KUBECTL)):
        (bin / name).write_text(text.replace("{here}", str(here)))
        (bin / name).chmod(0o755)
    return bin
