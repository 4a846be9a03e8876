"""The learner against plain transformers, one sequence at a time, on the shipped model and a random Qwen2."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace
from rolecall.actors.learner import Learner
from rolecall.actors.logprobs import logprobs
from rolecall.actors.lora import Lora
from rolecall.actors.losses import Loss
from rolecall.actors.packing import pack
from rolecall.actors.types import Completion, Group, Prompt
from rolecall.runtime.errors import Unrecoverable
from torch import Tensor

from .losses import LOSSES, name_of

PACKING = ("row_fill", "tokens_forwarded", "flops")
VOCABULARY = 437  # of the shipped model; the random ones have at least as many


def learner(model: str = "tiny", **changes) -> Learner:
    settings = {
        "lora": Lora(rank=4, alpha=8),
        "lr": 1e-3,
        "loss": Loss(),
        "temperature": 0.8,
        "seed": 0,
        "device": "cpu",
    }
    return Learner(model, **(settings | changes))


def stir(policy: Learner, seed: int = 0) -> None:
    """Random adapter weights: a fresh adapter's B is 0, which hides mistakes in it and gives A no gradient."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in policy._weights.values():
            weight.copy_(torch.randn(weight.shape, generator=generator) * 0.1)


def plain_logprobs(policy: Learner, prompt: Sequence[int], ids: Sequence[int]) -> Tensor:
    """Log-probability of each id after the prompt, by the model's own forward on that one sequence."""
    with torch.no_grad():
        logits = policy._policy(torch.tensor([[*prompt, *ids]]), use_cache=False).logits[0]
    logprobs = (logits[len(prompt) - 1 : -1] / policy._temperature).log_softmax(-1)
    return logprobs.gather(1, torch.tensor(ids)[:, None])[:, 0]


def groups(
    policy: Learner, count: int = 4, siblings: int = 4, seed: int = 0, version: int = 3
) -> list[Group]:
    """Random groups, whose siblings often begin alike, with log-probs of the policy as it is (on-policy)."""
    rng = random.Random(seed)
    made = []
    for number in range(count):
        prompt = [rng.randrange(2, VOCABULARY) for _ in range(rng.randint(3, 12))]
        start = [rng.randrange(2, VOCABULARY) for _ in range(6)]
        completions = []
        for place in range(siblings):
            tail = [rng.randrange(2, VOCABULARY) for _ in range(rng.randint(1, 9))]
            ids = [*start[: rng.randint(0, 6)], *tail]
            completions.append(
                Completion(
                    ids=ids,
                    logprobs=plain_logprobs(policy, prompt, ids).tolist(),
                    versions=[version] * len(ids),
                    finish_reason="length" if place == 1 else "stop",
                    text="",
                    reward=float(place % 2),
                )
            )
        made.append(
            Group(
                prompt=Prompt(id=number, text="", answer=""),
                prompt_ids=prompt,
                completions=completions,
                digests={},
                worker="rollout-0",
            )
        )
    return made


def change(group: Group, **changes) -> Group:
    """The group with these fields of every completion changed."""
    return replace(group, completions=[replace(c, **changes) for c in group.completions])


def of_version(group: Group, version: int) -> Group:
    completions = [replace(one, versions=[version] * len(one.ids)) for one in group.completions]
    return replace(group, completions=completions)


def poisoned(group: Group) -> Group:
    """The group with one log-probability that is NaN."""
    first, *others = group.completions
    return replace(group, completions=[replace(first, logprobs=[float("nan"), *first.logprobs[1:]]), *others])


def gradient(policy: Learner) -> Tensor:
    """What the last step's (clipped) gradient was, as one vector."""
    grads = [weight.grad for weight in policy._weights.values()]
    return torch.cat([grad.flatten() for grad in grads if grad is not None])


def random_model(folder: Path, **changes) -> str:
    from transformers import AutoConfig, AutoModelForCausalLM

    sizes = {
        "vocab_size": 448,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
        "initializer_range": 0.3,
    }
    kind = changes.pop("kind")
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **sizes | changes))
    model.save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def qwen2(tmp_path_factory) -> str:
    return random_model(tmp_path_factory.mktemp("qwen2"), kind="qwen2")


@pytest.mark.parametrize("model", ["tiny", "qwen2"])
@pytest.mark.parametrize(("row_tokens", "joined"), [(32, False), (4096, False), (128, True)])
def test_packed_logprobs_are_those_of_each_sequence_alone(model, row_tokens, joined, request) -> None:
    policy = learner(request.getfixturevalue(model) if model == "qwen2" else model)
    stir(policy)
    batch_of = groups(policy)
    expected = [c.logprobs for group in batch_of for c in group.completions]
    seen = set()
    for batch in pack(batch_of, [[1.0] * 4] * 4, row_tokens=row_tokens, joined=joined).batches:
        lp, entropy = logprobs(policy._policy, batch, policy._temperature)
        for number in batch.completion.unique().tolist():
            seen.add(number)
            assert lp[batch.completion == number].tolist() == pytest.approx(expected[number], abs=1e-5)
        assert bool((entropy > 0).all())
    assert seen == set(range(16))


def test_the_head_in_parts_gives_the_same_numbers_and_gradient() -> None:
    policy = learner()
    stir(policy)
    [batch] = pack(groups(policy, count=1), [[1.0] * 4], row_tokens=4096).batches
    results = []
    for max_logits in (1 << 25, 448 * 5):
        policy._optimizer.zero_grad()
        lp, entropy = logprobs(policy._policy, batch, 0.8, max_logits)
        (lp * torch.arange(len(lp))).sum().backward()
        results.append((lp.detach(), entropy, gradient(policy)))
    for whole, parts in zip(*results, strict=True):
        assert torch.allclose(whole, parts, rtol=1e-5, atol=1e-5 * float(whole.abs().max()))


@pytest.fixture(scope="module")
def still() -> tuple[Learner, list[Group]]:
    """A policy that no step moves, and groups that another one sampled."""
    policy = learner(max_grad_norm=1e9, lr=0.0, max_tokens=16)
    stir(policy)
    batch_of = groups(policy, count=3)
    stir(policy, seed=1)
    return policy, batch_of


@pytest.mark.parametrize(
    "loss", [*LOSSES, Loss(kl_coef=0.1), Loss(kind="gspo", mask_truncated=True)], ids=name_of
)
def test_packed_in_any_way_or_one_by_one_every_loss_has_the_same_gradient(still, loss: Loss) -> None:
    policy, batch_of = still
    policy._loss, policy._row_tokens = loss, 1 << 16
    whole = policy.step(batch_of, version=3)
    expected = gradient(policy)
    policy._row_tokens = 27  # the longest prompt and completion: nearly every completion by itself
    metrics = policy.step(batch_of[::-1], version=3)
    assert metrics == pytest.approx(whole | {key: metrics[key] for key in PACKING}, rel=1e-4, abs=1e-6)
    assert float((gradient(policy) - expected).norm()) <= 1e-5 * float(expected.norm())


def without_room(policy: Learner, *times: int) -> list[int]:
    """Have the network run out of memory when it is entered for these times; the list grows with each entry."""
    entered: list[int] = []

    def enter(*_: Any) -> None:
        entered.append(len(entered) + 1)
        if len(entered) in times:
            raise torch.OutOfMemoryError("no room")

    first_layer(policy).mlp.register_forward_pre_hook(enter)
    return entered


def first_layer(policy: Learner) -> Any:
    base: Any = policy._policy.get_base_model()
    return base.model.layers[0]


def test_what_does_not_fit_is_computed_twice_with_the_same_gradient() -> None:
    plain, recomputed = (learner(lr=0.0, row_tokens=32, max_grad_norm=1e9) for _ in range(2))
    stir(plain)
    stir(recomputed)
    batch_of = groups(plain)
    rows = without_room(plain)
    whole = plain.step(batch_of, version=3)
    entered = without_room(recomputed, 2)
    assert recomputed.step(batch_of, version=3) == pytest.approx(whole, rel=1e-5)
    assert len(rows) > 2
    assert len(entered) == 2 + 2 * len(rows)  # before it was known, then forward and again in backward
    for left, right in zip(gradient(plain), gradient(recomputed), strict=True):
        assert torch.allclose(left, right, rtol=1e-5, atol=1e-6)
    layer = first_layer(recomputed)
    assert not any(part.training for part in layer.modules() if part is not layer)


def test_what_does_not_fit_even_then_names_the_way_out() -> None:
    policy = learner(row_tokens=64)
    stir(policy)
    batch_of = groups(policy)
    without_room(policy, 1, 3)
    with pytest.raises(Unrecoverable, match=r"a micro-batch of 64 tokens does not fit .* shorten max_tokens"):
        policy.step(batch_of, version=3)


@pytest.mark.parametrize("row_tokens", [32, 64, 200, 4096])
@pytest.mark.parametrize("order", [0, 1])
def test_any_packing_and_order_gives_the_same_gradient(row_tokens: int, order: int) -> None:
    policy = learner(max_grad_norm=1e9, lr=0.0, row_tokens=1 << 16)
    stir(policy)
    # Off-policy, so that ratios are not all 1 and some are clipped.
    batch_of = groups(policy, count=5)
    stir(policy, seed=1)
    whole = policy.step(batch_of, version=3)
    expected = gradient(policy)

    policy._row_tokens = row_tokens
    random.Random(order).shuffle(batch_of)
    metrics = policy.step(batch_of, version=3)
    assert metrics == pytest.approx(whole | {key: metrics[key] for key in PACKING}, rel=1e-4, abs=1e-6)
    assert whole["clip_ratio/low"] > 0 and whole["clip_ratio/high"] > 0
    assert float((gradient(policy) - expected).norm() / expected.norm()) < 1e-5


@pytest.mark.parametrize("where", ["prompt", "completion"])
def test_a_group_of_another_vocabulary_is_left_out_and_named(where: str, caplog) -> None:
    alone, policy = learner(), learner()
    batch_of = groups(policy, count=2)
    first = batch_of[1].completions[0]
    foreign = replace(batch_of[1], worker="elsewhere/rollout-0")
    if where == "prompt":
        foreign = replace(foreign, prompt_ids=[*foreign.prompt_ids, 448])
    else:
        other = replace(first, ids=[448, *first.ids[1:]])
        foreign = replace(foreign, completions=[other, *foreign.completions[1:]])
    expected = alone.step(batch_of[:1], version=3)
    metrics = policy.step([batch_of[0], foreign], version=3)
    assert (metrics["foreign_groups"], metrics["loss"]) == (1.0, expected["loss"])
    assert expected["foreign_groups"] == 0.0
    assert torch.equal(gradient(policy), gradient(alone))
    assert f"group {foreign.id} of elsewhere/rollout-0" in caplog.text
    assert "token id 448" in caplog.text


def test_on_policy_metrics() -> None:
    policy = learner()
    stir(policy)
    batch_of = groups(policy, version=3) + [of_version(group, 2) for group in groups(policy, seed=9)]
    batch_of[0] = change(batch_of[0], reward=1.0)
    lengths = [len(c.ids) for group in batch_of for c in group.completions]
    trained = sum(lengths) - sum(len(c.ids) for c in batch_of[0].completions)
    metrics = policy.step(batch_of, version=3)
    close = pytest.approx
    assert metrics["ratio/mean"] == close(1, abs=1e-5)
    assert metrics["fresh/ratio_mean"] == close(1, abs=1e-5)
    assert metrics["fresh/log_ratio_max"] < 1e-4
    assert metrics["clip_ratio/low"] == metrics["clip_ratio/high"] == 0
    assert metrics["kl"] == close(0, abs=1e-8)
    assert metrics["reward"] == close((7 * 0.5 + 1) / 8)
    assert metrics["reward_std"] == close(7 / 8 * 0.5)
    assert metrics["zero_variance_share"] == close(1 / 8)
    assert metrics["tokens_trained"] == trained
    assert metrics["completions/mean_length"] == close(sum(lengths) / len(lengths))
    assert (metrics["completions/min_length"], metrics["completions/max_length"]) == (
        min(lengths),
        max(lengths),
    )
    assert metrics["completions/clipped_ratio"] == 0.25
    assert metrics["lr"] == 1e-3
    assert 0.8 < metrics["row_fill"] <= 1
    assert metrics["grad_norm"] > 0 and metrics["skipped"] == 0
    assert 0 < metrics["entropy"] < 6.2  # log 448 = 6.1


def test_the_mean_of_each_function_that_rewards_are_made_up_of() -> None:
    policy = learner()
    batch_of = groups(policy, count=2)
    batch_of[0] = change(batch_of[0], rewards={"right": 1.0, "short": -3.0})
    metrics = policy.step(batch_of, version=0)
    count = sum(len(group.completions) for group in batch_of)
    means = {name: value for name, value in metrics.items() if name.startswith("rewards/")}
    share = len(batch_of[0].completions) / count
    assert means == {"rewards/right": pytest.approx(share), "rewards/short": pytest.approx(-3 * share)}
    assert not [
        name for name in policy.step(groups(policy, count=2), version=0) if name.startswith("rewards/")
    ]


def test_names_that_each_completion_makes_up_are_not_all_told() -> None:
    """A line of metrics.jsonl has so many, whatever a machine sends."""
    policy = learner()
    [first, second] = groups(policy, count=2)
    made_up = [
        replace(completion, rewards={f"{at}/{i}": 1.0 for i in range(64)})
        for at, completion in enumerate(second.completions)
    ]
    metrics = policy.step(
        [change(first, rewards={"right": 1.0}), replace(second, completions=made_up)], version=0
    )
    names = [name for name in metrics if name.startswith("rewards/")]
    assert len(names) == 64 and "rewards/right" in names


def test_only_groups_of_this_version_count_as_fresh() -> None:
    policy = learner()
    fresh = groups(policy, count=2, version=3)
    stale = [of_version(group, 2) for group in groups(policy, count=2, seed=9)]
    stale = [
        replace(g, completions=[replace(c, logprobs=[lp - 0.1 for lp in c.logprobs]) for c in g.completions])
        for g in stale
    ]
    metrics = policy.step(fresh + stale, version=3)
    assert metrics["ratio/mean"] > 1.02
    assert metrics["fresh/ratio_mean"] == pytest.approx(1, abs=1e-5)
    assert "fresh/ratio_mean" not in policy.step(fresh + stale, version=4)


def test_nothing_to_train_changes_nothing() -> None:
    policy = learner()
    before = policy.adapter()
    same = [change(group, reward=1.0) for group in groups(policy)]
    metrics = policy.step(same, version=3)
    assert (metrics["loss"], metrics["grad_norm"], metrics["zero_variance_share"]) == (0, 0, 1)
    masked = learner(loss=Loss(mask_truncated=True))
    metrics = masked.step([change(group, finish_reason="length") for group in groups(policy)], version=3)
    assert (metrics["loss"], metrics["grad_norm"], metrics["tokens_trained"]) == (0, 0, 0)
    assert policy.adapter() == masked.adapter() == before


@pytest.mark.parametrize(
    "loss",
    [
        Loss(),
        Loss(kind="dr_grpo"),
        Loss(kind="gspo"),
        Loss(kind="cispo"),
        Loss(kind="reinforce"),
        Loss(kind="reinforce", centre="leave_one_out", scale="none", correction="tis"),
        Loss(kind="dual_clip"),
        Loss(scale="batch_std", aggregation="seq_mean", correction="mis"),
        Loss(correction="icepop", correction_level="sequence"),
        Loss(kl_coef=0.01),
    ],
    ids=name_of,
)
def test_steps_raise_what_was_rewarded_and_lower_what_was_not(loss: Loss) -> None:
    policy = learner(lr=3e-3, temperature=1.0, loss=loss, max_tokens=16)
    batch_of = groups(policy)

    def shift() -> tuple[float, float]:
        moved: dict[float, list[float]] = {0.0: [], 1.0: []}
        for group in batch_of:
            for c in group.completions:
                now = plain_logprobs(policy, group.prompt_ids, c.ids).sum().item()
                moved[c.reward].append(now - sum(c.logprobs))
        return sum(moved[1.0]), sum(moved[0.0])

    for _ in range(3):
        policy.step(batch_of, version=3)
    rewarded, unrewarded = shift()
    assert rewarded > 1
    assert unrewarded < rewarded - 5
    # Siblings begin alike, and a weight of r lets what was raised pull them up: only the others push them down, too.
    if loss.kind != "cispo" and loss.correction == "none":
        assert unrewarded < -1


def test_the_reference_is_the_base_model() -> None:
    policy = learner(loss=Loss(kl_coef=0.5), lr=0.0)
    base = learner(loss=Loss(kl_coef=0.5), lr=0.0)
    stir(policy)
    batch_of = groups(policy)
    ids = [(group.prompt_ids, c.ids) for group in batch_of for c in group.completions]
    d = torch.cat([plain_logprobs(base, *one) - plain_logprobs(policy, *one) for one in ids])
    metrics = policy.step(batch_of, version=3)
    assert metrics["kl_ref"] == pytest.approx((d.exp() - d - 1).mean().item(), rel=1e-4)
    assert metrics["kl"] == pytest.approx(0, abs=1e-8), "of the policy from the sampling one: it is the same"
    # The adapter is back on, and trained, after each micro-batch.
    assert policy.step(batch_of, version=3) == pytest.approx(metrics, rel=1e-5, abs=1e-6)
    # A fresh adapter adds nothing, so there the policy is its reference.
    assert base.step(groups(base), version=3)["kl_ref"] == pytest.approx(0, abs=1e-8)


def test_groups_without_variance_are_trained_if_the_loss_has_a_reference() -> None:
    without, held = learner(), learner(loss=Loss(kl_coef=0.1))
    for policy in (without, held):
        stir(policy)
    same = [change(group, reward=1.0) for group in groups(held)]
    assert without.step(same, version=3)["tokens_trained"] == 0
    metrics = held.step(same, version=3)
    assert metrics["tokens_trained"] == sum(len(c.ids) for group in same for c in group.completions)
    assert metrics["zero_variance_share"] == 1
    assert metrics["grad_norm"] > 0
    assert metrics["loss"] == pytest.approx(0.1 * metrics["kl_ref"])


def test_rewards_that_are_not_centred_train_groups_without_variance() -> None:
    policy = learner(loss=Loss(kind="reinforce", centre="none"))
    metrics = policy.step([change(group, reward=1.0) for group in groups(policy)], version=3)
    assert metrics["tokens_trained"] > 0 and metrics["grad_norm"] > 0
    assert metrics["zero_variance_share"] == 0


def test_a_correction_shows_in_the_metrics() -> None:
    policy = learner(loss=Loss(correction="tis", correction_cap=1.5))
    batch_of = groups(policy)
    older = [
        replace(g, completions=[replace(c, logprobs=[lp - 0.1 for lp in c.logprobs]) for c in g.completions])
        for g in batch_of
    ]
    metrics = policy.step(older, version=3)
    assert metrics["correction/weight_mean"] == pytest.approx(2.718281828**0.1, rel=1e-5)
    assert metrics["correction/cut_share"] == 0
    assert policy.step(batch_of, version=3).keys() == metrics.keys()
    assert "kl_ref" not in metrics
    assert not any(key.startswith("correction") for key in learner().step(batch_of, version=3))


def test_dr_divides_by_every_completion_and_the_most_tokens_one_may_have() -> None:
    policy, plain = learner(loss=Loss(kind="dr_grpo"), max_tokens=20, lr=0.0), learner(lr=0.0)
    batch_of = groups(policy)
    batch_of[0] = change(batch_of[0], reward=1.0)  # counts, though it isn't trained
    policy.step(batch_of, version=3)
    metrics = plain.step(batch_of, version=3)
    # On-policy the same gradient but for σ = ½ and the divisor; both below the norm they are clipped to, or scaled.
    ours, theirs = gradient(policy), gradient(plain)
    assert torch.allclose(ours / ours.norm(), theirs / theirs.norm(), atol=1e-5)
    norm = metrics["grad_norm"] * 0.5 * metrics["tokens_trained"] / (16 * 20)
    assert policy.step(batch_of, version=3)["grad_norm"] == pytest.approx(norm, rel=1e-4)


def test_dr_needs_to_know_the_most_tokens_a_completion_may_have() -> None:
    for loss in (Loss(kind="dr_grpo"), Loss(aggregation="dr")):
        with pytest.raises(Unrecoverable, match="give the trainer max_tokens") as caught:
            learner(loss=loss)
        assert caught.value.exit_code == 2


def test_a_restored_run_goes_on_bit_for_bit() -> None:
    first = learner()
    data = [groups(first, seed=seed) for seed in range(4)]
    for batch_of in data[:2]:
        first.step(batch_of, version=3)
    state = first.state()
    assert set(state) == {"learner.json", "learner.safetensors"}
    second = learner(seed=7)  # other initial weights: all must come from the state
    second.restore(state)
    assert second.adapter() == first.adapter()
    for batch_of in data[2:]:
        assert second.step(batch_of, version=3) == first.step(batch_of, version=3)
    assert second.state() == first.state()
    assert first.state() != state


def test_a_state_from_before_the_first_step_restores() -> None:
    first, second = learner(), learner(seed=7)
    second.step(groups(second), version=3)
    second.restore(first.state())
    assert second.state() == first.state()


def test_the_state_of_another_adapter_is_refused() -> None:
    with pytest.raises(Unrecoverable, match="'rank': 2"):
        learner().restore(learner(lora=Lora(rank=2)).state())


def test_steps_that_are_not_finite_are_skipped_and_three_in_a_row_end_the_run() -> None:
    policy = learner()
    good = groups(policy)
    bad = [poisoned(good[0]), *good[1:]]
    before = policy.adapter()
    for _ in range(2):
        assert policy.step(bad, version=3)["skipped"] == 1
    assert policy.adapter() == before
    assert policy.step(good, version=3)["skipped"] == 0
    assert policy.adapter() != before
    for _ in range(2):
        policy.step(bad, version=3)
    with pytest.raises(Unrecoverable, match="3 steps in a row"):
        policy.step(bad, version=3)


def test_a_reward_that_is_not_finite_names_the_prompt_and_the_worker() -> None:
    policy = learner()
    bad = [change(group, reward=float("nan")) for group in groups(policy, count=1)]
    with pytest.raises(
        Unrecoverable, match="prompt 0, sampled by rollout-0: reward 0 of the group is nan"
    ) as caught:
        policy.step(bad, version=3)
    assert caught.value.exit_code == 2


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"kind": "granite", "logits_scaling": 8.0}, "more than its head"),
        (
            {"kind": "gemma2", "head_dim": 8, "final_logit_softcapping": 5.0, "attn_logit_softcapping": None},
            "soft cap",
        ),
        ({"kind": "bloom", "n_head": 4}, "does not take a 4-D mask"),
    ],
)
def test_models_it_would_train_wrongly_are_refused(tmp_path: Path, changes: dict, sentence: str) -> None:
    model = random_model(tmp_path, **changes)
    with pytest.raises(Unrecoverable, match=sentence) as caught:
        learner(model)
    assert caught.value.exit_code == 2


def test_completions_longer_than_an_attention_window_are_refused(tmp_path: Path) -> None:
    policy = learner(random_model(tmp_path, kind="mistral", sliding_window=8))
    with pytest.raises(Unrecoverable, match="see only 8"):
        policy.step(groups(policy), version=3)


def test_temperature_must_be_above_zero() -> None:
    with pytest.raises(Unrecoverable, match="temperature 0"):
        learner(temperature=0.0)
