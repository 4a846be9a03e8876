"""The trainer: takes groups, makes one optimizer step of them, publishes the adapter."""

from __future__ import annotations

import time
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec.structs import replace

from ..runtime import Actor, Answer, Finished, Ref
from ..runtime.files import read_lines, write_whole
from ..runtime.store import Store
from .buffer import GroupSource
from .canary import CANARY
from .lora import Lora
from .losses import Loss
from .prompts import PromptSource
from .types import PATIENCE_S, Batch, Group

if TYPE_CHECKING:
    from .learner import Learner

__all__ = ["Trainer"]


RING = "ring.msgpack"


class _Ring(msgspec.Struct):
    """What a checkpoint holds besides the learner's state: snapshots, all lines of metrics.jsonl, packed by zlib for a
    long run has many, and what the prompt source is to hear with the next version."""

    prompts: bytes
    groups: bytes
    metrics: bytes
    successes: dict[int, float]


class Trainer(Actor):
    """GRPO on LoRA weights; see `Learner` for the step itself.

    groups:           a buffer, or the rollout workers themselves: the difference between async and sync.
    prompts:          told of every published version, so that it admits new work.
    batch:            groups an optimizer step trains on.
    publish_every, checkpoint_every: in optimizer steps.
    max_tokens:       the most a completion may have; a loss averaged by "dr" divides by it.
    max_staleness:    versions kept in the store reach this far back, and two further.

    Each step is one line in metrics.jsonl. Killed at any moment, it goes on from its last checkpoint: the
    groups of the steps after that are given to it again, and the lines of those steps are written anew. A checkpoint
    holds what prompts and groups know, too, so that the run can go on in another folder, on another machine.
    (Versions published by those steps stay published, so with checkpoint_every > 1 staleness, which counts
    versions, looks larger after a restart than it is.)
    """

    preloads = ("torch", "peft", "transformers", "rolecall.actors.learner")
    stop_timeout_s = 10.0

    def __init__(
        self,
        *,
        model: str,
        loss: Loss,
        lora: Lora,
        lr: float,
        temperature: float,
        steps: int,
        batch: int,
        seed: int,
        groups: Ref[GroupSource],
        prompts: Ref[PromptSource],
        weights: Store,
        max_staleness: int,
        max_tokens: int | None = None,
        publish_every: int = 1,
        checkpoint_every: int = 1,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.model, self.loss, self.temperature = model, loss, temperature
        self.lora, self.lr = lora, lr
        self.steps, self.batch, self.seed = steps, batch, seed
        self.groups, self.prompts, self.weights = groups, prompts, weights
        self.max_staleness, self.max_tokens = max_staleness, max_tokens
        self.publish_every, self.checkpoint_every = publish_every, checkpoint_every
        self.clock = clock

    def on_start(self) -> None:
        self.store = self.weights.open(self.context.run, self.context.folder)
        self.store.probe()
        self.epoch = self.store.take_epoch()
        self.learner = self._load_learner()
        self.metrics_file: Path = self.context.folder / "metrics.jsonl"
        self.done = self.durable = 0
        self._ahead: Answer[Batch] | None = None  # what the next step was asked for, or is not yet
        self.successes: dict[int, float] = {}  # of the prompts trained since the last version
        checkpoint = self.store.latest_checkpoint()
        if checkpoint is not None:
            self.done, state = checkpoint
            self.durable = self.done
            self.learner.restore(state)
            self._restore_ring(msgspec.msgpack.decode(state[RING], type=_Ring))
        _keep_lines(self.metrics_file, self.done)
        self.version = -1
        head = self.store.head()
        if head is not None and head.step == self.done:
            self.version = head.version
            self.prompts.ask(PromptSource.advance, self.done, self.version, self.successes)
            self.successes = {}
        else:
            self._publish(-1 if head is None else head.version)
        self.began_waiting = self.clock()
        self.publish_s = 0.0  # of the step before: a step's line is written before its version is published

    def _restore_ring(self, ring: _Ring) -> None:
        """If this folder is not the one the checkpoint was made in: what the others, too, need to go on."""
        self.successes = ring.successes
        if _last_step(self.metrics_file) < self.done:  # a line is written before its checkpoint
            self.prompts.ask(PromptSource.restore, ring.prompts)
            self.groups.any().within(PATIENCE_S).ask(GroupSource.restore, ring.groups)
            write_whole(
                self.metrics_file, zlib.decompress(ring.metrics)
            )  # last: should this one be killed, it is all done again

    def _load_learner(self) -> Learner:
        from .learner import Learner

        return Learner(
            self.model,
            lora=self.lora,
            lr=self.lr,
            loss=self.loss,
            temperature=self.temperature,
            max_tokens=self.max_tokens,
            seed=self.seed,
        )

    def step(self) -> float | None:
        if self.done >= self.steps:
            raise Finished
        batch = self._take()
        if not batch.groups:
            return 0.0
        taken = self.clock()
        metrics = self.learner.step(batch.groups, version=self.version)
        trained = self.clock()
        self.done += 1
        self.successes |= {group.id: _success(group) for group in batch.groups}
        self._write_metrics(batch, metrics, wait_s=taken - self.began_waiting, fwd_bwd_s=trained - taken)
        if self.done % self.checkpoint_every == 0 or self.done == self.steps:
            self._checkpoint()
        if self.done % self.publish_every == 0 or self.done == self.steps:
            self._publish(self.version)
        self.began_waiting = self.clock()
        self.publish_s = self.began_waiting - trained
        return 0.0

    def _ask_ahead(self) -> None:
        """The next step's groups can be on their way while the prompt source hears of the version, and no sooner, for
        what is whole by now is older than what will be.

        Not with a max_staleness below 2: before it has heard, more can then be lent that the step has to wait for.
        """
        if self.max_staleness > 1 and self.done < self.steps:
            source, step = self.groups.within(PATIENCE_S), self.done + 1
            self._ahead = source.ask_soon(GroupSource.take, step, self.batch, self.version, self.durable)

    def _take(self) -> Batch:
        """The groups of the next step; without groups if stale ones were dropped instead.

        A worker that dies after it gave its share may have another sample it, too, instead of its own: the same
        completions, to be trained once. What is missing then is sampled by its next incarnation, once that is asked.
        """
        parts = self._given()
        given = {group.id: group for part in parts for group in part.groups}
        while given and len(given) != self.batch:
            before, parts = parts, self._given()
            given |= {group.id: group for part in parts for group in part.groups}
            if parts == before:
                raise ValueError(
                    f"step {self.done + 1} was given the groups {sorted(given)} twice, instead of {self.batch} "
                    "different ones: a share was lost, and the step is made again"
                )
        groups = [given[id] for id in sorted(given)]
        return replace(parts[0], groups=groups, depth=sum(part.depth for part in parts))

    def _given(self) -> list[Batch]:
        """What the buffer, or each worker, gives for the next step."""
        if self._ahead is not None:
            ahead, self._ahead = self._ahead, None
            return [ahead.result()]
        source = self.groups.within(PATIENCE_S)
        return source.ask_each(GroupSource.take, self.done + 1, self.batch, self.version, self.durable)

    def _publish(self, newest: int) -> None:
        """Publish the weights as the version after `newest`, and let the prompt source admit more work."""
        self.version = newest + 1
        self.store.publish(
            self.learner.adapter() | {CANARY: msgspec.json.encode(self.learner.canary())},
            version=self.version,
            step=self.done,
            epoch=self.epoch,
            time=time.time(),
        )
        self._ask_ahead()
        self.prompts.ask(PromptSource.advance, self.done, self.version, self.successes)
        self.successes = {}
        if self.version % 10 == 0:
            self.store.collect(keep=self.max_staleness + 2)

    def _checkpoint(self) -> None:
        """Before the next step is asked for: a stale group dropped for it would be in neither snapshot."""
        ring = _Ring(
            # Before the groups: one delivered in between is then in both, and known by its id, instead of in neither.
            prompts=self.prompts.ask(PromptSource.snapshot),
            groups=self.groups.any().within(PATIENCE_S).ask(GroupSource.snapshot),
            metrics=zlib.compress(self.metrics_file.read_bytes(), level=1),
            successes=self.successes,
        )
        files = self.learner.state() | {RING: msgspec.msgpack.encode(ring)}
        self.store.save_checkpoint(files, step=self.done, epoch=self.epoch)
        self.durable = self.done

    def _write_metrics(
        self, batch: Batch, metrics: dict[str, float], *, wait_s: float, fwd_bwd_s: float
    ) -> None:
        staleness = [self.version - group.version for group in batch.groups]
        now = time.time()
        line: dict[str, Any] = {
            "step": self.done,
            "version": self.version,
            "time": now,
            **metrics,
            "staleness/mean": sum(staleness) / len(staleness),
            "staleness/max": max(staleness),
            "perf/rollout_wait_s": wait_s,
            "perf/fwd_bwd_s": fwd_bwd_s,
            "perf/publish_s": self.publish_s,
            "perf/step_s": wait_s + fwd_bwd_s + self.publish_s,
            **self._speeds(batch, metrics, wait_s + fwd_bwd_s + self.publish_s, fwd_bwd_s),
            "buffer/depth": batch.depth,
            "dropped": batch.dropped,
            "dropped_deciles": batch.dropped_deciles,
            "groups": [group.id for group in batch.groups],
            "workers": _count_by_worker(batch.groups),
        }
        with self.metrics_file.open("ab") as file:
            file.write(msgspec.json.encode(line) + b"\n")
        self.report(of=self.steps, **{key: value for key, value in line.items() if key != "groups"})

    def _speeds(
        self, batch: Batch, metrics: dict[str, float], step_s: float, fwd_bwd_s: float
    ) -> dict[str, float]:
        """Tokens a second of the whole step, and how much of what its GPU can do the trainer does while it trains."""
        sampled = sum(completion.sampled for group in batch.groups for completion in group.completions)
        speeds = {
            "perf/generated_tokens_per_s": sampled / step_s,
            "perf/trained_tokens_per_s": metrics["tokens_trained"] / step_s,
        }
        if (peak := self.learner.peak_flops) is not None:
            speeds["perf/mfu"] = metrics["flops"] / fwd_bwd_s / peak
        return speeds


def _success(group: Group) -> float:
    """The share of a group's completions that was right, as its rewards tell."""
    return sum(min(max(reward, 0.0), 1.0) for reward in group.rewards) / len(group.rewards)


def _count_by_worker(groups: list[Group]) -> dict[str, int]:
    counts: dict[str, int] = {}
    for group in groups:
        counts[group.worker] = counts.get(group.worker, 0) + 1
    return counts


def _last_step(path: Path) -> int:
    lines = read_lines(path)
    return lines[-1]["step"] if lines else 0


def _keep_lines(path: Path, steps: int) -> None:
    """Forget the lines of steps that are about to be made again, and a line cut short by a kill."""
    if path.exists():
        kept = [line for line in read_lines(path) if line["step"] <= steps]
        write_whole(path, b"".join(msgspec.json.encode(line) + b"\n" for line in kept))
