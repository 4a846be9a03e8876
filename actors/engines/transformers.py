"""Sampling with any causal language model of Hugging Face transformers, on a CPU or a GPU.

    distinct prompts ─▶ one prefill ─▶ cache rows copied to each request ─▶ a token a step,
                                                                            finished rows dropped

Imports torch, transformers and peft: only what runs inside an actor's `on_start` may import this module.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from peft import LoraConfig, PeftModel
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.cache_utils import DynamicCache
from transformers.pytorch_utils import Conv1D

from ...runtime.errors import Unrecoverable
from ..model import (
    Adapter,
    AdapterError,
    encode_prompt,
    eos_ids,
    linear_at,
    load_model,
    load_tokenizer,
    pick_device,
    read_adapter,
    wrap_lora,
)
from . import Request, Sample, Sampling

__all__ = ["TransformersEngine", "load_engine"]

# Dropping finished rows copies the cache of all the others: wait until it pays.
_DROP_BELOW = 0.75


class TransformersEngine:
    """Samples from `model`, which is the engine's from now on: adapters are put into its layers.

    version: the policy version it samples under; −1 until the first `load`.
    digest:  SHA-256 published with that version; empty until then.
    dtype:   what the model computes in.

    Raises Unrecoverable for a model that keeps no key-value cache.
    """

    def __init__(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
        self.version = -1
        self.digest = ""
        self._model = model.eval()
        self._tokenizer = tokenizer
        self.dtype = str(model.dtype).removeprefix("torch.")
        self._eos = eos_ids(model, tokenizer)
        self._forward = _Forward(model)
        # In 16 bits most of a small B·A would be rounded away when added to W, so there it stays a term of
        # its own; in float32 it fits, and merged layers are as fast as the base model's.
        self._layers = _MergedLayers(model) if model.dtype == torch.float32 else _PeftLayers(model)

    @property
    def versions(self) -> list[int]:
        """The one that is loaded: its folder is never read again."""
        return [] if self.version < 0 else [self.version]

    def load(self, version: int, digest: str, folder: Path) -> None:
        """Switch to the PEFT adapter in `folder`; a refused one (AdapterError) leaves the old in place."""
        adapter = read_adapter(folder, self._model)
        # An error half-way must not leave half an adapter under a good name.
        self.version, self.digest = -1, ""
        with torch.no_grad():
            self._layers.apply(adapter)
        self.version, self.digest = version, digest

    def encode(self, text: str) -> list[int]:
        """A prompt's token ids, as the model wants it asked."""
        return encode_prompt(self._tokenizer, text)

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> list[Sample]:
        """One sample a request, in their order, all of them in one batch.

        Each distinct prompt is computed once. A request's tokens depend on its own seed alone, within the
        rounding of the model's dtype. Raises AdapterError before the first `load` and when log-probs are not
        finite, and Unrecoverable for settings or prompts that no adapter could be sampled with.
        """
        self._check_loaded()
        if not requests:
            return []
        _check(self._model, requests, sampling)
        with torch.inference_mode():
            ids, logprobs = self._sample(requests, sampling)
        texts = self._tokenizer.batch_decode(
            ids, skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        return [
            Sample(row, values, "stop" if row[-1] in self._eos else "length", text)
            for row, values, text in zip(ids, logprobs, texts, strict=True)
        ]

    def score(self, prompt_ids: Sequence[int], ids: Sequence[int]) -> list[float]:
        """Log-probs of `ids` after the prompt, at temperature 1: a prefill, then token by token, as in `generate`."""
        self._check_loaded()
        logprobs = []
        with torch.inference_mode():
            batch = _Batch(self._forward, [list(prompt_ids)], len(ids))
            for place, token in enumerate(ids):
                if place:
                    batch.extend(torch.tensor([ids[place - 1]], device=self._model.device))
                logprobs.append(torch.log_softmax(batch.logits[0].float(), dim=-1)[token])
        return torch.stack(logprobs).tolist()

    def _check_loaded(self) -> None:
        if self.version < 0:
            raise AdapterError("no adapter is loaded: load one first, the base model is no policy version")

    def _sample(
        self, requests: Sequence[Request], sampling: Sampling
    ) -> tuple[list[list[int]], list[list[float]]]:
        """Token ids and log-probs of every request."""
        most, device = sampling.max_tokens, self._model.device
        batch = _Batch(self._forward, [request.prompt_ids for request in requests], most)
        stops = torch.zeros(batch.logits.shape[-1], dtype=torch.bool, device=device)
        stops[[token for token in self._eos if token < len(stops)]] = True
        draws = _uniforms(requests, most).to(device)
        tokens = torch.zeros(len(requests), most, dtype=torch.long, device=device)
        logprobs = torch.zeros(len(requests), most, device=device)
        lengths = torch.zeros(len(requests), dtype=torch.long, device=device)
        rows = torch.arange(len(requests), device=device)  # which request each row of the batch is
        alive = torch.ones(len(requests), dtype=torch.bool, device=device)
        for step in range(most):
            chosen, logprob = _draw(batch.logits, draws[rows, step], sampling.temperature)
            tokens[rows, step], logprobs[rows, step] = chosen, logprob
            lengths[rows] += alive
            alive = alive & ~stops[chosen]
            left = int(alive.sum())
            if left == 0 or step + 1 == most:
                break
            if left < _DROP_BELOW * len(rows):
                kept = alive.nonzero().squeeze(1)
                batch.select(kept)
                rows, chosen, alive = rows[kept], chosen[kept], alive[kept]
            batch.extend(chosen)
        if not bool(torch.isfinite(logprobs).all()):
            raise AdapterError(
                f"version {self.version} gives log-probs that are not finite: its training broke down"
            )
        ends = lengths.tolist()
        return (
            [row[:end] for row, end in zip(tokens.tolist(), ends, strict=True)],
            [row[:end] for row, end in zip(logprobs.tolist(), ends, strict=True)],
        )


def _check(model: PreTrainedModel, requests: Sequence[Request], sampling: Sampling) -> None:
    """Raise Unrecoverable for what can never be sampled."""
    temperature, most = sampling.temperature, sampling.max_tokens
    if not 0 <= temperature < float("inf") or most < 1:
        raise Unrecoverable(
            f"cannot sample with temperature {temperature} and max_tokens {most}: the first must be 0 or "
            f"more, the second at least 1",
            exit_code=2,
        )
    lengths = [len(request.prompt_ids) for request in requests]
    if min(lengths) == 0:
        raise Unrecoverable("a prompt has no tokens at all: leave empty prompts out of the data", exit_code=2)
    room = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if isinstance(room, int) and max(lengths) + most > room:
        raise Unrecoverable(
            f"a prompt of {max(lengths)} tokens and {most} new ones are more than the {room} positions of "
            f"model {model.name_or_path!r}: ask for fewer tokens or leave long prompts out",
            exit_code=2,
        )


def _uniforms(requests: Sequence[Request], count: int) -> torch.Tensor:
    """Uniform numbers in [0, 1), float64, requests × count: row i is the start of the stream of seed i.

    Philox is a counter-based generator: its streams need no warm-up and do not overlap.
    """
    streams = [np.random.Generator(np.random.Philox(key=request.seed)) for request in requests]
    return torch.from_numpy(np.stack([stream.random(count) for stream in streams]))


def _draw(
    logits: torch.Tensor, uniforms: torch.Tensor, temperature: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """One token for each row of `logits` (rows × vocabulary), and its log-prob (float32).

    By inversion: the first token whose cumulative probability exceeds u. (torch.multinomial would draw a
    number for every token of the vocabulary.) The sum is in float64: in float32 its rounding shifts rare
    tokens, and a u rounded up to 1 could pick a token of probability 0.
    """
    logprobs = torch.log_softmax(logits.float() / (temperature or 1.0), dim=-1)
    if temperature == 0:
        chosen = logits.argmax(dim=-1)
    else:
        cumulative = logprobs.exp().cumsum(dim=-1, dtype=torch.float64)
        point = uniforms[:, None] * cumulative[:, -1:]
        chosen = torch.searchsorted(cumulative, point, right=True).squeeze(1)
        chosen = chosen.clamp(max=logits.shape[-1] - 1)  # only NaN reaches past the end; it is reported later
    return chosen, logprobs.gather(1, chosen[:, None]).squeeze(1)


class _Forward:
    """A model's forward pass over new tokens, whatever its arguments are called."""

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

    def __call__(
        self, cache: DynamicCache, ids: torch.Tensor, mask: torch.Tensor, positions: torch.Tensor
    ) -> torch.Tensor:
        """Logits (rows × vocabulary) after the last of `ids` (rows × new tokens), which the cache takes in.

        mask (rows × tokens so far, new ones included): false where padding is.
        """
        arguments: dict[str, Any] = {
            "input_ids": ids,
            "attention_mask": mask,
            "use_cache": True,
            self._cache: cache,
            "position_ids": positions,
            "logits_to_keep": 1,
        }
        # A model without position_ids counts from the mask; one without logits_to_keep computes them all.
        return self.model(**{name: arguments[name] for name in arguments if name in self._takes}).logits[
            :, -1
        ]


class _Batch:
    """Completions under way, a row each: what the model has read of them, and the logits of what comes next.

    Prompts are padded on the left, so that every row's next token has the same column.
    """

    def __init__(self, forward: _Forward, prompts: list[list[int]], most: int) -> None:
        """Read each distinct prompt once, then copy its row to all who asked for it."""
        self._forward = forward
        model = forward.model
        distinct: dict[tuple[int, ...], int] = {}
        owners = [distinct.setdefault(tuple(prompt), len(distinct)) for prompt in prompts]
        self._width = max(map(len, distinct))
        ids = torch.zeros(len(distinct), self._width, dtype=torch.long)
        self._mask = torch.zeros(len(distinct), self._width + most, dtype=torch.long)
        for row, prompt in enumerate(distinct):
            ids[row, self._width - len(prompt) :] = torch.tensor(prompt)
            self._mask[row, self._width - len(prompt) :] = 1
        self._mask = self._mask.to(model.device)
        mask = self._mask[:, : self._width]
        positions = (mask.cumsum(dim=1) - 1).clamp(min=0)
        self._position = positions[:, -1:]
        self._cache = DynamicCache(config=model.config)
        self.logits = forward(self._cache, ids.to(model.device), mask, positions)
        self.select(torch.tensor(owners, device=model.device))

    def select(self, rows: torch.Tensor) -> None:
        """Make these the batch's rows: any of them, as often as they are named."""
        self._cache.reorder_cache(cast(torch.LongTensor, rows))
        self._mask, self._position = self._mask[rows], self._position[rows]
        self.logits = self.logits[rows]

    def extend(self, tokens: torch.Tensor) -> None:
        """Read one more token in every row."""
        self._width += 1
        self._position = self._position + 1
        self.logits = self._forward(
            self._cache, tokens[:, None], self._mask[:, : self._width], self._position
        )


class _MergedLayers:
    """Adapters added to the weights themselves, always from the base model's own: swaps never drift.

    Costs a second copy of the linear layers that an adapter changes.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model
        self._base: dict[str, torch.Tensor] = {}

    def apply(self, adapter: Adapter) -> None:
        for path in self._base.keys() - adapter.layers.keys():
            self._layer(path).weight.copy_(self._base[path])
        for path, (a, b) in adapter.layers.items():
            layer = self._layer(path)
            base = self._base.setdefault(path, layer.weight.detach().clone())
            delta = adapter.scaling * (b.to(base) @ a.to(base))
            layer.weight.copy_(base + (delta.T if isinstance(layer, Conv1D) else delta))

    def _layer(self, path: str) -> torch.nn.Linear | Conv1D:
        layer = linear_at(self._model, path)
        assert layer is not None, path  # read_adapter has looked
        return layer


class _PeftLayers:
    """Adapters beside the weights, in PEFT's layers; their tensors are overwritten by the next adapter's."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model
        self._wrapped: PeftModel | None = None
        self._shape: tuple[int, set[str]] = (0, set())

    def apply(self, adapter: Adapter) -> None:
        shape = (adapter.rank, set(adapter.layers))
        if shape != self._shape:
            if self._wrapped is not None:
                self._wrapped.unload()
            config = LoraConfig(r=adapter.rank, target_modules=sorted(adapter.layers), task_type="CAUSAL_LM")
            self._wrapped = wrap_lora(self._model, config, seed=0)
            self._shape = shape
        for path, (a, b) in adapter.layers.items():
            layer: Any = self._model.get_submodule(path)
            layer.lora_A["default"].weight.copy_(a)
            layer.lora_B["default"].weight.copy_(b)
            layer.scaling["default"] = adapter.scaling


def load_engine(model: str) -> TransformersEngine:
    """An engine for `model` (as `load_model` takes it) on the best device there is.

    float32 on a CPU, bfloat16 elsewhere: what the trainer computes in as well.
    """
    device = pick_device()
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    return TransformersEngine(load_model(model, device=device, dtype=dtype), load_tokenizer(model))
