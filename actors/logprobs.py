"""Log-probs of packed rows: of every sampled token at once, as if each sequence were forwarded alone.

Imports torch: import it where a trainer starts, not at a recipe's top.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from transformers.modeling_layers import GradientCheckpointingLayer

from ..runtime.errors import Unrecoverable
from .attention import Backend, attention_mask
from .packing import Batch, pack_answers

if TYPE_CHECKING:
    from peft import PeftModel

__all__ = [
    "attention_backend",
    "attention_window",
    "logprobs",
    "parts",
    "recompute_layers",
    "refuse_unless_packable",
]

MAX_LOGITS = 1 << 25  # tokens × vocabulary held at once: 128 MiB of float32


def logprobs(
    policy: PeftModel, batch: Batch, temperature: float, max_logits: int = MAX_LOGITS
) -> tuple[Tensor, Tensor]:
    """Log-probability of each sampled token, with gradient, and the entropy of its distribution: [N] float32.

    The head sees only the places that predict something; when tokens × vocabulary pass `max_logits`, part by
    part, and once more in backward, so that all the logits are never held together.
    """
    backbone, head = parts(policy)
    hidden = backbone(
        input_ids=batch.input_ids,
        attention_mask=attention_mask(batch.ends, attention_backend(policy)),
        position_ids=batch.position_ids,
        use_cache=False,
    ).last_hidden_state.flatten(0, 1)

    def of(predictor: Tensor, target: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        places, place = predictor.unique(return_inverse=True)  # siblings share places: one row of logits each
        logits = head(hidden.index_select(0, places)).float() / temperature
        lp = logits.log_softmax(-1)
        with torch.no_grad():
            entropy = -(lp.exp() * lp).sum(-1)
        return lp[place, target], entropy[place]

    at_once = max(1, max_logits // head.weight.shape[0])
    if len(batch.predictor) <= at_once:
        return of(batch.predictor, batch.target, hidden)
    done = [
        checkpoint(of, predictor, target, hidden, use_reentrant=False)
        for predictor, target in zip(batch.predictor.split(at_once), batch.target.split(at_once), strict=True)
    ]
    return torch.cat([lp for lp, _ in done]), torch.cat([entropy for _, entropy in done])


def attention_backend(policy: PeftModel) -> Backend:
    """What the model was loaded for."""
    causal: Any = policy.get_base_model()
    return "flex_attention" if causal.config._attn_implementation == "flex_attention" else "sdpa"


def parts(policy: PeftModel) -> tuple[Any, Any]:
    """The network up to its last hidden state, and the head on it."""
    causal: Any = policy.get_base_model()
    return causal.base_model, causal.get_output_embeddings()


def recompute_layers(policy: PeftModel) -> None:
    """From now on keep of each layer only what goes into it, and compute the rest again in backward.

    Raises Unrecoverable for a model whose layers can't.
    """
    causal: Any = policy.get_base_model()
    try:
        causal.gradient_checkpointing_enable({"use_reentrant": False})
    except ValueError as error:
        raise Unrecoverable(f"the layers of this model can't be computed again: {error}") from error
    for layer in causal.modules():
        if isinstance(layer, GradientCheckpointingLayer):
            layer.training = True  # only so does it do it; what is in it stays in evaluation mode


def attention_window(policy: PeftModel) -> int | None:
    """The fewest tokens any layer attends to, if one has a limit: a 4-D mask replaces the model's own."""
    config: Any = policy.get_base_model().config
    config = config.get_text_config()
    kinds = getattr(config, "layer_types", None) or ["sliding_attention"]
    limits = {"sliding_attention": "sliding_window", "chunked_attention": "attention_chunk_size"}
    windows = [getattr(config, limits[kind], None) for kind in set(kinds) & set(limits)]
    return min((window for window in windows if window is not None), default=None)


@torch.no_grad()
def refuse_unless_packable(policy: PeftModel, model: str) -> None:
    """Compare a packed row with the model's own forward, sequence by sequence."""
    causal: Any = policy.get_base_model()
    backbone, head = parts(policy)
    device, exact = causal.device, causal.dtype == torch.float32
    first = head.weight.shape[0] // 2
    prompt, answers = (
        [first + i for i in range(4)],
        [[first, first + 1, first + 2], [first, first + 3, first + 1]],
    )
    backend = attention_backend(policy)
    batch = pack_answers(prompt, answers, joined=backend != "sdpa").to(device)
    no_mask = "its attention does not take a 4-D mask; choose another model"
    try:
        packed = logprobs(policy, batch, 1.0)[0]
    except (TypeError, ValueError) as error:
        raise Unrecoverable(f"{model} cannot read packed rows ({error}): {no_mask}", exit_code=2) from error
    if backend == "flex_attention":  # what packed rows are compared with is attended in another way
        causal.set_attn_implementation("sdpa")
    for number, answer in enumerate(answers):
        ids = torch.tensor([prompt + answer], device=device)
        logits = causal(input_ids=ids, use_cache=False).logits
        ours = head(backbone(input_ids=ids, use_cache=False).last_hidden_state)
        if not torch.allclose(logits, ours, rtol=1e-5, atol=1e-5):
            raise Unrecoverable(
                f"the logits of {model} are more than its head applied to the last hidden state (a soft cap, "
                "a scale): such a model cannot be trained here; choose another",
                exit_code=2,
            )
        plain = (
            logits[0, len(prompt) - 1 : -1]
            .float()
            .log_softmax(-1)
            .gather(1, ids[0, len(prompt) :, None])[:, 0]
        )
        error = (packed[batch.completion == number] - plain).abs().max().item()
        if not error <= (1e-3 if exact else 0.25):
            raise Unrecoverable(
                f"{model} gives completions other log-probabilities (by {error:.3g}) packed in one row than each "
                f"alone: {no_mask}",
                exit_code=2,
            )
    if backend == "flex_attention":
        causal.set_attn_implementation(backend)
