"""The rollout worker: prompts in, scored groups out, always under a published policy version.

    prompts ─lease─▶ queue ─add─▶ engine ─step…─▶ turns ─▶ reward or environment ─▶ whole groups ─put─▶ buffer
                                    └──── the next turn, where it has an answer ──┘

Everything overlaps: while the engine goes from token to token, prompts are asked for, versions fetched, turns
answered or scored, and groups handed over. Nothing waits for the slowest of a batch, and nothing pauses for a swap.
"""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

from ..runtime import Actor, Answer, Finished, Ref, idempotent
from ..runtime.store import PolicyVersion, Store, StoreError
from .buffer import Buffer
from .canary import Quarantined, attest
from .delay import Delay
from .engines import Engine, Sampling, load_engine
from .episode import Episode, Judge, OpenGroup, begin_turns
from .prefetch import Prefetch
from .prompts import PromptSource
from .types import PATIENCE_S, Batch, Group, Lease, Prompt, Turn
from .waits import Waits

__all__ = ["RolloutWorker"]


class RolloutWorker(Actor):
    """Samples groups of completions.

    With a sink it works on its own: lease, sample, score, put. Without one it is a GroupSource: it samples
    its share of a step, one lease, when the trainer takes it.

    group_size: completions of one prompt. lease: prompts sampled at once (lease × group_size sequences).
    reward: what ends completions and scores them, or an environment's host, which answers turns until it does.
    engine: what samples, as `load_engine` takes it. lora_rank: the largest rank of the run's adapters.
    max_staleness: how many versions behind the newest a group may be trained: so many more may be in use at once. With
    0 it asks for prompts once it has none, for no more are lent before all of a version are trained.
    delay: how much longer each group takes than the engine does.
    inflight_swap: whether completions go on under a new version, or finish under the one they began with.

    A new version is fetched from a bucket in the background, and loaded between two tokens. After each swap the
    worker proves that its engine computes what the trainer published, before it begins anything: see `canary`.
    Reported with every group: see `Waits`.
    """

    preloads = ("torch", "peft", "transformers", "rolecall.actors.engines.transformers")

    def __init__(
        self,
        *,
        model: str,
        sampling: Sampling,
        group_size: int,
        lease: int,
        seed: int,
        prompts: Ref[PromptSource],
        reward: Ref[Judge],
        weights: Store,
        sink: Ref[Buffer] | None = None,
        engine: str = "transformers",
        lora_rank: int = 16,
        max_staleness: int = 0,
        inflight_swap: bool = False,
        delay: Delay = Delay(),  # noqa: B008  it is frozen
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.model, self.sampling = model, sampling
        self.engine_name, self.lora_rank, self.inflight_swap = engine, lora_rank, inflight_swap
        self.max_staleness = max_staleness
        self.max_loras = max(2, max_staleness + 1)  # 2: a swap needs room for the old and the new
        self.group_size, self.lease, self.seed = group_size, lease, seed
        self.prompts, self.reward = prompts.within(PATIENCE_S), reward.within(PATIENCE_S)
        self.sink = None if sink is None else sink.within(PATIENCE_S)
        self.weights, self.delay, self.clock = weights, delay, clock

    def on_start(self) -> None:
        self.engine = self._load_engine()
        self.store = self.weights.open(self.context.run, self.context.folder)
        self.prefetch = self._start_prefetch()
        self.worker = f"{self.context.node}/{self.name}" if self.context.node else self.name
        self.version = -1  # that the engine has proved to sample
        self.waits = Waits(self.clock)
        self._loaded: tuple[PolicyVersion, Path] | None = None  # but not proved
        self._digests: dict[int, str] = {}
        self._published = 0.0  # when the version was, of which there is no token yet
        self._newest = -1  # that was heard of
        self._news: Answer[int] | None = None
        self._asked: Answer[Lease] | None = None
        self._telling: dict[int, int] = {}
        self._lease = Lease(number=0, prompts=[], version=-1, finished=False, hold_s=0.0)
        self._hold_at = math.inf
        self._queue: list[OpenGroup] = []  # for a version that is not loaded yet
        self._sampling: dict[int, _Begun] = {}  # by request
        self._judging: list[_Judged] = []
        self._whole: list[OpenGroup] = []
        self._turns_go_on = (
            False  # else whoever is judged is done, as with a reward, and needs no seat any more
        )
        self._putting: list[OpenGroup] = []
        self._delivered: dict[int, int] = {}  # that the prompt source has not heard of: the lease of each
        self._given: tuple[int, int, list[Group]] = (-1, -1, [])
        self._shared: list[OpenGroup] = []  # what was given

    def _load_engine(self) -> Engine:
        return load_engine(
            self.engine_name,
            self.model,
            max_loras=self.max_loras,
            max_lora_rank=self.lora_rank,
            max_num_seqs=self.lease * self.group_size,
            inflight_swap=self.inflight_swap,
        )

    def _start_prefetch(self) -> Prefetch | None:
        if not self.weights.url.startswith("s3:"):
            return None  # a folder is no further away than the cache
        prefetch = Prefetch(self.store)
        prefetch.start()
        return prefetch

    def on_stop(self) -> None:
        if self.prefetch is not None:
            self.prefetch.stop()
        if self._held():  # others can begin at once with what is not finished here
            # An ask, whose answer is not waited for: at the end of a run there is nobody to tell, and no harm in it.
            self.prompts.ask_soon(PromptSource.leave, self.worker, self.context.incarnation, self._delivered)

    def step(self) -> float | None:
        """One token for everybody, and whatever else there is to do between two tokens."""
        if self.sink is None:
            self._hold()
            return self._pause_s()
        self.waits.over()
        self._follow()
        self._take_answers()
        self._hand_over(self.sink)
        self._take_lease()
        self._begin_queue()
        self._sample()
        self._lease_more()
        self._hold()
        if self.engine.running or any(one.openings.done for one in self._queue):
            return 0.0
        if self._late():
            self.waits.begin("sample_s")
        else:
            self.waits.begin("put_wait_s" if self._judging or self._putting else "lease_wait_s")
        return self._pause_s()

    def _pause_s(self) -> float | None:
        """Until there is something to say, or a group is due; an answer may come sooner."""
        pauses_s = [one.due - self.context.now() for one in self._late()]
        if self._hold_at < math.inf:
            pauses_s.append(self._hold_at - self.clock())
        return max(0.0, min(pauses_s)) if pauses_s else None

    def _late(self) -> list[OpenGroup]:
        """Groups that are done, but not due."""
        return [one for one in self._whole if one.due > self.context.now()]

    @idempotent
    def take(self, step: int, groups: int, version: int, durable: int) -> Batch:
        """Sample one lease of this step's prompts; the other workers sample the rest (see GroupSource).

        A worker that died over it, or since, samples the same again: its prompts are still lent to it, and a
        completion's draws depend on its prompt alone.
        """
        if self._given[:2] != (step, version):
            self.waits.over()
            self._drop_all()  # of a share that failed half-way
            self._shared = []
            self._receive(self._ask(self.lease, wait=False).result())
            if self._queue and self._lease.version > self.version:
                self._swap_at_once(self._lease.version)
            while self._queue or self._sampling or self._judging or self._late():
                if not self.engine.running:
                    self._wait_for_others()
                self._begin_queue()
                self._take_answers()
                self._sample()
                self._hold()
            self._shared, self._whole = sorted(self._whole, key=lambda one: one.prompt.id), []
            self._given = step, version, [one.group(self._digests, self.worker) for one in self._shared]
            self._report(self._given[2])
            self.waits.begin("lease_wait_s")
        return Batch(groups=self._given[2], dropped={}, depth=0)

    def _wait_for_others(self) -> None:
        if self._queue:
            self._queue[0].openings.result()
        elif self._judging:
            self._judging[0].answer.result()
        else:
            self.context.sleep(self._pause_s() or 0.0)

    @idempotent
    def snapshot(self) -> bytes:
        """Nothing: what it held is lent anew."""
        return b""

    @idempotent
    def restore(self, state: bytes) -> None:
        """See `snapshot`."""

    def _swap_at_once(self, version: int) -> None:
        self._load(version)
        try:
            self._prove()
        except Quarantined as error:
            # Raised in a handler it would be the asker's, and this engine would live on.
            raise SystemExit(f"Quarantined: {error}") from error

    # --- versions ----------------------------------------------------------------------------------------

    def _follow(self) -> None:
        """Swap when there is a newer version, and it is here; those that run get a token between load and proof."""
        if self._loaded is not None:
            self._prove()
        if self._news is not None and self._news.done:
            self._hear_of(self._news.result())
            self._news = None
        if self._news is None:
            self._news = self.prompts.ask_soon(PromptSource.policy, self._newest)
        if self.prefetch is not None and self.prefetch.newest >= self._newest:
            self._newest = self.prefetch.newest
        elif self.prefetch is not None and self.engine.running:
            return  # with nothing to hold up it is fetched here, and if that fails it is this worker's error
        in_use = {begun.version for begun in self._sampling.values()}
        if len(in_use) >= self.max_loras and not self.inflight_swap:
            return  # the engine would have no room before one of them is done
        if self._newest > self.version:
            self._load(self._newest)
            if not self.engine.running:
                self._prove()

    def _hear_of(self, version: int) -> None:
        if version > self._newest:
            self._newest = version
            if self.prefetch is not None:
                self.prefetch.hurry()

    def _load(self, version: int) -> None:
        began = self.clock()
        self.version = -1  # until it is proved, whatever goes wrong on the way
        policy, folder = self._fetched(version)
        self.engine.load(policy.version, policy.digest, folder)
        self._loaded = policy, folder
        self.waits.load_s = self.clock() - began

    def _prove(self) -> None:
        """Begin completions under this version from now on. Raises Quarantined if the engine computes another."""
        assert self._loaded is not None
        began = self.clock()
        policy, folder = self._loaded
        attest(self.engine, folder, self.worker)
        self.version, self._digests[policy.version] = policy.version, policy.digest
        self._loaded = None
        self._published = policy.time
        self.waits.load_s += self.clock() - began

    def _fetched(self, version: int) -> tuple[PolicyVersion, Path]:
        keep: list[int] = [*self.engine.versions, version]
        if self.prefetch is not None:
            self.prefetch.keep = keep
            if (ready := self.prefetch.ready) is not None and ready[0].version == version:
                return ready
        try:
            return self.store.policy(version), self.store.fetch(version, keep=keep)
        except StoreError:
            newest = self.store.head()
            if newest is None or newest.version <= version:
                raise
            # Collected, because this worker is slow to hear of versions: a newer one will do.
            return newest, self.store.fetch(newest.version, keep=keep)

    # --- prompts -----------------------------------------------------------------------------------------

    def _lease_more(self) -> None:
        if self._asked is not None:
            return
        now = self.context.now()
        judging = [judged for judged in self._judging if self._turns_go_on or judged.one.due > now]
        kept = len(self._late()) * self.group_size + sum(len(judged.episodes) for judged in judging)
        seats = self.lease * self.group_size - len(self._sampling) - kept
        # One that hands over slower than it samples has enough.
        most = 2 * self.lease - len({judged.one for judged in self._judging}) - len(self._putting)
        room = min(seats // self.group_size - len(self._queue), most)
        if room > 0 if self.max_staleness else room == self.lease:
            self._asked = self._ask(room, wait=True)

    def _take_lease(self) -> None:
        if self._asked is not None and self._asked.done:
            lease, self._asked = self._asked.result(), None
            if lease.finished:
                self._drop_all()  # nobody wants it
                raise Finished
            self._receive(lease)

    def _ask(self, count: int, *, wait: bool) -> Answer[Lease]:
        self._telling = dict(self._delivered)
        word = (self.worker, self.context.incarnation, self._lease.number, self._held(), self._telling)
        return self.prompts.ask_soon(PromptSource.next, *word, count, wait)

    def _receive(self, lease: Lease) -> None:
        for id in self._telling:
            if self._delivered.get(id) == self._telling[id]:
                del self._delivered[id]
        self._lease = lease
        self._hold_at = min(self._hold_at, self.clock() + lease.hold_s)
        self._hear_of(lease.version)
        if lease.prompts:
            openings = self.reward.ask_soon(Judge.open, lease.prompts)
            self._queue += [OpenGroup(prompt, lease, openings, i) for i, prompt in enumerate(lease.prompts)]

    def _drop_all(self) -> None:
        self._queue, self._sampling, self._judging, self._whole, self._putting = [], {}, [], [], []

    def _held(self) -> dict[int, int]:
        """The prompts it works on, and the lease that each came with."""
        under_way = [begun.one for begun in self._sampling.values()] + [
            judged.one for judged in self._judging
        ]
        held = [*self._queue, *under_way, *self._whole, *self._putting, *self._shared]
        return {one.prompt.id: one.lease.number for one in held}

    def _hold(self) -> None:
        """Say in time what it holds, has delivered, or, by leaving it out, was refused."""
        if self.clock() >= self._hold_at:
            held = self._held()
            word = (self.worker, self.context.incarnation, self._lease.number, held, self._delivered)
            self.prompts.tell(PromptSource.hold, *word)
            self._delivered = {}
            self._hold_at = self.clock() + self._lease.hold_s if held else math.inf

    # --- groups ------------------------------------------------------------------------------------------

    def _begin_queue(self) -> None:
        ready = [one for one in self._queue if one.lease.version <= self.version and one.openings.done]
        self._queue = [one for one in self._queue if one not in ready]
        for one in ready:
            one.prompt_ids = self.engine.encode(one.prompt.text + one.openings.result()[one.place])
            seeds = [self._seed_of(one.prompt, sibling) for sibling in range(self.group_size)]
            one.due = self.context.now() + self.delay.seconds(self.seed, one.prompt.id, self.worker)
            one.episodes = [Episode(one.prompt, one.prompt_ids, seed, self.sampling) for seed in seeds]
        self._begin_turns({episode: one for one in ready for episode in one.episodes})

    def _begin_turns(self, owners: Mapping[Episode, OpenGroup]) -> None:
        for id, episode in begin_turns(self.engine, list(owners)).items():
            self._sampling[id] = _Begun(owners[episode], episode, self.version)

    def _sample(self) -> None:
        """One token; turns that have come to their end are judged, those of one group together."""
        if not self.engine.running:
            return
        began, running = self.clock(), self.engine.running
        finished = self.engine.step()
        self.waits.sampled(began, running)
        if self._published and any(begun.version == self.version for begun in self._sampling.values()):
            self.waits.first_token_s, self._published = time.time() - self._published, 0.0
        ended = dict[OpenGroup, list[Episode]]()
        for sampled in finished:
            begun = self._sampling.pop(sampled.id, None)
            if begun is not None:  # else of a share that failed
                begun.episode.add_turn(sampled.sample)
                ended.setdefault(begun.one, []).append(begun.episode)
        for one, episodes in ended.items():
            transcripts = [episode.turns.copy() for episode in episodes]
            answer = self.reward.ask_soon(Judge.respond, one.prompt, transcripts)
            self._judging.append(_Judged(one, episodes, answer))

    def _take_answers(self) -> None:
        """Go on with the completions that have an answer and are not done with it; groups may be whole by it."""
        if self.version < 0:
            return  # the engine has not proved what it would go on under
        going_on = dict[Episode, OpenGroup]()
        for judged in [judged for judged in self._judging if judged.answer.done]:
            self._judging.remove(judged)
            for episode, turn in zip(judged.episodes, judged.answer.result(), strict=True):
                episode.add_answer(turn, self.engine)
                if not episode.done:
                    going_on[episode] = judged.one
            if all(episode.done for episode in judged.one.episodes):
                self._whole.append(judged.one)
        self._turns_go_on = self._turns_go_on or bool(going_on)
        self._begin_turns(going_on)

    def _hand_over(self, sink: Ref[Buffer]) -> None:
        late = self._late()
        due = [one for one in self._whole if one not in late]
        groups = [one.group(self._digests, self.worker) for one in due]
        for one, group in zip(due, groups, strict=True):
            one.put = sink.ask_soon(Buffer.put, group)
        self._putting += due
        self._whole = late
        if groups:
            self._report(groups)
        for one in [one for one in self._putting if one.put is not None and one.put.done]:
            assert one.put is not None
            self._putting.remove(one)
            if one.put.result() in ("accepted", "duplicate"):
                self._delivered[one.prompt.id] = one.lease.number
            else:
                self._hold_at = self.clock()  # its prompt is to be lent again, and soon

    def _report(self, groups: list[Group]) -> None:
        lengths = [len(completion.ids) for group in groups for completion in group.completions]
        tokens = sum(completion.sampled for group in groups for completion in group.completions)
        newest = max((group.version for group in groups), default=self.version)
        values = {"groups": len(groups), "tokens": tokens, "version": newest, "lengths": lengths}
        self.report(**values, **self.waits.take())

    def _seed_of(self, prompt: Prompt, sibling: int) -> int:
        """The same completion whichever worker samples it, and when it is sampled again."""
        key = f"{self.seed}/{prompt.id}/{sibling}".encode()
        return int.from_bytes(hashlib.blake2b(key, digest_size=8).digest())


class _Begun(NamedTuple):
    """A turn that the engine samples. version: under which it was begun."""

    one: OpenGroup
    episode: Episode
    version: int


class _Judged(NamedTuple):
    """Completions of one group whose turns are being answered."""

    one: OpenGroup
    episodes: list[Episode]
    answer: Answer[list[Turn]]
