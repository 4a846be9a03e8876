"""Sampling speed: TransformersEngine against transformers' `generate`, with the same model, prompts and settings.

    python -m tests.bench.sampler [--rounds 7] [--peer FILE]      (from the repository root)

Prints JSON: tokens a CPU-second, medians over interleaved rounds, and their ratios. One thread, so CPU time is
the wall time of a quiet machine. `--peer` names a Python file with a `Sampler(model, tokenizer)` whose
`generate(prompts, max_new)` returns a list of {"ids": …}: a hand-written sampler to compare with.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rolecall.actors.engines import Request, Sampling, generate
from rolecall.actors.engines.transformers import TransformersEngine
from rolecall.actors.lora import Lora
from rolecall.actors.model import adapter_files, add_lora, load_model, load_tokenizer
from rolecall.actors.tiny.problems import held_out
from transformers import PreTrainedModel

PROMPTS, MAX_TOKENS = 16, 64


def peer(file: Path) -> Any:
    """The `Sampler` of a Python file."""
    spec = importlib.util.spec_from_file_location("peer_sampler", file)
    assert spec is not None and spec.loader is not None, file
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.Sampler(base(), load_tokenizer("tiny"))


def base() -> PreTrainedModel:
    return load_model("tiny", device="cpu", dtype="float32")


def contenders(group: int, peer_file: Path | None) -> dict[str, Callable[[int], int]]:
    """name → a function of the round's number that samples `PROMPTS` × `group` completions, and counts tokens.

    All sample the same policy, an adapter that changes nothing: `peft_generate` computes it, `generate` is without.
    """
    tokenizer = load_tokenizer("tiny")
    texts = [kept.text for kept in held_out(PROMPTS) for _ in range(group)]
    lora = add_lora(base(), Lora(rank=8, alpha=16), seed=0)
    engine = TransformersEngine(base(), tokenizer)
    with tempfile.TemporaryDirectory() as folder:
        for name, content in adapter_files(lora).items():
            (Path(folder) / name).write_bytes(content)
        engine.load(0, "", Path(folder))
    prompts = [engine.encode(text) for text in texts]
    sampling = Sampling(max_tokens=MAX_TOKENS)
    padded: Any = tokenizer(texts, return_tensors="pt", padding=True)

    def ours(number: int) -> int:
        requests = [Request(prompt, number * 10_000 + place) for place, prompt in enumerate(prompts)]
        return sum(len(sample.ids) for sample in generate(engine, requests, sampling))

    def theirs(network: Any, number: int) -> int:
        torch.manual_seed(number)
        with torch.inference_mode():
            rows = network.generate(**padded, do_sample=True, top_k=0, top_p=1.0, max_new_tokens=MAX_TOKENS)
        return int((rows[:, padded["input_ids"].shape[1] :] != tokenizer.pad_token_id).sum())

    found = {"engine": ours, "generate": partial(theirs, base()), "peft_generate": partial(theirs, lora)}
    if peer_file is not None:
        sampler = peer(peer_file)
        found["peer"] = lambda number: sum(len(row["ids"]) for row in sampler.generate(prompts, MAX_TOKENS))
    return found


def measure(group: int, rounds: int, peer_file: Path | None = None) -> dict[str, Any]:
    """Medians at a batch of `PROMPTS` × `group`."""
    torch.set_num_threads(1)
    runs = contenders(group, peer_file)
    speeds: dict[str, list[float]] = {name: [] for name in runs}
    for number in range(rounds + 1):
        for name, run in runs.items():
            start = time.process_time()
            tokens = run(number)
            if number > 0:  # the first is a warm-up
                speeds[name].append(tokens / (time.process_time() - start))
    medians = {name: statistics.median(values) for name, values in speeds.items()}
    return {
        "rows": PROMPTS * group,
        "tokens_per_cpu_s": {name: round(value) for name, value in medians.items()},
        "engine_over": {name: round(medians["engine"] / value, 2) for name, value in medians.items()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--peer", type=Path)
    settings = parser.parse_args()
    for group in (1, 2, 8):
        print(json.dumps(measure(group, settings.rounds, settings.peer)), flush=True)


if __name__ == "__main__":
    main()
