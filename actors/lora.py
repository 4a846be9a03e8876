"""The adapter that is trained, as a setting. Recipes hold one in their Config: this imports without torch."""

from __future__ import annotations

import re
from dataclasses import dataclass
from math import isfinite, sqrt

from ..runtime.errors import Unrecoverable

__all__ = ["Lora"]

MAX_RANK = 256


@dataclass(frozen=True, kw_only=True)
class Lora:
    """W = W₀ + scaling · B A on linear layers, with A of rank × in and B of out × rank (Hu et al., arXiv 2106.09685).

    rank:    1 to 256.
    alpha:   scaling is alpha ÷ rank, or with rslora alpha ÷ √rank (Kalajdzievski, arXiv 2312.03732).
    layers:  names of linear layers, as in "q_proj,v_proj"; "" for all but the head.
    qlora:   hold the base model in 4-bit NormalFloat while it is trained (Dettmers et al., arXiv 2305.14314): needs
             bitsandbytes. Workers sample the base model as it is, so give the loss a correction.

    What vLLM can't serve can't be asked for: DoRA, and whole layers trained beside the adapter (PEFT's
    modules_to_save), the head and embeddings among them. Raises Unrecoverable (exit code 2).
    """

    rank: int = 8
    alpha: float = 16.0
    rslora: bool = False
    layers: str = ""
    qlora: bool = False

    def __post_init__(self) -> None:
        if not 1 <= self.rank <= MAX_RANK:
            raise Unrecoverable(f"a LoRA of rank {self.rank}: engines serve 1 to {MAX_RANK}", exit_code=2)
        if not (isfinite(self.alpha) and self.alpha > 0):
            raise Unrecoverable(f"a LoRA's alpha is above 0 and finite, not {self.alpha}", exit_code=2)
        if not all(re.fullmatch(r"[A-Za-z_][\w.]*", name, re.ASCII) for name in self.names):
            raise Unrecoverable(
                f"a LoRA on the layers {self.layers!r}: write their names as in q_proj,v_proj, or nothing for all",
                exit_code=2,
            )
        for name in self.names:
            if re.search(r"head|embed|wte|wpe", name):
                raise Unrecoverable(
                    f"a LoRA on {name}: vLLM serves none on heads and embeddings; name other layers",
                    exit_code=2,
                )

    @property
    def names(self) -> list[str]:
        """The layers named; none for all."""
        return self.layers.split(",") if self.layers else []

    @property
    def scaling(self) -> float:
        return self.alpha / (sqrt(self.rank) if self.rslora else self.rank)
