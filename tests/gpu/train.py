"""The optimizer step on a GPU: tokens a second, MFU, memory, with and without layers computed twice.

    python -m tests.gpu.train [--json] [--rounds 5]

A model of Qwen2.5-1.5B's shape with random weights, in bfloat16; LoRA of rank 1; groups of 8 completions that fill
rows of 16,384 tokens. mfu: of forward and backward, by `step_flops` (three times forward's, as TRL counts it) and the
GPU's dense bfloat16 peak. Prints one JSON object, or says that there is no GPU.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from rolecall.actors.learner import Learner
from rolecall.actors.logprobs import recompute_layers
from rolecall.actors.lora import Lora
from rolecall.actors.losses import Loss
from rolecall.actors.types import Completion, Group, Prompt
from transformers import AutoModelForCausalLM, Qwen2Config

PROMPT, COMPLETION, GROUP, GROUPS = 200, 475, 8, 16


def save_model(folder: Path, **changes: Any) -> str:
    """Qwen2.5-1.5B's shape, random weights."""
    shape: dict[str, Any] = {
        "vocab_size": 151936, "hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28,
        "num_attention_heads": 12, "num_key_value_heads": 2, "max_position_embeddings": 32768,
        "tie_word_embeddings": True,
    }  # fmt: skip
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = AutoModelForCausalLM.from_config(Qwen2Config(**(shape | changes)), dtype=torch.bfloat16)
    model.save_pretrained(folder)
    return str(folder)


def make_groups(vocabulary: int, count: int = GROUPS, seed: int = 0) -> list[Group]:
    """Groups of random tokens, whose completions differ in length and reward."""
    rng = random.Random(seed)

    def tokens(length: int) -> list[int]:
        return [rng.randrange(vocabulary) for _ in range(length)]

    made = []
    for number in range(count):
        completions = []
        for place in range(GROUP):
            ids = tokens(rng.randint(COMPLETION // 2, COMPLETION * 3 // 2))
            completions.append(
                Completion(
                    ids=ids, logprobs=[-11.9] * len(ids), versions=[0] * len(ids), finish_reason="stop", text="",
                    reward=float(place % 2),
                )
            )  # fmt: skip
        made.append(
            Group(
                prompt=Prompt(id=number, text="", answer=""), prompt_ids=tokens(PROMPT), completions=completions,
                digests={0: ""}, worker="bench",
            )
        )  # fmt: skip
    return made


def measure(model: str, groups: list[Group], *, recompute: bool, rounds: int) -> dict[str, Any]:
    """Of whole steps: the first compiles, and is not counted."""
    learner = Learner(model, lora=Lora(rank=1, alpha=32), lr=1e-5, loss=Loss(), temperature=1.0, seed=0)
    if recompute:
        recompute_layers(learner._policy)
    metrics = learner.step(groups, version=0)
    torch.cuda.reset_peak_memory_stats()
    times = []
    for _ in range(rounds):
        torch.cuda.synchronize()
        began = time.perf_counter()
        metrics = learner.step(groups, version=0)
        torch.cuda.synchronize()
        times.append(time.perf_counter() - began)
    step_s = statistics.median(times)
    peak = learner.peak_flops
    return {
        "step_s": round(step_s, 3),
        "tokens_per_s": round(metrics["tokens_forwarded"] / step_s),
        "mfu": round(metrics["flops"] / step_s / peak, 3) if peak else None,
        "peak_memory_gib": round(torch.cuda.max_memory_allocated() / 2**30, 1),
        "row_fill": round(metrics["row_fill"], 3),
        "recomputed": learner._recomputes or recompute,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="print it in one line")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("there is no GPU here", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory() as folder:
        model = save_model(Path(folder))
        groups = make_groups(151936)
        result = {"device": torch.cuda.get_device_name(), "torch": torch.__version__}
        for name, recompute in (("kept", False), ("recomputed", True)):
            result[name] = measure(model, groups, recompute=recompute, rounds=options.rounds)
            torch.cuda.empty_cache()
    print(json.dumps(result, indent=None if options.json else 2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
