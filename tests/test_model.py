"""Loading, prompts as ids, and LoRA adapters in and out."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch
from peft import PeftModel
from rolecall.actors.lora import Lora
from rolecall.actors.model import (
    AdapterError,
    adapter_files,
    add_lora,
    encode_answer,
    encode_prompt,
    eos_ids,
    load_model,
    load_tokenizer,
    model_path,
    read_adapter,
)
from rolecall.actors.tiny import BASE
from rolecall.runtime.errors import Unrecoverable
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedModel, PreTrainedTokenizerFast


def tiny() -> PreTrainedModel:
    return load_model("tiny", device="cpu", dtype="float32")


def trained_lora(seed: int, rank: int = 8) -> PeftModel:
    """A LoRA whose B is not 0 any more."""
    model = add_lora(tiny(), Lora(rank=rank, alpha=2 * rank), seed=seed)
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            parameter.data.normal_(std=0.05, generator=generator)
    return model


def write(model: PeftModel, folder: Path) -> Path:
    for name, content in adapter_files(model).items():
        (folder / name).write_bytes(content)
    return folder


def logits(model: torch.nn.Module) -> torch.Tensor:
    with torch.inference_mode():
        return model(input_ids=torch.arange(2, 40)[None]).logits


# Loading.


def test_tiny_is_the_shipped_folder_and_other_names_stay() -> None:
    assert model_path("tiny") == str(BASE)
    assert model_path("org/name") == "org/name"


def test_model_is_frozen_and_in_evaluation_mode() -> None:
    model = tiny()
    assert not model.training
    assert not any(parameter.requires_grad for parameter in model.parameters())
    assert model.name_or_path == "tiny"
    assert load_model("tiny", device="cpu", dtype=torch.bfloat16).dtype == torch.bfloat16


@pytest.mark.parametrize(
    "load", [load_tokenizer, lambda name: load_model(name, device="cpu", dtype="float32")]
)
@pytest.mark.parametrize("name", ["nobody/none-such", "/no/such/folder", "no such name"])
def test_unknown_model_is_one_sentence_within_seconds(
    load: Callable[[str], Any], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", "http://127.0.0.1:9")  # nobody listens there
    start = time.monotonic()
    with pytest.raises(Unrecoverable) as caught:
        load(name)
    assert time.monotonic() - start < 10
    assert caught.value.exit_code == 2
    assert repr(name) in str(caught.value)
    assert "give a folder" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_broken_weights_are_unrecoverable(tmp_path: Path) -> None:
    for file in BASE.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes()[:5000])
    with pytest.raises(Unrecoverable, match="cannot load model"):
        load_model(str(tmp_path), device="cpu", dtype="float32")


def test_unknown_dtype_is_unrecoverable() -> None:
    with pytest.raises(Unrecoverable, match="'float31'"):
        load_model("tiny", device="cpu", dtype="float31")


# Prompts.


def word_tokenizer(*, adds_bos: bool, template: str | None) -> PreTrainedTokenizerFast:
    words = ["<s>", "</s>", "[user]", "[model]", "hello", "a", "<unk>"]
    backend = Tokenizer(
        models.WordLevel({word: place for place, word in enumerate(words)}, unk_token="<unk>")
    )
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()  # pyright: ignore[reportAttributeAccessIssue]
    if adds_bos:
        backend.post_processor = processors.TemplateProcessing(  # pyright: ignore[reportAttributeAccessIssue]
            single="<s> $A", special_tokens=[("<s>", 0)]
        )
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>")
    tokenizer.chat_template = template
    return tokenizer


CHAT_TEMPLATE = (
    "{% for m in messages %}{{ '[' + ('user' if m['role'] == 'user' else 'model') + '] ' + m['content'] }}"
    "{% if m['role'] == 'assistant' %}</s>{% endif %}{{ ' ' }}{% endfor %}"
    "{% if add_generation_prompt %}[model]{% endif %}"
)


@pytest.mark.parametrize(
    ("template", "ended", "ids"),
    [(None, True, [4]), (None, False, [4]), (CHAT_TEMPLATE, False, [4]), (CHAT_TEMPLATE, True, [2, 4, 3])],
)
def test_an_answer_is_a_message_of_its_own_where_the_turn_has_ended(
    template: str | None, ended: bool, ids: list[int]
):
    tokenizer = word_tokenizer(adds_bos=True, template=template)
    assert encode_answer(tokenizer, "hello", ended=ended) == ids


BARE_TEMPLATE = "[user] {{ messages[0]['content'] }}{% if add_generation_prompt %} [model]{% endif %}"


@pytest.mark.parametrize(
    ("adds_bos", "template", "text", "ids"),
    [
        (False, None, "hello", [4]),
        (True, None, "hello", [0, 4]),
        (True, None, "<s> hello", [0, 4]),
        (True, BARE_TEMPLATE, "hello", [0, 2, 4, 3]),
        (True, "<s> " + BARE_TEMPLATE, "hello", [0, 2, 4, 3]),
        (True, "<s> <s> " + BARE_TEMPLATE, "hello", [0, 2, 4, 3]),
        (False, "<s> " + BARE_TEMPLATE, "hello", [0, 2, 4, 3]),
        (False, BARE_TEMPLATE, "hello", [2, 4, 3]),
    ],
)
def test_prompt_has_one_bos_where_the_model_uses_one(
    adds_bos: bool, template: str | None, text: str, ids: list[int]
) -> None:
    assert encode_prompt(word_tokenizer(adds_bos=adds_bos, template=template), text) == ids


def test_tiny_prompt_is_plain_text() -> None:
    tokenizer = load_tokenizer("tiny")
    ids = encode_prompt(tokenizer, "Ann has 12 pens")
    assert tokenizer.decode(ids) == "Ann has 12 pens"


def test_eos_is_a_set() -> None:
    model, tokenizer = tiny(), load_tokenizer("tiny")
    assert eos_ids(model, tokenizer) == {1}
    model.generation_config.eos_token_id = [7, 9]
    assert eos_ids(model, tokenizer) == {1, 7, 9}
    model.generation_config.eos_token_id = None
    assert eos_ids(model, tokenizer) == {1}


# Adapters.


def test_version_0_is_the_base_model() -> None:
    assert torch.equal(logits(add_lora(tiny(), Lora(rank=8, alpha=16), seed=0)), logits(tiny()))


def test_lora_is_on_every_linear_layer_but_the_head() -> None:
    model = add_lora(tiny(), Lora(rank=8, alpha=16), seed=0)
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert len(trained) == 2 * 7 * 2  # A and B, seven projections, two layers
    assert all("lora_" in name for name in trained)
    assert not any("lm_head" in name or "embed" in name for name in trained)


def test_only_the_seed_decides_the_first_weights() -> None:
    torch.manual_seed(1)
    state = torch.get_rng_state()
    first = adapter_files(add_lora(tiny(), Lora(rank=8, alpha=16), seed=3))
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(2)
    assert adapter_files(add_lora(tiny(), Lora(rank=8, alpha=16), seed=3)) == first
    assert adapter_files(add_lora(tiny(), Lora(rank=8, alpha=16), seed=4)) != first


def test_adapter_files_load_in_peft(tmp_path: Path) -> None:
    model = trained_lora(1)
    files = adapter_files(model)
    assert sorted(files) == ["adapter_config.json", "adapter_model.safetensors"]
    assert files == adapter_files(model)
    loaded = PeftModel.from_pretrained(tiny(), str(write(model, tmp_path)))
    assert torch.equal(logits(loaded), logits(model))
    assert not torch.equal(logits(loaded), logits(tiny()))


def test_adapter_files_name_no_path_of_this_machine(tmp_path: Path) -> None:
    config = json.loads(adapter_files(trained_lora(1))["adapter_config.json"])
    assert config["base_model_name_or_path"] == "tiny"
    assert config["target_modules"] == sorted(config["target_modules"])


def test_adapter_written_by_peft_is_read(tmp_path: Path) -> None:
    trained_lora(1, rank=4).save_pretrained(str(tmp_path))
    adapter = read_adapter(tmp_path, tiny())
    assert (adapter.rank, adapter.scaling, len(adapter.layers)) == (4, 2.0, 14)


def change_config(folder: Path, **changes: object) -> None:
    file = folder / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def change_tensors(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    file = folder / "adapter_model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file)


FIRST_A = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"


def put(name: str, make: Callable[[dict[str, torch.Tensor]], torch.Tensor]) -> Callable[[Path], None]:
    return lambda folder: change_tensors(folder, lambda tensors: tensors.update({name: make(tensors)}))


LAYER = "base_model.model.model.layers.0.self_attn.q_proj"


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (put(FIRST_A, lambda t: t[FIRST_A].fill_(float("nan"))), "NaN or infinite"),
        (put(FIRST_A, lambda t: t[FIRST_A].fill_(float("inf"))), "NaN or infinite"),
        (put(FIRST_A, lambda t: t[FIRST_A][:, :-1].clone()), "shapes"),
        (put(FIRST_A, lambda t: t[FIRST_A][:-1].clone()), "rank 8"),
        (put(FIRST_A.replace("q_proj", "z_proj"), lambda t: t[FIRST_A].clone()), "z_proj"),
        (put(LAYER + ".lora_magnitude_vector", lambda t: torch.ones(128)), "lora_magnitude_vector"),
        (lambda folder: change_tensors(folder, lambda t: t.pop(FIRST_A)), "shapes"),
        (lambda folder: change_tensors(folder, lambda t: t.clear()), "no weights"),
        (lambda folder: (folder / "adapter_model.safetensors").unlink(), "adapter_model.safetensors"),
        (lambda folder: (folder / "adapter_model.safetensors").write_bytes(b"12345678"), "cannot read"),
        (lambda folder: (folder / "adapter_config.json").unlink(), "adapter_config.json"),
        (lambda folder: (folder / "adapter_config.json").write_bytes(b"{"), "cannot read"),
        (lambda folder: change_config(folder, r=4), "rank 4"),
        (lambda folder: change_config(folder, r="8"), "r='8'"),
        (lambda folder: change_config(folder, lora_alpha=float("nan")), "lora_alpha=nan"),
        (lambda folder: change_config(folder, peft_type="IA3"), "not a LoRA"),
        (lambda folder: change_config(folder, use_dora=True), "use_dora=True"),
        (lambda folder: change_config(folder, rank_pattern={"q_proj": 4}), "rank_pattern"),
        (lambda folder: change_config(folder, a_setting_of_tomorrow=1), "a_setting_of_tomorrow"),
    ],
)
def test_unfit_adapter_is_refused(spoil: Callable[[Path], object], message: str, tmp_path: Path) -> None:
    folder = write(trained_lora(1), tmp_path)
    read_adapter(folder, tiny())
    spoil(folder)
    with pytest.raises(AdapterError, match=message):
        read_adapter(folder, tiny())


def test_rslora_scales_by_the_root_of_the_rank(tmp_path: Path) -> None:
    folder = write(trained_lora(1), tmp_path)
    change_config(folder, use_rslora=True)
    assert read_adapter(folder, tiny()).scaling == pytest.approx(16 / 8**0.5)
