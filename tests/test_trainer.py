"""The trainer: its steps, what it writes, and that no death of it or of its workers changes what is learnt."""

from __future__ import annotations

import json
import secrets
import tempfile
from collections.abc import Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from rolecall import Finished
from rolecall.actors.engines import Sampling
from rolecall.actors.lora import Lora
from rolecall.actors.losses import Loss
from rolecall.actors.prompts import PromptSource
from rolecall.actors.reward import Reward
from rolecall.actors.trainer import Trainer
from rolecall.actors.types import Batch, Group
from rolecall.runtime.ref import Call, bind_transport
from rolecall.runtime.store import PolicyStore, Store

from .fakes import Direct, FakeRollout, FakeTrainer, begin, group, ref
from .faults import FaultProxy
from .s3 import S3Server


class Died(Exception):
    """Of whoever is named in its argument."""


class MortalTrainer(FakeTrainer):
    """Gives the ring an occasion to kill it between any two of its writes."""

    ring: SyncRing

    def _write_metrics(self, *args: Any, **kwargs: Any) -> None:
        self.ring.occasion("trainer")
        super()._write_metrics(*args, **kwargs)
        self.ring.occasion("trainer")

    def _checkpoint(self) -> None:
        super()._checkpoint()
        self.ring.occasion("trainer")


class SyncRing(Direct):
    """A synchronous run on fake networks; at the occasions numbered in `kills` whoever acts dies.

    Messages are idempotent, so a worker's successor gets the message that killed it, as the runtime does it.
    """

    def __init__(
        self, folder: Path, *, steps: int, batch: int, workers: int = 2, checkpoint_every: int = 1,
        kills: Sequence[int] = (),
    ) -> None:  # fmt: skip
        super().__init__()
        self.folder, self.steps, self.batch = folder, steps, batch
        self.checkpoint_every, self.kills = checkpoint_every, set(kills)
        self.occasions = self.incarnations = self.deaths = 0
        self.workers = workers
        self.roles["rollout"] = [f"rollout-{i}" for i in range(workers)]
        for name, actor in self._others().items():
            self.actors[name] = actor
            begin(actor, folder, name)
        for name in self.roles["rollout"]:
            self.start_worker(name)

    def _others(self) -> dict[str, Any]:
        source = PromptSource(
            dataset="tiny", seed=0, groups_per_step=self.batch, steps=self.steps, max_staleness=0
        )
        return {"prompts": source, "reward": Reward(fn="exact_match")}

    def start_worker(self, name: str) -> None:
        self.incarnations += 1
        worker = FakeRollout(
            model="fake", sampling=Sampling(max_tokens=4), group_size=2, lease=-(-self.batch // self.workers),
            seed=0, prompts=ref("prompts"), reward=ref("reward"), weights=Store(),
        )  # fmt: skip
        self.actors[name] = worker
        begin(worker, self.folder, name, incarnation=self.incarnations)

    def start_trainer(self) -> MortalTrainer:
        trainer = MortalTrainer(
            model="fake", loss=Loss(), lora=Lora(rank=1, alpha=1), lr=1.0, temperature=1.0, seed=0,
            steps=self.steps, batch=self.batch, max_staleness=0, checkpoint_every=self.checkpoint_every,
            groups=ref("rollout"), prompts=ref("prompts"), weights=Store(),
        )  # fmt: skip
        trainer.ring = self
        begin(trainer, self.folder, "trainer")
        return trainer

    def occasion(self, who: str) -> None:
        self.occasions += 1
        if self.occasions in self.kills:
            self.deaths += 1
            raise Died(who)

    def ask(self, names: Sequence[str], call: Call, timeout_s: float) -> list[Any]:
        asker = "trainer" if call.method in ("take", "advance", "snapshot", "restore") else "rollout"
        self.occasion(asker)
        if call.method != "take":
            return super().ask(names, call, timeout_s)
        return [self._take(name, call, timeout_s) for name in names]

    def _take(self, name: str, call: Call, timeout_s: float) -> Batch:
        while True:
            try:
                return super().ask([name], call, timeout_s)[0]
            except Died as death:
                assert death.args == ("rollout",)
                self.start_worker(name)

    def run(self) -> PolicyStore:
        trainer = None
        while True:
            try:
                trainer = trainer or self.start_trainer()
                trainer.step()
            except Died as death:
                assert death.args == ("trainer",)
                trainer = None
            except Finished:
                return Store().open("local", self.folder)

    def metrics(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.folder / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(autouse=True)
def unbound() -> Iterator[None]:
    yield
    bind_transport(None)


def digest(store: PolicyStore) -> str:
    head = store.head()
    assert head is not None
    return head.digest


def test_a_step_is_a_line_a_checkpoint_and_a_version(tmp_path: Path):
    ring = SyncRing(tmp_path, steps=3, batch=4)
    store = ring.run()
    lines = ring.metrics()
    assert [line["step"] for line in lines] == [1, 2, 3]
    assert [line["version"] for line in lines] == [0, 1, 2]  # what it was sampled and trained from
    assert [line["groups"] for line in lines] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]
    assert lines[0]["workers"] == {"rollout-0": 2, "rollout-1": 2}
    assert {line["staleness/max"] for line in lines} == {0}
    assert [line["dropped"] for line in lines] == [{}, {}, {}]
    published = [store.policy(version) for version in range(4)]
    assert [policy.step for policy in published] == [0, 1, 2, 3]
    checkpoint = store.latest_checkpoint()
    assert checkpoint is not None and checkpoint[0] == 3


def test_shares_that_do_not_divide_make_whole_batches(tmp_path: Path):
    ring = SyncRing(tmp_path, steps=2, batch=5, workers=3)
    ring.run()
    assert [line["groups"] for line in ring.metrics()] == [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9]]


def learnt(ring: SyncRing) -> tuple[str, list[dict[str, Any]]]:
    """The final adapter, and of each step what a death must not change."""
    store = ring.run()
    same = ("step", "groups", "reward", "staleness/max", "dropped")
    return digest(store), [{key: line[key] for key in same} for line in ring.metrics()]


@lru_cache
def learnt_in_quiet(batch: int) -> tuple[str, list[dict[str, Any]]]:
    with tempfile.TemporaryDirectory() as folder:
        return learnt(SyncRing(Path(folder), steps=4, batch=batch, workers=1))


@settings(max_examples=60, deadline=None, derandomize=True, database=None)
@given(
    batch=st.integers(1, 4),
    workers=st.integers(1, 3),
    checkpoint_every=st.integers(1, 3),
    kills=st.lists(st.integers(1, 80), max_size=6),
)
def test_no_death_changes_what_is_learnt(batch: int, workers: int, checkpoint_every: int, kills: list[int]):
    """Bit for bit: the final adapter, and which groups each step was made of, are those of a quiet run."""
    quiet = learnt_in_quiet(batch)
    with tempfile.TemporaryDirectory() as folder:
        ring = SyncRing(
            Path(folder), steps=4, batch=batch, workers=workers, checkpoint_every=checkpoint_every,
            kills=kills,
        )  # fmt: skip
        assert learnt(ring) == quiet
        versions = [line["version"] for line in ring.metrics()]
        assert versions == sorted(set(versions))


def test_the_deaths_of_the_test_above_do_happen(tmp_path: Path):
    ring = SyncRing(tmp_path, steps=4, batch=2, checkpoint_every=3, kills=range(1, 60, 7))
    ring.run()
    assert ring.deaths == 9
    assert ring.incarnations > 2


def test_lines_of_steps_that_are_made_again_are_written_anew(tmp_path: Path):
    ring = SyncRing(tmp_path, steps=4, batch=2, checkpoint_every=2)
    trainer = ring.start_trainer()
    for _ in range(3):
        trainer.step()
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "cut sh')
    assert trainer.durable == 2
    again = ring.start_trainer()
    assert (again.done, again.version) == (2, 4)  # version 3 was out: it is never used again
    assert [line["step"] for line in ring.metrics()] == [1, 2]
    again.step()
    assert [(line["step"], line["version"]) for line in ring.metrics()] == [(1, 0), (2, 1), (3, 4)]


def test_an_overtaken_trainer_can_publish_no_more(tmp_path: Path):
    from rolecall.runtime.store import Fenced

    ring = SyncRing(tmp_path, steps=4, batch=2)
    first, second = ring.start_trainer(), ring.start_trainer()
    second.step()
    with pytest.raises(Fenced):
        first.step()


class Source(Direct):
    """A buffer and a prompt source that answer what the test says."""

    def __init__(self, batches: list[Batch]) -> None:
        super().__init__()
        self.batches = batches
        self.asked: list[tuple[Any, ...]] = []
        self.successes: list[dict[int, float]] = []  # as told with each version

    def ask(self, names: Sequence[str], call: Call, timeout_s: float) -> list[Any]:
        if call.method == "advance":
            self.successes.append(call.args[2])
        self.asked.append((call.method, *call.args[: 2 if call.method == "advance" else None]))
        answers = {"take": lambda: self.batches.pop(0), "snapshot": lambda: b"as it is"}
        return [answers.get(call.method, lambda: None)()]


def started(folder: Path, **changes: Any) -> Trainer:
    arguments: dict[str, Any] = {
        "model": "fake", "loss": Loss(), "lora": Lora(rank=1, alpha=1), "lr": 1.0, "temperature": 1.0,
        "seed": 0, "steps": 4, "batch": 2, "max_staleness": 3, "groups": ref("buffer"),
        "prompts": ref("prompts"), "weights": Store(),
    }  # fmt: skip
    trainer = FakeTrainer(**(arguments | changes))
    begin(trainer, folder, "trainer")
    return trainer


def batch(*versions: int, dropped: dict[str, int] | None = None, depth: int = 0) -> Batch:
    groups = [group(id, version) for id, version in enumerate(versions)]
    return Batch(groups=groups, dropped=dropped or {}, depth=depth)


@pytest.mark.parametrize("max_staleness", [1, 3])
def test_what_it_tells_and_asks(tmp_path: Path, max_staleness: int):
    """With more than 1 the next step's groups are asked for before the prompt source hears of the version."""
    peers = Source([batch(0, 0), batch(), batch(0, 1, dropped={"stale": 3}, depth=5), batch(1, 2)])
    trainer = started(tmp_path, max_staleness=max_staleness)
    trainer.step()
    trainer.step()  # a batch without groups: stale ones were dropped
    assert trainer.done == 1
    trainer.step()
    first, second, third = ("take", 1, 2, 0, 0), ("take", 2, 2, 1, 1), ("take", 3, 2, 2, 2)
    saved = [("snapshot",), ("snapshot",)]
    if max_staleness > 1:
        assert peers.asked == [
            first, ("advance", 0, 0), *saved, second, ("advance", 1, 1), second, *saved, third, ("advance", 2, 2),
        ]  # fmt: skip
    else:
        assert peers.asked == [
            ("advance", 0, 0), first, *saved, ("advance", 1, 1), second, second, *saved, ("advance", 2, 2),
        ]  # fmt: skip
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert lines[1]["staleness/mean"] == 0.5 and lines[1]["staleness/max"] == 1
    assert lines[1]["dropped"] == {"stale": 3} and lines[1]["buffer/depth"] == 5
    for line in lines:
        parts = ("perf/rollout_wait_s", "perf/fwd_bwd_s", "perf/publish_s")
        assert line["perf/step_s"] == pytest.approx(sum(line[key] for key in parts))


def test_a_share_that_two_have_sampled_is_trained_once_and_what_is_missing_asked_for(tmp_path: Path):
    """The second died after it gave its own, and another sampled that instead of what was left."""
    peers = Source([batch(0), batch(0, 0)])
    trainer = started(tmp_path, max_staleness=0)
    trainer.step()
    assert trainer.done == 1
    assert [asked for asked in peers.asked if asked[0] == "take"] == [("take", 1, 2, 0, 0)] * 2
    [line] = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert json.loads(line)["groups"] == [0, 1]


def test_a_share_that_nobody_has_is_an_error(tmp_path: Path):
    Source([batch(0), batch(0)])
    with pytest.raises(
        ValueError, match=r"step 1 was given the groups \[0\] twice, instead of 2 different ones"
    ):
        started(tmp_path, max_staleness=0).step()


def test_with_each_version_it_tells_how_much_was_right(tmp_path: Path):
    given = batch(0, 0)
    rewarded = [rewards_of(one, own) for one, own in zip(given.groups, ((1, 0.5), (-2, 0)), strict=True)]
    peers = Source([replace(given, groups=rewarded), batch(1, 1)])
    started(tmp_path).step()
    assert peers.successes == [{}, {0: 0.75, 1: 0.0}]


def rewards_of(one: Group, rewards: Sequence[float]) -> Group:
    scored = [replace(each, reward=reward) for each, reward in zip(one.completions, rewards, strict=True)]
    return replace(one, completions=scored)


def test_versions_and_checkpoints_now_and_then(tmp_path: Path):
    peers = Source([batch(0, 0) for _ in range(5)])
    trainer = started(tmp_path, steps=5, publish_every=2, checkpoint_every=3)
    for _ in range(5):
        trainer.step()
    assert [asked for asked in peers.asked if asked[0] == "advance"] == [
        ("advance", 0, 0), ("advance", 2, 1), ("advance", 4, 2), ("advance", 5, 3),
    ]  # fmt: skip
    taken = [asked[3:] for asked in peers.asked if asked[0] == "take"]
    assert taken == [(0, 0), (0, 0), (1, 0), (1, 3), (2, 3)]
    with pytest.raises(Finished):
        trainer.step()
    head = trainer.store.head()
    assert head is not None and (head.version, head.step) == (3, 5)


@pytest.mark.slow
def test_its_loop_lists_the_bucket_once(s3_server: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    for name, value in s3_server.environment().items():
        monkeypatch.setenv(name, value)
    weights = Store(f"s3://{s3_server.bucket}/{secrets.token_hex(8)}")
    Source([batch(version, version) for version in range(40)])
    with FaultProxy(s3_server) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.url)
        for steps, in_the_loop in ((15, 0), (25, 1)):  # the first has collected with its version 0
            trainer = started(tmp_path, steps=40, weights=weights, max_staleness=0)
            at_the_start = lists(proxy)
            for _ in range(steps):
                trainer.step()
            assert len(lists(proxy)) == len(at_the_start) + in_the_loop
        deleted = {seen.path.split("/")[-2] for seen in proxy.of("DELETE", "/manifest.json")}
    assert {f"v{version:06d}" for version in range(1, 38)} <= deleted


def lists(proxy: FaultProxy) -> list[str]:
    return [seen.path for seen in proxy.of("GET") if "list-type=2" in seen.path]


def test_started_again_at_its_end_it_has_nothing_to_do(tmp_path: Path):
    peers = Source([batch(0, 0)])
    started(tmp_path, steps=1).step()
    again = started(tmp_path, steps=1)
    with pytest.raises(Finished):
        again.step()
    assert peers.asked[-1] == ("advance", 1, 1)
