"""What a run shows, and that nothing it shows can end it."""

from __future__ import annotations

import io
import os
import sys
import termios
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from rolecall.runtime.console import Console, actors_table, say, terminal_width
from rolecall.runtime.control import ActorStatus
from rolecall.runtime.runs import RunFolder

from .commands import lines


class Outcome(ModuleType):
    """A recipe's `outcome` that knows only one kind of report."""

    def progress(self, reports: Mapping[str, Mapping[str, Any]]) -> str:
        return f"step {reports['trainer']['step']}" if reports else ""

    def describe(self, run: RunFolder, result: Mapping[str, Any]) -> str:
        return f"done: {result}"


def console(
    folder: Path, *, to_stderr: bool = False, awaited: Sequence[str] = (), ca: Path | None = None
) -> Console:
    recipe = ModuleType("recipe")
    recipe.__dict__["outcome"] = Outcome("outcome")
    folder.mkdir(exist_ok=True)
    return Console(RunFolder(folder), recipe, to_stderr=to_stderr, awaited=awaited, ca=ca)


def test_brackets_and_colons_are_printed_as_they_are(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    folder = tmp_path / "[bold]runs :smile:"
    with console(folder) as shown:
        shown.on_death("b", "ValueError: no end in [/INST]", 0.5)
        shown.on_death("b", "[red]ValueError[/red]: :warning:", None)
        shown.show_result({"steps": "[/INST]"})
    out = capsys.readouterr().out
    assert f"in {folder}\n" in out
    assert "b died: ValueError: no end in [/INST]; restarting it in 0.5 s\n" in out
    assert "b died: [red]ValueError[/red]: :warning:\n" in out
    assert "done: {'steps': '[/INST]'}\n" in out


def test_a_run_that_only_others_work_for_says_when_it_waits(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    with console(tmp_path, awaited=["rollout"]) as shown:
        for machines in ([], [], ["a-1"], ["a-1", "b-2"], ["b-2"], [], []):
            if not machines:
                shown.on_report("proxy", {"url": "http://t:1"})  # also when it has been restarted
            shown.on_report("proxy", {"machines": machines})
    waits = f"waiting for a machine to join with: rolecall join http://t:1 --token-file {tmp_path / 'token'}"
    said = [line for line in capsys.readouterr().out.splitlines() if "join" in line]
    assert said == [f"no rollout worker yet: {waits}", f"the last rollout worker has left: {waits}"]


def test_events_nest_what_was_reported(tmp_path: Path):
    values = {"time": 1, "actor": 2, "event": 3, "self": 4, "step": 5}
    with console(tmp_path) as shown:
        shown.on_report("trainer", values)
        shown.on_state("trainer", "up")
        shown.on_death("trainer", "killed", 0.5)
        shown.on_dead_letter("buffer", "put", "stopped")
    events = lines(tmp_path / "events.jsonl")
    assert all(event.pop("time") > 1e9 for event in events)
    assert events == [
        {"actor": "trainer", "event": "report", "values": values},
        {"actor": "trainer", "event": "state", "state": "up"},
        {"actor": "trainer", "event": "death", "reason": "killed", "restart_in_s": 0.5},
        {"actor": "buffer", "event": "dead_letter", "method": "put", "reason": "stopped"},
    ]


@pytest.mark.parametrize("value", [{(1, 2): 3}, {None: 1}, "\ud800"])
def test_a_report_that_json_cannot_hold_is_kept_as_text(tmp_path: Path, value: object):
    with console(tmp_path) as shown:
        shown.on_report("trainer", {"step": 1, "value": value})
    (event,) = lines(tmp_path / "events.jsonl")
    assert (event["actor"], event["event"]) == ("trainer", "report")
    assert ascii(value) in event["as_text"]


def test_a_progress_line_that_fails_is_shown_as_such(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    with console(tmp_path) as shown:
        shown.on_report("trainer", {"pace": 1})
    assert "the recipe's outcome.progress raised KeyError: 'step'" in capsys.readouterr().out


def test_only_the_proxy_says_where_to_join(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    with console(tmp_path) as shown:
        shown.on_report("trainer", {"step": 1, "url": "http://wandb.example/1"})
        assert "join" not in capsys.readouterr().out
        shown.on_report("proxy", {"url": "http://here:8700"})
        assert "rolecall join http://here:8700 --token-file" in capsys.readouterr().out


def test_who_joins_needs_a_certificate_that_only_the_run_has(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    with console(tmp_path, ca=tmp_path / "cert.pem") as shown:
        shown.on_report("proxy", {"url": "https://here:8700"})
    assert f"--token-file {tmp_path}/token --ca {tmp_path}/cert.pem\n" in capsys.readouterr().out


def broken_pipe() -> io.TextIOWrapper:
    """A text stream whose reader has gone."""
    reading, writing = os.pipe()
    os.close(reading)
    return os.fdopen(writing, "w", encoding="utf-8")


@pytest.mark.parametrize("to_stderr", [False, True])
def test_a_reader_that_has_gone_costs_only_what_it_would_have_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, to_stderr: bool
):
    with broken_pipe() as stream:
        monkeypatch.setattr(sys, "stderr" if to_stderr else "stdout", stream)
        with console(tmp_path, to_stderr=to_stderr) as shown:
            shown.on_report("trainer", {"step": 1})
            shown.on_death("trainer", "killed", 0.5)
            shown.show_result({})
    assert [event["event"] for event in lines(tmp_path / "events.jsonl")] == ["report", "death"]


def test_a_terminal_that_has_gone_costs_only_the_view(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    ours, theirs = os.openpty()
    with os.fdopen(theirs, "w", encoding="utf-8") as stream:
        monkeypatch.setattr(sys, "stdout", stream)
        monkeypatch.setenv("TERM", "xterm")
        with console(tmp_path) as shown:
            assert shown._live.is_started
            shown.on_report("trainer", {"step": 1})
            os.close(ours)
            shown.on_report("trainer", {"step": 2})
            shown.on_death("trainer", "killed", 0.5)
        assert sys.stdout is stream
    assert len(lines(tmp_path / "events.jsonl")) == 3


def test_say_to_nobody(capsys: pytest.CaptureFixture[str]):
    assert not say("lost", None)
    with broken_pipe() as stream:
        assert not say("lost", stream)
        say("lost", stream)
    assert say("heard", sys.stdout)
    assert capsys.readouterr().out == "heard\n"


def test_say_to_a_full_disk_is_an_error():
    stream = Path("/dev/full").open("w")  # noqa: SIM115  closing it fails as well
    with pytest.raises(OSError, match="No space left"):
        say("lost", stream)
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
    stream.close()


ACTORS = [
    ActorStatus("prompts", 4194304, "up", 1, 0, 0, None, None, 24 << 20),
    ActorStatus("rollout-10", 77, "starting", 12, 3, 1024, 99.5, 0.04, 1 << 30),
    ActorStatus("trainer", 8, "up", 13, 0, 2, 100.0, 6000.0, 2750 << 20),
    ActorStatus("evaluator", 0, "waiting", 0, 0, 16, 5999.0, None, 0),
]


def test_a_table_says_everything_in_columns():
    assert actors_table(ACTORS).splitlines() == [
        "ROLE           PID STATE    INCARNATION RESTARTS WAITING  OLDEST HANDLING  MEMORY",
        "prompts    4194304 up                 1        0       0       -        -  24 MiB",
        "rollout-10      77 starting          12        3    1024  99.5 s    0.0 s 1.0 GiB",
        "trainer          8 up                13        0       2   2 min    1.7 h 2.7 GiB",
        "evaluator        - waiting            -        0      16 100 min        -       -",
    ]


def test_a_narrow_terminal_gets_fewer_columns_and_is_told_which():
    whole = actors_table(ACTORS).splitlines()
    width = max(map(len, whole))
    assert actors_table(ACTORS, width).splitlines() == whole
    narrower = actors_table(ACTORS, width - 1).splitlines()
    assert "INCARNATION" not in narrower[0] and narrower[-1] == "no room for INCARNATION"
    for width in range(20, 200):
        *rows, last = actors_table(ACTORS, width).splitlines()
        assert max(map(len, rows)) <= width
        assert [row.split()[0] for row in rows[:4]] == ["ROLE", "prompts", "rollout-10", "trainer"]
        titles = set(rows[0].split()) | set(last.removeprefix("no room for ").split(", "))
        assert titles >= set(whole[0].split())


def test_nobody_is_a_table_of_titles():
    assert actors_table([]).split() == actors_table(ACTORS).splitlines()[0].split()


def test_only_a_terminal_has_a_width():
    assert terminal_width(None) is None
    assert terminal_width(io.StringIO()) is None
    ours, theirs = os.openpty()
    with os.fdopen(theirs, "w", encoding="utf-8") as stream:
        assert terminal_width(stream) is None  # a new one has not said
        termios.tcsetwinsize(theirs, (24, 61))
        assert terminal_width(stream) == 61
    os.close(ours)
