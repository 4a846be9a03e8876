"""Rollouts that take their time."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from rolecall import Unrecoverable
from rolecall.actors.delay import Delay
from rolecall.recipes import async_grpo, sync_grpo
from rolecall.runtime.ref import bind_transport
from rolecall.runtime.testing import LocalRun

from .fakes import FakeRollout
from .test_recipes import SMALL, check_ledger, final_digest, run
from .test_rollout import BATCH, Peers, work


@pytest.mark.parametrize(
    ("text", "delay"),
    [
        ("none", Delay()),
        ("fixed(0.2)", Delay(0.2)),
        ("fixed(3)", Delay(3.0)),
        ("lognormal(0.5,1.0)", Delay(0.5, 1.0)),
        ("lognormal( .5, 1 )", Delay(0.5, 1.0)),
    ],
)
def test_how_it_is_written(text: str, delay: Delay):
    assert Delay.parse(text) == delay


@pytest.mark.parametrize(
    "text", ["", "0.2", "fixed()", "fixed(-1)", "lognormal(0.5)", "fixed(1,2)", "fixed(nan)"]
)
def test_how_it_is_not(text: str):
    with pytest.raises(Unrecoverable, match=r"is no delay: write none, fixed\(0.2\)") as caught:
        Delay.parse(text)
    assert caught.value.exit_code == 2


def test_a_lognormal_has_its_median_and_mean():
    drawn = [Delay(0.5, 1.0).seconds(0, prompt, "rollout-0") for prompt in range(4000)]
    assert statistics.median(drawn) == pytest.approx(0.5, rel=0.08)
    assert statistics.mean(drawn) == pytest.approx(0.5 * 1.6487, rel=0.08)
    assert sum(value > 0.5 * 2.71828 for value in drawn) / len(drawn) == pytest.approx(0.159, abs=0.02)


def test_seed_prompt_and_worker_decide():
    delay = Delay(0.5, 1.0)
    assert delay.seconds(0, 1, "a") == delay.seconds(0, 1, "a")
    assert (
        len(
            {
                delay.seconds(0, 1, "a"),
                delay.seconds(1, 1, "a"),
                delay.seconds(0, 2, "a"),
                delay.seconds(0, 1, "b"),
            }
        )
        == 4
    )


@pytest.fixture
def peers(tmp_path: Path) -> Iterator[Peers]:
    yield Peers(tmp_path, max_staleness=2)
    bind_transport(None)


def slow(peers: Peers, delay: Delay, *, sink: bool = True) -> FakeRollout:
    """A worker on whose clock a sleep is over at once."""
    worker = peers.worker(sink=sink)

    def sleep(seconds: float) -> None:
        peers.now += seconds

    worker.context = dataclasses.replace(worker.context, now=lambda: peers.now, sleep=sleep)
    worker.delay = delay
    return worker


def test_a_group_is_whole_when_it_is_due_and_keeps_its_seat_until_then(peers: Peers):
    worker, reports = slow(peers, Delay(2.0)), list[dict[str, Any]]()
    worker.context = dataclasses.replace(worker.context, report=reports.append)
    work(worker)
    assert peers.delivered() == []
    assert len(peers.prompts.ledger.loans) == BATCH  # and no more: all seats are taken
    assert worker.step() == 2.0
    peers.now = 1.5
    assert worker.step() == 0.5
    peers.now = 2.0
    work(worker)
    assert [group.id for group in peers.delivered()] == list(range(BATCH))
    # To whoever looks at the worker's time, it sampled.
    assert (reports[0]["lease_wait_s"], reports[0]["put_wait_s"]) == (0.0, 0.0)


def test_a_slow_group_holds_up_no_other(peers: Peers):
    delay = Delay(1.0, 1.5)
    worker = slow(peers, delay)
    dues = sorted(delay.seconds(worker.seed, id, worker.worker) for id in range(BATCH))
    work(worker)
    for count, due in enumerate(dues[:-1], 1):
        peers.now = due
        work(worker)
        assert len([group for group in peers.delivered() if group.id < BATCH]) == count
    assert any(group.id >= BATCH for group in peers.delivered()) or len(peers.prompts.ledger.loans) > 1


def test_without_a_sink_a_share_takes_as_long_as_its_slowest_group(tmp_path: Path):
    peers = Peers(tmp_path, max_staleness=0)
    delay = Delay(1.0, 1.0)
    worker = slow(peers, delay, sink=False)
    batch = worker.take(1, BATCH, 0, 0)
    assert len(batch.groups) == BATCH
    assert peers.now == pytest.approx(
        max(delay.seconds(worker.seed, id, worker.worker) for id in range(BATCH))
    )
    bind_transport(None)


@pytest.mark.slow
def test_a_synchronous_run_learns_the_same_however_slow_its_workers_are(tmp_path: Path):
    for delay in ("none", "lognormal(5,1)"):
        run(sync_grpo.build(sync_grpo.Config(**SMALL, rollout_delay=delay)), tmp_path / delay)
    assert final_digest(tmp_path / "none") == final_digest(tmp_path / "lognormal(5,1)")


@pytest.mark.slow
def test_a_local_run_with_delays_repeats_in_virtual_time(tmp_path: Path):
    def made(folder: Path) -> LocalRun:
        return run(async_grpo.build(async_grpo.Config(**SMALL, rollout_delay="lognormal(9,1)")), folder)

    first, second = made(tmp_path / "first"), made(tmp_path / "second")
    assert first.turns == second.turns
    assert final_digest(first.folder) == final_digest(second.folder)
    assert first.now > 9
    check_ledger(first.folder, steps=3, batch=4, max_staleness=2)
