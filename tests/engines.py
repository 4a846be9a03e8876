"""Small models with random adapters, and a plain forward to compare engines with."""

from __future__ import annotations

import copy
import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from rolecall.actors.engines import Request, Sample, Sampling
from rolecall.actors.engines.transformers import TransformersEngine
from rolecall.actors.lora import Lora
from rolecall.actors.model import adapter_files, add_lora, load_model, load_tokenizer
from rolecall.actors.tiny.problems import held_out
from transformers import (
    AutoModelForCausalLM,
    BloomConfig,
    GemmaConfig,
    GPT2Config,
    GPTNeoXConfig,
    MistralConfig,
    PreTrainedModel,
    Qwen2Config,
)

SMALL: dict[str, Any] = {
    "vocab_size": 448,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": 1,
    "initializer_range": 0.3,
}
WIDE: dict[str, Any] = SMALL | {"intermediate_size": 64, "max_position_embeddings": 256}
GROUPED: dict[str, Any] = WIDE | {"num_key_value_heads": 2}
CONFIGS = {
    "qwen2": Qwen2Config(**GROUPED),
    "gpt_neox": GPTNeoXConfig(**WIDE),
    "gemma": GemmaConfig(**GROUPED, head_dim=8),
    "gpt2": GPT2Config(**SMALL),  # Conv1D layers, learned positions
    "mistral": MistralConfig(**GROUPED, sliding_window=8),  # the prompts are longer than the window
    "bloom": BloomConfig(**SMALL),  # takes no position_ids
    # One layer has a window, and the prompts are longer.
    "windowed": Qwen2Config(**GROUPED, use_sliding_window=True, sliding_window=8, max_window_layers=1),
}

# Importing a family of models takes seconds: the fast tests have two.
MODELS = [
    "tiny",
    "qwen2",
    *(pytest.param(name, marks=pytest.mark.slow) for name in CONFIGS if name not in ("qwen2", "windowed")),
]
# Those whose caches can be merged, and one whose can't.
JOINED = [*MODELS, "windowed"]


def fresh(name: str) -> PreTrainedModel:
    """The same weights every time."""
    if name == "tiny":
        return load_model("tiny", device="cpu", dtype="float32")
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        return AutoModelForCausalLM.from_config(copy.deepcopy(CONFIGS[name])).eval().requires_grad_(False)


def adapter(name: str, folder: Path, seed: int, *, rank: int = 4, std: float = 0.1) -> Path:
    """Write a LoRA that changes the model visibly."""
    lora = add_lora(fresh(name), Lora(rank=rank, alpha=2 * rank), seed=seed)
    generator = torch.Generator().manual_seed(seed)
    for parameter_name, parameter in lora.named_parameters():
        if "lora_B" in parameter_name:
            parameter.data.normal_(std=std, generator=generator)
    folder.mkdir()
    for file, content in adapter_files(lora).items():
        (folder / file).write_bytes(content)
    return folder


def engine_under(name: str, folder: Path, **options: Any) -> TransformersEngine:
    engine = TransformersEngine(fresh(name), load_tokenizer("tiny"), **options)
    engine.load(1, "one", folder)
    return engine


def finish(engine: TransformersEngine) -> dict[int, Sample]:
    """All that run, by their id."""
    done = {}
    while engine.running:
        done.update((sampled.id, sampled.sample) for sampled in engine.step())
    return done


def add(
    engine: TransformersEngine, requests: list[Request], sampling: Sampling
) -> dict[int, tuple[Request, Sampling]]:
    ids = engine.add(requests, sampling)
    return {id: (request, sampling) for id, request in zip(ids, requests, strict=True)}


def group(engine: TransformersEngine, prompts: int, size: int, seed: int = 100) -> list[Request]:
    ids = [engine.encode(problem.text) for problem in held_out(prompts) for _ in range(size)]
    return [Request(prompt, seed + place) for place, prompt in enumerate(ids)]


@functools.lru_cache(maxsize=3)
def policy(name: str, folder: Path) -> Any:
    return PeftModel.from_pretrained(fresh(name), str(folder)).eval()


def reference(name: str, folder: Path, request: Request, sample: Sample, temperature: float) -> list[float]:
    """Log-probs of the sampled tokens: peft's own forward of prompt and completion, alone and without a cache."""
    with torch.inference_mode():
        logits = policy(name, folder)(
            input_ids=torch.tensor([request.prompt_ids + sample.ids]), use_cache=False
        ).logits[0]
    expected = torch.log_softmax(logits[len(request.prompt_ids) - 1 : -1].float() / temperature, dim=-1)
    return expected[range(len(sample.ids)), sample.ids].tolist()


def assert_same(ones: list[Sample], others: list[Sample]) -> None:
    assert [(s.ids, s.finish_reason, s.text) for s in ones] == [
        (s.ids, s.finish_reason, s.text) for s in others
    ]
    for one, other in zip(ones, others, strict=True):
        assert one.logprobs == pytest.approx(other.logprobs, abs=5e-5)
