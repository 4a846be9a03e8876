"""The rollout worker: prompts in, scored groups out, always under a published policy version."""

from __future__ import annotations

import hashlib
import time

from ..runtime import Actor, Finished, Ref, idempotent
from ..runtime.store import Store
from .buffer import Buffer
from .canary import attest
from .engines import Engine, Request, Sampling, load_engine
from .prefetch import Prefetch
from .prompts import PromptSource
from .reward import Reward
from .types import PATIENCE_S, Batch, Completion, Group, Lease, Prompt

__all__ = ["RolloutWorker"]


class RolloutWorker(Actor):
    """Samples groups of completions.

    With a sink it works on its own: lease, sample, score, put. Without one it is a GroupSource: it samples
    its share of a step, one lease, when the trainer takes it.

    group_size: completions of one prompt. lease: prompts sampled at once (lease × group_size sequences).
    engine: what samples, as `load_engine` takes it. lora_rank: the largest rank of the run's adapters.
    max_staleness: how many versions behind the newest a group may be trained: so many more may be in use at once.

    While it samples, the next version is fetched from a bucket in the background, so that a swap costs little more
    than `engine.load`. After each swap it proves that its engine computes what the trainer published, before it
    samples: see `canary`. What a swap took is reported as load_s.
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
        reward: Ref[Reward],
        weights: Store,
        sink: Ref[Buffer] | None = None,
        engine: str = "transformers",
        lora_rank: int = 16,
        max_staleness: int = 0,
    ) -> None:
        self.model, self.sampling = model, sampling
        self.engine_name, self.lora_rank = engine, lora_rank
        self.max_loras = max(2, max_staleness + 1)  # 2: a swap needs room for the old and the new
        self.group_size, self.lease, self.seed = group_size, lease, seed
        self.prompts, self.reward, self.weights, self.sink = prompts, reward, weights, sink

    def on_start(self) -> None:
        self.engine = self._load_engine()
        self.store = self.weights.open(self.context.run, self.context.folder)
        self.prefetch = self._start_prefetch()
        self.worker = f"{self.context.node}/{self.name}" if self.context.node else self.name
        self.version = -1  # that the engine has proved to sample
        self.load_s = 0.0
        self._leased = 0
        self._delivered: list[int] = []
        self._given: tuple[int, int, list[Group]] = (-1, -1, [])

    def _load_engine(self) -> Engine:
        return load_engine(
            self.engine_name,
            self.model,
            max_loras=self.max_loras,
            max_lora_rank=self.lora_rank,
            max_num_seqs=self.lease * self.group_size,
        )

    def _start_prefetch(self) -> Prefetch | None:
        if not self.weights.url.startswith("s3:"):
            return None  # a folder is no further away than the cache
        prefetch = Prefetch(self.weights.open(self.context.run, self.context.folder))
        prefetch.start()
        return prefetch

    def on_stop(self) -> None:
        if self.prefetch is not None:
            self.prefetch.stop()

    def step(self) -> float | None:
        if self.sink is None:
            return None
        began = time.monotonic()
        lease = self._lease(wait=True)
        if lease.finished:
            raise Finished
        leased = time.monotonic()
        groups = self._sample(lease)
        sampled = time.monotonic()
        sink = self.sink.within(PATIENCE_S)
        for group, put in [(group, sink.ask_soon(Buffer.put, group)) for group in groups]:
            if put.result() in ("accepted", "duplicate"):
                self._delivered.append(group.id)
        self._say(groups, lease_wait_s=leased - began, sample_s=sampled - leased, since=sampled)
        return 0.0

    @idempotent
    def take(self, step: int, groups: int, version: int, durable: int) -> Batch:
        """Sample one lease of this step's prompts; the other workers sample the rest (see GroupSource).

        A worker that died over it, or since, samples the same again: its prompts are still lent to it, and a
        completion's draws depend on its prompt alone.
        """
        if self._given[:2] != (step, version):
            self._given = step, version, self._sample(self._lease(wait=False))
        return Batch(groups=self._given[2], dropped={}, depth=0)

    def _lease(self, *, wait: bool) -> Lease:
        lease = self.prompts.within(PATIENCE_S).ask(
            PromptSource.next,
            self.worker,
            self.context.incarnation,
            self._leased,
            self._delivered,
            self.lease,
            wait,
        )
        self._leased, self._delivered = lease.number, []
        return lease

    def _sample(self, lease: Lease) -> list[Group]:
        if not lease.prompts:
            return []
        if lease.version > self.version:
            self._swap(lease.version)
        prompt_ids = [self.engine.encode(prompt.text) for prompt in lease.prompts]
        requests = [
            Request(ids, self._seed_of(prompt, sibling))
            for prompt, ids in zip(lease.prompts, prompt_ids, strict=True)
            for sibling in range(self.group_size)
        ]
        samples = iter(self.engine.generate(requests, self.sampling))
        scored = []
        for prompt, ids in zip(lease.prompts, prompt_ids, strict=True):
            siblings = [next(samples) for _ in range(self.group_size)]
            rewards = self.reward.ask_soon(Reward.score, prompt, [sample.text for sample in siblings])
            scored.append((prompt, ids, siblings, rewards))
        groups = []
        for prompt, ids, siblings, rewards in scored:
            completions = [
                Completion(
                    ids=sample.ids,
                    logprobs=sample.logprobs,
                    version=self.engine.version,
                    finish_reason=sample.finish_reason,
                    text=sample.text,
                    reward=reward,
                )
                for sample, reward in zip(siblings, rewards.result(), strict=True)
            ]
            groups.append(
                Group(
                    prompt=prompt,
                    prompt_ids=ids,
                    completions=completions,
                    digest=self.engine.digest,
                    worker=self.worker,
                )
            )
        return groups

    def _swap(self, version: int) -> None:
        """Sample under this version from now on. Raises Quarantined if the engine then computes something else."""
        began = time.monotonic()
        self.version = -1  # until it is proved, whatever goes wrong on the way
        policy = self.store.policy(version)
        folder = self.store.fetch(version, keep=self.engine.versions)
        self.engine.load(version, policy.digest, folder)
        attest(self.engine, folder, self.worker)
        self.version = version
        self.load_s = time.monotonic() - began

    def _seed_of(self, prompt: Prompt, sibling: int) -> int:
        """The same completion whichever worker samples it, and when it is sampled again."""
        key = f"{self.seed}/{prompt.id}/{sibling}".encode()
        return int.from_bytes(hashlib.blake2b(key, digest_size=8).digest())

    def _say(self, groups: list[Group], *, lease_wait_s: float, sample_s: float, since: float) -> None:
        tokens = sum(len(completion.ids) for group in groups for completion in group.completions)
        self.report(
            groups=len(groups),
            tokens=tokens,
            version=self.engine.version,
            lease_wait_s=lease_wait_s,
            load_s=self.load_s,
            sample_s=sample_s,
            put_wait_s=time.monotonic() - since,
        )
