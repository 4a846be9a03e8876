"""Actors of a GRPO run whose model is a hash: their data goes the real way, at thousands of steps a second.

What the fake engine samples depends on the adapter's bytes, the prompt and the seed; what the fake learner's
adapter becomes depends on every group it was given, in order. So one group lost, doubled or sampled under
other weights changes every adapter after it, as it would with a network.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import msgspec
from rolecall import Actor, Graph, NotYet, Ref
from rolecall.actors.buffer import Buffer
from rolecall.actors.canary import CANARY, Canary
from rolecall.actors.engines import Engine, Request, Sample, Sampled, Sampling
from rolecall.actors.evaluator import Evaluator
from rolecall.actors.lora import Lora
from rolecall.actors.losses import Loss
from rolecall.actors.prompts import PromptSource
from rolecall.actors.reward import Reward
from rolecall.actors.rollout import RolloutWorker
from rolecall.actors.trainer import Trainer
from rolecall.actors.types import Completion, Group, Prompt
from rolecall.runtime.actor import Context
from rolecall.runtime.ref import Call, bind_transport
from rolecall.runtime.store import PolicyVersion, Store, StoreError

if TYPE_CHECKING:
    from rolecall.actors.learner import Learner


class FakeEngine:
    """Answers `#### 0` to `#### 9`, by hash, in one step. Seeds it was asked for are kept, to look at."""

    def __init__(self) -> None:
        self.version, self.dtype = -1, "float32"
        self.seeds: list[int] = []
        self._weights = b""
        self._under_way: list[Sampled] = []

    @property
    def versions(self) -> list[int]:
        return [] if self.version < 0 else [self.version]

    def load(self, version: int, digest: str, folder: Path) -> None:
        self.version = version
        self._weights = (folder / "adapter.bin").read_bytes()

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    @property
    def running(self) -> int:
        return len(self._under_way)

    def add(self, requests: Sequence[Request], sampling: Sampling) -> list[int]:
        assert self._weights, "no adapter is loaded"
        ids = list(range(len(self.seeds), len(self.seeds) + len(requests)))
        self.seeds += [request.seed for request in requests]
        samples = [self._sample(request) for request in requests]
        self._under_way += map(Sampled, ids, samples)
        return ids

    def step(self) -> list[Sampled]:
        finished, self._under_way = self._under_way, []
        return finished

    def score(self, prompt_ids: Sequence[int], ids: Sequence[int]) -> list[float]:
        return fake_logprobs(self._weights, prompt_ids, ids)

    def _sample(self, request: Request) -> Sample:
        drawn = hashlib.sha256(self._weights + bytes(request.prompt_ids) + request.seed.to_bytes(8)).digest()
        return Sample(list(drawn[:4]), [-1.0] * 4, [self.version] * 4, "stop", f"#### {drawn[0] % 10}")


def fake_logprobs(weights: bytes, prompt_ids: Sequence[int], ids: Sequence[int]) -> list[float]:
    drawn = hashlib.sha256(weights + bytes([*prompt_ids, *ids])).digest()
    return [-1.0 - byte / 16 for byte in drawn[: len(ids)]]


def fake_canary(weights: bytes) -> Canary:
    """What a trainer with these weights publishes with them."""
    prompt_ids, ids = [1, 2, 3], [4, 5, 6, 7]
    logprobs = fake_logprobs(weights, prompt_ids, ids)
    return Canary(prompt_ids=prompt_ids, ids=ids, logprobs=logprobs, dtype="float32")


def fake_version(weights: bytes) -> dict[str, bytes]:
    """A version's files."""
    return {"adapter.bin": weights, CANARY: msgspec.json.encode(fake_canary(weights))}


class FakeLearner:
    """The adapter is a hash of all it was trained on, so equal adapters mean equal training."""

    def __init__(self) -> None:
        self.weights = hashlib.sha256(b"untrained").digest()
        self.peak_flops = None

    def step(self, groups: Sequence[Group], *, version: int) -> dict[str, float]:
        for group in groups:
            ids = [completion.ids for completion in group.completions]
            self.weights = hashlib.sha256(self.weights + repr((group.id, ids)).encode()).digest()
        rewards = [reward for group in groups for reward in group.rewards]
        tokens = sum(len(completion.ids) for group in groups for completion in group.completions)
        return {"reward": sum(rewards) / len(rewards), "loss": 0.0, "tokens_trained": tokens, "flops": 1e9}

    def adapter(self) -> dict[str, bytes]:
        return {"adapter.bin": self.weights}

    def canary(self) -> Canary:
        return fake_canary(self.weights)

    def state(self) -> dict[str, bytes]:
        return {"learner.bin": self.weights}

    def restore(self, state: Mapping[str, bytes]) -> None:
        self.weights = state["learner.bin"]


class FakeRollout(RolloutWorker):
    preloads = ()

    def _load_engine(self) -> Engine:
        return FakeEngine()


class FakeEvaluator(Evaluator):
    preloads = ()

    def _load_engine(self) -> Engine:
        return FakeEngine()


class FakeTrainer(Trainer):
    preloads = ()

    def _load_learner(self) -> Learner:
        return cast("Learner", FakeLearner())


def fake_ring(
    *,
    steps: int,
    batch: int,
    workers: int = 2,
    max_staleness: int | None = None,
    eval_every: int = 2,
    checkpoint_every: int = 1,
    trainer: Callable[..., Trainer] = FakeTrainer,
    store: str = "file://",
) -> Graph:
    """The wiring of `async_grpo`, or without a max_staleness of `sync_grpo`, round fake networks."""
    graph, weights = Graph("fake"), Store(store)
    staleness = max_staleness or 0
    sampling = Sampling(max_tokens=4)
    prompts = graph.add("prompts", PromptSource, dataset="tiny", seed=0, steps=steps, groups_per_step=batch,
                        max_staleness=staleness)  # fmt: skip
    reward = graph.add("reward", Reward, fn="exact_match")
    buffer = None
    if max_staleness is not None:
        buffer = graph.add("buffer", Buffer, capacity=batch * (1 + staleness), max_staleness=staleness,
                           prompts=prompts, weights=weights)  # fmt: skip
    rollout = graph.add("rollout", FakeRollout, model="fake", sampling=sampling, group_size=2,
                        lease=-(-batch // workers), seed=0, prompts=prompts, reward=reward, weights=weights,
                        sink=buffer)  # fmt: skip
    last = graph.add("trainer", trainer, model="fake", loss=Loss(), lora=Lora(rank=1, alpha=1), lr=1.0,
                     temperature=1.0, steps=steps, batch=batch, seed=0, max_staleness=staleness,
                     groups=buffer or rollout, prompts=prompts, weights=weights,
                     checkpoint_every=checkpoint_every)  # fmt: skip
    evaluator = graph.add("evaluator", FakeEvaluator, model="fake", dataset="tiny", problems=8,
                          sampling=sampling, every=eval_every, steps=steps, seed=0,
                          score="exact_match", weights=weights)  # fmt: skip
    graph.place(rollout, replicas=workers)
    graph.until(last, evaluator)
    return graph


def begin(actor: Actor, folder: Path, name: str, *, incarnation: int = 1, node: str = "") -> None:
    """Start an actor that lives in the test itself; what it reports is not kept."""
    actor.context = Context(name, incarnation, node, "local", folder, lambda values: None)
    actor.on_start()


class Parked:
    """An answer that is tried for, at once and again, until its actor says no more NotYet."""

    def __init__(self, ask: Callable[[], Any]) -> None:
        self._ask, self._heard, self._value = ask, False, None
        self._try()

    def _try(self) -> None:
        with suppress(NotYet):
            self._value, self._heard = self._ask(), True

    @property
    def done(self) -> bool:
        if not self._heard:
            self._try()
        return self._heard

    def result(self) -> Any:
        assert self.done, "nobody will ever answer this"
        return self._value


class Direct:
    """Messages as plain calls to the actors in `actors`: bind it, and a ref works in the test itself.

    before: called with every message first; it may raise, as if the message never arrived.
    """

    def __init__(self) -> None:
        self.actors: dict[str, Actor] = {}
        self.roles: dict[str, list[str]] = {}
        self.watched: list[str] = []
        self.before: Callable[[str, Call], None] = lambda name, call: None
        bind_transport(self)

    def ask(self, names: Sequence[str], call: Call, timeout_s: float) -> list[Any]:
        answers = []
        for name in names:
            self.before(name, call)
            answers.append(getattr(self.actors[name], call.method)(*call.args, **call.kwargs))
        return answers

    def ask_soon(self, name: str, call: Call, timeout_s: float) -> Parked:
        return Parked(lambda: self.ask([name], call, timeout_s)[0])

    def tell(self, name: str, call: Call) -> None:
        self.ask([name], call, 0.0)

    def replicas(self, name: str) -> Sequence[str]:
        return self.roles.get(name, [name])

    def pick(self, name: str) -> str:
        return self.replicas(name)[0]

    def watch(self, name: str) -> None:
        self.watched.append(name)


class Published:
    """A store, for a Buffer, that knows only the digests of versions 0 to `newest`."""

    def __init__(self, newest: int = 0) -> None:
        self.newest = newest

    @property
    def store(self) -> Store:
        return cast(Store, self)

    def open(self, run: str, folder: Path) -> Published:
        return self

    def policy(self, version: int) -> PolicyVersion:
        if not 0 <= version <= self.newest:
            raise StoreError(f"no version {version}")
        return PolicyVersion(
            version=version, step=version, epoch=1, digest=digest_of(version), files={}, nonce=""
        )


def digest_of(version: int) -> str:
    """The digest that `Published` has for a version."""
    return f"digest of {version}"


def group(
    id: int, version: int = 0, *, digest: str | None = None, reward: float = 1.0, worker: str = "w"
) -> Group:
    """A group of two completions, attested as `Published` would have it unless a digest is given."""
    completions = [
        Completion(
            ids=[id % 200],
            logprobs=[-1.0],
            versions=[version],
            finish_reason="stop",
            text="#### 1",
            reward=value,
        )
        for value in (reward, 0.0)
    ]
    return Group(
        prompt=Prompt(id=id, text=f"problem {id}", answer="1"),
        prompt_ids=[1],
        completions=completions,
        digests={version: digest_of(version) if digest is None else digest},
        worker=worker,
    )


def ref(name: str) -> Ref[Any]:
    return Ref(name)
