"""Hosts of a network of their own on this machine: Linux's network namespaces, for who may make them."""

from __future__ import annotations

import fcntl
import heapq
import os
import random
import secrets
import select
import shutil
import struct
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType

from .commands import Command, until

_TUNSETIFF, _IFF_TAP, _IFF_NO_PI = 0x400454CA, 0x0002, 0x1000
_LISTEN = "0A"  # the state in /proc/net/tcp
# A host sees its own folder of all hosts' (`$1`), and has a name of its own (`$2`).
_APART = """
echo "$2" > /proc/sys/kernel/hostname && mount -t tmpfs none "$1" && mkdir "$1/$2" &&
mount -c --bind /proc/self/cwd "$1/$2" && cd "$1/$2" && shift 2 && exec "$@"
"""


class NotPermitted(Exception):
    """This machine has no namespaces for us: why."""


def _ip(*words: str) -> str:
    done = subprocess.run(["ip", *words], capture_output=True, text=True, check=False)
    if done.returncode:
        raise NotPermitted(f"ip {' '.join(words)}: {done.stderr.strip() or done.returncode}")
    return done.stdout


class Network:
    """A switch, whose address is this machine's, and hosts on it, which it removes at the end."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.name = f"rc{secrets.token_hex(3)}"
        self.prefix = f"198.18.{secrets.randbelow(256)}"  # for tests of networks (RFC 2544)
        self.address = f"{self.prefix}.1"
        self.hosts: list[Host] = []

    def __enter__(self) -> Network:
        if os.geteuid() != 0 or not shutil.which("ip") or not Path("/dev/net/tun").exists():
            raise NotPermitted("network namespaces need root, `ip` and /dev/net/tun")
        try:
            _ip("link", "add", self.name, "type", "bridge")
            _ip("addr", "add", f"{self.address}/24", "dev", self.name)
            _ip("link", "set", self.name, "up")
            _ip("netns", "add", self.name)  # whether there may be hosts
            _ip("netns", "del", self.name)
        except NotPermitted:
            self._remove()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for host in self.hosts:
            host.remove()
        self._remove()

    def _remove(self) -> None:
        subprocess.run(["ip", "link", "del", self.name], capture_output=True, check=False)

    def host(self, name: str, *, delay_s: float = 0.0, loss: float = 0.0) -> Host:
        """A host more. delay_s, loss: of each frame from it or to it, and which share of them never arrives."""
        host = Host(self, name, len(self.hosts) + 2)
        self.hosts.append(host)
        host.plug_in(Cable(delay_s, loss, random.Random(0)) if delay_s or loss else None)
        return host


class Host:
    """A network namespace, and for each command a view of the file system in which other hosts' folders are empty."""

    def __init__(self, network: Network, name: str, number: int) -> None:
        self.network, self.name = network, name
        self.namespace, self.port = f"{network.name}-{name}", f"{network.name}p{number}"
        self.address = f"{network.prefix}.{number}"
        self.folder = network.folder / name
        self.folder.mkdir(parents=True)
        self.cable: Cable | None = None
        self.commands: list[Command] = []

    def plug_in(self, cable: Cable | None) -> None:
        _ip("netns", "add", self.namespace)
        inside = f"{self.port}i"
        if cable is None:
            _ip("link", "add", self.port, "type", "veth", "peer", "name", inside)
        else:
            self.cable = cable
            cable.lay(self.port, inside)
        _ip("link", "set", inside, "netns", self.namespace, "name", "eth0")
        _ip("link", "set", self.port, "master", self.network.name, "up")
        for words in (("link", "set", "lo", "up"), ("addr", "add", f"{self.address}/24", "dev", "eth0"),
                      ("link", "set", "eth0", "up")):  # fmt: skip
            _ip("-n", self.namespace, *words)
        self._wait_until_plugged_in()

    def cut(self) -> None:
        """Pull its plug."""
        _ip("link", "set", self.port, "down")

    def mend(self) -> None:
        _ip("link", "set", self.port, "up")
        self._wait_until_plugged_in()

    def _wait_until_plugged_in(self) -> None:
        """Until then there is no route to anybody."""
        until(lambda: "LOWER_UP" in _ip("-n", self.namespace, "link", "show", "eth0"), 10)
        until(lambda: "state forwarding" in _ip("-d", "link", "show", self.port), 10)

    def run(self, words: Sequence[str], environment: Mapping[str, str]) -> Command:
        """`rolecall …` there."""
        command = Command(list(words), self.folder, environment, self._through())
        self.commands.append(command)
        return command

    def output(self, *words: str) -> str:
        """Of another command there."""
        command = [*self._through(), *words]
        return subprocess.run(command, cwd=self.folder, capture_output=True, text=True, check=True).stdout

    def _through(self) -> list[str]:
        apart = ["unshare", "--mount", "--uts", "sh", "-c", _APART, "sh", str(self.network.folder), self.name]
        return ["ip", "netns", "exec", self.namespace, *apart]

    def listening(self) -> list[str]:
        """Where it could be dialled, if anywhere."""
        rows = [line.split() for line in self.output("cat", "/proc/net/tcp", "/proc/net/tcp6").splitlines()]
        return [row[1] for row in rows if row[3] == _LISTEN]

    def power_off(self) -> None:
        """Nobody hears of it any more, nobody of it lives, and its kernel has nothing left to send."""
        self.cut()
        self._kill()
        self._unplug()

    def _kill(self) -> None:
        def one_more() -> bool:
            left = [pid for command in self.commands for pid in command.processes()]
            for pid in left:
                try:
                    os.kill(pid, 9)
                except ProcessLookupError:
                    continue
            return not left

        until(one_more, 10)

    def remove(self) -> None:
        self._kill()
        if self.cable is not None:
            self.cable.take_up()
        self._unplug()

    def _unplug(self) -> None:
        subprocess.run(["ip", "link", "del", self.port], capture_output=True, check=False)
        subprocess.run(["ip", "netns", "del", self.namespace], capture_output=True, check=False)


class Cable:
    """Two network devices whose frames arrive at the other one late, and some never."""

    def __init__(self, delay_s: float, loss: float, rng: random.Random) -> None:
        self.delay_s, self.loss, self.rng = delay_s, loss, rng
        self.lost = 0
        self._ends: list[int] = []
        self._stop = os.eventfd(0)
        self._thread = threading.Thread(target=self._carry, daemon=True)

    def lay(self, *names: str) -> None:
        for name in names:
            end = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
            fcntl.ioctl(end, _TUNSETIFF, struct.pack("16sH22x", name.encode(), _IFF_TAP | _IFF_NO_PI))
            self._ends.append(end)
        self._thread.start()

    def take_up(self) -> None:
        os.eventfd_write(self._stop, 1)
        self._thread.join()
        for fd in (*self._ends, self._stop):
            os.close(fd)

    def _carry(self) -> None:
        other = dict(zip(self._ends, reversed(self._ends), strict=True))
        under_way: list[tuple[float, int, int, bytes]] = []
        count = 0
        while True:
            wait_s = under_way[0][0] - time.monotonic() if under_way else None
            ready = select.select([*self._ends, self._stop], [], [], wait_s and max(0.0, wait_s))[0]
            if self._stop in ready:
                return
            for end in ready:
                frame = os.read(end, 1 << 16)
                count += 1
                if self.rng.random() < self.loss:
                    self.lost += 1
                else:
                    heapq.heappush(under_way, (time.monotonic() + self.delay_s, count, other[end], frame))
            while under_way and under_way[0][0] <= time.monotonic():
                _, _, end, frame = heapq.heappop(under_way)
                try:
                    os.write(end, frame)
                except OSError:  # its device is down
                    self.lost += 1
