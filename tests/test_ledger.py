"""Prompt source and buffer as one ledger: whoever dies when, each group is trained once and none is lost."""

from __future__ import annotations

import shutil
import tempfile
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from rolecall import NotYet
from rolecall.actors.buffer import Buffer
from rolecall.actors.prompts import PromptSource
from rolecall.actors.types import Batch, Group
from rolecall.runtime.ref import bind_transport

from .fakes import Direct, Published, begin, group, ref


@dataclass
class Worker:
    """A rollout worker as its peers see it. holding: sampled groups it has yet to put, with their leases."""

    name: str
    incarnation: int = 1
    leased: int = 0
    delivered: dict[int, int] = field(default_factory=dict)
    holding: list[tuple[Group, int]] = field(default_factory=list)

    @property
    def held(self) -> dict[int, int]:
        return {one.id: lease for one, lease in self.holding}


class Ring(RuleBasedStateMachine):
    """Workers, a trainer and kills at random; at the end everybody works in turns until the run is over."""

    @initialize(
        steps=st.integers(1, 6),
        batch=st.integers(1, 3),
        max_staleness=st.integers(0, 3),
        tight=st.booleans(),
        checkpoint_every=st.integers(1, 3),
        workers=st.integers(1, 3),
    )
    def begin(
        self, steps: int, batch: int, max_staleness: int, tight: bool, checkpoint_every: int, workers: int
    ) -> None:
        self.steps, self.batch, self.max_staleness = steps, batch, max_staleness
        self.checkpoint_every = checkpoint_every
        self.capacity = batch if tight else batch * (1 + max_staleness)
        self.folder = Path(tempfile.mkdtemp())
        self.published, self.now, self.peers = Published(), 0.0, Direct()
        self.workers = [Worker(f"w{i}") for i in range(workers)]
        self.refused: Counter[str] = Counter()
        self.start_prompts()
        self.start_buffer()
        # The trainer: steps done and durable, what each step of the surviving lineage trained on, what the
        # buffer has handed out for a step it may have to hand out again, the step each version was made at.
        self.done = self.durable = 0
        self.trained: dict[int, list[int]] = {}
        self.handed: dict[int, list[Group]] = {}
        self.step_of_version = [0]
        self.prompts.advance(0, 0, {})

    def teardown(self) -> None:
        if hasattr(self, "folder"):
            try:
                self.finish()
            finally:
                bind_transport(None)
                shutil.rmtree(self.folder)

    @property
    def version(self) -> int:
        return self.published.newest

    # --- whoever keeps a ledger dies ---------------------------------------------------------------------

    @rule()
    def start_prompts(self) -> None:
        self.prompts = PromptSource(
            dataset="tiny", seed=0, groups_per_step=self.batch, steps=self.steps,
            max_staleness=self.max_staleness, lease_s=600.0, clock=lambda: self.now,
        )  # fmt: skip
        self.peers.actors["prompts"] = self.prompts
        begin(self.prompts, self.folder, "prompts")

    @rule()
    def start_buffer(self) -> None:
        self.buffer = Buffer(
            capacity=self.capacity, max_staleness=self.max_staleness, prompts=ref("prompts"),
            weights=self.published.store,
        )  # fmt: skip
        self.peers.actors["buffer"] = self.buffer
        begin(self.buffer, self.folder, "buffer")

    # --- workers -----------------------------------------------------------------------------------------

    @rule(at=st.integers(0, 2), count=st.integers(1, 4), wait=st.booleans(), answers_lost=st.integers(0, 2))
    def ask_for_prompts(self, at: int, count: int, wait: bool, answers_lost: int) -> None:
        self.lease(self.workers[at % len(self.workers)], count, wait, answers_lost)

    def lease(self, worker: Worker, count: int, wait: bool, answers_lost: int = 0) -> bool:
        """Ask for prompts, once more for each lost answer; whether it has something to put now."""
        if len(worker.holding) >= 4:
            return True
        delivered = dict(worker.delivered)
        request = (worker.name, worker.incarnation, worker.leased, worker.held, delivered, count, wait)
        try:
            for _ in range(answers_lost):
                self.prompts.next(*request)
                self.start_prompts()
            lease = self.prompts.next(*request)
        except NotYet:
            return bool(worker.holding)
        assert len(lease.prompts) <= count
        assert lease.finished == (self.prompts.ledger.step >= self.steps)
        worker.leased, worker.delivered = lease.number, {}
        name = f"{worker.name}.{worker.incarnation}.{lease.number}"
        worker.holding += [
            (group(prompt.id, lease.version, worker=name), lease.number) for prompt in lease.prompts
        ]
        return bool(worker.holding)

    @rule(at=st.integers(0, 2), heard=st.booleans())
    def hold(self, at: int, heard: bool) -> None:
        worker = self.workers[at % len(self.workers)]
        self.prompts.hold(worker.name, worker.incarnation, worker.leased, worker.held, worker.delivered)
        if heard:
            worker.delivered = {}

    @rule(at=st.integers(0, 2))
    def leave(self, at: int) -> None:
        worker = self.workers[at % len(self.workers)]
        self.prompts.leave(worker.name, worker.incarnation, worker.delivered)
        self.die(at)

    @rule(at=st.integers(0, 2), times=st.integers(1, 2))
    def put_a_group(self, at: int, times: int) -> None:
        worker = self.workers[at % len(self.workers)]
        if worker.holding:
            self.put(worker, times)

    def put(self, worker: Worker, times: int = 1) -> bool:
        """Put a group, and once more if the answer was lost; whether the buffer had an answer."""
        (first, lease), answer = worker.holding[0], ""
        for _ in range(times):
            try:
                answer = self.buffer.put(first)
            except NotYet:
                assert len(self.buffer._waiting) >= self.capacity and first.id not in self.buffer._awaited
                return False
            if answer != "accepted":
                self.refused[answer] += 1
        worker.holding.pop(0)
        if answer in ("accepted", "duplicate"):
            worker.delivered[first.id] = lease
        return True

    @rule(at=st.integers(0, 2), count=st.integers(1, 4))
    def work(self, at: int, count: int) -> None:
        """One undisturbed round."""
        worker = self.workers[at % len(self.workers)]
        self.lease(worker, count, wait=False)
        while worker.holding and self.put(worker):
            pass

    @rule(at=st.integers(0, 2), groups_put=st.integers(1, 3))
    def die_after_a_few(self, at: int, groups_put: int) -> None:
        """What it has put is delivered, and lent again for want of word."""
        worker = self.workers[at % len(self.workers)]
        self.lease(worker, groups_put, wait=False)
        for _ in range(min(groups_put, len(worker.holding))):
            self.put(worker)
        self.die(at)

    @rule(at=st.integers(0, 2))
    def put_what_no_version_sampled(self, at: int) -> None:
        worker = self.workers[at % len(self.workers)]
        if worker.holding and self.buffer._find(worker.holding[0][0].id) is None:
            first, lease = worker.holding.pop(0)
            answer = self.buffer.put(group(first.id, first.version, digest="another adapter's"))
            assert answer in ("unknown", "stale", "duplicate")
            self.refused[answer] += 1
            if answer == "duplicate":
                worker.delivered[first.id] = lease

    @rule(at=st.integers(0, 2))
    def die(self, at: int) -> None:
        worker = self.workers[at % len(self.workers)]
        self.workers[at % len(self.workers)] = Worker(worker.name, worker.incarnation + 1)

    @rule(after_s=st.sampled_from([100.0, 700.0]))
    def let_time_pass(self, after_s: float) -> None:
        self.now += after_s
        self.prompts.step()

    # --- the trainer -------------------------------------------------------------------------------------

    @precondition(lambda self: self.done < self.steps)
    @rule()
    def make_steps(self) -> None:
        """As many as there are groups for."""
        while self.done < self.steps and self.train():
            pass

    @precondition(lambda self: self.done < self.steps)
    @rule(dies=st.sampled_from(["", "", "", "over the step", "unsaved", "unpublished", "untold"]))
    def make_a_step(self, dies: str) -> None:
        self.train(dies)

    def train(self, dies: str = "") -> bool:
        """Take a batch and make a step of it, unless it dies on the way; whether there was a batch."""
        step = self.done + 1
        try:
            batch = self.buffer.take(step, self.batch, self.version, self.durable)
        except NotYet:
            return False
        if not batch.groups:
            return True  # stale ones were dropped: their prompts are lent again
        self.check_handed(step, batch)
        if dies == "over the step":
            self.restart_trainer()
            return True
        self.done, self.trained[step] = step, [member.id for member in batch.groups]
        if dies == "unsaved":
            self.restart_trainer()
            return True
        if step % self.checkpoint_every == 0 or step == self.steps:
            self.durable = step
        if dies == "unpublished":
            self.restart_trainer()
            return True
        self.publish()
        if dies == "untold":
            self.restart_trainer()
            return True
        self.prompts.advance(self.done, self.version, {})
        return True

    @rule()
    def restart_trainer(self) -> None:
        self.done = self.durable
        self.trained = {step: ids for step, ids in self.trained.items() if step <= self.done}
        if self.step_of_version[-1] != self.done:
            self.publish()
        self.prompts.advance(self.done, self.version, {})

    def publish(self) -> None:
        self.published.newest += 1
        self.step_of_version.append(self.done)

    def check_handed(self, step: int, batch: Batch) -> None:
        assert len(batch.groups) == self.batch
        ids = [member.id for member in batch.groups]
        before = [id for ids in self.trained.values() for id in ids]
        assert len({*ids, *before}) == len(ids) + len(before), "trained twice"
        if step in self.handed:
            assert batch.groups == self.handed[step], "another batch for the same step"
            return
        self.handed[step] = batch.groups
        ages = [member.version for member in batch.groups]
        assert self.version - min(ages) <= self.max_staleness
        assert all(max(ages) <= member.version for member in self.buffer._waiting.values()), "not the oldest"

    # --- what holds at all times -------------------------------------------------------------------------

    @invariant()
    def bounds(self) -> None:
        if hasattr(self, "buffer"):
            # Only what a step waits for may be above it: not more than were ever admitted.
            assert len(self.buffer._waiting) <= max(self.capacity, self.batch * (1 + self.max_staleness))
            refused = {key: n for key, n in self.buffer.record.dropped.items() if key != "stale"}
            assert refused == {key: n for key, n in self.refused.items() if key != "stale"}
            assert self.buffer.record.dropped.get("stale", 0) >= self.refused["stale"]

    def finish(self) -> None:
        """Nobody dies any more: the run must come to its end, and the ledger must add up."""
        rounds = 0
        while self.done < self.steps:
            went = self.train()
            for worker in self.workers:
                while self.lease(worker, 2, True) and self.put(worker):
                    went = True
            rounds += 1
            assert went, "starved: nobody can go on"
            assert rounds < 200, "they go round for ever"
        trained = sorted(id for ids in self.trained.values() for id in ids)
        assert trained == list(range(self.steps * self.batch))
        for worker in self.workers:
            lease = self.prompts.next(
                worker.name, worker.incarnation, worker.leased, worker.held, worker.delivered, 1, True
            )
            assert lease.finished


class LongRing(Ring):
    """The same, many times over."""


def often(max_examples: int) -> settings:
    return settings(
        max_examples=max_examples,
        stateful_step_count=50,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
    )


TestRing, TestLongRing = Ring.TestCase, pytest.mark.slow(LongRing.TestCase)
TestRing.settings, TestLongRing.settings = often(50), often(300)
