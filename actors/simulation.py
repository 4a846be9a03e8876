"""A recipe's own graph in virtual time: what a run would do with a thousand workers, before a machine is rented.

    real: PromptSource, Buffer, Reward's place, RolloutWorker, Trainer, and all messages between them
    simulated: the engine, the reward, the learner, the store; they take the time that a profile says they do

A completion of n tokens is one token here, whose id is n: nobody in between looks at it.
"""

from __future__ import annotations

import hashlib
import math
import random
import tempfile
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, cast

import msgspec

from ..runtime import Graph, idempotent
from ..runtime.errors import ActorDied, Unrecoverable
from ..runtime.store import PolicyVersion, Store, StoreError
from ..runtime.testing import Killed, LocalRun, spend, virtual_clock
from .canary import CANARY, Canary
from .engines import Engine, Request, Sample, Sampled, Sampling
from .evaluator import Evaluator
from .profile import Profile
from .prompts import PromptSource
from .reward import Reward
from .rollout import RolloutWorker
from .trainer import Trainer
from .types import Group, Prompt

if TYPE_CHECKING:
    from .learner import Learner

__all__ = ["Prediction", "simulate"]

MEMORY = "/dev/shm"  # noqa: S108  a file system in memory, where there is one
_CANARY = Canary(prompt_ids=[1], ids=[1], logprobs=[0.0], dtype="float32")


class Prediction(msgspec.Struct, frozen=True, kw_only=True):
    """What a run would come to.

    wall_s: from the start of its first process until the trainer has finished. first_step_s: the first step's wait
    and work.
    groups_per_s, tokens_per_s: trained, after the first step. trainer_wait_share: as in a run's result.
    shares: of the time of each role's machines, what it went on; they add up to 1.
    dropped: groups by reason. gpu_h: hours of the trainer's and the rollout workers' machines. lost: machines.
    bottleneck: "trainer-bound", "rollout-bound" or "balanced": who waits for whom.
    """

    steps: int
    workers: int
    wall_s: float
    first_step_s: float
    groups_trained: int
    groups_per_s: float
    tokens_per_s: float
    trainer_wait_share: float
    staleness_mean: float
    staleness_max: int
    dropped: dict[str, int]
    shares: dict[str, dict[str, float]]
    bottleneck: str
    gpu_h: dict[str, float]
    lost: int


@dataclass(eq=False)
class World:
    """What the simulated parts of one run share. spent: seconds of each actor by what they went on."""

    profile: Profile
    seed: int
    folder: Path
    starts: bool
    versions: list[PolicyVersion] = field(default_factory=list)
    spent: dict[str, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))
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


def uniform(key: str) -> float:
    """Between 0 and 1, the same for the same key."""
    return int.from_bytes(hashlib.blake2b(key.encode(), digest_size=7).digest()) / 2**56


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

    def load(self, version: int, digest: str, folder: Path) -> None:
        self._advance()
        self._world.spend(self._name, "swap", self._world.profile.apply.draw(self._world.draw("apply")))
        self.version, self._looked = version, virtual_clock()

    def score(self, prompt_ids: Sequence[int], ids: Sequence[int]) -> list[float]:
        return list(_CANARY.logprobs)

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

    def step(self, groups: Sequence[Group], *, version: int) -> dict[str, float]:
        tokens = sum(completion.ids[0] for group in groups for completion in group.completions)
        drawn = self._world.draw("train")
        self._world.spend(self._name, "train", self._world.profile.train.at(tokens, drawn))
        return {"reward": 0.0, "loss": 0.0, "tokens_trained": float(tokens)}

    def adapter(self) -> dict[str, bytes]:
        return {}

    def canary(self) -> Canary:
        return _CANARY

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

    def publish(self, files: Mapping[str, bytes], *, version: int, step: int, epoch: int) -> PolicyVersion:
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


class _Simulated:
    """Of every role: the world it lives in, and how long it takes to start."""

    world: ClassVar[World]
    preloads: ClassVar[tuple[str, ...]] = ()
    name: str

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
        whole = min(group - len(one.samples) for one in self._sampling.values())
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


def _recast(graph: Graph, world: World) -> None:
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


def simulate(
    graph: Graph,
    profile: Profile,
    *,
    seed: int = 0,
    lost_per_h: float = 0.0,
    away_s: float = 60.0,
    starts: bool = True,
) -> Prediction:
    """Run `graph`, with whatever is heavy simulated, to its end.

    lost_per_h: how often each rollout worker's machine is lost, as a rented one may be, on average in an hour; the next
    is there in `away_s` seconds, and its worker begins then to start. starts: whether roles take time to start.
    Raises Unrecoverable (exit code 2) for a graph without a trainer and rollout workers.
    """
    roles = {real: [role for role in graph if issubclass(role.actor, real)] for real in (RolloutWorker, Trainer)}
    if not all(len(found) == 1 for found in roles.values()):
        raise Unrecoverable(
            f"{graph.name} can't be simulated: it needs one role of rollout workers and one trainer", exit_code=2
        )
    (rollout,), (trainer,) = roles.values()
    with tempfile.TemporaryDirectory(dir=MEMORY if Path(MEMORY).is_dir() else None) as name:
        folder = Path(name)
        (folder / CANARY).write_bytes(msgspec.json.encode(_CANARY))
        world = World(profile, seed, folder, starts)
        _recast(graph, world)
        losses = _Losses(rollout.members, lost_per_h / 3600, away_s, random.Random(seed))
        run = LocalRun(graph, folder=folder / "run", kill=losses.due, rng=random.Random(seed))
        run.run()
        return _prediction(run, world, rollout.members, trainer.name, len(losses.happened))


class _Losses:
    """Machines that are lost as time passes, each as likely as any other (a Poisson process)."""

    def __init__(self, names: Sequence[str], per_s: float, away_s: float, rng: random.Random) -> None:
        self._names, self._rate, self._away_s, self._rng = names, per_s * len(names), away_s, rng
        self._next = rng.expovariate(self._rate) if self._rate > 0 else math.inf
        self.happened: list[tuple[float, str]] = []

    def due(self, run: LocalRun) -> list[str]:
        while self._next <= run.now:
            name = self._rng.choice(self._names)
            run.lose(name, self._away_s)
            self.happened.append((self._next, name))
            self._next += self._rng.expovariate(self._rate)
        return []


def _prediction(
    run: LocalRun, world: World, workers: Sequence[str], trainer: str, lost: int
) -> Prediction:
    # A step that was made again, after a death, counts once.
    steps = list({report["step"]: report for report in run.reports[trainer]}.values())
    later, wall_s = steps[1:], world.ended
    waited = sum(step["perf/rollout_wait_s"] for step in later)
    worked = sum(step["perf/step_s"] for step in later)
    groups = [sum(step["workers"].values()) for step in steps]
    spent = {"rollout": [world.spent[name] for name in workers], "trainer": [world.spent[trainer]]}
    spent["trainer"][0]["wait"] = sum(step["perf/rollout_wait_s"] for step in steps)
    shares = {role: _shares(counters, wall_s * len(counters)) for role, counters in spent.items()}
    idle = shares["rollout"].get("lease wait", 0.0) + shares["rollout"].get("put wait", 0.0)
    wait_share = waited / worked if worked else 0.0
    return Prediction(
        steps=len(steps),
        workers=len(workers),
        wall_s=wall_s,
        first_step_s=steps[0]["perf/step_s"],
        groups_trained=sum(groups),
        groups_per_s=sum(groups[1:]) / worked if worked else 0.0,
        tokens_per_s=sum(step["tokens_trained"] for step in later) / worked if worked else 0.0,
        trainer_wait_share=wait_share,
        staleness_mean=sum(step["staleness/mean"] for step in steps) / len(steps),
        staleness_max=max(step["staleness/max"] for step in steps),
        dropped=dict(steps[-1]["dropped"]),
        shares=shares,
        bottleneck=_bottleneck(wait_share, idle),
        gpu_h={"rollout": len(workers) * wall_s / 3600, "trainer": wall_s / 3600},
        lost=lost,
    )


def _shares(counters: Sequence[Counter[str]], total_s: float) -> dict[str, float]:
    together: Counter[str] = Counter()
    for counter in counters:
        together.update(counter)
    shares = {what: seconds / total_s for what, seconds in sorted(together.items()) if seconds}
    return {**shares, "other": max(0.0, 1.0 - sum(shares.values()))}


def _bottleneck(trainer_waits: float, workers_wait: float) -> str:
    if trainer_waits > workers_wait + 0.1:
        return "rollout-bound"
    return "trainer-bound" if workers_wait > trainer_waits + 0.1 else "balanced"
