"""Data sets: what they give, in which order, and what is said of broken ones."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from itertools import islice
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rolecall import Unrecoverable
from rolecall.actors.data import load_dataset, load_rows
from rolecall.actors.tiny import problems


def write(folder: Path, *rows: object, name: str = "tasks.jsonl") -> str:
    path = folder / name
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
    return str(path)


def refused(name: str) -> str:
    with pytest.raises(Unrecoverable) as caught:
        load_dataset(name, seed=0)
    assert caught.value.exit_code == 2
    return str(caught.value)


def test_tiny_never_gives_a_held_out_problem():
    dataset, held_out = load_dataset("tiny", seed=3), problems.held_out_texts()
    drawn = [dataset[i][0] for i in range(5000)]
    assert held_out.isdisjoint(drawn)
    assert [text for text, _ in load_rows("tiny", 50)] == [kept.text for kept in problems.held_out(50)]


def test_tiny_is_the_sequence_of_its_seed():
    dataset = load_dataset("tiny", seed=3)
    expected = [(problem.text, problem.answer) for problem in islice(problems.training(3), 40)]
    assert dataset[39] == expected[39]  # random access
    assert [dataset[i] for i in range(40)] == expected
    assert load_dataset("tiny", seed=4)[0] != expected[0]


def test_more_held_out_problems_than_there_are():
    with pytest.raises(Unrecoverable, match=r"5000 problems .* tiny has 1024: ask for fewer") as caught:
        load_rows("tiny", 5000)
    assert caught.value.exit_code == 2


@pytest.mark.parametrize("text", ["prompt", "question", "problem"])
@pytest.mark.parametrize("answer", ["answer", "solution"])
def test_columns_by_their_usual_names(tmp_path: Path, text: str, answer: str):
    name = write(tmp_path, {text: "1+1?", answer: "2", "level": 3})
    assert load_dataset(name, seed=0)[0] == ("1+1?", "2")


def test_numbers_as_answers_blank_lines_and_odd_characters(tmp_path: Path):
    path = tmp_path / "tasks.jsonl"
    path.write_text('\n{"prompt": "one\u2028line", "answer": 2}\n\n{"prompt": "é", "answer": 0.5}', "utf-8")
    assert sorted(load_rows(str(path), 9)) == [("one\u2028line", "2"), ("é", "0.5")]


@given(count=st.integers(1, 12), seed=st.integers(0, 2**32))
def test_each_pass_is_a_permutation_and_its_own(
    tmp_path_factory: pytest.TempPathFactory, count: int, seed: int
):
    rows = [{"prompt": str(i), "answer": str(i)} for i in range(count)]
    name = write(tmp_path_factory.mktemp("data"), *rows)
    dataset = load_dataset(name, seed=seed)
    sequence = [dataset[i] for i in range(3 * count)]
    for at in range(0, 3 * count, count):
        assert sorted(sequence[at : at + count]) == sorted((str(i), str(i)) for i in range(count))
    again = load_dataset(name, seed=seed)
    assert [again[i] for i in reversed(range(3 * count))] == sequence[::-1]


def test_passes_and_seeds_differ(tmp_path: Path):
    name = write(tmp_path, *({"prompt": str(i), "answer": "0"} for i in range(50)))
    first = load_dataset(name, seed=0)
    order = [first[i] for i in range(100)]
    assert order[:50] != order[50:]
    other = load_dataset(name, seed=1)
    assert [other[i] for i in range(50)] != order[:50]


def test_rows_to_evaluate_on_are_the_first_as_they_lie(tmp_path: Path):
    name = write(tmp_path, *({"prompt": str(i), "answer": "0"} for i in range(5)))
    assert load_rows(name, 3) == [("0", "0"), ("1", "0"), ("2", "0")]
    assert len(load_rows(name, 99)) == 5


def test_a_missing_file(tmp_path: Path):
    name = str(tmp_path / "missing.jsonl")
    assert refused(name) == f"can't read the data set {name}: No such file or directory; check the path"


def test_an_empty_file(tmp_path: Path):
    assert refused(write(tmp_path)).endswith("tasks.jsonl has no rows: give one with at least one")


def test_a_folder_and_bytes_that_are_no_text(tmp_path: Path):
    (tmp_path / "folder.jsonl").mkdir()
    assert "Is a directory" in refused(str(tmp_path / "folder.jsonl"))
    (tmp_path / "bytes.jsonl").write_bytes(b"\xff\xfe\x00")
    assert "is not UTF-8" in refused(str(tmp_path / "bytes.jsonl"))


@pytest.mark.parametrize(
    ("line", "text"),
    [
        ('{"prompt": "1+1?", "answer"', "line 2 of {path} is not JSON (Expecting"),
        ("[", "line 2 of {path} is not JSON (Expecting"),
        (
            '["1+1?", "2"]',
            'line 2 of {path} needs a text "prompt" (or "question", "problem") and an "answer"',
        ),
        ('{"prompt": "1+1?"}', "line 2 of {path} needs"),
        ('{"answer": "2"}', "line 2 of {path} needs"),
        ('{"prompt": 11, "answer": "2"}', "line 2 of {path} needs"),
        ('{"prompt": "1+1?", "answer": null}', "line 2 of {path} needs"),
    ],
)
def test_a_broken_line_is_named(tmp_path: Path, line: str, text: str):
    path = tmp_path / "tasks.jsonl"
    path.write_text('{"prompt": "fine", "answer": "1"}\n' + line + "\n")
    assert text.format(path=path) in refused(str(path))


HUB = """
import sys
from rolecall.actors.data import load_dataset
from rolecall import Unrecoverable
try:
    load_dataset("nobody/nothing:main", seed=0)
except Unrecoverable as error:
    print(error)
    sys.exit(error.exit_code)
"""


@pytest.mark.slow
def test_the_hub_out_of_reach_is_said_within_seconds(tmp_path: Path):
    pytest.importorskip("datasets")
    began = time.monotonic()
    environment = {"HF_ENDPOINT": "http://127.0.0.1:9", "HF_HOME": str(tmp_path)}
    result = subprocess.run([sys.executable, "-c", HUB], env=environment, capture_output=True, text=True)
    assert result.returncode == 2, result.stderr
    assert result.stdout.startswith("can't load the data set nobody/nothing:main: Couldn't reach")
    assert "check the name (owner/name:config:split) and the connection" in result.stdout
    assert time.monotonic() - began < 20


def test_the_hub_without_its_library():
    code = "import sys; sys.modules['datasets'] = None" + HUB
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.returncode == 2, result.stderr
    assert "comes from the Hugging Face hub: pip install 'rolecall[hub]', or give the path" in result.stdout
