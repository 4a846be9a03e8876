"""What only a GPU can show: rows attended block by block, in bfloat16, and that the bench runs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from rolecall.actors.attention import BLOCK
from rolecall.actors.learner import Learner
from rolecall.actors.logprobs import logprobs
from rolecall.actors.lora import Lora
from rolecall.actors.losses import Loss
from rolecall.actors.packing import pack

from .train import make_groups, measure, save_model

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU"),
]
SMALL = {"vocab_size": 1000, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2,
         "num_attention_heads": 4, "num_key_value_heads": 2}  # fmt: skip


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_model(tmp_path_factory.mktemp("model"), **SMALL)


def test_joined_rows_give_the_log_probs_of_each_sequence_alone(model: str):
    learner = Learner(model, lora=Lora(), lr=1e-3, loss=Loss(), temperature=1.0, seed=0)
    groups = make_groups(1000, count=3)
    [batch, *_] = pack(groups, [[1.0] * 8] * 3, row_tokens=128 * BLOCK, joined=True).batches
    with torch.no_grad():
        lp = logprobs(learner._policy, batch.to("cuda"), 1.0)[0].cpu()
        base: Any = learner._policy.get_base_model()
        base.set_attn_implementation("sdpa")
        completions = [(group, one) for group in groups for one in group.completions]
        for number, (group, one) in enumerate(completions):
            ids = torch.tensor([[*group.prompt_ids, *one.ids]], device="cuda")
            logits = base(input_ids=ids, use_cache=False).logits[0, len(group.prompt_ids) - 1 : -1].float()
            alone = (
                logits.log_softmax(-1).gather(1, torch.tensor(one.ids, device="cuda")[:, None])[:, 0].cpu()
            )
            assert (lp[batch.completion == number] - alone).abs().max() < 0.1


def test_the_bench_measures_a_step_with_layers_kept_and_computed_twice(model: str):
    groups = make_groups(1000, count=4)
    kept, twice = (measure(model, groups, recompute=recompute, rounds=2) for recompute in (False, True))
    assert kept["tokens_per_s"] > 0 and twice["recomputed"]
    assert twice["peak_memory_gib"] <= kept["peak_memory_gib"]
