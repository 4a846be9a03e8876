"""The prompt source: hands out each prompt of the run once, and no sooner than it can still be trained in time."""

from __future__ import annotations

import heapq
import math
import time
from collections.abc import Callable
from functools import partial
from typing import Annotated, ClassVar

import msgspec

from ..runtime import Actor, Down, NotYet, Ref, idempotent
from ..runtime.files import start_of
from .curriculum import Curriculum
from .data import load_dataset
from .ledger import Heard, Ledger, Loan
from .pace import Pace
from .types import Count, Lease, Prompt

__all__ = ["PromptSource"]

PromptCount = Annotated[int, msgspec.Meta(ge=0, le=4096)]
WorkerName = Annotated[str, msgspec.Meta(max_length=200, pattern=r"^[^\x00-\x1f\x7f]*$")]
Lent = dict[Count, Count]
"""Prompts by id, each with the number of the lease it came with: one that is lent again is another loan."""


MAX_WORKERS = 4096  # that are remembered although they hold nothing
_LAST = 2**62  # above the number of any lease


class _Snapshot(msgspec.Struct):
    """Below `next` all is delivered but what is `unfinished`. leases: how many there have been."""

    next: int
    leases: int
    unfinished: list[int]
    curriculum: bytes


class PromptSource(Actor):
    """Leases prompts to rollout workers.

    dataset:          as `load_dataset` takes it.
    groups_per_step:  groups one optimizer step trains on.
    steps:            optimizer steps of the run: no prompt beyond them is handed out.
    max_staleness:    how many versions behind a group may be when it is trained.
    publish_every:    optimizer steps from one version to the next.
    curriculum:       skip prompts that are always or never solved by now, see Curriculum; rewards are then 0 to 1.
    lease_s:          a prompt that nobody says he holds for so long is taken back: its worker has vanished.

    Admission: a prompt is lent only if its group will be trained while at most max_staleness versions have
    come out since, if all goes evenly; if not, the buffer has the trainer wait (see Buffer). So staleness is bounded
    by not starting work, not by throwing it away, which would throw away what is slow, that is, long. Where the
    trainer does without so much, less is lent: see Pace. No worker is lent more than its share while others wait.
    Nothing is lent before the first version is out.

    Workers that are actors say their own names. Another name than its own is of the sender's making, as those of the
    workers in other languages that ask over HTTP, and is put below the sender's: nobody can speak for whom he is not.

    With max_staleness=0 a group is of use to its own version only, so every version starts afresh: what was
    not trained by then (the trainer went back to a checkpoint, a worker died with its groups) is lent again.
    """

    http: ClassVar = {
        "POST /v1/prompts": "next",
        "POST /v1/prompts/hold": "hold",
        "POST /v1/prompts/leave": "leave",
        "GET /v1/policy": "policy",
    }
    for_workers: ClassVar = ("next", "hold", "leave", "policy")

    def __init__(
        self,
        *,
        dataset: str,
        seed: int,
        groups_per_step: int,
        steps: int,
        max_staleness: int,
        publish_every: int = 1,
        curriculum: bool = False,
        lease_s: float = 600.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.dataset, self.seed = dataset, seed
        self.groups_per_step, self.steps = groups_per_step, steps
        self.max_staleness = max_staleness
        self.ahead_steps = publish_every * (1 + max_staleness)
        self.version_groups = publish_every * groups_per_step
        self.with_curriculum = curriculum
        self.lease_s, self.clock = lease_s, clock

    def on_start(self) -> None:
        self.rows = load_dataset(self.dataset, seed=self.seed)
        self.rows[0]  # an empty or broken data set is found now
        self.curriculum: Curriculum | None = None
        if self.with_curriculum:
            file = self.state_folder / "curriculum.json"
            self.rows = self.curriculum = Curriculum(self.rows, file, seed=self.seed)
        self.pace = Pace(self.version_groups, (1 + self.max_staleness) * self.version_groups)
        self.ledger = Ledger(self.state_folder / "ledger.jsonl")
        self._forget_who_was_before()
        for loan in self.ledger.loans.values():
            loan.since = self.clock()  # the clock may be another machine's
        self._look_at = self.clock() + self.lease_s
        self._renew_at, self._renewing = self.clock() + self.lease_s / 2, False
        self._spoke = dict.fromkeys(
            self.ledger.workers, self.clock()
        )  # who was heard of when, the latest last
        self._sharers = {
            loan.worker for loan in self.ledger.loans.values()
        }  # they hold prompts, or want some
        self._wanting: set[str] = set()  # they asked for more than there was
        for name, heard in self.ledger.workers.items():
            if heard.actor:
                Ref(name).watch()

    def _forget_who_was_before(self) -> None:
        """The run's own workers of an earlier start of it: nobody may have their names now, to die or to ask."""
        start = start_of(self.context.incarnation)
        for name, heard in list(self.ledger.workers.items()):
            if heard.actor and "/" not in name and start_of(heard.incarnation) < start:
                for id in list(self.ledger.held_by(name)):
                    self.ledger.take_back(id)
                self.ledger.forget(name)

    @idempotent
    def next(
        self,
        worker: WorkerName,
        incarnation: Count,
        lease: Count,
        holding: Lent,
        delivered: Lent,
        count: PromptCount,
        wait: bool,
    ) -> Lease:
        """Lend up to `count` prompts more.

        lease: number of the last lease that reached the worker, 0 if none has since it started. holding,
        delivered: what it works on, and what it has handed over as groups since it last said so. Whatever else is
        lent to it is lent anew: it died with the worker's last incarnation, was refused, or is of a lease that
        never arrived. wait: keep the request until there is a prompt to lend; otherwise the lease may be empty.
        """
        ledger, worker = self.ledger, self._name(worker)
        finished = ledger.step >= self.steps
        if not self._heed(worker, incarnation, lease, holding, delivered):
            return self._lease(0, [], finished=finished)
        ids = self._admit(worker, count)
        if not ids and wait and not finished:
            raise NotYet(self._may_lend if self._room <= 0 else partial(self._may_lend_to, worker))
        ledger.leases += 1
        for id in ids:
            ledger.lend(id, Loan(worker, ledger.leases, self.clock(), ledger.version))
        ledger.save()
        return self._lease(ledger.leases, ids, finished=finished)

    @idempotent
    def hold(
        self, worker: WorkerName, incarnation: Count, lease: Count, holding: Lent, delivered: Lent
    ) -> None:
        """As `next`, but without wanting more; of what is on its way to the worker meanwhile it says nothing.

        A worker says so before `hold_s` are over, or its prompts are lent anew.
        """
        worker = self._name(worker)
        if self._heed(worker, incarnation, lease, holding, delivered, until=lease):
            for id, loan in self.ledger.held_by(worker).items():
                if id in holding:
                    loan.since = self.clock()

    @idempotent
    def leave(self, worker: WorkerName, incarnation: Count, delivered: Lent) -> None:
        """This worker works no more: what is lent to it is lent anew, and what it still asks for is not given."""
        worker = self._name(worker)
        if self._heed(worker, incarnation, _LAST, {}, delivered):
            self._wanting.discard(worker)

    def on_down(self, down: Down) -> None:
        """A worker of this package has died: others can begin with its prompts, before it is back, if ever."""
        heard = self.ledger.workers.get(down.name)
        if heard is not None and heard.incarnation <= down.incarnation:
            self._heed(down.name, down.incarnation, _LAST, {}, {})
            self._wanting.discard(down.name)

    @idempotent
    def lent_under(self, version: int) -> list[int]:
        """The prompts on loan since this was the newest version."""
        return [id for id, loan in self.ledger.loans.items() if loan.version == version]

    @idempotent
    def spare(self, groups: int) -> None:
        """So many whole groups waited besides a step's own when it was to be made; or, negative, it lacked so many."""
        self.pace.heed(groups)

    @idempotent
    def give_back(self, ids: list[int]) -> None:
        """Groups with these ids were dropped: their prompts are to be sampled again."""
        ledger = self.ledger
        for id in ids:
            # A loan may be the dropped group's own, of which its worker has yet to say that it was delivered.
            if id < ledger.next:
                ledger.take_back(id)
        ledger.save()

    @idempotent
    def advance(self, step: int, version: int, successes: dict[int, float]) -> None:
        """The trainer has published `version`, with the weights after `step` optimizer steps.

        successes: of each prompt trained since the version before, the share of its completions that was right.
        """
        ledger = self.ledger
        if self.curriculum is not None:
            self.curriculum.learn(successes)
            self.curriculum.plan(self._last_step(step) * self.groups_per_step)
        for id in successes:
            ledger.deliver(id)  # its worker may not have said so yet
        if self.max_staleness == 0 and version > ledger.version:
            ledger.start_afresh(step * self.groups_per_step)
        ledger.step, ledger.version = step, version
        ledger.save()

    @idempotent
    def snapshot(self) -> bytes:
        """What another, in another folder, needs to go on from here."""
        ledger = self.ledger
        curriculum = self.curriculum.snapshot() if self.curriculum is not None else b""
        return msgspec.msgpack.encode(
            _Snapshot(ledger.next, ledger.leases, [*ledger.returned, *ledger.loans], curriculum)
        )

    @idempotent
    def restore(self, state: bytes) -> None:
        """Go on from a snapshot, whatever is known here. What was on loan is lent anew."""
        ledger = self.ledger
        saved = msgspec.msgpack.decode(state, type=_Snapshot)
        if self.curriculum is not None and saved.curriculum:
            self.curriculum.restore(saved.curriculum)
        self._wanting.clear()
        self._sharers.clear()
        ledger.start_afresh(saved.next)
        ledger.leases = max(saved.leases, ledger.leases)
        for id in saved.unfinished:
            ledger.take_back(id)
        ledger.save()

    @idempotent
    def policy(self, after: int) -> int:
        """The newest version's number, once it is above `after`: a long poll for those without the store."""
        if self.ledger.version <= after:
            raise NotYet
        return self.ledger.version

    def step(self) -> float | None:
        """Take back what has been on loan for too long."""
        if self._renewing or self.clock() >= self._renew_at:
            self._renewing = not self._renewing
            self._renew_at = self.clock() + self.lease_s / 2
        if (now := self.clock()) > self._look_at:
            ledger = self.ledger
            late = [id for id, loan in ledger.loans.items() if now - loan.since > self.lease_s]
            for id in late:
                ledger.take_back(id)
            self._forget(now - self.lease_s)
            ledger.save()
            since = min((loan.since for loan in ledger.loans.values()), default=now)
            self._look_at = min(since, now) + self.lease_s  # before that nothing is late
        return 0.0 if self._renewing else min(5.0, self.lease_s)

    def _forget(self, before: float) -> None:
        """Those who hold nothing and were heard of last before that time, or are too many."""
        for name, spoke in list(self._spoke.items()):
            if spoke >= before and len(self._spoke) <= MAX_WORKERS:
                break
            if not self.ledger.held_by(name):
                del self._spoke[name]
                self._sharers.discard(name)
                self._wanting.discard(name)
                self.ledger.forget(name)

    def _name(self, worker: str) -> str:
        """In the ledger."""
        return worker if self.sender in ("", worker) else f"{self.sender}/{worker}"

    def _heed(
        self, worker: str, incarnation: int, lease: int, holding: Lent, delivered: Lent, until: int = _LAST
    ) -> bool:
        """Believe what a worker says of leases up to `until`; whether it is its newest word.

        Does not renew a loan: this word may have waited here for longer than its worker has lived.
        """
        ledger = self.ledger
        actor = "/" not in worker or worker == self.sender
        heard = ledger.workers.get(worker, Heard(0, 0, actor))
        if (incarnation, lease) < (heard.incarnation, heard.lease):
            return False
        if worker not in ledger.workers and heard.actor:
            Ref(worker).watch()
        if (word := Heard(incarnation, lease, heard.actor)) != heard or worker not in ledger.workers:
            ledger.hear(worker, word)
        self._spoke.pop(worker, None)
        self._spoke[worker] = self.clock()
        if len(self._spoke) > MAX_WORKERS:
            self._forget(-math.inf)
        for id, loan in ledger.held_by(worker).items():
            if loan.lease <= until and holding.get(id) != loan.lease:
                (ledger.deliver if delivered.get(id) == loan.lease else ledger.take_back)(id)
        if not ledger.held_by(worker):
            self._sharers.discard(worker)
        ledger.save()
        return True

    def _lease(self, number: int, ids: list[int], *, finished: bool) -> Lease:
        prompts = [self._prompt(id) for id in ids]
        version, hold_s = self.ledger.version, self.lease_s / 4
        return Lease(number=number, prompts=prompts, version=version, finished=finished, hold_s=hold_s)

    def _last_step(self, step: int) -> int:
        """The last whose prompts may be lent after that one."""
        return min(step + self.ahead_steps, self.steps)

    def _may_lend(self) -> bool:
        """Whether it can be worth the while to try again for those who wait for prompts.

        Now and then it is, so that they count as heard of.
        """
        if self._renewing or self.ledger.step >= self.steps:
            return True
        return self.ledger.version >= 0 and (self._room > 0 or bool(self.ledger.returned))

    def _may_lend_to(self, worker: str) -> bool:
        """As `_may_lend`, for one that had its share: each gives back at its own time, and for all the others to try
        again would take as many tries as there are workers, for every prompt."""
        if not self._may_lend():
            return False
        return self._renewing or bool(self.ledger.returned) or self._share(worker, 1, self._room) > 0

    def _admit(self, worker: str, count: int) -> list[int]:
        ledger = self.ledger
        if count > 0:
            self._sharers.add(worker)
        ids = self._returned(worker, count)
        room = self._room
        fresh = max(0, min(room, self._share(worker, count, room) - len(ids)))
        ids += range(ledger.next, ledger.next + fresh)
        ledger.next += fresh
        if self.max_staleness == 0 and ledger.version >= 0:
            ids += heapq.nsmallest(count - len(ids), ledger.returned.keys() - ids)
        (self._wanting.add if len(ids) < count else self._wanting.discard)(worker)
        return ids

    def _returned(self, worker: str, count: int) -> list[int]:
        """Of what was returned, the oldest.

        With max_staleness=0 only what this worker had itself: what another had may be whole, and with the trainer.
        """
        returned = self.ledger.returned
        if not returned or self.ledger.version < 0:
            return []
        if self.max_staleness == 0:
            returned = [id for id, last in returned.items() if last == worker]
        return heapq.nsmallest(count, returned)

    def _share(self, worker: str, count: int, room: int) -> int:
        """So many; or, while others have asked in vain, no more than leaves as many to each of them."""
        if self._wanting <= {worker}:
            return count
        sharers = len(self._sharers) + (worker not in self._sharers)
        share = math.ceil((len(self.ledger.loans) + room) / sharers)
        return min(count, share - self.ledger.held(worker))

    @property
    def _room(self) -> int:
        """How many prompts may be lent by now that never were."""
        return max(0, self._last_to_lend() - self.ledger.next)

    def _last_to_lend(self) -> int:
        """All prompts before this one may be lent by now."""
        if self.ledger.version < 0:
            return 0
        return min(
            self.ledger.step * self.groups_per_step + self.pace.groups, self.steps * self.groups_per_step
        )

    def _prompt(self, id: int) -> Prompt:
        text, answer = self.rows[id]
        return Prompt(id=id, text=text, answer=answer)
