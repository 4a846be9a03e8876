"""What tests/test_vllm.py looks at: one VllmEngine through all its situations, in the environment that has vLLM.

python tests/vllm_engine.py JOB.json RESULT.json

Tests can't run there, nor vLLM where they run: what it sampled goes over as JSON.
"""

from __future__ import annotations

import json
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rolecall.actors.canary import Quarantined, attest
from rolecall.actors.engines import Request, Sample, Sampled, Sampling
from rolecall.actors.engines.vllm import VllmEngine
from rolecall.actors.model import AdapterError
from rolecall.actors.tiny.problems import held_out
from rolecall.runtime.errors import Unrecoverable

MAX_LORAS = 2


def error(function: Callable[[], Any]) -> dict[str, Any]:
    """How it refuses."""
    try:
        function()
    except (AdapterError, Quarantined, Unrecoverable) as refusal:
        return {"error": type(refusal).__name__, "says": str(refusal)}
    return {"error": "", "says": ""}


def group(engine: VllmEngine, prompts: int, size: int, seed: int = 100) -> list[Request]:
    ids = [engine.encode(problem.text) for problem in held_out(prompts) for _ in range(size)]
    return [Request(prompt, seed + place) for place, prompt in enumerate(ids)]


def told(request: Request, sample: Sample, temperature: float, version: int, digest: str) -> dict[str, Any]:
    return {
        "prompt_ids": request.prompt_ids,
        "ids": sample.ids,
        "logprobs": sample.logprobs,
        "finish_reason": sample.finish_reason,
        "text": sample.text,
        "temperature": temperature,
        "version": version,
        "digest": digest,
    }


def sampled(
    engine: VllmEngine, requests: Sequence[Request], *, temperature: float = 1.0, most: int = 24
) -> list[dict[str, Any]]:
    samples = engine.generate(requests, Sampling(temperature=temperature, max_tokens=most))
    return [
        told(request, sample, temperature, engine.version, engine.digest)
        for request, sample in zip(requests, samples, strict=True)
    ]


class Added:
    """Requests that were added, by the id the engine gave them."""

    def __init__(self, engine: VllmEngine) -> None:
        self.engine = engine
        self.asked: dict[int, tuple[Request, float]] = {}
        self.done: list[dict[str, Any]] = []

    def add(self, requests: Sequence[Request], temperature: float, most: int = 24) -> None:
        ids = self.engine.add(requests, Sampling(temperature=temperature, max_tokens=most))
        self.asked |= {id: (request, temperature) for id, request in zip(ids, requests, strict=True)}

    def step(self, steps: int) -> None:
        for _ in range(steps):
            self.done += [self._told(one) for one in self.engine.step()]

    def finish(self) -> list[dict[str, Any]]:
        while len(self.done) < len(self.asked):
            self.step(1)
        return self.done

    def _told(self, one: Sampled) -> dict[str, Any]:
        request, temperature = self.asked[one.id]
        return told(request, one.sample, temperature, one.version, one.digest)


def swaps(engine: VllmEngine, folders: dict[str, Path]) -> dict[str, Any]:
    """Adapter one, then two while requests are under way, then one again."""
    requests = group(engine, prompts=2, size=2)
    added, versions = Added(engine), []
    for version, name in ((1, "one"), (2, "two"), (3, "one")):
        engine.load(version, name, folders[name])
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
    for version, name in ((10, "one"), (11, "head"), (12, "one"), (13, "two")):
        engine.load(version, name, folders[name])
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


def siblings(engine: VllmEngine, folders: dict[str, Path]) -> dict[str, Any]:
    """Long prompts, under a version that has computed none of them, asked for in turns."""
    engine.load(20, "one", folders["one"])
    texts = [" ".join(problem.text for problem in held_out(24)[place::2]) for place in (0, 1)]
    prompts = [engine.encode(text) for text in texts]
    requests = [Request(prompts[place % 2], place) for place in range(8)]
    prompt_tokens, cached_tokens = engine.prompt_tokens, engine.cached_tokens
    samples = sampled(engine, requests, most=4)
    counted = {
        "prompt_tokens": engine.prompt_tokens - prompt_tokens,
        "cached_tokens": engine.cached_tokens - cached_tokens,
    }
    ids = engine.add(requests, Sampling(max_tokens=1))
    order = [ids.index(one.id) for one in engine.step()]  # that of the batch, as all end at once
    return {"samples": samples, "order": order, **counted}


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
    ]
    return [
        error(
            lambda ids=ids, sampling=sampling: engine.generate([Request([5], 0), Request(ids, 1)], sampling)
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
    for version, name in ((50, "one"), (51, "two"), (52, "one")):
        added.add(group(engine, prompts=2, size=2, seed=version), 1.0)
        added.step(1)
        engine.load(version, name, folders[name])
        seen.append(attested(engine, folders[name]))
    return [*seen, attested(engine, folders["two"]), {"samples": added.finish()}]


def base_under_an_adapter_s_name(engine: VllmEngine, folders: dict[str, Path]) -> dict[str, Any]:
    engine.load(55, "one", folders["one"])
    loaded = engine._loaded[55]
    engine._loaded[55] = replace(loaded, adapter=None)
    seen = attested(engine, folders["one"])
    engine._loaded[55] = loaded
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


def main() -> None:
    job, result = json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2])
    folders = {name: Path(folder) for name, folder in job["folders"].items()}
    too_small = error(lambda: VllmEngine("tiny", kv_cache_bytes=1 << 18))
    began = time.process_time()
    engine = VllmEngine("tiny", max_loras=MAX_LORAS, max_lora_rank=6, max_num_seqs=32)
    seen: dict[str, Any] = {"too_small": too_small, "start_cpu_s": time.process_time() - began}
    seen["unloaded"] = error(lambda: sampled(engine, [Request([5, 6], 0)]))
    seen["swaps"] = swaps(engine, folders)
    seen["more"] = more_versions_than_room(engine, folders)
    seen["seeds"] = seeds(engine)
    seen["siblings"] = siblings(engine, folders)
    seen["greedy"] = sampled(engine, group(engine, prompts=4, size=1), temperature=0.0)
    seen["many"] = sampled(engine, group(engine, prompts=8, size=4), most=20)
    seen["canaries"] = canaries(engine, folders)
    seen["base"] = base_under_an_adapter_s_name(engine, folders)
    seen["one_name"] = one_name_for_every_version(engine, folders, result.parent / "policy")
    engine.load(62, "one", folders["one"])
    seen["refusals"] = refusals(engine, job["refused"], folders)
    seen["never"] = never(engine)
    seen["none"] = sampled(engine, [])
    seen["breakdown"] = breakdown(engine, folders)
    result.write_text(json.dumps(seen))


if __name__ == "__main__":
    main()
