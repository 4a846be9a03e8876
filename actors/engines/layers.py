"""Adapters of several policy versions in one model's layers: whichever is to be computed is put in by reference.

Imports torch, transformers and peft: only what runs inside an actor's `on_start` may import this module.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import torch
from peft import LoraConfig, PeftModel
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from ..model import Adapter, linear_at, wrap_lora

__all__ = ["MergedLayers", "PeftLayers"]


class MergedLayers:
    """Adapters added to the weights themselves, always to the base model's own: swaps never drift.

    versions: those that can be used. Each costs a copy of the linear layers that its adapter changes.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model
        self._base: dict[str, nn.Parameter] = {}
        self._merged: dict[int, dict[str, nn.Parameter]] = {}
        self._used: int | None = None

    @property
    def versions(self) -> list[int]:
        return sorted(self._merged)

    @torch.no_grad()
    def add(self, version: int, adapter: Adapter) -> None:
        """Get a version ready; the one in use stays in use."""
        merged = {}
        for path, (a, b) in adapter.layers.items():
            layer = self._layer(path)
            base = self._base.setdefault(path, cast(nn.Parameter, layer.weight))
            delta = adapter.scaling * (b.to(base) @ a.to(base))
            weight = base + (delta.T if isinstance(layer, Conv1D) else delta)
            merged[path] = nn.Parameter(weight, requires_grad=False)
        self._merged[version] = merged

    def drop(self, version: int) -> None:
        """Forget a version. `use` another before the model computes anything."""
        del self._merged[version]
        if version == self._used:
            self._used = None

    def use(self, version: int) -> None:
        """Compute this version from now on."""
        if version == self._used:
            return
        self._used = None  # until all of it is in
        for path, weight in (self._base | self._merged[version]).items():
            self._layer(path).weight = weight
        self._used = version

    def _layer(self, path: str) -> nn.Linear | Conv1D:
        layer = linear_at(self._model, path)
        assert layer is not None, path  # read_adapter has looked
        return layer


class PeftLayers:
    """Adapters beside the weights, in PEFT's layers.

    Every layer that any of the versions changes is wrapped; where a version has nothing, its B·A is 0.
    versions: those that can be used.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model
        self._wrapped: PeftModel | None = None
        self._layers: dict[str, Any] = {}  # PEFT's, by their path
        self._adapters: dict[int, tuple[float, Mapping[str, tuple[nn.Parameter, nn.Parameter]]]] = {}
        self._used: int | None = None

    @property
    def versions(self) -> list[int]:
        return sorted(self._adapters)

    def add(self, version: int, adapter: Adapter) -> None:
        """Get a version ready; the one in use must be named to `use` again."""
        tensors = {path: (self._parameter(a), self._parameter(b)) for path, (a, b) in adapter.layers.items()}
        self._wrap({*self._layers, *adapter.layers})
        self._adapters[version] = adapter.scaling, tensors

    def drop(self, version: int) -> None:
        """Forget a version. `use` another before the model computes anything."""
        del self._adapters[version]
        if version == self._used:
            self._used = None

    def use(self, version: int) -> None:
        """Compute this version from now on."""
        if version == self._used:
            return
        self._used = None  # until all of it is in
        scaling, tensors = self._adapters[version]
        for path, layer in self._layers.items():
            a, b = tensors.get(path) or self._nothing(layer)
            layer.lora_A["default"].weight, layer.lora_B["default"].weight = a, b
            layer.scaling["default"] = scaling
        self._used = version

    def _wrap(self, paths: set[str]) -> None:
        if paths == self._layers.keys():
            return
        self._used, self._layers = None, {}
        if self._wrapped is not None:
            self._wrapped.unload()
        # The rank is that of the tensors put in later.
        config = LoraConfig(r=1, target_modules=sorted(paths), task_type="CAUSAL_LM")
        self._wrapped = wrap_lora(self._model, config, seed=0)
        self._layers = {path: self._model.get_submodule(path) for path in paths}

    def _parameter(self, tensor: torch.Tensor) -> nn.Parameter:
        # In float32, as PEFT keeps adapters of 16-bit models, and as the trainer has them.
        return nn.Parameter(tensor.to(self._model.device, torch.float32), requires_grad=False)

    def _nothing(self, layer: Any) -> tuple[nn.Parameter, nn.Parameter]:
        return (
            self._parameter(torch.zeros(1, layer.in_features)),
            self._parameter(torch.zeros(layer.out_features, 1)),
        )
