"""TransformersEngine against a plain transformers and peft forward of the very same tokens."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from rolecall.actors.engines import Request, Sampling, generate
from rolecall.actors.engines.transformers import TransformersEngine
from rolecall.actors.model import AdapterError, load_model, load_tokenizer
from rolecall.runtime.errors import Unrecoverable

from .engines import MODELS, adapter, assert_same, engine_under, fresh, group, policy, reference


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_logprobs_are_those_of_a_plain_forward_before_and_after_swaps(
    name: str, temperature: float, tmp_path: Path
) -> None:
    one, two = adapter(name, tmp_path / "one", 1), adapter(name, tmp_path / "two", 2)
    engine = engine_under(name, one)
    requests = group(engine, prompts=2, size=2)
    sampled = []
    for version, folder in [(1, one), (2, two), (3, one)]:
        engine.load(version, folder.name, folder)
        assert (engine.version, engine.versions) == (version, [version])
        samples = generate(engine, requests, Sampling(temperature=temperature, max_tokens=12))
        for request, sample in zip(requests, samples, strict=True):
            expected = reference(name, folder, request, sample, temperature)
            assert sample.logprobs == pytest.approx(expected, abs=1e-4)
            assert sample.versions == [version] * len(sample.ids)
        sampled.append([(sample.ids, sample.logprobs) for sample in samples])
    assert sampled[0] == sampled[2]  # to the last bit: swaps leave nothing behind
    assert sampled[0] != sampled[1]


@pytest.mark.parametrize("name", MODELS)
def test_scores_are_the_logprobs_that_were_sampled(name: str, tmp_path: Path) -> None:
    engine = engine_under(name, adapter(name, tmp_path / "one", 1))
    requests = group(engine, prompts=2, size=1)
    samples = generate(engine, requests, Sampling(max_tokens=12))
    for request, sample in zip(requests, samples, strict=True):
        assert engine.score(request.prompt_ids, sample.ids) == pytest.approx(sample.logprobs, abs=1e-4)
    assert engine.versions == [1]


@pytest.mark.parametrize("name", MODELS)
def test_batch_of_different_lengths_equals_one_by_one_in_any_order(name: str, tmp_path: Path) -> None:
    engine = engine_under(name, adapter(name, tmp_path / "one", 1))
    requests = group(engine, prompts=4, size=3)
    assert len({len(request.prompt_ids) for request in requests}) > 1
    sampling = Sampling(max_tokens=24)
    together = generate(engine, requests, sampling)
    alone = [generate(engine, [request], sampling)[0] for request in requests]
    assert_same(together, alone)
    assert_same(together[::-1], generate(engine, requests[::-1], sampling))


def test_fewer_tokens_are_the_start_of_more(tmp_path: Path) -> None:
    engine = engine_under("tiny", adapter("tiny", tmp_path / "one", 1))
    requests = group(engine, prompts=2, size=2)
    few = generate(engine, requests, Sampling(max_tokens=3))
    many = generate(engine, requests, Sampling(max_tokens=40))
    assert [sample.ids for sample in few] == [sample.ids[:3] for sample in many]


@pytest.mark.parametrize("stop", [("=",), ("+4",), ("\n#", "5-"), ("####",), (" pens", "no")])
def test_a_completion_ends_with_the_token_that_completes_a_text(
    stop: tuple[str, ...], tmp_path: Path
) -> None:
    """And is the same until then; some of these texts are parts of a token, some are several tokens."""
    engine = engine_under("tiny", adapter("tiny", tmp_path / "one", 1))
    requests = group(engine, prompts=6, size=6)
    whole = generate(engine, requests, Sampling(max_tokens=40))
    tokenizer = load_tokenizer("tiny")
    stopped = 0
    for free, sample in zip(
        whole, generate(engine, requests, Sampling(max_tokens=40, stop=stop)), strict=True
    ):
        texts = [tokenizer.decode(free.ids[: n + 1], skip_special_tokens=True) for n in range(len(free.ids))]
        ends = [n + 1 for n, text in enumerate(texts) if any(one in text for one in stop)]
        length = ends[0] if ends else len(free.ids)
        assert (sample.ids, sample.text) == (free.ids[:length], texts[length - 1])
        assert sample.logprobs == pytest.approx(free.logprobs[:length], abs=5e-5)
        assert len(sample.versions) == length
        assert sample.finish_reason == ("stop" if ends else free.finish_reason)
        stopped += bool(ends)
    assert stopped > 0 or stop == (" pens", "no")


def test_an_empty_text_to_stop_at_is_refused(tmp_path: Path) -> None:
    engine = engine_under("tiny", adapter("tiny", tmp_path / "one", 1))
    with pytest.raises(Unrecoverable, match="cannot stop at an empty text"):
        generate(engine, group(engine, prompts=1, size=1), Sampling(max_tokens=4, stop=("=", "")))


def test_an_answer_is_read_as_it_is(tmp_path: Path) -> None:
    engine = engine_under("tiny", adapter("tiny", tmp_path / "one", 1))
    assert engine.encode_answer("19", [5, 6]) == engine.encode("19")
    assert engine.encode_answer("19", [5, 1]) == engine.encode(
        "19"
    )  # no chat template: no message of its own
    assert engine.encode_answer("", [5, 6]) == []


@pytest.mark.parametrize("name", MODELS)
def test_greedy_is_generate(name: str, tmp_path: Path) -> None:
    folder = adapter(name, tmp_path / "one", 1)
    engine = engine_under(name, folder)
    model = policy(name, folder)
    for request in group(engine, prompts=4, size=1):
        prompt = torch.tensor([request.prompt_ids])
        with torch.inference_mode():
            expected = model.generate(
                input_ids=prompt,
                attention_mask=torch.ones_like(prompt),
                do_sample=False,
                max_new_tokens=24,
                eos_token_id=1,
                pad_token_id=0,
            )[0, prompt.shape[1] :].tolist()
        sample = generate(engine, [request], Sampling(temperature=0, max_tokens=24))[0]
        assert sample.ids == expected
        assert sample.logprobs == pytest.approx(reference(name, folder, request, sample, 1.0), abs=1e-4)


def test_tokens_come_as_often_as_their_probability_says(tmp_path: Path) -> None:
    engine = engine_under("tiny", adapter("tiny", tmp_path / "one", 1, std=0.0))
    prompt = engine.encode("Ann has 12 pens,")
    count = 4000
    samples = generate(engine, [Request(prompt, seed) for seed in range(count)], Sampling(max_tokens=1))
    with torch.inference_mode():
        logits = fresh("tiny")(input_ids=torch.tensor([prompt])).logits[0, -1]
    seen = Counter(sample.ids[0] for sample in samples)
    assert len(seen) > 20
    for token, share in enumerate(torch.softmax(logits, dim=-1).tolist()):
        deviation = (count * share * (1 - share)) ** 0.5
        assert abs(seen[token] - count * share) < 4.5 * deviation + 1


def test_every_end_token_stops_and_the_limit_cuts_off(tmp_path: Path) -> None:
    folder = adapter("tiny", tmp_path / "one", 1, std=0.0)
    tokenizer = load_tokenizer("tiny")
    newline = tokenizer("\n")["input_ids"][0]
    requests = group(engine_under("tiny", folder), prompts=8, size=4)
    plain = generate(engine_under("tiny", folder), requests, Sampling(max_tokens=20))
    assert {sample.finish_reason for sample in plain} == {"stop", "length"}
    for sample in plain:
        stopped = sample.finish_reason == "stop"
        assert (sample.ids[-1] == 1) == stopped
        assert 1 not in sample.ids[:-1]
        assert stopped or len(sample.ids) == 20
        assert len(sample.logprobs) == len(sample.ids)
        assert sample.text == tokenizer.decode(sample.ids[: -1 if stopped else None])

    model = fresh("tiny")
    model.generation_config.eos_token_id = [1, newline]
    engine = TransformersEngine(model, tokenizer)
    engine.load(1, "", folder)
    ends = Counter(sample.ids[-1] for sample in generate(engine, requests, Sampling(max_tokens=64)))
    assert set(ends) == {1, newline}


def test_an_adapter_with_fewer_layers_leaves_the_others_as_the_base_has_them(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    full, part = adapter("tiny", tmp_path / "full", 1), adapter("tiny", tmp_path / "part", 2)
    file = part / "adapter_model.safetensors"
    save_file({name: tensor for name, tensor in load_file(file).items() if "q_proj" in name}, file)
    engine, swapped = engine_under("tiny", part), engine_under("tiny", full)
    engine.load(2, "", part)
    swapped.load(2, "", part)
    requests = group(engine, prompts=2, size=2)
    assert generate(swapped, requests, Sampling(max_tokens=8)) == generate(
        engine, requests, Sampling(max_tokens=8)
    )


def test_16_bits_keep_the_adapter_beside_the_weights(tmp_path: Path) -> None:
    """B·A far below bfloat16's rounding of W still acts, and swaps (another rank, too) leave nothing behind."""
    small, other = (
        adapter("tiny", tmp_path / "small", 1, std=1e-3),
        adapter("tiny", tmp_path / "other", 2, rank=2),
    )
    model = load_model("tiny", device="cpu", dtype="bfloat16")
    plain: Any = model.get_submodule("model.layers.0.self_attn.q_proj")
    weight = plain.weight.clone()
    engine = TransformersEngine(model, load_tokenizer("tiny"))
    requests = group(engine, prompts=2, size=2)
    sampled = []
    for version, folder in [(1, small), (2, other), (3, small)]:
        engine.load(version, "", folder)
        sampled.append(generate(engine, requests, Sampling(max_tokens=12)))
    first, second, third = [[(sample.ids, sample.logprobs) for sample in samples] for samples in sampled]
    assert first == third != second
    layer: Any = model.get_submodule("model.layers.0.self_attn.q_proj")
    assert torch.equal(layer.base_layer.weight, weight)
    states = torch.ones(1, weight.shape[1], dtype=torch.bfloat16)
    assert not torch.equal(layer.lora_B["default"].weight, torch.zeros_like(layer.lora_B["default"].weight))
    wide = layer.scaling["default"] * layer.lora_B["default"](layer.lora_A["default"](states.float()))
    assert 0 < wide.abs().max() < 0.05
    for request, sample in zip(requests, sampled[0], strict=True):
        assert sample.logprobs == pytest.approx(reference("tiny", small, request, sample, 1.0), abs=0.25)


def test_the_base_is_never_sampled_in_silence(tmp_path: Path) -> None:
    engine = TransformersEngine(fresh("tiny"), load_tokenizer("tiny"))
    assert (engine.version, engine.versions) == (-1, [])
    with pytest.raises(AdapterError, match="no adapter is loaded"):
        engine.score([5, 6], [7])
    with pytest.raises(AdapterError, match="no adapter is loaded"):
        generate(engine, [Request([5, 6], 0)], Sampling(max_tokens=1))


def test_a_refused_adapter_leaves_the_old_one_in_place(tmp_path: Path) -> None:
    engine = engine_under("tiny", adapter("tiny", tmp_path / "one", 1))
    requests = group(engine, prompts=1, size=2)
    before = generate(engine, requests, Sampling(max_tokens=8))
    with pytest.raises(AdapterError, match="shapes"):
        engine.load(2, "two", adapter("qwen2", tmp_path / "two", 1))
    assert (engine.version, engine.versions) == (1, [1])
    assert generate(engine, requests, Sampling(max_tokens=8)) == before


def test_logprobs_that_are_not_finite_are_an_error(tmp_path: Path) -> None:
    engine = engine_under("tiny", adapter("tiny", tmp_path / "one", 1, std=1e37))
    with pytest.raises(AdapterError, match="version 1 gives log-probs that are not finite"):
        generate(engine, group(engine, prompts=1, size=2), Sampling(max_tokens=8))


@pytest.mark.parametrize(
    ("ids", "sampling", "message"),
    [
        ([], Sampling(max_tokens=4), "no tokens"),
        ([5] * 500, Sampling(max_tokens=64),
         "500 tokens and 64 new ones are more than the 512 positions of model 'tiny': ask for fewer tokens"),
        ([5], Sampling(max_tokens=0), "max_tokens 0"),
        ([5], Sampling(max_tokens=4, temperature=-1.0), "temperature -1.0"),
        ([5], Sampling(max_tokens=4, temperature=float("nan")), "temperature nan"),
    ],
)  # fmt: skip
def test_what_can_never_be_sampled_is_unrecoverable(
    ids: list[int], sampling: Sampling, message: str, tmp_path: Path
) -> None:
    engine = engine_under("tiny", adapter("tiny", tmp_path / "one", 1))
    with pytest.raises(Unrecoverable, match=message) as caught:
        generate(engine, [Request([5, 6], 0), Request(ids, 1)], sampling)
    assert caught.value.exit_code == 2


def test_no_requests_no_samples(tmp_path: Path) -> None:
    assert (
        generate(engine_under("tiny", adapter("tiny", tmp_path / "one", 1)), [], Sampling(max_tokens=4)) == []
    )


@pytest.mark.parametrize("options", [{"max_loras": 0}, {"max_num_seqs": 0}])
def test_an_engine_with_no_room_is_unrecoverable(options: dict[str, Any]) -> None:
    with pytest.raises(Unrecoverable, match="there must be room for one"):
        TransformersEngine(fresh("tiny"), load_tokenizer("tiny"), **options)
