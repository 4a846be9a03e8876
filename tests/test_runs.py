"""Run folders: their names, what is in them, and one that is damaged."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
from rolecall import Unrecoverable
from rolecall.runtime.cli import main
from rolecall.runtime.files import read_lines, write_whole
from rolecall.runtime.runs import RunFolder, create_run, find_run


def test_runs_of_one_second_on_machines_that_share_a_store_have_different_ids(tmp_path: Path):
    runs = [create_run(tmp_path / str(number), "async_grpo", {}) for number in range(3)]
    assert len({run.info.id for run in runs}) > 1  # all three alike: once in 2³² times
    for run in runs:
        assert re.fullmatch(r"async_grpo-\d{8}-\d{6}-[0-9a-f]{4}", run.path.name)
        assert run.info.id == run.path.name


def test_a_joining_machine_keeps_the_runs_id(tmp_path: Path):
    run = create_run(tmp_path, "join-async_grpo", {}, id="theirs")
    assert run.info.id == "theirs"
    assert run.path.name.startswith("join-async_grpo-")


def test_a_run_starts_with_its_process(tmp_path: Path):
    code = (
        "import sys; sys.stdin.read(1); from pathlib import Path; from rolecall.runtime.runs import create_run; "
        f"print(create_run(Path({str(tmp_path)!r}), 'x', {{}}).info.started)"
    )
    before = time.time()
    process = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    after = time.time()
    out, _ = process.communicate(b"x")
    assert before - 0.05 <= float(out) <= after + 0.05  # the kernel counts hundredths


def test_what_is_written_is_whole(tmp_path: Path):
    path = tmp_path / "run.json"
    for data in (b"old", b"new"):
        write_whole(path, data)
        assert path.read_bytes() == data
    assert list(tmp_path.iterdir()) == [path]


def test_a_line_that_is_being_written_is_no_line_yet(tmp_path: Path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n{"step": 2}\n{"st')
    assert RunFolder(tmp_path).lines("metrics.jsonl") == [{"step": 1}, {"step": 2}]
    assert read_lines(tmp_path / "nothing.jsonl") == []


@pytest.mark.parametrize("damage", ["", "{", "[]", '{"id": 3}', "\x00"])
def test_a_damaged_run_hides_no_other(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], damage: str, monkeypatch: pytest.MonkeyPatch
):
    good = create_run(tmp_path, "async_grpo", {})
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad" / "run.json").write_text(damage)
    assert find_run(tmp_path, None).path == good.path
    with pytest.raises(Unrecoverable, match=f"there is no live run in {tmp_path}"):
        find_run(tmp_path, None, live=True)
    for command in (["ps", "bad"], ["stop", "bad"], ["sample", "bad", "hello"]):
        assert main([*command, "--runs", str(tmp_path)]) == 2
        text = capsys.readouterr().err
        assert text.startswith(f"rolecall: {tmp_path / 'bad' / 'run.json'} is damaged (")
        assert text.endswith("): choose another run\n") and text.count("\n") == 1
