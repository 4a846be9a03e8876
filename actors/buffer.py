"""The buffer between rollout workers and trainer: a ring of whole groups, oldest policy first."""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from pathlib import Path
from typing import ClassVar, Protocol

import msgspec

from ..runtime import Actor, Answer, AskTimeout, NotYet, Ref, Unrecoverable, idempotent
from ..runtime.files import write_whole
from ..runtime.store import Store, StoreError
from .prompts import PromptSource
from .types import LARGEST, Batch, Completion, Count, Group

__all__ = ["Buffer", "GroupSource"]

ROUNDING = 1e-3  # how far above 0 a log-probability may be


class GroupSource(Protocol):
    """Whatever a trainer can take groups from: a buffer, or the rollout workers themselves."""

    @idempotent
    def take(self, step: int, groups: int, version: int, durable: int) -> Batch:
        """Groups for optimizer step number `step`.

        Asked again for the same step (the trainer died over it) it gives the same groups, so nothing is
        trained twice and nothing is lost. version: the trainer's. durable: the last step in a checkpoint;
        what was given out for it or before need not be kept any longer.
        """
        ...

    @idempotent
    def snapshot(self) -> bytes:
        """What another, in another folder, needs to go on from here: of several, any knows it."""
        ...

    @idempotent
    def restore(self, state: bytes) -> None:
        """Go on from a snapshot: another folder's, or one of a time when this one was not in use."""
        ...


class _Record(msgspec.Struct):
    """What a restart needs besides the groups.

    newest:  the last step that was handed groups. trained: ids of groups whose step is durable.
    """

    handed: dict[int, list[int]] = {}
    newest: int = 0
    trained: set[int] = set()
    trained_below: int = 0
    dropped: dict[str, int] = {}
    dropped_deciles: dict[str, list[int]] = {}
    version: int = 0


class _Snapshot(msgspec.Struct):
    """All that a buffer knows, to be kept elsewhere."""

    record: _Record
    groups: list[Group]


_Lent = tuple[int, Answer[list[int]]]
"""What is lent under the oldest version that a step may train, and puts until that was asked."""


class Buffer(Actor):
    """Keeps groups until the trainer takes them, on disk as well, so that its death costs none.

    capacity:      groups it holds; when full, `put` waits.
    max_staleness: how many versions behind the trainer's a group may be.

    A group is refused, and counted by reason, when it is `malformed` (nobody could train it), `stale`, a
    `duplicate` (its id was delivered before), or `unknown` (its version and digest are not a published pair:
    the worker samples something else than it says). The worker says which of its groups were taken; the
    prompts of the others are lent again.
    """

    http: ClassVar = {
        "POST /v1/groups": "put",
        "GET /v1/batch": "take",
        "GET /v1/policy/digest": "digest",
    }
    for_workers: ClassVar = ("put", "digest")

    def __init__(
        self, *, capacity: int, max_staleness: int, prompts: Ref[PromptSource], weights: Store
    ) -> None:
        self.capacity, self.max_staleness = capacity, max_staleness
        self.prompts, self.weights = prompts, weights

    def on_start(self) -> None:
        self._store = self.weights.open(self.context.run, self.context.folder)
        self._digests: dict[int, str] = {}
        self._puts = 0
        self._lengths = deque[int](maxlen=1000)
        self._lent: dict[tuple[int, int], _Lent] = {}  # by step and the trainer's version
        self._trained_files: list[int] = []  # to be removed once the record says that they were trained
        self._awaited: set[int] = set()  # what the next step waits for
        self._told = 0  # the last step of which the prompt source knows what there was to spare
        self._folder: Path = self.state_folder
        record = self._folder / "record.json"
        self.record = msgspec.json.decode(record.read_bytes(), type=_Record) if record.exists() else _Record()
        groups = [
            msgspec.msgpack.decode(path.read_bytes(), type=Group) for path in self._folder.glob("*.group")
        ]
        known = {group.id: group for group in groups}
        self._place(known)

    def _place(self, known: dict[int, Group]) -> None:
        self._handed = {step: {id: known.pop(id) for id in ids} for step, ids in self.record.handed.items()}
        self._fresh_for = -1  # the trainer's version for which none that waits is stale
        self._waiting = {id: group for id, group in known.items() if not self._was_trained(id)}

    @idempotent
    def snapshot(self) -> bytes:
        """Its record and its groups, encoded."""
        handed = (group for groups in self._handed.values() for group in groups.values())
        groups = [*self._waiting.values(), *handed]
        return msgspec.msgpack.encode(_Snapshot(self.record, groups))

    @idempotent
    def restore(self, state: bytes) -> None:
        """Go on from a snapshot, whatever is known here."""
        saved = msgspec.msgpack.decode(state, type=_Snapshot)
        early = self._waiting  # put here by a worker that outlived the machine the snapshot is of
        self.record, self._trained_files = saved.record, []  # what was trained since is to be trained again
        self._place(early | {group.id: group for group in saved.groups})
        for group in saved.groups:
            self._write(group)
        self._save()

    @idempotent
    def put(self, group: Group) -> str:
        """Take one finished group: "accepted", or the reason it was refused.

        Waits while the buffer is full: back-pressure for the workers; not if the next step waits for this group.
        """
        refusal = self._refusal(group)
        if refusal:
            self._count(refusal, [group])
            return refusal
        if self._find(group.id) is not None:
            return "accepted"  # sent again because the answer was lost
        if len(self._waiting) >= self.capacity and group.id not in self._awaited:
            raise NotYet(self._may_take)
        self._puts += 1
        self._write(group)
        self._waiting[group.id] = group
        self._lengths.append(_length(group))
        return "accepted"

    @idempotent
    def take(self, step: Count, groups: Count, version: Count, durable: Count) -> Batch:
        """Whole groups for optimizer step number `step`, those with the oldest policy first.

        Asked again for a step it gives the same groups, whoever asks, and no group for two steps; until that step is
        durable (the last in a checkpoint), when its groups are let go. version: the trainer's.

        A batch without groups means that stale ones were dropped and there were too few left: ask again.
        Raises Unrecoverable (exit code 2) for more groups than it can hold, ValueError for a step that is
        neither one whose groups it still has nor the next, and when a step not yet handed out is durable.
        """
        if groups > self.capacity:
            raise Unrecoverable(
                f"a buffer of {self.capacity} groups can never give {groups} at once: set its capacity to at least "
                f"{groups}",
                exit_code=2,
            )
        newest = self.record.newest
        if durable > newest or not (step in self._handed or step == newest + 1):
            raise ValueError(
                f"no groups for step {step} with step {durable} durable: the last step that was given groups is "
                f"{newest}, so ask for step {newest + 1}, or again for one that is not durable"
            )
        self.record.version = version
        self._forget(durable)
        if step not in self._handed:
            dropped = self._drop_stale()
            spare = len(self._waiting) - groups
            if spare < 0:
                self._tell(step, spare)
                if dropped:
                    return self._batch([])
                raise NotYet
            if self._would_be_stale(step, version):
                if self._awaited:  # whatever there is, it is no surplus while the trainer waits
                    self._tell(step, 0)
                raise NotYet
            self._tell(step, spare)
            oldest = sorted(self._waiting.values(), key=lambda group: (group.version, group.id))
            self._handed[step] = {group.id: self._waiting.pop(group.id) for group in oldest[:groups]}
            self.record.newest = step
            self._lent.clear()
            if self.max_staleness > 1:  # nothing more is lent under a version that is not the newest any more
                self._lent[step + 1, version + 1] = self._ask_what_is_lent(version + 1)
        self._save()
        return self._batch([*self._handed[step].values()])

    def _may_take(self) -> bool:
        """Whether it can be worth the while to put again what there was no room for."""
        return len(self._waiting) < self.capacity or bool(self._awaited)

    def _refusal(self, group: Group) -> str:
        if not _is_well_formed(group):
            return "malformed"
        same = self._find(group.id)
        if same is not None:
            return "" if same == group else "duplicate"
        if self._was_trained(group.id):
            return "duplicate"
        if self._is_stale(group):  # first, for the manifests of old versions are gone
            return "stale"
        published = {version: self.digest(version) for version in group.digests}
        return "" if all(published.values()) and published == group.digests else "unknown"

    def _is_stale(self, group: Group) -> bool:
        return self.record.version - group.version > self.max_staleness

    def _would_be_stale(self, step: int, version: int) -> bool:
        """Whether this step would make a group stale that is still being sampled, or it is not known yet.

        It is waited for instead, since what is slow is long, and a policy that is trained without its long answers
        learns to give short ones.
        """
        # A trainer that died may still ask for this step, at another version: each has its own answer to wait for.
        asked = step, version
        if asked not in self._lent:
            self._lent[asked] = self._ask_what_is_lent(version)
        puts, answer = self._lent[asked]
        if not answer.done:
            return True  # its answer calls `step`, and that has this looked at again
        try:
            lent = answer.result()
        except AskTimeout:
            del self._lent[asked]  # in the time of whoever asked then: the next may have more
            raise
        self._awaited = {id for id in lent if self._find(id) is None and not self._was_trained(id)}
        if self._awaited and puts != self._puts:  # it may have been given back since
            del self._lent[asked]
            return self._would_be_stale(step, version)
        return bool(self._awaited)

    def _ask_what_is_lent(self, version: int) -> _Lent:
        """Under the version whose groups are too old after a step at this one."""
        return self._puts, self.prompts.ask_soon(PromptSource.lent_under, version - self.max_staleness)

    def step(self) -> float | None:
        """Nothing of its own: see `_would_be_stale`."""
        return None

    def _tell(self, step: int, spare: int) -> None:
        """Once for each step, the prompt source hears whether too much or too little is under way."""
        if self._told < step:
            self._told = step
            self.prompts.tell(PromptSource.spare, spare)

    def _find(self, id: int) -> Group | None:
        if id in self._waiting:
            return self._waiting[id]
        return next((groups[id] for groups in self._handed.values() if id in groups), None)

    @idempotent
    def digest(self, version: Count) -> str:
        """SHA-256 that this version was published with, which groups must name; empty if it never was, or is too old
        to be sampled."""
        if version not in self._digests:
            try:
                self._digests[version] = self._store.policy(version).digest
            except StoreError:
                return ""  # never published, or collected since: nobody may sample it
        return self._digests[version]

    def _drop_stale(self) -> bool:
        if self._fresh_for == self.record.version:
            return False  # and what has come since was refused if it was
        groups = [group for group in self._waiting.values() if self._is_stale(group)]
        if groups:
            # In this order a kill in between counts or returns a group twice, which harms nobody, but never
            # loses one: a prompt that is neither here nor with its source would starve the run.
            self._count("stale", groups)
            stale = [group.id for group in groups]
            self.prompts.ask(PromptSource.give_back, stale)
            self._remove(stale)
        self._fresh_for = self.record.version
        return bool(groups)

    def _forget(self, durable: int) -> None:
        ids = [
            id for step in [step for step in self._handed if step <= durable] for id in self._handed.pop(step)
        ]
        record = self.record
        record.trained.update(ids)
        while record.trained_below in record.trained:
            record.trained.remove(record.trained_below)
            record.trained_below += 1
        self._trained_files += ids

    def _remove(self, ids: list[int]) -> None:
        for id in ids:
            self._waiting.pop(id, None)
            (self._folder / f"{id}.group").unlink(missing_ok=True)

    def _was_trained(self, id: int) -> bool:
        return id < self.record.trained_below or id in self.record.trained

    def _write(self, group: Group) -> None:
        write_whole(self._folder / f"{group.id}.group", msgspec.msgpack.encode(group))

    def _batch(self, groups: list[Group]) -> Batch:
        record = self.record
        return Batch(
            groups=groups,
            dropped=record.dropped,
            depth=len(self._waiting),
            dropped_deciles=record.dropped_deciles,
        )

    def _count(self, reason: str, groups: list[Group]) -> None:
        """Dropping what is late is dropping what is long, if one does not look."""
        record = self.record
        record.dropped[reason] = record.dropped.get(reason, 0) + len(groups)
        deciles, known = record.dropped_deciles.setdefault(reason, [0] * 10), sorted(self._lengths)
        for group in groups:
            deciles[10 * bisect_left(known, _length(group)) // (len(known) + 1)] += 1
        self._save()
        self.report(dropped=self.record.dropped)

    def _save(self) -> None:
        self.record.handed = {step: [*groups] for step, groups in self._handed.items()}
        write_whole(self._folder / "record.json", msgspec.json.encode(self.record))
        self._remove(self._trained_files)
        self._trained_files = []


def _length(group: Group) -> int:
    return max((len(completion.ids) for completion in group.completions), default=0)


def _is_well_formed(group: Group) -> bool:
    """Whether a trainer could train it: a group may come from another machine, and checked by type alone."""
    return (
        0 <= group.id < 2**62
        and _are_token_ids(group.prompt_ids)
        and len(group.completions) > 0
        and all(_is_well_formed_completion(completion) for completion in group.completions)
        and group.digests.keys() == {v for completion in group.completions for v in completion.versions}
    )


def _is_well_formed_completion(completion: Completion) -> bool:
    return (
        _are_token_ids(completion.ids)
        and len(completion.logprobs) == len(completion.ids)
        and all(-LARGEST < logprob <= ROUNDING for logprob in completion.logprobs)
        and all(
            abs(reward) < LARGEST for reward in (completion.reward, *completion.rewards.values())
        )  # NaN is not
        and len(completion.versions) == len(completion.ids)
        and completion.versions[0] >= 0
        and completion.versions == sorted(completion.versions)
        and completion.versions[-1] < 2**62
        and completion.finish_reason in ("stop", "length")
        and (not completion.mask or (len(completion.mask) == len(completion.ids) and any(completion.mask)))
    )


def _are_token_ids(ids: list[int]) -> bool:
    return len(ids) > 0 and min(ids) >= 0 and max(ids) < 2**31
