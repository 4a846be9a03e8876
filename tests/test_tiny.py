"""The tiny task and its base model: the text it was trained on, what is held out, and how it is made."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from itertools import islice
from pathlib import Path

import pytest
from rolecall.actors.tiny import BASE
from rolecall.actors.tiny.problems import (
    HARD,
    HELD_OUT,
    Kind,
    Problem,
    held_out,
    held_out_texts,
    problem,
    problems,
    training,
)


def test_text_is_what_the_base_model_was_trained_on() -> None:
    assert problem(random.Random(0)) == Problem(
        "Ann has 9 coins, drops 5, sells 4, finds 5 and wins 1. How many coins now?\n",
        "9-5=4\n4-4=0\n0+5=5\n5+1=6\n#### 6",
        "6",
    )


def test_worked_lines_lead_from_the_first_number_to_the_answer() -> None:
    for drawn in islice(problems(1), 500):
        *lines, last = drawn.worked.split("\n")
        total = int(drawn.text.split(" has ")[1].split()[0])
        assert 2 <= len(lines) <= 5
        for line in lines:
            sign = "+" if "+" in line else "-"
            before, rest = line.split(sign)
            change, after = rest.split("=")
            assert int(before) == total
            total += int(change) if sign == "+" else -int(change)
            assert int(after) == total
            assert 0 <= total <= 24
        assert last == drawn.direct == f"#### {total}" == f"#### {drawn.answer}"


def test_hard_problems_are_longer_and_have_larger_totals_and_their_own_are_held_out() -> None:
    drawn = list(islice(training(1, HARD), 300))
    assert {one.worked.count("=") for one in drawn} == {4, 5}
    assert max(int(one.answer) for one in drawn) == 29
    assert sum("-" in one.worked for one in drawn) < 150
    texts = held_out_texts(HARD)
    assert len(texts) == HELD_OUT and not texts & {one.text for one in drawn}


def test_a_seed_is_a_sequence() -> None:
    assert list(islice(training(1), 20)) == list(islice(training(1), 20))
    assert list(islice(training(1), 20)) != list(islice(training(2), 20))


def test_held_out_problems_are_distinct_and_always_the_same() -> None:
    assert len(held_out_texts()) == HELD_OUT
    assert held_out(10) == held_out(HELD_OUT)[:10]
    with pytest.raises(ValueError, match="1025 held-out problems"):
        held_out(HELD_OUT + 1)


def test_training_passes_over_held_out_problems() -> None:
    unchecked = [drawn.text for drawn in islice(problems(8), 50_000)]
    assert held_out_texts() & set(unchecked), (
        "seed 8 should meet one by chance: the check has something to do"
    )
    checked = [drawn.text for drawn in islice(training(8), 45_000)]
    assert not held_out_texts() & set(checked)


def test_the_shipped_base_was_not_trained_on_held_out_problems() -> None:
    """Replays the draws of `make_base --seed 4`, without its check."""
    rng = random.Random(4)
    seen = set()
    for _ in range(540):
        events = rng.randint(2, 5)
        for _ in range(32):
            seen.add(problem(rng, Kind(fewest=events, most=events)).text)
            rng.random()
    assert len(seen) > 17_000
    assert not held_out_texts() & seen


@pytest.mark.parametrize("module", ["rolecall.actors.tiny.problems", "rolecall.actors.engines"])
def test_needs_no_torch(module: str) -> None:
    code = f"import sys, {module}; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_shipped_files() -> None:
    names = {file.name for file in BASE.iterdir()}
    assert names == {
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    }
    assert (BASE / "model.safetensors").stat().st_size < 2_300_000


@pytest.mark.slow
def test_make_base_learns_and_writes_what_ships(tmp_path: Path) -> None:
    from rolecall.actors.model import load_model, load_tokenizer
    from rolecall.actors.tiny.make_base import make_model, make_tokenizer, save, train

    tokenizer = make_tokenizer()
    model = make_model(tokenizer, seed=4)
    losses = train(model, tokenizer, seed=4, steps=60)
    assert sum(losses[-5:]) < sum(losses[:5]) / 3
    once, again = (train(make_model(tokenizer, seed=4), tokenizer, seed=4, steps=4) for _ in range(2))
    assert once == again
    save(model, tokenizer, tmp_path)

    assert {file.name for file in tmp_path.iterdir()} == {file.name for file in BASE.iterdir()}
    assert (tmp_path / "tokenizer.json").read_bytes() == (BASE / "tokenizer.json").read_bytes()
    for name in ("config.json", "tokenizer_config.json"):
        made, shipped = (json.loads((folder / name).read_text()) for folder in (tmp_path, BASE))
        made.pop("transformers_version", None)
        shipped.pop("transformers_version", None)
        assert made == shipped
    made = load_model(str(tmp_path), device="cpu", dtype="float32").state_dict()
    shipped = load_model("tiny", device="cpu", dtype="float32").state_dict()
    assert {name: tensor.shape for name, tensor in made.items()} == {
        name: tensor.shape for name, tensor in shipped.items()
    }
    text = held_out(1)[0].text
    assert load_tokenizer(str(tmp_path))(text)["input_ids"] == load_tokenizer("tiny")(text)["input_ids"]
