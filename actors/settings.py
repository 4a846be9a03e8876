"""The settings that all recipes have. Recipes inherit them: this imports without torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from ..runtime.recipe import AtLeastOne, AtLeastTwo, NotNegative, Positive
from .lora import Lora
from .losses import Loss

__all__ = ["Settings"]


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What a run of any recipe may change, with `--set field=value`."""

    model: str = "tiny"
    train_set: str = "tiny"
    eval_set: str = "tiny"
    store: str = "file://"
    seed: NotNegative = 0
    curriculum: bool = False  # leave out prompts that are always or never solved by now
    steps: AtLeastOne = 40
    batch: AtLeastOne = 16
    group_size: AtLeastTwo = 8
    max_tokens: AtLeastOne = 64
    temperature: Positive = 1.0
    lora: Lora = field(default_factory=Lora)  # set as lora.rank=…: see Lora
    lr: Positive = 1e-3
    rollout_workers: NotNegative = 2
    rollout_delay: str = "none"  # or fixed(SECONDS), lognormal(MEDIAN,SIGMA): see Delay
    engine: Literal["transformers", "vllm"] = "transformers"  # what the rollout workers sample with
    engine_python: str = ""  # the interpreter they run in; by default this one
    loss: Loss = field(default_factory=Loss)  # set as loss.kind=…, loss.clip_high=…: see Loss
    eval_problems: AtLeastOne = 256
    eval_every: AtLeastOne = 10
