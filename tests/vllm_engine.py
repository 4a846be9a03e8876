"""What tests/test_vllm.py looks at: a VllmEngine through all its situations, and one that swaps in flight, in the
environment that has vLLM.

python tests/vllm_engine.py JOB.json RESULT.json

Tests can't run there, nor vLLM where they run: what it sampled goes over as JSON.
"""

from __future__ import annotations

import gc
import json
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rolecall.actors.canary import Quarantined, attest
from rolecall.actors.engines import Request, Sample, Sampling, generate
from rolecall.actors.engines.vllm import VllmEngine
from rolecall.actors.model import AdapterError
from rolecall.actors.tiny.problems import held_out
from rolecall.runtime.errors import Unrecoverable

MAX_LORAS = 2
ADAPTERS = {1: "one", 2: "two", 3: "one", 10: "one", 11: "head", 12: "one", 13: "two", 20: "one", 62: "one"}
ADAPTERS |= {50: "one", 51: "two", 52: "one", 55: "one"}
ADAPTERS |= {version: ("two", "one")[version % 2] for version in range(101, 116)} | {105: "head"}


def error(function: Callable[[], Any]) -> dict[str, Any]:
    """How it refuses."""
    try:
        function()
    except (AdapterError, Quarantined, Unrecoverable) as refusal:
        return {"error": type(refusal).__name__, "says": str(refusal)}
    return {"error": "", "says": ""}


def swap(engine: VllmEngine, version: int, folders: dict[str, Path]) -> None:
    engine.load(version, ADAPTERS[version], folders[ADAPTERS[version]])


def group(engine: VllmEngine, prompts: int, size: int, seed: int = 100) -> list[Request]:
    ids = [engine.encode(problem.text) for problem in held_out(prompts) for _ in range(size)]
    return [Request(prompt, seed + place) for place, prompt in enumerate(ids)]


def told(request: Request, sample: Sample, temperature: float) -> dict[str, Any]:
    return {
        "prompt_ids": request.prompt_ids,
        "ids": sample.ids,
        "logprobs": sample.logprobs,
        "finish_reason": sample.finish_reason,
        "text": sample.text,
        "temperature": temperature,
        "versions": sample.versions,
        "adapters": [ADAPTERS[version] for version in sample.versions],
    }


def sampled(
    engine: VllmEngine,
    requests: Sequence[Request],
    *,
    temperature: float = 1.0,
    most: int = 24,
    stop: tuple[str, ...] = (),
) -> list[dict[str, Any]]:
    samples = generate(engine, requests, Sampling(temperature=temperature, max_tokens=most, stop=stop))
    return [told(request, sample, temperature) for request, sample in zip(requests, samples, strict=True)]


class Added:
    """Requests that were added, by the id the engine gave them."""

    def __init__(self, engine: VllmEngine) -> None:
        self.engine = engine
        self.asked: dict[int, tuple[Request, float]] = {}
        self.done: dict[int, dict[str, Any]] = {}

    def add(self, requests: Sequence[Request], temperature: float, most: int = 24) -> None:
        ids = self.engine.add(requests, Sampling(temperature=temperature, max_tokens=most))
        self.asked |= {id: (request, temperature) for id, request in zip(ids, requests, strict=True)}

    def step(self, steps: int) -> None:
        for _ in range(steps):
            for one in self.engine.step():
                request, temperature = self.asked[one.id]
                self.done[one.id] = told(request, one.sample, temperature)

    def finish(self) -> list[dict[str, Any]]:
        while len(self.done) < len(self.asked):
            self.step(1)
        return [self.done[id] for id in self.asked]


def swaps(engine: VllmEngine, folders: dict[str, Path]) -> dict[str, Any]:
    """Adapter one, then two while requests are under way, then one again."""
    requests = group(engine, prompts=2, size=2)
    added, versions = Added(engine), []
    for version in (1, 2, 3):
        swap(engine, version, folders)
        versions.append(engine.versions)
        for temperature in (1.0, 0.7):
            added.add(requests, temperature)
        added.step(4 if version == 1 else 1)
        if version == 2:
            added.finish()
            versions.append(engine.versions)
    samples = added.finish()
    return {"samples": samples, "versions": versions, "running": engine.running}


def more_versions_than_room(engine: VllmEngine, folders: dict[str, Path]) -> dict[str, Any]:
    """Each version has requests under way when the next is loaded."""
    added, most = Added(engine), 0
    for version in (10, 11, 12, 13):
        swap(engine, version, folders)
        added.add(group(engine, prompts=2, size=2, seed=version), 1.0, most=12)
        added.step(1)
        most = max(most, len(engine.versions))
    return {"samples": added.finish(), "most": most, "versions": engine.versions}


def seeds(engine: VllmEngine) -> dict[str, Any]:
    requests = [*group(engine, prompts=3, size=2), *group(engine, prompts=1, size=2, seed=2**64 - 2)]
    hot = 2.0  # hardly two completions are alike
    return {
        "together": sampled(engine, requests, temperature=hot),
        "alone": [sampled(engine, [request], temperature=hot)[0] for request in requests],
        "reversed": sampled(engine, requests[::-1], temperature=hot)[::-1],
    }


def long_siblings(engine: VllmEngine) -> list[Request]:
    """Of two prompts of several blocks each, asked for in turns."""
    texts = [" ".join(problem.text for problem in held_out(24)[place::2]) for place in (0, 1)]
    prompts = [engine.encode(text) for text in texts]
    return [Request(prompts[place % 2], place) for place in range(8)]


def counted(engine: VllmEngine, sample: Callable[[], list[dict[str, Any]]]) -> dict[str, Any]:
    prompt_tokens, cached_tokens = engine.prompt_tokens, engine.cached_tokens
    return {
        "samples": sample(),
        "prompt_tokens": engine.prompt_tokens - prompt_tokens,
        "cached_tokens": engine.cached_tokens - cached_tokens,
    }


def siblings(engine: VllmEngine, folders: dict[str, Path]) -> dict[str, Any]:
    """Long prompts, under a version that has computed none of them."""
    swap(engine, 20, folders)
    requests = long_siblings(engine)
    seen = counted(engine, lambda: sampled(engine, requests, most=4))
    ids = engine.add(requests, Sampling(max_tokens=1))
    order = [ids.index(one.id) for one in engine.step()]  # that of the batch, as all end at once
    return {**seen, "order": order}


def refusals(engine: VllmEngine, refused: dict[str, str], folders: dict[str, Path]) -> dict[str, Any]:
    requests = group(engine, prompts=1, size=2)
    before, says = sampled(engine, requests), {}
    for place, (name, folder) in enumerate(refused.items()):
        says[name] = error(lambda place=place, folder=folder: engine.load(30 + place, "bad", Path(folder)))
    says["changed"] = error(lambda: engine.load(1, "another digest", folders["two"]))
    return {"says": says, "before": before, "after": sampled(engine, requests)}


def never(engine: VllmEngine) -> list[dict[str, Any]]:
    asked = [
        ([], Sampling(max_tokens=4)),
        ([5] * 500, Sampling(max_tokens=64)),
        ([5], Sampling(max_tokens=0)),
        ([5], Sampling(max_tokens=4, temperature=-1.0)),
        ([5], Sampling(max_tokens=4, temperature=0.001)),
        ([5], Sampling(max_tokens=4, temperature=2.5)),
    ]
    return [
        error(
            lambda ids=ids, sampling=sampling: generate(engine, [Request([5], 0), Request(ids, 1)], sampling)
        )
        for ids, sampling in asked
    ]


def attested(engine: VllmEngine, folder: Path) -> dict[str, Any]:
    cached_tokens = engine.cached_tokens
    began = time.perf_counter()
    seen = error(lambda: attest(engine, folder, "w"))
    took_s = time.perf_counter() - began
    return {**seen, "cached_tokens": engine.cached_tokens - cached_tokens, "took_s": took_s}


def canaries(engine: VllmEngine, folders: dict[str, Path]) -> list[dict[str, Any]]:
    """Swaps as they should be, with requests under way, then one under which the folder is another's."""
    added, seen = Added(engine), []
    for version in (50, 51, 52):
        added.add(group(engine, prompts=2, size=2, seed=version), 1.0)
        added.step(1)
        swap(engine, version, folders)
        seen.append(attested(engine, folders[ADAPTERS[version]]))
    return [*seen, attested(engine, folders["two"]), {"samples": added.finish()}]


def base_under_an_adapter_s_name(engine: VllmEngine, folders: dict[str, Path]) -> dict[str, Any]:
    swap(engine, 55, folders)
    adapter, engine._adapters[55] = engine._adapters[55], None
    seen = attested(engine, folders["one"])
    engine._adapters[55] = adapter
    return seen


def one_name_for_every_version(
    engine: VllmEngine, folders: dict[str, Path], here: Path
) -> list[dict[str, Any]]:
    """What a careless engine would do: vLLM reads the new weights, and keeps the prefix cache by the name."""
    honest = engine._vllm
    engine._vllm = replace(honest, lora=lambda name, number, path: honest.lora("policy", number, path))
    seen = []
    for version, name in ((60, "one"), (61, "two")):
        shutil.copytree(folders[name], here, dirs_exist_ok=True)
        engine.load(version, name, here)
        seen.append(attested(engine, here))
    engine._vllm = honest
    return seen


def breakdown(engine: VllmEngine, folders: dict[str, Path]) -> list[dict[str, Any]]:
    """The last thing it does."""
    engine.load(40, "broken", folders["broken"])
    return [
        error(lambda: sampled(engine, group(engine, prompts=1, size=2))),
        error(lambda: engine.load(41, "one", folders["one"])),
        error(lambda: sampled(engine, group(engine, prompts=1, size=2))),
        error(engine.step),
    ]


def swaps_in_flight(engine: VllmEngine, folders: dict[str, Path]) -> dict[str, Any]:
    """Three swaps, each after three tokens, and one more at once: under 104 nobody samples a token."""
    added, versions = Added(engine), []
    swap(engine, 101, folders)
    for temperature in (1.0, 0.7):
        added.add(group(engine, prompts=2, size=4), temperature)
    for version in (102, 103, 104):
        added.step(3)
        swap(engine, version, folders)
        versions.append(engine.versions)
    swap(engine, 105, folders)
    return {"samples": added.finish(), "versions": versions, "running": engine.running}


def ends_in_flight(engine: VllmEngine, folders: dict[str, Path]) -> dict[str, Any]:
    """Completions with one token left at a swap, and some that end while another's tokens are scored."""
    left, kept = Added(engine), Added(engine)
    left.add(group(engine, prompts=2, size=2), 1.0, most=4)
    left.step(3)
    swap(engine, 106, folders)
    samples = left.finish()
    kept.add(group(engine, prompts=1, size=2), 1.0, most=1)
    attested(engine, folders["two"])
    running = [engine.running]
    swap(engine, 107, folders)
    running.append(engine.running)
    kept.step(1)
    return {"left": samples, "kept": list(kept.done.values()), "running": [*running, engine.running]}


def canaries_in_flight(engine: VllmEngine, folders: dict[str, Path]) -> dict[str, Any]:
    added, seen = Added(engine), []
    added.add(group(engine, prompts=2, size=2), 1.0)
    for version in (108, 109):
        added.step(2)
        swap(engine, version, folders)
        seen.append(attested(engine, folders[ADAPTERS[version]]))
    refused = error(lambda: engine.load(110, "none", folders["one"] / "nowhere"))
    return {"canaries": seen, "refused": refused, "samples": added.finish(), "versions": engine.versions}


def siblings_in_flight(engine: VllmEngine, folders: dict[str, Path]) -> dict[str, Any]:
    added = Added(engine)
    added.add(long_siblings(engine), 1.0, most=4)
    added.step(2)
    swap(engine, 111, folders)
    return counted(engine, added.finish)


def not_begun(engine: VllmEngine, folders: dict[str, Path]) -> list[list[dict[str, Any]]]:
    """The same requests before and after a swap."""
    added, requests = Added(engine), group(engine, prompts=2, size=1)
    added.add(requests, 1.0)
    swap(engine, 112, folders)
    return [added.finish(), sampled(engine, requests)]


def draws(engine: VllmEngine, folders: dict[str, Path]) -> list[list[int]]:
    """The seeds that two completions are drawn with, where a swap follows each of their tokens."""
    honest, given = engine._vllm, list[int]()

    def parameters(**settings: Any) -> Any:
        given.append(settings["seed"])
        return honest.parameters(**settings)

    engine._vllm = replace(honest, parameters=parameters)
    added = Added(engine)
    added.add(group(engine, prompts=1, size=2), 1.0, most=4)
    for version in (113, 114, 115):
        added.step(1)
        swap(engine, version, folders)
    added.finish()
    engine._vllm = honest
    return [given[0::2], given[1::2]]


def in_flight(folders: dict[str, Path]) -> dict[str, Any]:
    """Through its situations with an engine that swaps in flight."""
    engine = VllmEngine("tiny", max_loras=MAX_LORAS, max_lora_rank=6, max_num_seqs=12, inflight_swap=True)
    return {
        "swaps": swaps_in_flight(engine, folders),
        "ends": ends_in_flight(engine, folders),
        "canaries": canaries_in_flight(engine, folders),
        "siblings": siblings_in_flight(engine, folders),
        "not_begun": not_begun(engine, folders),
        "draws": draws(engine, folders),
    }


def between_requests(folders: dict[str, Path], refused: dict[str, str], here: Path) -> dict[str, Any]:
    """Through its situations with an engine that swaps between requests."""
    engine = VllmEngine("tiny", max_loras=MAX_LORAS, max_lora_rank=6, max_num_seqs=32)
    seen = {
        "unloaded": error(lambda: sampled(engine, [Request([5, 6], 0)])),
        "swaps": swaps(engine, folders),
        "more": more_versions_than_room(engine, folders),
        "seeds": seeds(engine),
        "siblings": siblings(engine, folders),
        "greedy": sampled(engine, group(engine, prompts=4, size=1), temperature=0.0),
        "many": sampled(engine, group(engine, prompts=8, size=4), most=20),
        "canaries": canaries(engine, folders),
        "base": base_under_an_adapter_s_name(engine, folders),
        "one_name": one_name_for_every_version(engine, folders, here),
    }
    swap(engine, 62, folders)
    return seen | {
        "refusals": refusals(engine, refused, folders),
        "never": never(engine),
        "stops": texts_to_stop_at(engine),
        "none": sampled(engine, []),
        "breakdown": breakdown(engine, folders),
    }


def texts_to_stop_at(engine: VllmEngine) -> dict[str, Any]:
    requests = group(engine, prompts=4, size=4)
    return {
        "free": sampled(engine, requests),
        "stopped": sampled(engine, requests, stop=("=", "\n#")),
        "running": engine.running,
        "after": sampled(engine, requests),
    }


def main() -> None:
    job, result = json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2])
    folders = {name: Path(folder) for name, folder in job["folders"].items()}
    seen = {"too_small": error(lambda: VllmEngine("tiny", kv_cache_bytes=1 << 18))}
    seen |= between_requests(folders, job["refused"], result.parent / "policy")
    gc.collect()  # so that there is never more than one
    seen["in_flight"] = in_flight(folders)
    result.write_text(json.dumps(seen))


if __name__ == "__main__":
    main()
