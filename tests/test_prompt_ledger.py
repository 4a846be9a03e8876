"""The prompt source's ledger: what its file says, whenever a kill comes."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from rolecall.actors import ledger as ledger_module
from rolecall.actors.ledger import Heard, Ledger, Loan


def state(ledger: Ledger) -> Any:
    numbers = ledger.next, ledger.leases, ledger.step, ledger.version
    held = {name: set(ledger.held_by(name)) for name in ("a", "b", "c")}
    return numbers, dict(ledger.workers), dict(ledger.loans), set(ledger.returned), held


def change(ledger: Ledger, rng: random.Random) -> None:
    """Something that happens to a prompt source."""
    name = rng.choice("abc")
    match rng.choice(["lend", "lend", "deliver", "take back", "hear", "forget", "step", "afresh"]):
        case "lend":
            ledger.leases += 1
            id = min(ledger.returned, default=ledger.next)
            ledger.next = max(ledger.next, id + 1)
            ledger.lend(id, Loan(name, ledger.leases, 0.0, ledger.version))
        case "deliver" if ledger.loans:
            ledger.deliver(rng.choice(sorted(ledger.loans)))
        case "take back" if ledger.next:
            ledger.take_back(rng.randrange(ledger.next))
        case "hear":
            ledger.hear(name, Heard(1, ledger.leases, rng.random() < 0.5))
        case "forget" if name in ledger.workers and not ledger.held_by(name):
            ledger.forget(name)
        case "step":
            ledger.step, ledger.version = ledger.step + 1, ledger.version + 1
        case "afresh" if rng.random() < 0.1:
            ledger.start_afresh(ledger.step)
        case _:
            pass


@pytest.mark.parametrize("seed", range(10))
def test_the_file_says_what_was_saved_last_even_if_its_end_is_cut_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int
):
    monkeypatch.setattr(ledger_module, "MAX_BYTES", 700)
    rng, file = random.Random(seed), tmp_path / "ledger.jsonl"
    ledger = Ledger(file)
    begun, before = 0, state(ledger)
    for _ in range(300):
        for _ in range(rng.randrange(4)):
            change(ledger, rng)
        written = file.read_bytes() if file.exists() else b""
        ledger.save()
        now = state(ledger)
        assert state(Ledger(file)) == now
        grown = file.read_bytes() if file.exists() else b""
        begun += not grown.startswith(written)
        if grown.startswith(written) and len(grown) > len(written) > 0:
            torn = tmp_path / "torn"  # a line more, of which a kill may leave a part
            torn.write_bytes(grown[: rng.randrange(len(written), len(grown))])
            assert state(Ledger(torn)) == before
            if rng.random() < 0.1:
                file.write_bytes(torn.read_bytes())
                ledger = Ledger(file)
                now = before
        before = now
    assert begun > 5


def test_what_a_worker_costs_does_not_grow_with_the_others(tmp_path: Path):
    file = tmp_path / "ledger.jsonl"
    ledger = Ledger(file)
    for id in range(8000):
        ledger.lend(id, Loan(f"gpu-{id % 1000}/rollout", id, 0.0, 0))
    ledger.save()
    before = file.stat().st_size
    ledger.lend(8000, Loan("gpu-7/rollout", 8000, 0.0, 0))
    ledger.save()
    assert 0 < file.stat().st_size - before < 200
    assert set(ledger.held_by("gpu-7/rollout")) == {*range(7, 8000, 1000), 8000}
