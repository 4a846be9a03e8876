"""What travels round the ring: prompts out, groups of completions back."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Struct

__all__ = [
    "LARGEST",
    "MOST_REWARDS",
    "PATIENCE_S",
    "Batch",
    "Completion",
    "Count",
    "Group",
    "Lease",
    "Prompt",
    "Rewards",
    "Turn",
]

Count = Annotated[int, Meta(ge=0, lt=2**62)]
"""A number that another machine may send: any JSON file and any 8-byte integer can hold it."""

PATIENCE_S = 6 * 3600.0
"""How long one role waits for another's work: that a trainer or a worker is slow is no fault."""

LARGEST = 3e38
"""A reward is below it, as is a log-probability: float32's, so that no sum of them overflows."""


class Prompt(Struct, frozen=True, kw_only=True):
    """One problem, handed out once.

    `id` is its place in the run's endless sequence of prompts, so it names the group it becomes, too:
    two groups with one id are the same work done twice.
    """

    id: int
    text: str
    answer: str


class Lease(Struct, frozen=True, kw_only=True):
    """Prompts lent to one rollout worker.

    number:   the worker names it when it says what became of the prompts; from 1, and growing.
    hold_s:   seconds after which the worker must say again that it holds them (see PromptSource.hold).
    version:  the newest policy version; the prompts must be sampled with it or a newer one.
    finished: the run is over: nothing will be lent any more.
    """

    number: int
    prompts: list[Prompt]
    version: int
    finished: bool
    hold_s: float


class Turn(Struct, frozen=True, kw_only=True):
    """What is answered to a turn of the policy's.

    text:    put after the turn, for the policy to go on from.
    reward:  for this turn; a completion's is the sum of its turns'.
    rewards: by name, of what the reward is made up, if of several.
    done:    whether this was the last one; nothing is put after it.
    """

    text: str = ""
    reward: float = 0.0
    rewards: dict[str, float] = {}
    done: bool = False


MOST_REWARDS = 64
Rewards = Annotated[dict[Annotated[str, Meta(max_length=200)], float], Meta(max_length=MOST_REWARDS)]
"""By name; as much as a machine may send that is not trusted."""


class Completion(Struct, frozen=True, kw_only=True):
    """All that comes after the prompt: one turn of the policy's, or several with an environment's answers between.

    ids:           token ids, end-of-sequence included.
    logprobs:      log-probability of each under the distribution it was drawn from (after temperature); 0 for what
                   an environment wrote.
    versions:      policy version that sampled each token; an environment's have that of the token before. They never
                   decrease.
    mask:          true where the policy sampled the token, and only there is it trained; empty where it sampled all.
    finish_reason: "stop" (it came to its end) or "length" (cut off).
    reward:        what the reward function or the environment gave; NaN until it is scored.
    rewards:       by name, of what that is made up, if of several: for the metrics.
    """

    ids: list[int]
    logprobs: list[float]
    versions: list[int]
    finish_reason: str
    text: str
    mask: list[bool] = []
    reward: float = float("nan")
    rewards: Rewards = {}

    @property
    def sampled(self) -> int:
        """How many of its tokens the policy sampled."""
        return sum(self.mask) if self.mask else len(self.ids)


class Group(Struct, frozen=True, kw_only=True):
    """Sibling completions of one prompt: the unit that travels, is dropped, and is trained, whole.

    digests: SHA-256 of each adapter that sampled any of it, as published with its version.
    worker: name of the rollout worker, for the logs.
    """

    prompt: Prompt
    prompt_ids: list[int]
    completions: list[Completion]
    digests: dict[int, str]
    worker: str

    @property
    def id(self) -> int:
        return self.prompt.id

    @property
    def version(self) -> int:
        """The oldest policy version that sampled any part of it: staleness is counted from here."""
        return min(completion.versions[0] for completion in self.completions)

    @property
    def rewards(self) -> list[float]:
        return [completion.reward for completion in self.completions]


class Batch(Struct, frozen=True, kw_only=True):
    """Groups for one optimizer step, and how the buffer they come from is doing.

    dropped: groups thrown away since the run began, by reason; dropped_deciles: the same by how long their longest
             completion was among those of the last thousand that came, from the shortest tenth to the longest.
    depth:   groups still waiting.
    """

    groups: list[Group]
    dropped: dict[str, int]
    depth: int
    dropped_deciles: dict[str, list[int]] = {}
