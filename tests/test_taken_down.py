"""Mail of an actor that is taken down, and lives on: it waits for the next incarnation."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from .processes import Run

pytestmark = [pytest.mark.slow, pytest.mark.timeout(60)]

Act = Callable[[Run, str, str, Any], None]


def take_down(by: Callable[[Run], Any]) -> Act:
    """Act once the sender of graphs/taken.py has sent everything and the ledger is in its first message."""

    def act(run: Run, kind: str, name: str, value: Any) -> None:
        if kind == "report" and ("sent" in value or "holding" in value):
            seen.append(name)
            if sorted(seen) == ["ledger", "sender"]:
                by(run)

    seen: list[str] = []
    return act


@pytest.mark.parametrize(
    ("settings", "by"),
    [
        ({"strategy": "REST_FOR_ONE"}, lambda run: run.kill("victim")),
        ({"strategy": "ONE_FOR_ALL", "subtree": "true"}, lambda run: run.kill("victim")),
        ({}, lambda run: run.supervisor.restart("ledger")),
    ],
)
def test_the_mail_of_who_is_taken_down_waits_for_its_next_incarnation(
    tmp_path: Path, settings: dict[str, Any], by: Callable[[Run], Any]
):
    run = Run("taken", tmp_path, settings, take_down(by))
    assert run.go().exit_code == 0
    lines = run.reports["sender"][-1]["lines"]
    assert [line for line, _ in lines] == ["held", *map(str, range(100))]
    incarnations = [int(incarnation) for _, incarnation in lines]
    assert incarnations[0] < incarnations[1] == incarnations[-1]
    assert run.dead_letters == []
