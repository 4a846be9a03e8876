"""The parts of a run that are heavy, as they are in virtual time: they take what a profile says, and compute nothing.

A completion of n tokens is one token here, whose id is n: nobody in between looks at it.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, cast

from ..runtime import Actor, Graph, idempotent
from ..runtime.errors import ActorDied
from ..runtime.store import PolicyVersion, Store, StoreError
from ..runtime.testing import Killed, spend, virtual_clock
from .canary import Canary
from .engines import Engine, Request, Sample, Sampled, Sampling
from .evaluator import Evaluator
from .profile import Profile, uniform
from .prompts import PromptSource
from .reward import Reward
from .rollout import RolloutWorker
from .trainer import Trainer
from .types import Group, Prompt

if TYPE_CHECKING:
    from .learner import Learner

__all__ = ["CANARY_OF_ALL", "World", "recast"]

CANARY_OF_ALL = Canary(prompt_ids=[1], ids=[1], logprobs=[0.0], dtype="float32")


@dataclass(eq=False)
class World:
    """What the simulated parts of one run share. spent: seconds of each actor by what they went on."""

    profile: Profile
    seed: int
    folder: Path
    starts: bool
    versions: list[PolicyVersion] = field(default_factory=list)
    spent: dict[str, dict[str, float]] = field(
        default_factory=lambda: defaultdict(lambda: defaultdict(float))
    )
    ended: float = math.inf  # when the trainer had finished
    begun: set[str] = field(default_factory=set)  # who has been started once
    _draws: Counter[str] = field(default_factory=Counter)

    def now(self) -> float:
        """Virtual seconds, up to the trainer's end: what comes after is nobody's time."""
        return min(virtual_clock(), self.ended)

    def draw(self, what: str) -> float:
        """Between 0 and 1; the next of its kind."""
        self._draws[what] += 1
        return uniform(f"{self.seed}/{what}/{self._draws[what]}")

    def spend(self, actor: str, on: str, seconds: float) -> None:
        began = self.now()
        try:
            spend(seconds)
        finally:  # also where it is killed meanwhile
            self.spent[actor][on] += self.now() - began


class SimulatedEngine:
    """Tokens come as time passes, faster or slower with how many completions are under way.

    waits: a step takes the time until the next completion is done; otherwise whoever asks has seen to it that some
    has passed, and is told what is done by now.
    """

    dtype = "float32"

    def __init__(self, world: World, name: str, *, waits: bool) -> None:
        self.version = -1
        self._world, self._name, self._waits = world, name, waits
        self._left: dict[int, float] = {}  # tokens that each has to come
        self._tokens: dict[int, tuple[int, int]] = {}  # of each, and the version
        self._count = 0
        self._looked = virtual_clock()
        self._step_s = 0.0

    @property
    def versions(self) -> list[int]:
        return sorted({version for _, version in self._tokens.values()} | {self.version} - {-1})

    @property
    def running(self) -> int:
        return len(self._left)

    def encode(self, text: str) -> list[int]:
        return [1]

    def encode_answer(self, text: str, ids: Sequence[int]) -> list[int]:
        return [1]

    def load(self, version: int, digest: str, folder: Path) -> None:
        self._advance()
        self._world.spend(self._name, "swap", self._world.profile.apply.draw(self._world.draw("apply")))
        self.version, self._looked = version, virtual_clock()

    def score(self, prompt_ids: Sequence[int], ids: Sequence[int]) -> list[float]:
        return list(CANARY_OF_ALL.logprobs)

    def add(self, requests: Sequence[Request], sampling: Sampling) -> list[int]:
        self._advance()
        ids = list(range(self._count, self._count + len(requests)))
        self._count += len(requests)
        for id, request in zip(ids, requests, strict=True):
            drawn = self._world.profile.tokens.draw(uniform(f"{self._world.seed}/{request.seed}"))
            tokens = max(1, min(sampling.max_tokens, round(drawn)))
            self._left[id], self._tokens[id] = float(tokens), (tokens, self.version)
        self._change_pace()
        return ids

    def step(self) -> list[Sampled]:
        if self._waits and self._left:
            spend(self.in_s(1))
        self._advance()
        done = [id for id, left in self._left.items() if left < 1e-6]
        finished = []
        for id in done:
            del self._left[id]
            tokens, version = self._tokens.pop(id)
            finished.append(Sampled(id, Sample([tokens], [-1.0], [version], "stop", "")))
        if done:
            self._change_pace()
        return finished

    def in_s(self, count: int) -> float:
        """Seconds until so many of those under way are done, at the pace of now."""
        left = sorted(self._left.values())
        passed = virtual_clock() - self._looked
        return max(0.0, left[min(count, len(left)) - 1] * self._step_s - passed) if left else math.inf

    def _advance(self) -> None:
        now = virtual_clock()
        if self._left:
            self._world.spent[self._name]["sample"] += max(0.0, self._world.now() - self._looked)
            tokens = (now - self._looked) / self._step_s
            for id in self._left:
                self._left[id] -= tokens
        self._looked = now

    def _change_pace(self) -> None:
        if self._left:
            ratio = self._world.draw(f"sample/{self._name}")
            self._step_s = self._world.profile.sample.at(len(self._left), ratio)


class SimulatedLearner:
    """Takes the time for the tokens that it is given."""

    def __init__(self, world: World, name: str) -> None:
        self._world, self._name = world, name
        self.peak_flops = None

    def step(self, groups: Sequence[Group], *, version: int) -> dict[str, float]:
        tokens = sum(completion.ids[0] for group in groups for completion in group.completions)
        drawn = self._world.draw("train")
        self._world.spend(self._name, "train", self._world.profile.train.at(tokens, drawn))
        return {"reward": 0.0, "loss": 0.0, "tokens_trained": float(tokens), "flops": 0.0}

    def adapter(self) -> dict[str, bytes]:
        return {}

    def canary(self) -> Canary:
        return CANARY_OF_ALL

    def state(self) -> dict[str, bytes]:
        return {}

    def restore(self, state: Mapping[str, bytes]) -> None:
        """There is nothing."""


class SimulatedVersions:
    """A store in memory: publishing takes the profile's time, all else none."""

    url = "file://"

    def __init__(self, world: World) -> None:
        self._world = world
        self._checkpoint: tuple[int, dict[str, bytes]] | None = None

    def open(self, run: str, folder: Path) -> SimulatedVersions:
        return self

    def probe(self) -> None:
        """It can be written to."""

    def take_epoch(self) -> int:
        return 1

    def publish(
        self, files: Mapping[str, bytes], *, version: int, step: int, epoch: int, time: float = 0.0
    ) -> PolicyVersion:
        took = self._world.profile.publish.draw(self._world.draw("publish"))
        self._world.spend("trainer", "publish", took if version else 0.0)
        policy = PolicyVersion(
            version=version, step=step, epoch=epoch, digest=f"{version:064x}", files={}, nonce=""
        )
        self._world.versions.append(policy)
        return policy

    def head(self) -> PolicyVersion | None:
        return self._world.versions[-1] if self._world.versions else None

    def policy(self, version: int) -> PolicyVersion:
        if not 0 <= version < len(self._world.versions):
            raise StoreError(f"there is no version {version}")
        return self._world.versions[version]

    def fetch(self, version: int, *, keep: Sequence[int] = ()) -> Path:
        return self._world.folder

    def save_checkpoint(self, files: Mapping[str, bytes], *, step: int, epoch: int) -> None:
        self._checkpoint = step, dict(files)

    def latest_checkpoint(self) -> tuple[int, dict[str, bytes]] | None:
        return self._checkpoint

    def collect(self, *, keep: int) -> None:
        """Nothing: a version takes no room."""


class _Simulated(Actor):
    """Of every role: the world it lives in, and how long it takes to start."""

    world: ClassVar[World]
    preloads: ClassVar[tuple[str, ...]] = ()

    def _begin(self) -> None:
        world = self.world
        if self.name in world.begun:
            world.spend(self.name, "start", world.profile.restart.draw(world.draw("restart")))
        elif world.starts:
            world.spend(self.name, "start", world.profile.start.draw(world.draw("start")))
        world.begun.add(self.name)


class _News:
    """What the prompt source would tell of a newer version, without a message from each of a thousand workers."""

    def __init__(self, world: World, after: int) -> None:
        self._world, self._after = world, after

    @property
    def done(self) -> bool:
        return bool(self._world.versions) and self._world.versions[-1].version > self._after

    def result(self) -> int:
        return self._world.versions[-1].version


class SimulatedRollout(_Simulated, RolloutWorker):
    def on_start(self) -> None:
        self._begin()
        RolloutWorker.on_start(self)

    def _load_engine(self) -> Engine:
        return SimulatedEngine(self.world, self.name, waits=self.sink is None)

    @property
    def _news(self) -> Any:
        return _News(self.world, self._newest)

    @_news.setter
    def _news(self, news: Any) -> None:  # pyright: ignore[reportIncompatibleVariableOverride]
        """It was heard, or asked for."""

    def step(self) -> float | None:
        pause_s = RolloutWorker.step(self)
        if pause_s != 0.0 or not self.engine.running:
            return pause_s
        # Until one more group has room, or is whole: between these a worker would only count tokens.
        group = self.group_size
        engine = cast(SimulatedEngine, self.engine)
        whole = min(Counter(begun.one for begun in self._sampling.values()).values())
        return engine.in_s(min(whole, engine.running % group or group))

    def report(self, **values: Any) -> None:
        self._note_waits(values)

    def on_stop(self) -> None:
        self.waits.over()  # on a clock that has stopped
        self._note_waits(self.waits.take())
        RolloutWorker.on_stop(self)

    def _note_waits(self, values: Mapping[str, Any]) -> None:
        for wait in ("lease_wait_s", "put_wait_s"):
            self.world.spent[self.name][wait.removesuffix("_s").replace("_", " ")] += values.get(wait, 0.0)


class SimulatedTrainer(_Simulated, Trainer):
    def on_start(self) -> None:
        self._begin()
        Trainer.on_start(self)

    def step(self) -> float | None:
        try:
            return Trainer.step(self)
        except (ActorDied, ValueError) as error:  # a process would die of it, and make the step again
            raise Killed from error

    def on_stop(self) -> None:
        self.world.ended = virtual_clock()

    def _load_learner(self) -> Learner:
        return cast("Learner", SimulatedLearner(self.world, self.name))


class SimulatedReward(_Simulated, Reward):
    def on_start(self) -> None:
        self._begin()

    @idempotent
    def score(self, prompt: Prompt, completions: Sequence[str]) -> list[float]:
        self.world.spend(self.name, "score", self.world.profile.score.draw(self.world.draw("score")))
        return [0.0] * len(completions)

    def step(self) -> float | None:
        return None

    def on_stop(self) -> None:
        """There is nothing to report."""


class SimulatedPrompts(_Simulated, PromptSource):
    def on_start(self) -> None:
        PromptSource.on_start(self)


class SimulatedEvaluator(_Simulated, Evaluator):
    def _load_engine(self) -> Engine:
        return SimulatedEngine(self.world, self.name, waits=True)


_PARTS: list[tuple[type[Any], type[Any], bool]] = [  # and which of them read a clock
    (RolloutWorker, SimulatedRollout, True),
    (Trainer, SimulatedTrainer, True),
    (Reward, SimulatedReward, False),
    (PromptSource, SimulatedPrompts, True),
    (Evaluator, SimulatedEvaluator, False),
]


def recast(graph: Graph, world: World) -> None:
    """Let the simulated parts play the roles of `graph`; also those that a recipe has changed by a subclass."""
    store = SimulatedVersions(world)
    for role in list(graph):
        changed: dict[str, Any] = {
            name: store for name, value in role.kwargs.items() if isinstance(value, Store)
        }
        simulated: type[Any] = role.actor
        for real, part, clock in _PARTS:
            if issubclass(role.actor, real):
                # A subclass's own methods come after the simulated ones, and before those of the real role.
                bases = (part,) if role.actor is real else (part, role.actor)
                simulated = type(part.__name__, bases, {"world": world})
                if clock:
                    changed["clock"] = world.now if real is RolloutWorker else virtual_clock
        if PromptSource in simulated.__mro__:
            changed["dataset"] = "tiny"
        if Evaluator in simulated.__mro__:
            changed |= {"dataset": "tiny", "problems": min(256, role.kwargs["problems"])}
        graph.recast(role.name, simulated, **changed)
