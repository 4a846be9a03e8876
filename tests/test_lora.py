"""The adapter as a setting: what can be asked for, and what the model gets."""

from __future__ import annotations

from importlib.util import find_spec
from math import sqrt
from typing import Any

import pytest
import torch
from peft.tuners.lora import LoraLayer
from rolecall.actors.learner import Learner
from rolecall.actors.lora import Lora
from rolecall.actors.losses import Loss
from rolecall.actors.model import add_lora, load_model
from rolecall.runtime.errors import Unrecoverable

LINEAR = {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}


def with_lora(**settings: Any) -> Any:
    return add_lora(load_model("tiny", device="cpu", dtype=torch.float32), Lora(**settings), seed=0)


def layers_of(policy: Any) -> set[str]:
    return {name.split(".")[-4] for name, weight in policy.named_parameters() if weight.requires_grad}


@pytest.mark.parametrize("rank", [1, 8, 256])
def test_every_linear_layer_but_the_head_has_one_of_any_rank(rank: int):
    policy = with_lora(rank=rank)
    assert layers_of(policy) == LINEAR
    shapes = {weight.shape[0] for name, weight in policy.named_parameters() if "lora_A" in name}
    assert shapes == {rank}


def test_some_layers_alone():
    assert layers_of(with_lora(layers="q_proj,v_proj")) == {"q_proj", "v_proj"}
    with pytest.raises(
        Unrecoverable, match=r"no layer 'w_proj' for a LoRA: it has down_proj, gate_proj, k_proj"
    ):
        with_lora(layers="q_proj,w_proj")


@pytest.mark.parametrize("rslora", [False, True])
def test_its_scaling_is_what_it_says(rslora: bool):
    lora = Lora(rank=16, alpha=8, rslora=rslora)
    assert lora.scaling == (8 / sqrt(16) if rslora else 0.5)
    policy = add_lora(load_model("tiny", device="cpu", dtype=torch.float32), lora, seed=0)
    assert {part.scaling["default"] for part in policy.modules() if isinstance(part, LoraLayer)} == {
        lora.scaling
    }


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"rank": 0}, "a LoRA of rank 0: engines serve 1 to 256"),
        ({"rank": 257}, "a LoRA of rank 257"),
        ({"alpha": float("nan")}, "a LoRA's alpha is above 0 and finite, not nan"),
        ({"layers": "q_proj, v_proj"}, "write their names as in q_proj,v_proj"),
        ({"layers": "q_proj,lm_head"}, "vLLM serves none on heads and embeddings"),
        ({"layers": "embed_tokens"}, "vLLM serves none on heads and embeddings"),
    ],
)
def test_what_no_engine_serves_is_refused_at_once(settings: dict[str, Any], text: str):
    with pytest.raises(Unrecoverable, match=text) as caught:
        Lora(**settings)
    assert caught.value.exit_code == 2


def test_four_bits_without_bitsandbytes_name_the_way_out(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("rolecall.actors.model.find_spec", lambda name: None)
    with pytest.raises(Unrecoverable, match=r"needs bitsandbytes.*pip install 'rolecall\[qlora\]'"):
        load_model("tiny", device="cpu", dtype=torch.float32, four_bit=True)


@pytest.mark.skipif(find_spec("bitsandbytes") is None, reason="bitsandbytes is not installed")
def test_a_base_model_in_four_bits_is_trained():
    from .test_learner import groups, stir

    policy = Learner(
        "tiny", lora=Lora(rank=4, qlora=True), lr=1e-2, loss=Loss(), temperature=0.8, seed=0, device="cpu"
    )  # fmt: skip
    base: Any = policy._policy.get_base_model()
    assert type(base.model.layers[0].mlp.up_proj.base_layer).__name__ == "Linear4bit"
    stir(policy)
    metrics = policy.step(groups(policy), version=3)
    assert metrics["skipped"] == 0 and metrics["grad_norm"] > 0
