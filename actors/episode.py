"""One completion under way: turns of the policy's, and between them what is answered to it.

    prompt ─▶ request ─engine─▶ turn ─judge─▶ answer ─┬─▶ request: the prompt and all that came after it
                                                      └─▶ completion

Rollout workers and evaluators play by the same rules, which are these.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from msgspec.structs import replace

from ..runtime import Answer, Unrecoverable, idempotent
from .engines import Engine, Request, Sample, Sampling
from .reward import are_rewards, is_reward
from .types import LARGEST, Completion, Group, Lease, Prompt, Turn

__all__ = ["Episode", "Judge", "OpenGroup", "begin_turns", "play"]


class Judge(Protocol):
    """Whoever answers turns: a reward, which has a completion end with its first, or an environment's host."""

    @idempotent
    def open(self, prompts: Sequence[Prompt]) -> list[str]:
        """What is put after each prompt's text before the policy's first turn."""
        ...

    @idempotent
    def respond(self, prompt: Prompt, transcripts: Sequence[Sequence[str]]) -> list[Turn]:
        """The answers to completions of this prompt: each is given as all its turns so far, the newest last."""
        ...


class Episode:
    """A completion that grows by turns.

    seed:     0 to 2⁶⁴−1; decides all its draws.
    sampling: of a turn, but that max_tokens is the most tokens of them all, an environment's included.
    """

    def __init__(self, prompt: Prompt, prompt_ids: list[int], seed: int, sampling: Sampling) -> None:
        self.prompt, self.prompt_ids = prompt, prompt_ids
        self.turns: list[str] = []
        self.text, self.reward, self.done = "", 0.0, False
        self.rewards = defaultdict[str, float](float)
        self._seed, self._sampling = seed, sampling
        self._ids: list[int] = []
        self._logprobs: list[float] = []
        self._versions: list[int] = []
        self._mask: list[bool] = []
        self._turn_ids: list[int] = []
        self._finish_reason = ""

    def request(self) -> tuple[Request, Sampling]:
        """For its next turn."""
        seed = self._seed
        if self.turns:
            key = f"{seed}/{len(self.turns)}".encode()
            seed = int.from_bytes(hashlib.blake2b(key, digest_size=8).digest())
        left = self._sampling.max_tokens - len(self._ids)
        return Request(self.prompt_ids + self._ids, seed), replace(self._sampling, max_tokens=left)

    def add_turn(self, sample: Sample) -> None:
        """What was sampled for its request."""
        self._add(sample.ids, sample.logprobs, sample.versions, sample.text, sampled=True)
        self._turn_ids, self._finish_reason = sample.ids, sample.finish_reason
        self.turns.append(sample.text)

    def add_answer(self, turn: Turn, engine: Engine) -> None:
        """What the judge has answered to its last turn. Without room to go on it is cut off there.

        Raises Unrecoverable for a reward that can't be trained.
        """
        self.reward += turn.reward
        for name, reward in turn.rewards.items():
            self.rewards[name] += reward
        if not (is_reward(self.reward) and are_rewards(self.rewards)):
            raise Unrecoverable(
                f"the reward of a completion of prompt {self.prompt.id} ({self.prompt.text[:80]!r}) is {self.reward!r} "
                f"with what was given for its last turn, {turn!r}: rewards must be finite numbers, below {LARGEST}, "
                "and have short names; mend whoever judges it"
            )
        self.done = turn.done
        if turn.done:
            return
        ids = engine.encode_answer(turn.text, self._turn_ids)
        if len(self._ids) + len(ids) >= self._sampling.max_tokens:
            self.done, self._finish_reason = True, "length"
        else:
            # By nobody's policy, but a list of versions that never decrease has no room for that.
            version = self._versions[-1]
            self._add(ids, [0.0] * len(ids), [version] * len(ids), turn.text, sampled=False)

    def _add(
        self, ids: list[int], logprobs: list[float], versions: list[int], text: str, *, sampled: bool
    ) -> None:
        self._ids += ids
        self._logprobs += logprobs
        self._versions += versions
        self._mask += [sampled] * len(ids)
        self.text += text

    def completion(self) -> Completion:
        """Itself, once it is done."""
        return Completion(
            ids=self._ids,
            logprobs=self._logprobs,
            versions=self._versions,
            mask=[] if all(self._mask) else self._mask,
            finish_reason=self._finish_reason,
            text=self.text,
            reward=self.reward,
            rewards=dict(self.rewards),
        )


@dataclass(eq=False)
class OpenGroup:
    """A group under way, from the lease of its prompt until the buffer has it.

    openings: of all the lease's prompts; place: of this one among them. due: it is not whole before, on the
    actor's clock.
    """

    prompt: Prompt
    lease: Lease
    openings: Answer[list[str]]
    place: int
    prompt_ids: list[int] = field(default_factory=list)
    episodes: list[Episode] = field(default_factory=list)
    put: Answer[str] | None = None
    due: float = 0.0

    def group(self, digests: Mapping[int, str], worker: str) -> Group:
        """Itself, once all its completions are done. digests: of the versions that sampled it, and of others."""
        completions = [episode.completion() for episode in self.episodes]
        versions = {version for completion in completions for version in completion.versions}
        return Group(
            prompt=self.prompt,
            prompt_ids=self.prompt_ids,
            completions=completions,
            digests={version: digests[version] for version in versions},
            worker=worker,
        )


def begin_turns(engine: Engine, episodes: Sequence[Episode]) -> dict[int, Episode]:
    """Have the engine sample the next turn of each; by the id of its request."""
    alike = dict[Sampling, list[tuple[Episode, Request]]]()
    for episode in episodes:
        request, sampling = episode.request()
        alike.setdefault(sampling, []).append((episode, request))
    begun = dict[int, Episode]()
    for sampling, several in alike.items():
        ids = engine.add([request for _, request in several], sampling)
        begun.update(zip(ids, (episode for episode, _ in several), strict=True))
    return begun


def play(engine: Engine, judge: Judge, episodes: Sequence[Episode]) -> None:
    """Have these come to their ends, in an engine that nobody else has added to, with a judge in this process."""
    under_way = begin_turns(engine, episodes)
    while under_way:
        going_on = list[Episode]()
        for sampled in engine.step():
            episode = under_way.pop(sampled.id)
            episode.add_turn(sampled.sample)
            [turn] = judge.respond(episode.prompt, [episode.turns])
            episode.add_answer(turn, engine)
            if not episode.done:
                going_on.append(episode)
        under_way |= begin_turns(engine, going_on)
