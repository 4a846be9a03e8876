"""The rollout worker, alone with real peers and a fake engine."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any

import pytest
from rolecall import Finished, Ref, Unrecoverable
from rolecall.actors.buffer import Buffer
from rolecall.actors.canary import Quarantined
from rolecall.actors.engines import Sampled, Sampling
from rolecall.actors.pace import Pace
from rolecall.actors.prefetch import Prefetch
from rolecall.actors.prompts import PromptSource
from rolecall.actors.reward import Reward, exact_match
from rolecall.actors.rollout import RolloutWorker
from rolecall.actors.types import Group, Prompt
from rolecall.runtime.ref import Call, bind_transport
from rolecall.runtime.store import PolicyStore, Store

from .fakes import Direct, FakeEngine, FakeRollout, begin, fake_version, ref
from .s3 import S3Server

STEPS, BATCH, GROUP_SIZE = 4, 4, 3


class Peers(Direct):
    """Everybody round the worker: 4 steps of 4 groups, version 0 published, at most 2 versions behind."""

    def __init__(self, folder: Path, max_staleness: int) -> None:
        super().__init__()
        self.folder, self.now = folder, 0.0
        self.prompts = PromptSource(
            dataset="tiny", seed=0, groups_per_step=BATCH, steps=STEPS, max_staleness=max_staleness,
            clock=lambda: self.now,
        )  # fmt: skip
        self.buffer = Buffer(
            capacity=99, max_staleness=max_staleness, prompts=ref("prompts"), weights=Store()
        )
        self.reward = Reward(fn=exact_match)
        self.actors |= {"prompts": self.prompts, "buffer": self.buffer, "reward": self.reward}
        for name, actor in self.actors.items():
            begin(actor, folder, name)
        self.prompts.spare(-99)  # all is lent that may be
        self.store: PolicyStore = Store().open("local", folder)
        self.epoch = self.store.take_epoch()
        self.publish(0, step=0)

    def publish(self, version: int, *, step: int) -> None:
        files = fake_version(f"weights after step {step}".encode())
        self.store.publish(files, version=version, step=step, epoch=self.epoch)
        self.prompts.advance(step, version, {})

    def worker(
        self, *, sink: bool, name: str = "rollout", incarnation: int = 1, lease: int = BATCH, node: str = "",
        max_staleness: int = 2, max_tokens: int = 4,
    ) -> FakeRollout:  # fmt: skip
        to: Ref[Buffer] | None = ref("buffer") if sink else None
        made = FakeRollout(
            model="fake", sampling=Sampling(max_tokens=max_tokens), group_size=GROUP_SIZE, lease=lease, seed=5,
            prompts=ref("prompts"), reward=ref("reward"), weights=Store(), sink=to,
            max_staleness=max_staleness, clock=lambda: self.now,
        )  # fmt: skip
        begin(made, self.folder, name, incarnation=incarnation, node=node)
        return made

    def delivered(self) -> list[Group]:
        return [self.buffer._waiting[id] for id in sorted(self.buffer._waiting)]


@pytest.fixture
def peers(tmp_path: Path) -> Iterator[Peers]:
    yield Peers(tmp_path, max_staleness=2)
    bind_transport(None)


@pytest.fixture
def sync_peers(tmp_path: Path) -> Iterator[Peers]:
    yield Peers(tmp_path, max_staleness=0)
    bind_transport(None)


def work(worker: FakeRollout, steps: int = 4) -> None:
    """Let it go on until it waits for others, who answer at once here: at most so many steps."""
    for _ in range(steps):
        worker.step()


def test_one_round_is_lease_sample_score_put(peers: Peers):
    worker = peers.worker(sink=True, lease=3, node="far")
    worker.step()
    assert peers.prompts.ledger.loans.keys() == {0, 1, 2}  # asked for, while there is nothing to sample
    worker.step()
    assert peers.delivered() == []
    worker.step()
    groups = peers.delivered()
    assert [group.id for group in groups] == [0, 1, 2]
    published = peers.store.policy(0)
    for group in groups:
        assert group.prompt_ids == list(group.prompt.text.encode())
        assert (group.version, group.digests, group.worker) == (0, {0: published.digest}, "far/rollout")
        assert len(group.completions) == GROUP_SIZE
        for completion in group.completions:
            assert completion.reward == exact_match(group.prompt, completion.text)
            assert len(completion.ids) == len(completion.logprobs) == len(completion.versions)
    worker.step()  # asking again has said that they were delivered
    assert not {0, 1, 2} & peers.prompts.ledger.loans.keys()
    assert peers.prompts.ledger.returned == set()


class Slow(FakeEngine):
    """One completion a step, the shortest prompts' first; a version's go on under it after a swap."""

    def step(self) -> list[Sampled]:
        first, self._under_way = self._under_way[:1], self._under_way[1:]
        return first


def test_prompts_join_and_groups_leave_while_others_are_sampled(peers: Peers):
    worker = peers.worker(sink=True, lease=2)
    worker.engine = Slow()
    running = []
    while len(peers.delivered()) < 2 * BATCH:
        worker.step()
        running.append(worker.engine.running)
    first = next(at for at, count in enumerate(running) if count)
    # Room for two prompts, of which one is always half-way when the other is done: it never runs empty.
    assert min(running[first : -2 * GROUP_SIZE]) >= GROUP_SIZE - 1
    assert max(running) == 2 * GROUP_SIZE - 1


def test_a_completion_ends_under_the_version_it_began_with(peers: Peers):
    worker = peers.worker(sink=True, lease=2)
    worker.engine = Slow()
    for _ in range(3):
        worker.step()
    peers.publish(1, step=1)
    work(worker, 30)
    versions = {group.id: group.version for group in peers.delivered()}
    assert versions[0] == versions[1] == 0
    assert set(versions.values()) == {0, 1}
    for group in peers.delivered():
        assert group.digests == {group.version: peers.store.policy(group.version).digest}


def test_a_version_that_was_collected_before_it_was_fetched_is_passed_over(peers: Peers):
    worker = peers.worker(sink=True)
    for version in range(1, 5):
        peers.publish(version, step=version)
    peers.prompts.advance(0, 2, {})  # all that this worker has heard of
    peers.store.collect(keep=0)
    work(worker)
    assert worker.version == 4 and {group.version for group in peers.delivered()} == {4}


def test_it_samples_with_the_newest_version(peers: Peers):
    worker = peers.worker(sink=True)
    work(worker, 3)
    peers.publish(1, step=1)
    work(worker)
    assert [group.version for group in peers.delivered()][:BATCH] == [0] * BATCH
    assert peers.delivered()[-1].version == 1
    assert peers.delivered()[-1].digests == {1: peers.store.policy(1).digest}


def test_a_prompt_that_asks_for_a_version_waits_until_it_is_here(peers: Peers):
    """The bucket is slow: what runs goes on, and what must be newer waits."""
    worker = peers.worker(sink=True, lease=1)
    worker.engine = Slow()
    worker.step()
    worker.step()
    worker.prefetch = prefetch = Prefetch(peers.store)  # a thread that has not been started
    peers.publish(1, step=1)
    while worker.engine.running:
        worker.step()
        assert worker.version == 0
    prefetch.look()
    work(worker, 2)
    assert worker.version == 1


class Endless(FakeEngine):
    """The completions of the first prompt never end; others take one step."""

    def step(self) -> list[Sampled]:
        done = [one for one in self._under_way if one.id >= GROUP_SIZE]
        self._under_way = [one for one in self._under_way if one.id < GROUP_SIZE]
        return done


def test_what_it_holds_stays_its_own_however_many_leases_come_meanwhile(peers: Peers):
    peers.prompts.steps = 1000
    peers.buffer.capacity = 10_000
    worker = peers.worker(sink=True, lease=2)
    worker.engine = Endless()
    for step in range(200):
        peers.now += 10.0  # 2000 s in all, and a loan holds 600
        worker.step()
        peers.prompts.step()
        if step % 10 == 0:
            peers.publish(peers.prompts.ledger.version + 1, step=peers.prompts.ledger.step + 1)
    assert peers.prompts.ledger.loans[0].lease == 1
    assert len(peers.delivered()) > 20
    worker.on_stop()
    assert peers.prompts.ledger.loans == {} and 0 in peers.prompts.ledger.returned


def test_what_was_refused_is_lent_again_at_once_although_no_more_is_lent(peers: Peers):
    worker = peers.worker(sink=True, lease=99)
    worker.step()
    worker.step()
    peers.buffer.record.version = 9  # the trainer is ahead of all that is sampled now
    worker.step()
    assert peers.buffer.record.dropped == {"stale": 3 * BATCH}
    peers.buffer.record.version = 0
    work(worker)
    assert [group.id for group in peers.delivered()] == list(range(3 * BATCH))
    assert peers.now == 0.0


def test_an_idle_worker_says_what_it_has_delivered_before_it_is_lent_again(peers: Peers):
    worker = peers.worker(sink=True, lease=3 * BATCH)
    work(worker, 6)
    assert len(peers.delivered()) == 3 * BATCH and peers.prompts.ledger.loans
    while (pause := worker.step()) is not None:
        peers.now += pause
        peers.prompts.step()
    assert peers.now < 600.0
    assert peers.prompts.ledger.loans == {} and peers.prompts.ledger.returned == set()


def test_a_version_that_comes_between_two_answers_is_not_slept_through(peers: Peers):
    worker = peers.worker(sink=True)
    work(worker, 8)
    peers.publish(1, step=1)

    def another(name: str, call: Call) -> None:
        if call.method == "next":
            peers.before = lambda name, call: None
            peers.publish(2, step=2)

    peers.before = another
    delivered = len(peers.delivered())
    for _ in range(12):
        assert worker.step() == 0.0 or not worker._queue
    assert worker.version == 2 and len(peers.delivered()) > delivered


class OneLong(FakeEngine):
    """Of each three completions the first takes thirty steps, the others one."""

    def __init__(self) -> None:
        super().__init__()
        self.steps = 0
        self.began: dict[int, int] = {}

    def step(self) -> list[Sampled]:
        self.steps += 1
        for one in self._under_way:
            self.began.setdefault(one.id, self.steps)
        done = [one for one in self._under_way if one.id % 3 or self.steps - self.began[one.id] >= 30]
        self._under_way = [one for one in self._under_way if one not in done]
        return done


def test_seats_that_siblings_have_left_are_taken(peers: Peers):
    peers.prompts.steps = 1000
    peers.prompts.pace = Pace(1000, 1000)
    peers.buffer.capacity = 10_000
    worker = peers.worker(sink=True, lease=8)
    worker.engine = OneLong()
    taken = []
    for _ in range(100):
        worker.step()
        taken.append(worker.engine.running)
    assert sum(taken[20:]) / len(taken[20:]) > 0.75 * 8 * GROUP_SIZE
    assert max(taken) <= 8 * GROUP_SIZE


def test_a_share_stays_its_workers_until_the_next(sync_peers: Peers):
    worker = sync_peers.worker(sink=False, lease=2, max_staleness=0)
    first = [group.id for group in worker.take(1, BATCH, 0, 0).groups]
    for _ in range(10):
        pause = worker.step()
        assert pause is not None
        sync_peers.now += pause + 1.0
        worker.step()
        sync_peers.prompts.step()
    assert sorted(sync_peers.prompts.ledger.loans) == first


class Stale(FakeEngine):
    """Like a prefix cache that outlives a swap: what it computes is the version before's."""

    def load(self, version: int, digest: str, folder: Path) -> None:
        before = self._weights
        super().load(version, digest, folder)
        self._weights = before or self._weights


def test_no_group_leaves_a_worker_that_samples_something_else_than_it_says(peers: Peers):
    worker = peers.worker(sink=True)
    worker.engine = Stale()
    work(worker, 3)
    peers.publish(1, step=1)
    says = r"worker rollout can't prove that it samples version 1: [34] of the canary's 4 log-probs differ"
    for _ in range(2):  # and it does not get through by trying again
        with pytest.raises(Quarantined, match=says):
            work(worker)
    sampled_before = [group.version for group in peers.delivered()]
    assert set(sampled_before) == {0}
    work(peers.worker(sink=True, incarnation=2))
    sampled_since = [group.version for group in peers.delivered()][len(sampled_before) :]
    assert len(sampled_since) >= BATCH and set(sampled_since) == {1}
    assert peers.buffer.record.dropped == {}


def test_a_worker_that_is_taken_from_dies_of_it_instead_of_the_trainer(sync_peers: Peers):
    worker = sync_peers.worker(sink=False, lease=2, max_staleness=0)
    worker.engine = Stale()
    worker.take(1, BATCH, 0, 0)
    sync_peers.publish(1, step=1)
    with pytest.raises(SystemExit, match="Quarantined: worker rollout can't prove that it samples version 1"):
        worker.take(2, BATCH, 1, 1)


def test_a_version_without_a_canary_is_not_sampled(peers: Peers):
    files = {"adapter.bin": b"whoever published this"}
    peers.store.publish(files, version=1, step=1, epoch=peers.epoch)
    peers.prompts.advance(1, 1, {})
    with pytest.raises(Quarantined, match=r"version 1: its canary\.json cannot be read"):
        work(peers.worker(sink=True))
    assert peers.delivered() == []


class Several(FakeEngine):
    """Still needs the versions of the requests that it has not finished."""

    @property
    def versions(self) -> list[int]:
        return list(range(self.version + 1))


def test_folders_that_the_engine_may_read_again_stay(peers: Peers):
    workers = [peers.worker(sink=True, name=name) for name in ("several", "one")]
    workers[0].engine = Several()
    kept: list[list[list[int]]] = []
    for worker in workers:
        asked: list[list[int]] = []
        fetch = worker.store.fetch

        def noted(
            version: int, *, keep: Collection[int] = (), asked: Any = asked, fetch: Any = fetch
        ) -> Path:
            asked.append(sorted(keep))
            return fetch(version, keep=keep)

        worker.store.fetch = noted
        for version in range(3):
            if version > peers.prompts.ledger.version:
                peers.publish(version, step=version)
            worker._load(version)
            worker._prove()
        kept.append(asked)
    assert kept == [[[0], [0, 1], [0, 1, 2]], [[0], [0, 1], [1, 2]]]


def test_a_folder_is_not_fetched_from_ahead(peers: Peers):
    assert peers.worker(sink=True).prefetch is None


@pytest.mark.slow
def test_a_bucket_is_until_it_stops(s3_server: S3Server, bucket: Callable[..., object], tmp_path: Path):
    bucket()
    weights = Store(f"s3://{s3_server.bucket}/ahead")
    trainer = weights.open("local", tmp_path / "trainer")
    trainer.publish(fake_version(b"weights"), version=0, step=0, epoch=trainer.take_epoch())
    worker = FakeRollout(
        model="fake", sampling=Sampling(max_tokens=4), group_size=2, lease=3, seed=5, prompts=ref("prompts"),
        reward=ref("reward"), weights=weights,
    )  # fmt: skip
    begin(worker, tmp_path / "worker", "rollout")
    assert worker.prefetch is not None
    assert "prefetch" in {thread.name for thread in threading.enumerate()}
    worker.on_stop()
    assert "prefetch" not in {thread.name for thread in threading.enumerate()}
    worker.prefetch.look()
    [cached] = (tmp_path / "worker" / "cache").glob("v*")
    assert (cached / "adapter.bin").read_bytes() == b"weights"


@pytest.mark.parametrize(("max_staleness", "max_loras"), [(0, 2), (1, 2), (2, 3), (8, 9)])
def test_an_engine_has_room_for_the_versions_in_use(max_staleness: int, max_loras: int):
    made = RolloutWorker(
        model="fake", sampling=Sampling(max_tokens=4), group_size=2, lease=3, seed=5, prompts=ref("prompts"),
        reward=ref("reward"), weights=Store(), max_staleness=max_staleness,
    )  # fmt: skip
    assert made.max_loras == max_loras


def test_every_completion_has_a_seed_of_its_own_for_ever(peers: Peers):
    worker = peers.worker(sink=True)
    work(worker, 2)
    engine = worker.engine
    assert isinstance(engine, FakeEngine)
    assert len(set(engine.seeds)) == BATCH * GROUP_SIZE
    assert all(0 <= seed < 2**64 for seed in engine.seeds)
    prompt = Prompt(id=1, text="", answer="")
    other = peers.worker(sink=True, name="another", incarnation=9)
    assert [other._seed_of(prompt, sibling) for sibling in range(GROUP_SIZE)] == engine.seeds[3:6]


def test_a_refused_group_is_lent_again(peers: Peers):
    worker = peers.worker(sink=True)
    worker.step()
    worker.step()
    worker._digests[0] = "of another adapter"
    worker.step()
    assert peers.buffer.record.dropped == {"unknown": BATCH}
    worker._digests[0] = peers.store.policy(0).digest
    work(worker)
    assert [group.id for group in peers.delivered()] == list(range(3 * BATCH))


def test_a_duplicate_is_not_sampled_for_ever(peers: Peers):
    worker = peers.worker(sink=True)
    work(worker, 2)
    worker._lease_more = lambda: None
    worker.step()
    restarted = peers.worker(sink=True, incarnation=2)  # it died before it could say what was delivered
    peers.publish(1, step=0)
    work(restarted, 3)
    assert peers.buffer.record.dropped == {"duplicate": BATCH}
    work(restarted)
    assert [group.id for group in peers.delivered()] == list(range(3 * BATCH))


def test_a_death_at_any_message_loses_nothing(peers: Peers):
    class Died(Exception):
        pass

    messages = 0

    def die_at(number: int) -> None:
        def before(name: str, call: Call) -> None:
            nonlocal messages
            messages += 1
            if messages == number:
                raise Died

        nonlocal messages
        messages = 0
        peers.before = before

    incarnation, worker = 1, peers.worker(sink=True)
    for number in range(1, 12):
        die_at(number)
        try:
            work(worker, 5)
        except Died:
            incarnation += 1
            worker = peers.worker(sink=True, incarnation=incarnation)
    die_at(0)
    work(worker)
    ids = [group.id for group in peers.delivered()]
    on_loan = {*peers.prompts.ledger.loans, *peers.prompts.ledger.returned}
    assert incarnation > 9
    assert {*ids, *on_loan} == set(range(peers.prompts.ledger.next))
    assert len(ids) >= 2 * BATCH


def test_it_finishes_with_the_run(peers: Peers):
    worker = peers.worker(sink=True)
    peers.publish(1, step=STEPS)
    with pytest.raises(Finished):
        work(worker)


def test_a_broken_reward_ends_the_run(peers: Peers):
    def broken(prompt: Prompt, completion: str) -> float:
        return math.nan

    peers.reward.given = broken
    peers.reward.on_start()
    with pytest.raises(Unrecoverable, match="reward function broken gave nan"):
        work(peers.worker(sink=True))


def test_without_a_sink_it_waits_to_be_taken_from(sync_peers: Peers):
    workers = [sync_peers.worker(sink=False, name=name, lease=2) for name in ("a", "b")]
    assert [worker.step() for worker in workers] == [None, None]
    parts = [worker.take(1, BATCH, 0, 0).groups for worker in workers]
    assert [[group.id for group in part] for part in parts] == [[0, 1], [2, 3]]
    assert workers[0].take(1, BATCH, 0, 0).groups == parts[0]
    sync_peers.publish(1, step=1)
    assert [group.id for group in workers[1].take(2, BATCH, 1, 1).groups] == [4, 5]
    assert [group.version for group in workers[0].take(2, BATCH, 1, 1).groups] == [1, 1]


def test_a_share_that_died_with_its_worker_is_sampled_again_and_the_same(sync_peers: Peers):
    worker = sync_peers.worker(sink=False, lease=2)
    before = worker.take(1, BATCH, 0, 0).groups
    other = sync_peers.worker(sink=False, name="other", lease=2)
    other.take(1, BATCH, 0, 0)
    after = sync_peers.worker(sink=False, incarnation=2, lease=2).take(1, BATCH, 0, 0).groups
    assert after == before


def test_a_trainer_that_went_back_gets_the_same_prompts_under_its_own_version(sync_peers: Peers):
    worker = sync_peers.worker(sink=False)
    first = worker.take(1, BATCH, 0, 0).groups
    sync_peers.publish(1, step=1)
    worker.take(2, BATCH, 1, 0)
    sync_peers.publish(2, step=0)
    again = worker.take(1, BATCH, 2, 0).groups
    assert [group.id for group in again] == [group.id for group in first]
    assert [group.version for group in again] == [2] * BATCH
    texts = [[completion.text for completion in group.completions] for group in again]
    assert texts == [[completion.text for completion in group.completions] for group in first]
