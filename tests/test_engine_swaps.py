"""Requests that join and leave at any token, and versions side by side, in the transformers engine."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from rolecall.actors.engines import Request, Sample, Sampling, generate
from rolecall.actors.engines.transformers import TransformersEngine
from rolecall.actors.model import AdapterError, load_model, load_tokenizer

from .engines import JOINED, adapter, add, assert_same, engine_under, finish, group, reference


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
