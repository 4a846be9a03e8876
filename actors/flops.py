"""How much arithmetic an optimizer step is, and how much a GPU can do: the two sides of MFU.

Imports torch: import it where a trainer starts, not at a recipe's top.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from .packing import Batch

if TYPE_CHECKING:
    from peft import PeftModel

__all__ = ["peak_flops", "step_flops"]

# Dense, bfloat16, by NVIDIA's data sheets.
_PEAKS = {"B200": 2250e12, "H200": 989e12, "H100": 989e12, "A100": 312e12, "L40S": 362e12, "L4": 121e12}


def peak_flops(device: str) -> float | None:
    """Operations a second that a device can do at most in bfloat16; None where that is not known."""
    if not device.startswith("cuda"):
        return None
    words = re.findall(r"[A-Z0-9]+", torch.cuda.get_device_name(device).upper())
    return next((peak for name, peak in _PEAKS.items() if name in words), None)


def step_flops(policy: PeftModel, batches: Sequence[Batch]) -> float:
    """Operations of forward and backward over these rows, padding apart, and nothing computed twice counted twice.

    Three times those of forward, as PaLM (arXiv 2204.02311, appendix B) and TRL count them: a LoRA needs fewer, for a
    frozen weight has no gradient. Forward: 2 for each weight and token, and 4 × the width of all heads for each
    pair of tokens that see each other.
    """
    causal: Any = policy.get_base_model()
    config = causal.config.get_text_config()
    heads = config.num_attention_heads
    width = heads * (getattr(config, "head_dim", None) or config.hidden_size // heads)
    inputs = causal.get_input_embeddings().weight
    head = causal.get_output_embeddings().weight
    weights = sum(
        weight.numel() for weight in causal.parameters() if weight is not inputs and weight is not head
    )
    forward = 0.0
    for batch in batches:
        # Padding sees itself alone and is at position 0; so does the first token of a prompt, which weighs nothing.
        pairs = int((batch.position_ids + 1).sum()) - (batch.input_ids.numel() - batch.tokens)
        forward += 2.0 * weights * batch.tokens + 2.0 * head.numel() * len(batch.predictor)
        forward += 4.0 * config.num_hidden_layers * width * pairs
    return 3.0 * forward
