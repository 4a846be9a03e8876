"""What a causal language model has read, a row a completion, and the logits of what comes next.

    distinct prompts ─▶ one prefill ─▶ rows copied to each request ─▶ a token a step in every row
                                        └── gathered with the rows that are under way ──┘

Imports torch and transformers: only what runs inside an actor's `on_start` may import this module.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any, cast

import torch
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicCache, DynamicLayer

from ...runtime.errors import Unrecoverable

__all__ = ["Batch", "Forward"]

# Columns that a cache is made longer by: it is copied once for so many tokens.
_SPARE = 64


class Batch:
    """Rows of tokens that a model has read. They are padded on the left, so that all end in the same column.

    logits:    rows × vocabulary, of the token after each row's last.
    mergeable: whether rows can be gathered with those of other batches. States of models with sliding windows
               or recurrences can't: there a row's place in time is the whole batch's.
    """

    def __init__(self, forward: Forward, prompts: Sequence[Sequence[int]]) -> None:
        """Read these prompts, each from its start."""
        device = forward.model.device
        self._forward = forward
        self._lengths = [len(prompt) for prompt in prompts]
        self._width = max(self._lengths)
        ids = torch.zeros(len(prompts), self._width, dtype=torch.long)
        for row, prompt in enumerate(prompts):
            ids[row, self._width - len(prompt) :] = torch.tensor(prompt)
        self._cache = _empty_cache(forward.model)
        self.mergeable = _is_growing(self._cache)
        mask = self._mask_up_to(self._width)
        columns = torch.arange(self._width, device=device)
        pads = torch.tensor([self._width - length for length in self._lengths], device=device)
        positions = (columns - pads[:, None]).clamp(min=0)
        self._position = positions[:, -1:]
        self.logits = forward(self._cache, ids.to(device), mask, positions)[:, -1]
        self._mask = self._mask_of_steps()

    def __len__(self) -> int:
        return len(self._lengths)

    def extend(self, tokens: torch.Tensor) -> None:
        """Read one more token in every row."""
        self._width += 1
        self._lengths = [length + 1 for length in self._lengths]
        self._position = self._position + 1
        if self._mask is not None and self._mask.shape[-1] < self._width:
            self._mask = self._mask_of_steps()
        mask = None if self._mask is None else self._mask[..., : self._width]
        self.logits = self._forward(self._cache, tokens[:, None], mask, self._position)[:, -1]

    def _mask_up_to(self, end: int) -> torch.Tensor | None:
        """Rows × `end` columns: 0 where padding is; None where there is none."""
        pads = [self._width - length for length in self._lengths]
        if not any(pads):
            return None
        device = self._forward.model.device
        return (torch.arange(end, device=device) >= torch.tensor(pads, device=device)[:, None]).long()

    def _mask_of_steps(self) -> torch.Tensor | None:
        """What `extend` slices: as `_mask_up_to`, or what attention adds to its scores (rows × 1 × 1 × columns)."""
        mask = self._mask_up_to(self._width + _SPARE)
        if mask is None or not (self.mergeable and self._forward.takes_scores):
            return mask
        lowest = torch.finfo(self.logits.dtype).min
        scores = torch.zeros(mask.shape, dtype=self.logits.dtype, device=mask.device)
        return scores.masked_fill(mask == 0, lowest)[:, None, None]

    @staticmethod
    def logits_of(forward: Forward, prompt: Sequence[int], ids: Sequence[int]) -> torch.Tensor:
        """Logits (ids × vocabulary) of each of `ids` after the prompt, from one reading of them all."""
        device = forward.model.device
        read = torch.tensor([[*prompt, *ids[:-1]]], device=device)
        positions = torch.arange(read.shape[1], device=device)[None]
        return forward(_empty_cache(forward.model), read, None, positions, keep=len(ids))[0]

    @classmethod
    def gather(cls, parts: Sequence[tuple[Batch, Sequence[int]]]) -> Batch:
        """One batch of these rows of these batches, which are used up: any rows, as often as they are named.

        Several batches must be `mergeable`.
        """
        gathered = cls.__new__(cls)
        first = parts[0][0]
        gathered._forward, gathered.mergeable = first._forward, first.mergeable
        gathered._lengths = [batch._lengths[row] for batch, rows in parts for row in rows]
        device = first.logits.device
        indices = [torch.tensor(rows, device=device) for _, rows in parts]
        if first.mergeable:
            gathered._width = max(gathered._lengths)
            layers = list(zip(*(batch._cache.layers for batch, _ in parts), strict=True))
            gathered._cache = first._cache
            gathered._cache.layers[:] = [
                _gather_layers(cast(Any, several), indices, gathered._width) for several in layers
            ]
        else:
            assert len(parts) == 1, "states that can't be merged"
            gathered._width, gathered._cache = first._width, first._cache
            gathered._cache.reorder_cache(cast(torch.LongTensor, indices[0]))
        chosen = [(batch, index) for (batch, _), index in zip(parts, indices, strict=True)]
        gathered._position = torch.cat([batch._position[index] for batch, index in chosen])
        gathered.logits = torch.cat([batch.logits[index] for batch, index in chosen])
        gathered._mask = gathered._mask_of_steps()
        return gathered


class _GrowingLayer(DynamicLayer):
    """Keys and values with room for more: DynamicLayer would copy all of them for every token."""

    def __init__(self) -> None:
        super().__init__()
        self._room: tuple[torch.Tensor, torch.Tensor] | None = None  # what keys and values are the start of

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
            self.keys, self.values = key_states, value_states
            return key_states, value_states
        assert self.keys is not None and self.values is not None
        start = self.keys.shape[2]
        end = start + key_states.shape[2]
        if self._room is None or self._room[0].shape[2] < end:
            self._room = _with_room(self.keys), _with_room(self.values)
        keys, values = self._room
        keys[:, :, start:end] = key_states
        values[:, :, start:end] = value_states
        self.keys, self.values = keys[:, :, :end], values[:, :, :end]
        return self.keys, self.values


def _with_room(tensor: torch.Tensor) -> torch.Tensor:
    rows, heads, columns, size = tensor.shape
    grown = tensor.new_empty(rows, heads, columns + _SPARE, size)
    grown[:, :, :columns] = tensor
    return grown


def _gather_layers(
    layers: Sequence[_GrowingLayer], indices: Sequence[torch.Tensor], width: int
) -> _GrowingLayer:
    """One layer's keys and values of the rows named by `indices`, a tensor a layer: `width` columns and room."""
    gathered = _GrowingLayer()
    keys = _gather_rows([cast(torch.Tensor, layer.keys) for layer in layers], indices, width)
    values = _gather_rows([cast(torch.Tensor, layer.values) for layer in layers], indices, width)
    gathered.lazy_initialization(keys, values)
    gathered._room = keys, values
    gathered.keys, gathered.values = keys[:, :, :width], values[:, :, :width]
    return gathered


def _gather_rows(
    tensors: Sequence[torch.Tensor], indices: Sequence[torch.Tensor], width: int
) -> torch.Tensor:
    """Rows × heads × columns × size, the last columns of each tensor in front of column `width`."""
    first, count = tensors[0], sum(map(len, indices))
    gathered = first.new_empty(count, first.shape[1], width + _SPARE, first.shape[3])
    start = 0
    for tensor, index in zip(tensors, indices, strict=True):
        rows, columns = gathered[start : start + len(index)], min(width, tensor.shape[2])
        # What is masked is multiplied by 0, which NaN would survive.
        rows[:, :, : width - columns] = 0
        rows[:, :, width - columns : width] = tensor[:, :, tensor.shape[2] - columns :].index_select(0, index)
        start += len(index)
    return gathered


def _empty_cache(model: PreTrainedModel) -> DynamicCache:
    cache = DynamicCache(config=model.config)
    if all(type(layer) is DynamicLayer for layer in cache.layers):
        cache.layers[:] = [_GrowingLayer() for _ in cache.layers]
    return cache


def _is_growing(cache: DynamicCache) -> bool:
    return all(isinstance(layer, _GrowingLayer) for layer in cache.layers)


class Forward:
    """A model's forward pass over new tokens, whatever its arguments are called.

    takes_scores: whether the mask of one new token a row may be what attention adds to its scores. It is passed
                  on as it is by models that attend through transformers' common interface, and need nothing else
                  of a mask when they are told positions; they'd make it from the other kind in every step.

    Raises Unrecoverable for a model that keeps no key-value cache.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model
        self._takes = inspect.signature(model.forward).parameters.keys()
        # transformers renamed the cache within 5.x; old models keep states under names of their own.
        names = [name for name in ("cache", "past_key_values") if name in self._takes]
        if not names:
            raise Unrecoverable(
                f"{type(model).__name__} takes no key-value cache, so it cannot be sampled token by token: "
                f"choose another model",
                exit_code=2,
            )
        self._cache = names[0]
        self.takes_scores = (
            model.dtype == torch.float32
            and model.config._attn_implementation == "sdpa"
            and getattr(model, "_supports_attention_backend", False)
            and "position_ids" in self._takes
        )

    def __call__(
        self,
        cache: DynamicCache,
        ids: torch.Tensor,
        mask: torch.Tensor | None,
        positions: torch.Tensor,
        keep: int = 1,
    ) -> torch.Tensor:
        """Logits (rows × keep × vocabulary) after the last `keep` of `ids` (rows × new tokens), which the cache
        takes in.

        mask (rows × tokens so far, new ones included): 0 where padding is; None where there is none.
        """
        arguments: dict[str, Any] = {
            "input_ids": ids,
            "attention_mask": mask,
            "use_cache": True,
            self._cache: cache,
            "position_ids": positions,
            "logits_to_keep": keep,
        }
        # A model without position_ids counts from the mask; one without logits_to_keep computes them all.
        known = {name: arguments[name] for name in arguments if name in self._takes}
        return self.model(**known).logits[:, -keep:]
