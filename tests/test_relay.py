"""Actors of two machines: messages both ways, bridges that are killed, machines that are lost."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from rolecall.runtime.proxy import FAREWELL_S
from rolecall.runtime.remote import SESSION_HEADER, TOKEN_HEADER

from .commands import until
from .processes import GRAPHS, Run

pytestmark = [pytest.mark.slow, pytest.mark.timeout(90)]

LEASE_S = 5.0  # which a loaded computer keeps


class Node:
    """A machine that has joined: its supervisor and actors, and what it prints."""

    def __init__(self, url: str, token_file: Path, folder: Path) -> None:
        folder.mkdir()
        self.mark = uuid.uuid4().hex
        self.process = subprocess.Popen(
            [sys.executable, str(Path(__file__).parent / "joining.py"), str(GRAPHS / "far.py"), url, str(token_file),
             str(folder)],
            stdout=subprocess.PIPE, text=True, env={**os.environ, "ROLECALL_TEST_MARK": self.mark},
        )  # fmt: skip
        self.lines: list[dict[str, Any]] = []
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(json.loads(line))

    def pid(self, name: str) -> int:
        """Of the one that is up now."""
        return [
            line["pid"] for line in list(self.lines) if line.get("state") == "up" and line["name"] == name
        ][-1]

    def ups(self, name: str) -> int:
        return sum(line.get("state") == "up" and line["name"] == name for line in list(self.lines))

    def signal(self, number: signal.Signals) -> None:
        """To all of its processes, its supervisor first."""
        mark = f"ROLECALL_TEST_MARK={self.mark}".encode()
        for entry in [Path(f"/proc/{self.process.pid}"), *Path("/proc").iterdir()]:
            try:
                if entry.name.isdigit() and mark in (entry / "environ").read_bytes():
                    os.kill(int(entry.name), number)
            except (FileNotFoundError, ProcessLookupError, PermissionError):
                continue

    def wait(self) -> int:
        code = self.process.wait(30.0)
        self._reader.join()
        return code


class Visit:
    """A run of graphs/far.py; `story` is told in a thread of its own, and ends the run when it is done."""

    def __init__(
        self, folder: Path, story: Callable[[Visit], None], lease_s: float = 30.0, tls: str = ""
    ) -> None:
        self.folder, self.story = folder, story
        self.token_file = folder / "token"
        self.token_file.touch(mode=0o600)
        self.token_file.write_text("the-token\n")
        self.nodes: list[Node] = []
        self.stopped = False
        self.error: BaseException | None = None
        self.thread: threading.Thread | None = None
        self.kept: tuple[httpx.Client, ...] = ()
        settings = {"token_file": self.token_file, "lease_s": lease_s, "tls": tls}
        self.run = Run("far", folder, settings, self.act)

    def act(self, run: Run, kind: str, name: str, value: Any) -> None:
        if kind == "report" and "url" in value and self.thread is None:
            self.url = value["url"]
            self.thread = threading.Thread(target=self._tell)
            self.thread.start()

    def _tell(self) -> None:
        try:
            self.story(self)
        except BaseException as error:  # noqa: BLE001  raised by `go`
            self.error = error
        finally:
            self.stop()

    def stop(self) -> None:
        if not self.stopped:  # to ask twice would kill everybody
            self.stopped = True
            self.run.supervisor.stop()

    def go(self) -> None:
        try:
            outcome = self.run.go()
            assert self.thread is not None
            self.thread.join()
            if self.error is not None:
                raise self.error
            assert outcome.exit_code == 130, outcome.story
        finally:
            for node in self.nodes:
                node.signal(signal.SIGKILL)
                node.wait()

    def join(self) -> Node:
        node = Node(self.url, self.token_file, self.folder / f"node{len(self.nodes)}")
        self.nodes.append(node)
        return node

    def notes(self) -> dict[str, list[int]]:
        """What the ledger has handled, of each sender."""
        notes: dict[str, list[int]] = defaultdict(list)
        file = self.folder / "state" / "ledger" / "notes"
        written = file.read_text() if file.exists() else ""
        for line in written[: written.rfind("\n") + 1].splitlines():  # the last may not be whole yet
            sender, number = line.split()
            notes[sender].append(int(number))
        return notes

    def reports(self, key: str) -> list[dict[str, Any]]:
        return [report for report in list(self.run.reports["driver"]) if key in report]

    def progress(self) -> None:
        """Wait until more has gone both ways."""
        notes, echoes = sum(map(len, self.notes().values())), len(self.reports("echo"))
        until(lambda: sum(map(len, self.notes().values())) >= notes + 30, 30.0)
        until(lambda: len(self.reports("echo")) >= echoes + 3, 30.0)

    def check(self) -> None:
        """Everything was handled exactly once, in order for each sender."""
        for sender, numbers in self.notes().items():
            assert numbers == list(range(1, len(numbers) + 1)), sender
        numbers = [report["echo"] for report in self.reports("echo")]
        assert numbers == sorted(numbers)


def test_whoever_is_killed_in_between_costs_nothing_but_time(tmp_path: Path):
    def story(visit: Visit) -> None:
        node = visit.join()
        visit.progress()
        visit.run.kill("proxy")
        visit.progress()
        os.kill(node.pid("link"), signal.SIGKILL)
        visit.progress()
        ups = node.ups("link")
        visit.run.kill("proxy")
        os.kill(node.pid("link"), signal.SIGKILL)
        visit.progress()
        assert node.ups("link") == ups + 1
        assert visit.reports("down") == visit.reports("died") == []

        os.kill(node.pid("worker"), signal.SIGKILL)
        until(lambda: visit.reports("down"), 30.0)
        visit.progress()
        [down] = visit.reports("down")
        assert (down["down"], down["reason"], down["final"]) == ("gpu-1/worker", "killed by SIGKILL", False)
        assert len(visit.notes()) == 2
        state = {actor.name: actor.state for actor in visit.run.supervisor.status().actors}
        assert state["gpu-1/worker"] == "up"
        visit.stop()
        assert node.wait() == 0, node.lines
        letters = [(line["dead_letter"], line["reason"]) for line in node.lines if "dead_letter" in line]
        assert set(letters) <= {("note", "stopped")} and len(letters) < 10  # what was under way at the end

    visit = Visit(tmp_path, story)
    visit.go()
    visit.check()
    assert visit.run.dead_letters == []


def test_a_machine_that_is_lost_or_comes_back_too_late(tmp_path: Path):
    def story(visit: Visit) -> None:
        first, second = visit.join(), visit.join()
        until(lambda: len(visit.notes()) == 2, 30.0)
        visit.progress()
        first.signal(signal.SIGKILL)
        until(lambda: visit.reports("down"), 30.0)
        visit.progress()  # the others go on
        second.signal(signal.SIGSTOP)
        until(lambda: len(visit.reports("down")) == 2, 30.0)
        second.signal(signal.SIGCONT)
        assert second.wait() == 3
        assert "goes on without this machine" in second.lines[-1]["story"]
        for down in visit.reports("down"):
            machine = down["down"].partition("/")[0]
            assert down["reason"] == f"machine {machine} has not been heard of for {LEASE_S:g} s"
            assert down["final"]
        assert {down["down"] for down in visit.reports("down")} == {"gpu-1/worker", "gpu-2/worker"}
        assert {name for name, reason in visit.run.deaths} == {"gpu-1/worker", "gpu-2/worker"}
        third = visit.join()
        visit.progress()
        assert {note.partition("/")[0] for note in visit.notes()} == {"gpu-1", "gpu-2", "gpu-3"}
        third.process.send_signal(signal.SIGTERM)  # it leaves in order, and is not waited for
        assert third.wait() == 130
        until(lambda: len(visit.reports("down")) == 3, 30.0)
        down = visit.reports("down")[-1]
        assert (down["down"], down["reason"], down["final"]) == ("gpu-3/worker", "", True)

    visit = Visit(tmp_path, story, lease_s=LEASE_S)
    visit.go()
    visit.check()


def test_the_end_of_a_run_does_not_wait_for_machines_that_are_given_up_nor_for_strangers(tmp_path: Path):
    ends_at: list[float] = []

    def story(visit: Visit) -> None:
        client = httpx.Client(
            base_url=visit.url, headers={TOKEN_HEADER: visit.token_file.read_text().strip()}
        )
        assert client.get("/v1/who").json() == "proxy"  # not whoever it says
        stranger = httpx.Client(base_url=visit.url)
        joined = client.post("/v1/relay/join", content=b"lost").json()
        proof = f"{joined['number']}.{joined['secret']}"
        assert client.post("/v1/relay/open", headers={SESSION_HEADER: proof}).status_code == 200
        until(lambda: any(report.get("machines") == [] for report in visit.run.reports["proxy"][2:]), 30.0)
        assert stranger.get("/v1/docs").status_code == 200
        ends_at.append(time.monotonic() + FAREWELL_S / 2)
        visit.stop()
        visit.kept = client, stranger  # their connections stay open

    visit = Visit(tmp_path, story, lease_s=1.0)
    visit.go()
    assert time.monotonic() < ends_at[0]
    for client in visit.kept:
        client.close()
