"""One optimizer step of GRPO over whole groups: log-probs, loss, gradient, AdamW on the adapter.

    groups ─▶ pack ─▶ micro-batches ─▶ log-probs ─▶ loss ─▶ gradients, summed ─▶ clip ─▶ AdamW

No actor, no files: a step takes groups and gives numbers, the adapter and the state are bytes.
Imports torch and transformers: import it where a trainer starts, not at a recipe's top.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from functools import cached_property
from math import isfinite
from typing import Any

import torch
from torch import Tensor

from ..runtime.errors import Unrecoverable
from .advantages import refuse_unless_finite
from .attention import BLOCK, backend_for
from .canary import Canary, canary_tokens
from .flops import peak_flops, step_flops
from .logprobs import attention_window, logprobs, parts, recompute_layers, refuse_unless_packable
from .lora import Lora
from .losses import Loss
from .metrics import Seen, group_metrics, token_metrics
from .model import adapter_files, add_lora, load_model, load_tokenizer, pick_device
from .objectives import Totals
from .packing import Batch, Packed, pack, pack_answers
from .types import Group

__all__ = ["Learner"]

log = logging.getLogger("rolecall")

BAD_STEPS_IN_A_ROW = 3
ROW_TOKENS, ROW_TOKENS_JOINED = 4096, 16384


def _longest(groups: Sequence[Group], block: int) -> int:
    """Tokens of the longest prompt with a completion, in whole blocks."""
    lengths = [len(group.prompt_ids) + len(one.ids) for group in groups for one in group.completions]
    return block * -(-max(lengths, default=0) // block)


class Learner:
    """The policy under training: a frozen base model, its LoRA adapter, and AdamW.

    model:         what `load_model` takes. Its head must be a plain linear map and its attention take a 4-D
                   mask; tried here on a few tokens: Unrecoverable if not.
    temperature:   the one the completions were sampled at; logits are divided by it.
    max_tokens:    the most tokens a completion may have; a loss averaged by "dr" divides by it.
    row_tokens:    places a micro-batch may hold, padding included, or what the longest prompt with its completion
                   needs, if that is more. By default 4,096, or 16,384 on a GPU.
    max_grad_norm: gradients of a larger 2-norm are scaled down to it.
    device:        a torch device; None for the best there is. The base model is float32 on "cpu", else bfloat16.

    A step draws no random numbers, so there is no generator to save: the model stays in evaluation mode, for
    dropout would make every ratio wrong.
    """

    def __init__(
        self,
        model: str,
        *,
        lora: Lora,
        lr: float,
        loss: Loss,
        temperature: float,
        seed: int,
        max_tokens: int | None = None,
        row_tokens: int | None = None,
        max_grad_norm: float = 1.0,
        device: str | None = None,
    ) -> None:
        if temperature <= 0:
            raise Unrecoverable(
                f"temperature {temperature} leaves nothing to learn from: set it above 0", exit_code=2
            )
        if loss.averages_by == "dr" and max_tokens is None:
            raise Unrecoverable(
                f"{loss.kind} averages over the most tokens a completion may have: give the trainer max_tokens",
                exit_code=2,
            )
        self._device = device or pick_device()
        dtype = torch.float32 if self._device == "cpu" else torch.bfloat16
        attention = backend_for(self._device)
        self._joined = attention == "flex_attention"
        base = load_model(
            model,
            device=self._device,
            dtype=dtype,
            attention=attention if self._joined else None,
            four_bit=lora.qlora,
        )
        self._policy = add_lora(base, lora, seed=seed)
        self._weights = {name: p for name, p in self._policy.named_parameters() if p.requires_grad}
        self._optimizer = torch.optim.AdamW(
            self._weights.values(), lr=lr, betas=(0.9, 0.95), weight_decay=0.0, fused=True
        )
        self._model, self._seed = model, seed
        self._loss, self._temperature, self._max_tokens = loss, temperature, max_tokens or 0
        self._row_tokens = row_tokens or (ROW_TOKENS_JOINED if self._joined else ROW_TOKENS)
        self._max_grad_norm = max_grad_norm
        self._recomputes = False
        self.peak_flops = peak_flops(self._device)
        self._settings = {"rank": lora.rank, "scaling": lora.scaling}
        self._counters = {"steps": 0, "skipped": 0, "skipped_in_a_row": 0}
        self._window = attention_window(self._policy)
        self._vocabulary: int = parts(self._policy)[1].weight.shape[0]
        refuse_unless_packable(self._policy, model)
        log.info("training %s on %s, in %s, attention by %s", model, self._device, dtype, attention)

    def step(self, groups: Sequence[Group], *, version: int) -> dict[str, float]:
        """One optimizer step over whole groups; gives its metrics.

        version: the policy version these weights were published as; groups sampled by it are the fresh ones.

        A group whose advantages are all 0 has no gradient and is not forwarded, unless the loss holds the policy to
        a reference. With nothing to train (no group left, or all is masked) the weights stay as they are, and the
        metrics of tokens are missing. A group with a token id beyond the vocabulary, which only a worker
        with another model makes, is left out and counted in `foreign_groups`: it can't stop the run. A loss
        or gradient that is not finite skips the step: `skipped` is 1, and these two metrics say NaN or
        infinity. Raises Unrecoverable after three of those in a row, on a reward that is not finite, and on a
        completion too long for the model's attention window.
        """
        self._check_lengths(groups)
        _check_rewards(groups)
        own = [group for group in groups if not self._is_foreign(group)]
        advantages = self._loss.advantages([group.rewards for group in own])
        packed = pack(
            own,
            advantages,
            row_tokens=max(self._row_tokens, _longest(own, BLOCK if self._joined else 1)),
            joined=self._joined,
            mask_truncated=self._loss.mask_truncated,
            keep_zeros=self._loss.trains_equal_groups,
        )
        equal, foreign = sum(not any(values) for values in advantages), len(groups) - len(own)
        metrics = {**group_metrics(groups), "lr": float(self._optimizer.param_groups[0]["lr"])}
        metrics |= {"zero_variance_share": (equal + foreign) / len(groups), "row_fill": packed.fill}
        metrics |= {"tokens_trained": float(packed.trained_tokens), "foreign_groups": float(foreign)}
        metrics |= {"tokens_forwarded": float(sum(batch.tokens for batch in packed.batches))}
        metrics |= {"flops": step_flops(self._policy, packed.batches)}
        if packed.trained_tokens == 0:
            return metrics | {"loss": 0.0, "grad_norm": 0.0, "skipped": 0.0}
        versions = [group.version for group in own for _ in group.completions]
        fresh = torch.tensor(versions, device=self._device) == version
        summed = self._accumulate_within_memory(packed, fresh)
        return metrics | summed | self._update(summed["loss"])

    def adapter(self) -> dict[str, bytes]:
        """The adapter as peft's files, by name."""
        return adapter_files(self._policy)

    def canary(self) -> Canary:
        """What this policy says of the run's canary tokens: computed as in a step, at temperature 1."""
        prompt_ids, ids = self._canary_tokens
        batch = pack_answers(prompt_ids, [ids], joined=self._joined).to(self._device)
        with torch.no_grad():
            lp = logprobs(self._policy, batch, 1.0)[0]
        causal: Any = self._policy.get_base_model()
        dtype = str(causal.dtype).removeprefix("torch.")
        return Canary(prompt_ids=prompt_ids, ids=ids, logprobs=lp.tolist(), dtype=dtype)

    @cached_property
    def _canary_tokens(self) -> tuple[list[int], list[int]]:
        causal: Any = self._policy.get_base_model()
        positions = getattr(causal.config.get_text_config(), "max_position_embeddings", None)
        rooms = [room for room in (positions, self._window) if isinstance(room, int)]
        return canary_tokens(load_tokenizer(self._model), self._seed, min(rooms, default=None))

    def state(self) -> dict[str, bytes]:
        """All that `restore` needs to go on from here: weights and AdamW's moments, counters and settings."""
        from safetensors.torch import save

        tensors = {f"weight/{name}": weight.detach() for name, weight in self._weights.items()}
        for name, weight in self._weights.items():
            for key, value in self._optimizer.state.get(weight, {}).items():
                tensors[f"{key}/{name}"] = value
        about = {"settings": self._settings, "counters": self._counters}
        return {
            "learner.safetensors": save(
                {name: tensor.cpu().contiguous() for name, tensor in tensors.items()}
            ),
            "learner.json": json.dumps(about).encode(),
        }

    def restore(self, state: Mapping[str, bytes]) -> None:
        """Go on from a `state()` of a learner with the same model and settings; on a CPU, bit for bit.

        The learning rate is this learner's own. Raises Unrecoverable when the state is of another adapter.
        """
        from safetensors.torch import load

        about = json.loads(state["learner.json"])
        tensors = load(state["learner.safetensors"])
        saved = {
            key.removeprefix("weight/"): t.shape for key, t in tensors.items() if key.startswith("weight/")
        }
        if about["settings"] != self._settings or saved != {
            name: w.shape for name, w in self._weights.items()
        }:
            raise Unrecoverable(
                f"the saved state is of an adapter with {about['settings']} and {len(saved)} weights, this run's "
                f"has {self._settings} and {len(self._weights)}: give the settings and the model it was saved "
                "with, or start a new run",
                exit_code=2,
            )
        moments: dict[int, dict[str, Tensor]] = {}
        with torch.no_grad():
            for i, (name, weight) in enumerate(self._weights.items()):
                weight.copy_(tensors[f"weight/{name}"])
                if f"step/{name}" in tensors:
                    moments[i] = {key: tensors[f"{key}/{name}"] for key in ("step", "exp_avg", "exp_avg_sq")}
        param_groups = self._optimizer.state_dict()["param_groups"]
        self._optimizer.load_state_dict({"state": moments, "param_groups": param_groups})
        self._counters = dict(about["counters"])

    def _check_lengths(self, groups: Sequence[Group]) -> None:
        if self._window is None:
            return
        for group in groups:
            length = len(group.prompt_ids) + max(len(completion.ids) for completion in group.completions)
            if length > self._window:
                raise Unrecoverable(
                    f"group {group.id} is {length} tokens long and some layers of the model see only "
                    f"{self._window}, which packed rows cannot keep to: hold prompt and completion within that",
                    exit_code=2,
                )

    def _is_foreign(self, group: Group) -> bool:
        largest = max(
            max(ids, default=0) for ids in (group.prompt_ids, *(part.ids for part in group.completions))
        )
        if largest < self._vocabulary:
            return False
        log.warning(
            "group %d of %s is not trained: it has token id %d, and the model's vocabulary ends at %d; stop that "
            "worker, which samples another model", group.id, group.worker, largest, self._vocabulary - 1,
        )  # fmt: skip
        return True

    def _accumulate_within_memory(self, packed: Packed, fresh: Tensor) -> dict[str, float]:
        """Once more from the start if there is too little memory, and with less kept for backward from now on."""
        while True:
            try:
                return self._accumulate(packed, fresh)
            except torch.OutOfMemoryError as error:
                if self._recomputes:
                    raise Unrecoverable(
                        f"a micro-batch of {self._row_tokens} tokens does not fit into memory, though all layers are "
                        f"computed again in backward ({error}): shorten max_tokens, or take a larger GPU"
                    ) from error
            # Not in the handler: its traceback holds what has to be let go.
            log.warning(
                "not enough memory to keep all of a micro-batch of %d tokens for backward: from now on its layers "
                "are computed twice", self._row_tokens,
            )  # fmt: skip
            recompute_layers(self._policy)
            self._recomputes = True

    def _accumulate(self, packed: Packed, fresh: Tensor) -> dict[str, float]:
        """Sum the gradients of all micro-batches; fresh: [completions] bool."""
        self._optimizer.zero_grad()
        loss = torch.zeros((), device=self._device)
        budget = len(fresh) * self._max_tokens
        totals = Totals(packed.trained_tokens, packed.trained_sequences, budget)
        seen: list[Seen] = []
        for batch in packed.batches:
            batch = batch.to(self._device)
            lp_ref = self._reference(batch) if self._loss.kl_coef > 0 else None
            lp, entropy = logprobs(self._policy, batch, self._temperature)
            share, stats = self._loss(
                lp, batch.lp_gen, batch.advantage, batch.loss_mask, batch.completion, totals, lp_ref=lp_ref
            )
            share.backward()
            loss += share.detach()
            seen.append(Seen(stats, entropy, batch.loss_mask, fresh[batch.completion]))
        return {"loss": loss.item(), **token_metrics(seen)}

    @torch.no_grad()
    def _reference(self, batch: Batch) -> Tensor:
        """Log-probs under the base model: the adapter switched off, so no second copy of it is in memory."""
        with self._policy.disable_adapter():
            return logprobs(self._policy, batch, self._temperature)[0]

    def _update(self, loss: float) -> dict[str, float]:
        """Clip and apply the gradients, or skip the step if they or the loss are not finite."""
        norm = float(torch.nn.utils.clip_grad_norm_(self._weights.values(), self._max_grad_norm))
        counters = self._counters
        if isfinite(norm) and isfinite(loss):  # the loss, too: capping a NaN ratio gives it a gradient of 0
            self._optimizer.step()
            counters["steps"] += 1
            counters["skipped_in_a_row"] = 0
            return {"grad_norm": norm, "skipped": 0.0}
        counters["skipped"] += 1
        counters["skipped_in_a_row"] += 1
        if counters["skipped_in_a_row"] >= BAD_STEPS_IN_A_ROW:
            raise Unrecoverable(
                f"loss or gradient were not finite in {BAD_STEPS_IN_A_ROW} steps in a row (loss {loss}, norm "
                f"{norm}), after {counters['steps']} good ones: lower the learning rate, or look for "
                "log-probabilities that are not finite in the rollouts"
            )
        return {"grad_norm": norm, "skipped": 1.0}


def _check_rewards(groups: Sequence[Group]) -> None:
    for group in groups:
        try:
            refuse_unless_finite(group.rewards)
        except ValueError as error:
            raise Unrecoverable(
                f"prompt {group.id}, sampled by {group.worker}: {error}; mend the reward function",
                exit_code=2,
            ) from error
