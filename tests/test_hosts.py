"""A run over hosts that share nothing but a network, which fails while it runs."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from .commands import Command, lines, proxy_url, until
from .network import Host, Network, NotPermitted
from .s3 import S3Server
from .test_join import RECIPE, TESTS
from .test_run import check_ledger

pytestmark = [pytest.mark.slow, pytest.mark.timeout(200)]

STEPS, BATCH = 80, 4
STALENESS = 2
CUT_S = 20.0  # of the 30 s after which a machine counts as lost


@pytest.fixture
def network(tmp_path: Path) -> Iterator[Network]:
    with ExitStack() as stack:
        try:
            made = stack.enter_context(Network(tmp_path / "hosts"))
        except NotPermitted as error:
            pytest.skip(str(error))
        yield made


@pytest.fixture
def bucket(network: Network, tmp_path: Path) -> Iterator[S3Server]:
    """At the switch's own address."""
    (tmp_path / "s3").mkdir()
    server = S3Server(tmp_path / "s3", host=network.address)
    server.start()
    yield server
    server.stop()


class Far:
    """The run on a host of its own, and what is seen of the others there."""

    def __init__(self, network: Network, bucket: S3Server) -> None:
        path = os.pathsep.join(filter(None, [str(TESTS), os.environ.get("PYTHONPATH", "")]))
        self.environment = bucket.environment() | {"PYTHONPATH": path}
        self.network, self.host = network, network.host("trainer")
        settings = [
            f"store=s3://{bucket.bucket}/far",
            f"steps={STEPS}",
            f"batch={BATCH}",
            "pace_s=0.5",
            "lease_s=4",
        ]
        chosen = [word for setting in settings for word in ("--set", setting)]
        words = ["run", RECIPE, "--proxy", f"{self.host.address}:0", *chosen]
        self.command = self.host.run(words, self.environment)
        self.folder = self.command.run_folder()
        self.url = proxy_url(self.folder)

    def join(self, host: Host) -> Command:
        shutil.copyfile(self.folder / "token", host.folder / "token")
        return host.run(["join", self.url, "--token-file", "token"], self.environment)

    def hosts(self, after: int) -> set[str]:
        """Whose groups were trained after that many steps: `a` of a-1/rollout."""
        metrics = lines(self.folder / "metrics.jsonl")
        return {worker.rpartition("-")[0] for line in metrics[after:] for worker in line["workers"]}

    def steps(self) -> int:
        return len(lines(self.folder / "metrics.jsonl"))

    def hear_from(self, hosts: str) -> None:
        """Wait until groups of these are trained that were sampled later than now."""
        after = self.steps() + STALENESS + 1
        until(lambda: set(hosts) <= self.hosts(after), 60)

    def deaths(self) -> dict[str, str]:
        events = lines(self.folder / "events.jsonl")
        return {event["actor"]: event["reason"] for event in events if event["event"] == "death"}


def test_hosts_that_are_cut_off_lost_and_added_cost_nothing_but_time(network: Network, bucket: S3Server):
    far = Far(network, bucket)
    a, b = network.host("a"), network.host("b")
    c = network.host("c", delay_s=0.05, loss=0.02)  # 0.1 s there and back
    joined = {host.name: far.join(host) for host in (a, b, c)}
    far.hear_from("abc")
    assert [host.listening() for host in (a, b, c)] == [[], [], []]  # they only dial out
    assert a.output("ls", str(network.folder)) == "a\n"

    off_at = time.monotonic()
    b.power_off()
    far.hear_from("ac")
    cut_at = time.monotonic()
    a.cut()
    far.hear_from("c")
    b.plug_in(None)
    d = network.host("d")
    joined |= {host.name: far.join(host) for host in (b, d)}
    until(lambda: time.monotonic() > cut_at + CUT_S, CUT_S)
    a.mend()
    far.hear_from("abcd")
    until(far.deaths, off_at + 60.0 - time.monotonic())
    (far.folder / "hurry").touch()
    code, out, err = far.command.finish(60)
    assert code == 0, err
    for command in joined.values():
        code, out, err = command.finish(30)
        assert (code, out.splitlines()[-1]) == (0, "the run has finished"), err
    deaths = far.deaths()
    assert len(deaths) == 1, deaths
    [(who, why)] = deaths.items()
    machine = who.removesuffix("/rollout")
    assert machine.startswith("b-") and why == f"machine {machine} has not been heard of for 30 s"
    check_ledger(far.folder, STEPS, BATCH)
    assert c.cable is not None and c.cable.lost > 20
    assert [pid for host in network.hosts for command in host.commands for pid in command.processes()] == []
