"""The canary with a real network: what a trainer publishes, and workers that sample something else."""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
import pytest
import torch
from rolecall.actors.canary import CANARY, TOLERANCE, Canary, Quarantined, attest, canary_tokens
from rolecall.actors.engines import Request, Sampling, generate
from rolecall.actors.engines.transformers import TransformersEngine
from rolecall.actors.learner import Learner
from rolecall.actors.lora import Lora
from rolecall.actors.losses import Loss
from rolecall.actors.model import load_model, load_tokenizer
from rolecall.actors.tiny.problems import held_out
from rolecall.actors.types import Completion, Group, Prompt
from rolecall.runtime.errors import Unrecoverable
from rolecall.runtime.store import PolicyStore, Store, StoreError
from safetensors.torch import load_file, save_file
from transformers import GPT2Config, GPT2LMHeadModel, Qwen2Config, Qwen2ForCausalLM


def sampled(engine: TransformersEngine) -> Group:
    """Eight completions of one problem, the odd ones rewarded."""
    [problem] = held_out(1)
    prompt = Prompt(id=0, text=problem.text, answer="")
    ids = engine.encode(problem.text)
    samples = generate(engine, [Request(ids, seed) for seed in range(8)], Sampling(max_tokens=16))
    completions = [
        Completion(
            ids=sample.ids, logprobs=sample.logprobs, versions=sample.versions, reward=float(place % 2),
            finish_reason=sample.finish_reason, text=sample.text,
        )
        for place, sample in enumerate(samples)
    ]  # fmt: skip
    return Group(prompt=prompt, prompt_ids=ids, completions=completions, digests={}, worker="w")


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> PolicyStore:
    """Versions 0 to 2 of a run: one optimizer step apart, as any two versions are."""
    store = Store().open("local", tmp_path_factory.mktemp("run"))
    learner = Learner("tiny", lora=Lora(), lr=1e-3, loss=Loss(), temperature=1.0, seed=3)
    epoch, worker = store.take_epoch(), engine()
    for version in range(3):
        files = learner.adapter() | {CANARY: msgspec.json.encode(learner.canary())}
        store.publish(files, version=version, step=version, epoch=epoch)
        load(worker, store, version)
        learner.step([sampled(worker)], version=version)
    return store


def canary(store: PolicyStore, version: int) -> Canary:
    return msgspec.json.decode((store.fetch(version) / CANARY).read_bytes(), type=Canary)


def engine(dtype: str = "float32") -> TransformersEngine:
    return TransformersEngine(load_model("tiny", device="cpu", dtype=dtype), load_tokenizer("tiny"))


def load(engine: TransformersEngine, store: PolicyStore, version: int) -> Path:
    folder = store.fetch(version)
    engine.load(version, store.policy(version).digest, folder)
    return folder


def test_it_is_of_the_run_s_seed_and_the_same_in_every_version(store: PolicyStore):
    tokenizer = load_tokenizer("tiny")
    tokens = canary_tokens(tokenizer, 3)
    for version in range(3):
        told = canary(store, version)
        assert (told.prompt_ids, told.ids, told.dtype) == (*tokens, "float32")
        assert len(told.ids) == len(told.logprobs) == 8
        assert len(told.prompt_ids) > 32  # a whole block of any prefix cache
    assert canary_tokens(tokenizer, 4)[1] != tokens[1]


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], str]:
    """A model that has no more than so many positions, each with a learned embedding."""

    def made(positions: int) -> str:
        folder = tmp_path_factory.mktemp("small")
        tokenizer = load_tokenizer("tiny")
        tokenizer.save_pretrained(folder)
        config = GPT2Config(
            vocab_size=len(tokenizer), n_embd=32, n_layer=2, n_head=4, n_positions=positions,
            initializer_range=0.3, bos_token_id=None, eos_token_id=1,
        )  # fmt: skip
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(0)
            GPT2LMHeadModel(config).save_pretrained(folder)
        return str(folder)

    return made


@pytest.mark.parametrize("positions", [16, 64])
def test_a_model_with_few_positions_has_a_shorter_one(
    small: Callable[[int], str], tmp_path: Path, positions: int
):
    model = small(positions)
    learner = Learner(model, lora=Lora(), lr=1e-3, loss=Loss(), temperature=1.0, seed=3)
    told = learner.canary()
    whole = canary_tokens(load_tokenizer(model), 3)
    assert len(whole[0]) > 64
    assert (told.prompt_ids, told.ids) == (whole[0][: positions - 8], whole[1])
    for name, content in (learner.adapter() | {CANARY: msgspec.json.encode(told)}).items():
        (tmp_path / name).write_bytes(content)
    honest = TransformersEngine(load_model(model, device="cpu", dtype="float32"), load_tokenizer(model))
    honest.load(0, "", tmp_path)
    attest(honest, tmp_path, "w")


def test_the_room_a_text_needs_is_all_that_is_taken():
    tokenizer = load_tokenizer("tiny")
    whole = canary_tokens(tokenizer, 3)
    enough = len(whole[0]) + len(whole[1])
    assert canary_tokens(tokenizer, 3, enough) == canary_tokens(tokenizer, 3, 512) == whole
    assert len(canary_tokens(tokenizer, 3, enough - 1)[0]) == len(whole[0]) - 1


def test_too_few_positions_for_any_is_said(small: Callable[[int], str]):
    learner = Learner(small(15), lora=Lora(), lr=1e-3, loss=Loss(), temperature=1.0, seed=3)
    with pytest.raises(
        Unrecoverable, match=r"reads only 15 tokens at once, and the canary .* needs 16: choose"
    ):
        learner.canary()


def test_one_of_a_model_with_an_attention_window_is_within_it(tmp_path: Path):
    """The trainer's mask has no window: beyond it, an honest engine would say something else."""
    tokenizer = load_tokenizer("tiny")
    tokenizer.save_pretrained(tmp_path)
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        config = Qwen2Config(
            vocab_size=len(tokenizer), hidden_size=32, intermediate_size=64, num_hidden_layers=2,
            num_attention_heads=4, num_key_value_heads=2, initializer_range=0.3, use_sliding_window=True,
            sliding_window=24, max_window_layers=1,
        )  # fmt: skip
        Qwen2ForCausalLM(config).save_pretrained(tmp_path)
    model = str(tmp_path)
    learner = Learner(model, lora=Lora(), lr=1e-3, loss=Loss(), temperature=1.0, seed=3)
    told = learner.canary()
    assert len(told.prompt_ids + told.ids) == 24
    for name, content in (learner.adapter() | {CANARY: msgspec.json.encode(told)}).items():
        (tmp_path / name).write_bytes(content)
    honest = TransformersEngine(load_model(model, device="cpu", dtype="float32"), load_tokenizer(model))
    honest.load(0, "", tmp_path)
    attest(honest, tmp_path, "w")


def test_its_logprobs_are_a_plain_forward_s_at_temperature_1(store: PolicyStore):
    told = canary(store, 0)  # an adapter that changes nothing
    model = load_model("tiny", device="cpu", dtype="float32")
    with torch.inference_mode():
        logits = model(input_ids=torch.tensor([told.prompt_ids + told.ids])).logits[0]
    expected = torch.log_softmax(logits[len(told.prompt_ids) - 1 : -1], dim=-1)[range(8), told.ids]
    assert told.logprobs == pytest.approx(expected.tolist(), abs=1e-4)


def test_an_honest_engine_is_attested_through_swaps(store: PolicyStore):
    honest = engine()
    for version in (0, 1, 2, 1):
        attest(honest, load(honest, store, version), "w")


def test_a_single_step_is_seen(store: PolicyStore):
    """So is whatever differs more: the base under an adapter's name, or the version before the last."""
    told = [canary(store, version).logprobs for version in range(3)]
    for ones, others in ((told[0], told[1]), (told[1], told[2]), (told[0], told[2])):
        largest = max(abs(one - other) for one, other in zip(ones, others, strict=True))
        assert largest > 10 * TOLERANCE["float32"]


class ServesTheBase(TransformersEngine):
    """As a server that does not know an adapter's name, and answers all the same."""

    def load(self, version: int, digest: str, folder: Path) -> None:
        super().load(version, digest, base_adapter(folder))


def base_adapter(folder: Path) -> Path:
    """The same adapter, but that it changes nothing."""
    nothing = folder.parent / f"{folder.name}-nothing"
    shutil.copytree(folder, nothing, dirs_exist_ok=True)
    tensors = load_file(nothing / "adapter_model.safetensors")
    save_file({name: tensor * 0 for name, tensor in tensors.items()}, nothing / "adapter_model.safetensors")
    return nothing


def test_the_base_under_an_adapter_s_name_is_found_out(store: PolicyStore):
    lying = ServesTheBase(load_model("tiny", device="cpu", dtype="float32"), load_tokenizer("tiny"))
    folder = load(lying, store, 2)
    assert lying.version == 2  # which it names on every token
    with pytest.raises(Quarantined, match=r"worker far/w can't prove that it samples version 2: .* differ"):
        attest(lying, folder, "far/w")


def test_files_swapped_in_the_store_are_found_out_by_their_digest(store: PolicyStore, tmp_path: Path):
    there = tmp_path / "store" / "local"
    shutil.copytree(store.fetch(1).parent.parent / "store" / "local", there)
    names = [there / "policy" / f"v00000{version}" / "adapter_model.safetensors" for version in (1, 2)]
    contents = [name.read_bytes() for name in names]
    for name, content in zip(names, reversed(contents), strict=True):
        name.write_bytes(content)
    for version in (1, 2):
        with pytest.raises(StoreError, match=r"adapter_model\.safetensors .* is damaged"):
            Store().open("local", tmp_path).fetch(version)


def test_files_swapped_behind_the_digest_are_found_out_by_the_canary(store: PolicyStore):
    """Between the check and the engine there is a disk, a cache, and whatever the engine does with a folder."""
    swapped = engine()
    swapped.load(1, store.policy(1).digest, store.fetch(2))
    with pytest.raises(Quarantined, match="version 1"):
        attest(swapped, store.fetch(1), "w")


def test_16_bits_are_allowed_their_rounding(store: PolicyStore):
    coarse = engine("bfloat16")
    folder = load(coarse, store, 2)
    attest(coarse, folder, "w")
    told = canary(store, 2)
    found = coarse.score(told.prompt_ids, told.ids)
    assert 1e-3 < max(abs(one - other) for one, other in zip(found, told.logprobs, strict=True)) < 0.25


class Gives(TransformersEngine):
    """Gives the trainer's log-probs, the last one `off`."""

    off = 0.0

    def score(self, prompt_ids: Sequence[int], ids: Sequence[int]) -> list[float]:
        return [*self.told[:-1], self.told[-1] + self.off]

    told: Sequence[float] = ()


@pytest.mark.parametrize(("off", "passes"), [(9e-4, True), (-1.1e-3, False), (math.nan, False)])
def test_one_token_too_far_off_is_enough(store: PolicyStore, off: float, passes: bool):
    gives = Gives(load_model("tiny", device="cpu", dtype="float32"), load_tokenizer("tiny"))
    folder = load(gives, store, 2)
    gives.told, gives.off = canary(store, 2).logprobs, off
    if passes:
        attest(gives, folder, "w")
        return
    with pytest.raises(Quarantined, match=r"1 of the canary's 8 log-probs differ .* 0\.001 are allowed"):
        attest(gives, folder, "w")


def test_a_broken_file_is_no_proof(store: PolicyStore, tmp_path: Path):
    honest = engine()
    folder = shutil.copytree(load(honest, store, 1), tmp_path / "broken")
    (folder / CANARY).write_bytes(b'{"prompt_ids": [1]')
    with pytest.raises(Quarantined, match=r"canary\.json cannot be read"):
        attest(honest, folder, "w")
