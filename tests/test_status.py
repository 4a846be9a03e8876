"""What the supervisor knows of everybody without asking anybody."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest
from rolecall.runtime.child import Child
from rolecall.runtime.control import NODE_BITS, ActorStatus, Member
from rolecall.runtime.status import run_status

from .processes import Run

pytestmark = [pytest.mark.slow, pytest.mark.timeout(60)]


def test_status_names_everybody_and_what_they_handle(tmp_path: Path):
    seen: list[ActorStatus] = []

    def act(run: Run, kind: str, name: str, value: Any) -> None:
        if kind == "report" and value.get("hanging"):
            seen.extend(run.supervisor.status().actors)
            run.kill(name)

    run = Run("talk", tmp_path, {"scene": "kill"}, act)
    assert run.go().exit_code == 0
    assert [(one.name, one.state, one.restarts) for one in seen] == [
        ("target", "up", 0),
        ("relay", "up", 0),
        ("caller", "up", 0),
    ]
    assert [one.handling_s is not None for one in seen] == [True, False, False]
    assert seen[0].handling_s is not None
    assert 0.0 <= seen[0].handling_s < 60.0
    assert len({one.pid for one in seen}) == 3


def test_status_sums_what_waits_over_all_who_sent_it(tmp_path: Path):
    role = Run("tree", tmp_path).graph["a"]
    children = [Child(role, 0, name, sockets=tmp_path) for name in ("a", "b", "c")]
    for child in children[:2]:
        child.adopt(os.getpid())
    now = time.monotonic_ns()
    children[0].page.note_sent(1, 3, now - 2 * 10**9)
    children[1].page.note_sent(1, 4, now - 5 * 10**9)
    children[2].page.note_sent(1, 100, 1)  # before it died
    children[1].page.begin(7, 1, now - 10**9)
    children[0].page.note_sent(3, 2, now - 10**9)
    far = Member("gpu-1/d", "d", 1 << NODE_BITS, "cut", node="gpu-1")
    status = run_status(children, [far], 6)
    for child in children[:2]:
        os.close(child.pidfd)
    a, b, c, d = status.actors
    assert (d.name, d.state, d.waiting, d.pid, d.handling_s) == ("gpu-1/d", "cut", 2, 0, None)
    assert (a.waiting, b.waiting, c.waiting, status.dead_letters) == (0, 7, 0, 6)
    assert (a.oldest_s, c.oldest_s) == (None, None)
    assert b.oldest_s is not None and 5.0 <= b.oldest_s < 60.0
    assert b.handling_s is not None and 1.0 <= b.handling_s < 60.0
    assert (a.handling_s, c.handling_s, c.pid, c.rss) == (None, None, 0, 0)
    assert a.rss > 1 << 20
