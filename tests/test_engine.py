"""TransformersEngine against a plain transformers and peft forward of the very same tokens."""

from __future__ import annotations

import copy
import functools
import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from rolecall.actors.engines import Request, Sample, Sampling, generate
from rolecall.actors.engines.transformers import TransformersEngine
from rolecall.actors.model import AdapterError, adapter_files, add_lora, load_model, load_tokenizer
from rolecall.actors.tiny.problems import held_out
from rolecall.runtime.errors import Unrecoverable
from transformers import (
    AutoModelForCausalLM,
    BloomConfig,
    GemmaConfig,
    GPT2Config,
    GPTNeoXConfig,
    MistralConfig,
    PreTrainedModel,
    Qwen2Config,
)

SMALL: dict[str, Any] = {
    "vocab_size": 448,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": 1,
    "initializer_range": 0.3,
}
WIDE: dict[str, Any] = SMALL | {"intermediate_size": 64, "max_position_embeddings": 256}
GROUPED: dict[str, Any] = WIDE | {"num_key_value_heads": 2}
CONFIGS = {
    "qwen2": Qwen2Config(**GROUPED),
    "gpt_neox": GPTNeoXConfig(**WIDE),
    "gemma": GemmaConfig(**GROUPED, head_dim=8),
    "gpt2": GPT2Config(**SMALL),  # Conv1D layers, learned positions
    "mistral": MistralConfig(**GROUPED, sliding_window=8),  # the prompts are longer than the window
    "bloom": BloomConfig(**SMALL),  # takes no position_ids
    # One layer has a window, and the prompts are longer.
    "windowed": Qwen2Config(**GROUPED, use_sliding_window=True, sliding_window=8, max_window_layers=1),
}

# Importing a family of models takes seconds: the fast tests have two.
MODELS = [
    "tiny",
    "qwen2",
    *(pytest.param(name, marks=pytest.mark.slow) for name in CONFIGS if name not in ("qwen2", "windowed")),
]
# Those whose caches can be merged, and one whose can't.
JOINED = [*MODELS, "windowed"]


def fresh(name: str) -> PreTrainedModel:
    """The same weights every time."""
    if name == "tiny":
        return load_model("tiny", device="cpu", dtype="float32")
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        return AutoModelForCausalLM.from_config(copy.deepcopy(CONFIGS[name])).eval().requires_grad_(False)


def adapter(name: str, folder: Path, seed: int, *, rank: int = 4, std: float = 0.1) -> Path:
    """Write a LoRA that changes the model visibly."""
    lora = add_lora(fresh(name), rank=rank, alpha=2 * rank, seed=seed)
    generator = torch.Generator().manual_seed(seed)
    for parameter_name, parameter in lora.named_parameters():
        if "lora_B" in parameter_name:
            parameter.data.normal_(std=std, generator=generator)
    folder.mkdir()
    for file, content in adapter_files(lora).items():
        (folder / file).write_bytes(content)
    return folder


def engine_under(name: str, folder: Path, **options: Any) -> TransformersEngine:
    engine = TransformersEngine(fresh(name), load_tokenizer("tiny"), **options)
    engine.load(1, "one", folder)
    return engine


def finish(engine: TransformersEngine) -> dict[int, Sample]:
    """All that run, by their id."""
    done = {}
    while engine.running:
        done.update((sampled.id, sampled.sample) for sampled in engine.step())
    return done


def add(
    engine: TransformersEngine, requests: list[Request], sampling: Sampling
) -> dict[int, tuple[Request, Sampling]]:
    ids = engine.add(requests, sampling)
    return {id: (request, sampling) for id, request in zip(ids, requests, strict=True)}


def group(engine: TransformersEngine, prompts: int, size: int, seed: int = 100) -> list[Request]:
    ids = [engine.encode(problem.text) for problem in held_out(prompts) for _ in range(size)]
    return [Request(prompt, seed + place) for place, prompt in enumerate(ids)]


@functools.lru_cache(maxsize=3)
def policy(name: str, folder: Path) -> Any:
    return PeftModel.from_pretrained(fresh(name), str(folder)).eval()


def reference(name: str, folder: Path, request: Request, sample: Sample, temperature: float) -> list[float]:
    """Log-probs of the sampled tokens: peft's own forward of prompt and completion, alone and without a cache."""
    with torch.inference_mode():
        logits = policy(name, folder)(
            input_ids=torch.tensor([request.prompt_ids + sample.ids]), use_cache=False
        ).logits[0]
    expected = torch.log_softmax(logits[len(request.prompt_ids) - 1 : -1].float() / temperature, dim=-1)
    return expected[range(len(sample.ids)), sample.ids].tolist()


def assert_same(ones: list[Sample], others: list[Sample]) -> None:
    assert [(s.ids, s.finish_reason, s.text) for s in ones] == [
        (s.ids, s.finish_reason, s.text) for s in others
    ]
    for one, other in zip(ones, others, strict=True):
        assert one.logprobs == pytest.approx(other.logprobs, abs=5e-5)


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
        ([5] * 500, Sampling(max_tokens=64), "more than the 512 positions"),
        ([5], Sampling(max_tokens=0), "max_tokens 0"),
        ([5], Sampling(max_tokens=4, temperature=-1.0), "temperature -1.0"),
        ([5], Sampling(max_tokens=4, temperature=float("nan")), "temperature nan"),
    ],
)
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


@pytest.mark.parametrize("name", JOINED)
def test_versions_in_flight_together_each_sample_as_a_plain_forward_says(name: str, tmp_path: Path) -> None:
    one, two = adapter(name, tmp_path / "one", 1), adapter(name, tmp_path / "two", 2)
    engine = engine_under(name, one)
    requests = group(engine, prompts=4, size=2)
    asked: dict[int, tuple[Request, Sampling]] = {}
    done: dict[int, Sample] = {}
    under = {}
    for version, folder, parts in [
        (1, one, [requests[:2], requests[2:4]]),
        (2, two, [requests[4:6], requests[6:]]),
    ]:
        engine.load(version, folder.name, folder)
        for part, temperature in zip(parts, [1.0, 0.7], strict=True):
            added = add(engine, part, Sampling(temperature=temperature, max_tokens=12))
            asked |= added
            under |= dict.fromkeys(added, (version, folder))
            done.update((sampled.id, sampled.sample) for sampled in engine.step())
    assert engine.versions == [1, 2]
    done |= finish(engine)
    assert engine.versions == [2]
    assert done.keys() == asked.keys()
    for id, (request, sampling) in asked.items():
        version, folder = under[id]
        sample = done[id]
        assert sample.versions == [version] * len(sample.ids)
        expected = reference(name, folder, request, sample, sampling.temperature)
        assert sample.logprobs == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize("name", JOINED)
def test_requests_that_join_in_the_middle_sample_as_alone(name: str, tmp_path: Path) -> None:
    folder = adapter(name, tmp_path / "one", 1)
    engine = engine_under(name, folder, max_num_seqs=5)  # they queue for a while
    requests = group(engine, prompts=4, size=3)
    random.Random(5).shuffle(requests)
    sampling = [Sampling(temperature=t, max_tokens=n) for t, n in [(1.0, 16), (0.7, 5), (0.0, 9), (1.0, 1)]]
    asked: dict[int, tuple[Request, Sampling]] = {}
    done: dict[int, Sample] = {}
    for start in range(0, len(requests), 2):
        asked |= add(engine, requests[start : start + 2], sampling[start // 2 % 4])
        for _ in range(2):
            done.update((sampled.id, sampled.sample) for sampled in engine.step())
        assert engine.running == len(asked) - len(done)
    done |= finish(engine)
    assert list(asked) == sorted(done) == list(range(len(requests)))
    alone = engine_under(name, folder)
    assert_same(
        [done[id] for id in asked], [generate(alone, [request], how)[0] for request, how in asked.values()]
    )


def test_prompts_that_one_prefill_has_no_room_for_are_read_in_several(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = adapter("tiny", tmp_path / "one", 1)
    requests = group(engine_under("tiny", folder), prompts=4, size=2)
    whole = generate(engine_under("tiny", folder), requests, Sampling(max_tokens=8))
    monkeypatch.setattr("rolecall.actors.engines.cohort._PREFILL_TOKENS", 1)
    assert_same(whole, generate(engine_under("tiny", folder), requests, Sampling(max_tokens=8)))


@pytest.mark.parametrize("name", JOINED)
def test_an_inflight_swap_goes_on_with_what_is_there(name: str, tmp_path: Path) -> None:
    folders = {number: adapter(name, tmp_path / f"v{number}", number) for number in (1, 2, 3)}
    engine = engine_under(name, folders[1], inflight_swap=True, max_num_seqs=5, max_loras=1)
    asked = add(engine, group(engine, prompts=3, size=2), Sampling(max_tokens=12))
    done: dict[int, Sample] = {}
    for version in (2, 3):
        for _ in range(3):
            done.update((sampled.id, sampled.sample) for sampled in engine.step())
        engine.load(version, str(version), folders[version])
        assert engine.versions == [version]
    done |= finish(engine)
    assert done.keys() == asked.keys()
    assert {1, 2, 3} <= {version for sample in done.values() for version in sample.versions}
    for id, (request, _) in asked.items():
        sample = done[id]
        assert sample.versions == sorted(sample.versions)
        expected = {
            number: reference(name, folders[number], request, sample, 1.0) for number in set(sample.versions)
        }
        stamped = [expected[version][place] for place, version in enumerate(sample.versions)]
        assert sample.logprobs == pytest.approx(stamped, abs=1e-4)


def test_a_swap_to_the_same_weights_in_flight_changes_no_token(tmp_path: Path) -> None:
    folder = adapter("tiny", tmp_path / "one", 1)
    still, swapped = engine_under("tiny", folder), engine_under("tiny", folder, inflight_swap=True)
    requests = group(still, prompts=3, size=2)
    ids = swapped.add(requests, Sampling(max_tokens=12))
    done = {sampled.id: sampled.sample for sampled in [*swapped.step(), *swapped.step()]}
    swapped.load(2, "one", folder)
    done |= finish(swapped)
    assert_same([done[id] for id in ids], generate(still, requests, Sampling(max_tokens=12)))


def test_a_version_waits_until_there_is_room_for_it(tmp_path: Path) -> None:
    folders = {number: adapter("tiny", tmp_path / f"v{number}", number) for number in (1, 2, 3)}
    engine = engine_under("tiny", folders[1])
    [request, other] = group(engine, prompts=2, size=1)
    [one] = engine.add([request], Sampling(max_tokens=4))
    assert engine.step() == []
    engine.load(2, "two", folders[2])
    [two] = engine.add([other], Sampling(max_tokens=64))
    assert engine.versions == [1, 2]
    engine.load(3, "three", folders[3])
    assert (engine.version, engine.versions, engine.running) == (3, [2, 3], 2)
    early = engine.step()
    assert [sampled.id for sampled in early] == [one]
    expected = reference("tiny", folders[1], request, early[0].sample, 1.0)
    assert early[0].sample.logprobs == pytest.approx(expected, abs=1e-4)
    assert finish(engine)[two].versions[0] == 2
    assert (engine.versions, engine.running) == ([3], 0)


@pytest.mark.parametrize("name", ["tiny", "windowed"])
def test_others_are_not_disturbed_by_scores(name: str, tmp_path: Path) -> None:
    one, two = adapter(name, tmp_path / "one", 1), adapter(name, tmp_path / "two", 2)
    engine, alone = engine_under(name, one), engine_under(name, one)
    requests = group(engine, prompts=2, size=2)
    expected = generate(alone, requests, Sampling(max_tokens=6))
    ids = engine.add(requests, Sampling(max_tokens=6))
    engine.load(2, "two", two)
    alone.load(2, "two", two)
    given = list(range(10, 18))
    assert engine.score(requests[0].prompt_ids, given) == pytest.approx(
        alone.score(requests[0].prompt_ids, given), abs=1e-5
    )
    assert engine.running == len(ids)
    done = finish(engine)
    assert_same([done[id] for id in ids], expected)
    assert engine.score(requests[0].prompt_ids, []) == []


def test_16_bit_versions_live_side_by_side(tmp_path: Path) -> None:
    """They have other ranks and other layers."""
    from safetensors.torch import load_file, save_file

    full, part = adapter("tiny", tmp_path / "full", 1), adapter("tiny", tmp_path / "part", 2, rank=2)
    file = part / "adapter_model.safetensors"
    save_file({name: tensor for name, tensor in load_file(file).items() if "q_proj" in name}, file)

    def engine(folder: Path) -> TransformersEngine:
        model = load_model("tiny", device="cpu", dtype="bfloat16")
        engine = TransformersEngine(model, load_tokenizer("tiny"))
        engine.load(1, folder.name, folder)
        return engine

    for first, second in [(full, part), (part, full)]:
        both = engine(first)
        requests = group(both, prompts=2, size=2)
        ids = both.add(requests, Sampling(max_tokens=12))
        done = {sampled.id: sampled.sample for sampled in both.step()}
        both.load(2, second.name, second)
        ids += both.add(requests, Sampling(max_tokens=12))
        done |= finish(both)
        alone = [
            sample
            for folder in (first, second)
            for sample in generate(engine(folder), requests, Sampling(max_tokens=12))
        ]
        # Rows of one version are a batch of their own: the same to the last bit.
        assert [(done[id].ids, done[id].logprobs) for id in ids] == [(s.ids, s.logprobs) for s in alone]


def test_a_version_never_changes(tmp_path: Path) -> None:
    folder = adapter("tiny", tmp_path / "one", 1)
    engine = engine_under("tiny", folder)
    engine.load(1, "one", folder)
    engine.load(2, "two", folder)
    with pytest.raises(AdapterError, match="version 1 had the digest one before, and has other now"):
        engine.load(1, "other", folder)
    engine.load(1, "one", folder)
    assert (engine.version, engine.versions) == (1, [1])


def test_a_broken_version_takes_only_its_own_requests_along(tmp_path: Path) -> None:
    folder = adapter("tiny", tmp_path / "one", 1)
    engine = engine_under("tiny", folder)
    requests = group(engine, prompts=2, size=2)
    expected = generate(engine_under("tiny", folder), requests, Sampling(max_tokens=8))
    ids = engine.add(requests, Sampling(max_tokens=8))
    engine.load(2, "two", adapter("tiny", tmp_path / "two", 1, std=1e37))
    engine.add(requests, Sampling(max_tokens=8))
    with pytest.raises(AdapterError, match="version 2 gives log-probs that are not finite"):
        engine.step()
    assert engine.running == len(ids)
    done = finish(engine)
    assert_same([done[id] for id in ids], expected)


@pytest.mark.parametrize("options", [{"max_loras": 0}, {"max_num_seqs": 0}])
def test_an_engine_with_no_room_is_unrecoverable(options: dict[str, Any]) -> None:
    with pytest.raises(Unrecoverable, match="there must be room for one"):
        TransformersEngine(fresh("tiny"), load_tokenizer("tiny"), **options)
