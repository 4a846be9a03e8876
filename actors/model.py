"""The policy as a network: loading a model and its tokenizer, prompts as token ids, LoRA adapters in and out.

Imports torch and transformers: only what runs inside an actor's `on_start` may import this module.
"""

from __future__ import annotations

import json
import math
import re
import warnings
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, cast

import httpx
import huggingface_hub
import torch
import transformers
from peft import LoraConfig, PeftModel, get_peft_model, get_peft_model_state_dict
from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from transformers.pytorch_utils import Conv1D

from ..runtime.errors import RolecallError, Unrecoverable
from .attention import Backend
from .lora import Lora
from .tiny import BASE

__all__ = [
    "Adapter",
    "AdapterError",
    "adapter_files",
    "add_lora",
    "encode_answer",
    "encode_prompt",
    "eos_ids",
    "linear_at",
    "load_model",
    "load_tokenizer",
    "model_path",
    "pick_device",
    "read_adapter",
    "wrap_lora",
]

_CONNECT_TIMEOUT_S = 5.0
_HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")
# A broken folder, an unknown architecture, a missing package or a shape that differs each raise their own.
_LOAD_ERRORS = (OSError, ValueError, ImportError, RuntimeError, KeyError, SafetensorError)


class AdapterError(RolecallError):
    """An adapter that must not be sampled from: missing, broken, or made for another model."""


def model_path(model: str) -> str:
    """Where `model` is loaded from: "tiny" ships with this package; a folder or an id stays as it is."""
    return str(BASE) if model == "tiny" else model


def pick_device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def load_tokenizer(model: str) -> PreTrainedTokenizerBase:
    """The tokenizer of "tiny", a folder or a Hugging Face id. Raises Unrecoverable when there is none."""
    try:
        return AutoTokenizer.from_pretrained(_source(model))
    except _LOAD_ERRORS as error:
        raise _cannot_load("the tokenizer of ", model, error) from error


def load_model(
    model: str,
    *,
    device: str,
    dtype: str | torch.dtype,
    attention: Backend | None = None,
    four_bit: bool = False,
) -> PreTrainedModel:
    """The causal language model of "tiny", a folder or a Hugging Face id: frozen, and in evaluation mode.

    dtype: a torch.dtype or its name, such as "float32": of the weights, or with four_bit (NF4, by bitsandbytes) of
    what is computed with them. attention: None for what suits the model best.
    Raises Unrecoverable when it cannot be loaded.
    """
    number = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    if not isinstance(number, torch.dtype):
        raise Unrecoverable(f"torch has no dtype {dtype!r}: use float32, bfloat16 or float16", exit_code=2)
    if four_bit and find_spec("bitsandbytes") is None:
        raise Unrecoverable(
            "a base model in 4 bits needs bitsandbytes, which is not installed here: pip install 'rolecall[qlora]', or "
            "leave lora.qlora off",
            exit_code=2,
        )
    quantized = {"quantization_config": _four_bit(number), "device_map": device} if four_bit else {}
    transformers.utils.logging.disable_progress_bar()  # a worker's log is not a terminal
    try:
        network: Any = AutoModelForCausalLM.from_pretrained(
            _source(model), dtype=number, attn_implementation=attention, **quantized
        )
        if not four_bit:  # which is where it belongs
            network.to(device)
    except _LOAD_ERRORS as error:
        raise _cannot_load("", model, error) from error
    network.name_or_path = model  # what adapters name as their base: never a path of this machine for "tiny"
    return network.eval().requires_grad_(False)


def _four_bit(dtype: torch.dtype) -> transformers.BitsAndBytesConfig:
    return transformers.BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_compute_dtype=dtype,
        bnb_4bit_use_double_quant=True,
    )


def _source(model: str) -> str:
    """The folder or Hugging Face id to load `model` from; FileNotFoundError where there is neither.

    Without a network it is the folder in Hugging Face's cache: its client, given an id, would retry for half a
    minute before it looked there.
    """
    path = model_path(model)
    if Path(path).is_dir():
        return path
    if not _HUB_ID.fullmatch(path):
        raise FileNotFoundError("no such folder")
    if not huggingface_hub.constants.HF_HUB_OFFLINE and _reachable(huggingface_hub.constants.ENDPOINT):
        return path
    cached = huggingface_hub.try_to_load_from_cache(path, "config.json")
    if not isinstance(cached, str):
        raise FileNotFoundError("no such folder, not in the cache, and the network cannot be reached")
    return str(Path(cached).parent)


def _reachable(url: str) -> bool:
    try:
        httpx.head(url, timeout=_CONNECT_TIMEOUT_S)
    except httpx.HTTPError:
        return False
    return True


def _cannot_load(part: str, model: str, error: Exception) -> Unrecoverable:
    reason = next(iter(str(error).strip().splitlines()), type(error).__name__).rstrip(".")
    return Unrecoverable(
        f"cannot load {part}model {model!r} ({reason}): give a folder that holds one, 'tiny', or an id on "
        f"{huggingface_hub.constants.ENDPOINT}",
        exit_code=2,
    )


def encode_prompt(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """Token ids of a prompt: as one user message where the tokenizer has a chat template, else as plain text.

    Begins with exactly one BOS where the model uses one: templates often write it, tokenizers often add it,
    and a model that sees two answers worse.
    """
    if tokenizer.chat_template is not None:
        encoded = tokenizer.apply_chat_template(
            [{"role": "user", "content": text}], add_generation_prompt=True, tokenize=True, return_dict=False
        )
    else:
        encoded = tokenizer(text)["input_ids"]
    ids = cast(list[int], encoded)
    bos = tokenizer.bos_token_id
    if not isinstance(bos, int):
        return ids
    after = next((place for place, token in enumerate(ids) if token != bos), len(ids))
    adds_bos = cast(list[int], tokenizer("a")["input_ids"])[0] == bos
    return [bos, *ids[after:]] if after or adds_bos else ids


def encode_answer(tokenizer: PreTrainedTokenizerBase, text: str, *, ended: bool) -> list[int]:
    """Token ids of what is put after a turn that the model has written.

    ended: whether that turn ends with an end-of-sequence token. If so, and the tokenizer has a chat template, the text
    is the user's next message, up to where the model's begins; else it is this text and nothing more.
    """
    if ended and tokenizer.chat_template is not None:
        said = "\N{SPIRAL NOTE PAD}"  # what the template does not say itself, and leaves as it is
        chat = [
            {"role": "user", "content": "-"},
            {"role": "assistant", "content": said},
            {"role": "user", "content": text},
        ]
        whole = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
        after = cast(str, whole).partition(said)[2]
        # Ends in its end-of-sequence token, which the model has written.
        text = after.removeprefix(cast(str, tokenizer.eos_token or ""))
    return cast(list[int], tokenizer(text, add_special_tokens=False)["input_ids"])


def eos_ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """Every token that ends a completion: chat models have two, one of them only in the generation config."""
    configured = model.generation_config.eos_token_id if model.generation_config is not None else None
    several = configured if isinstance(configured, list) else [configured]
    return frozenset(token for token in [*several, tokenizer.eos_token_id] if isinstance(token, int))


def add_lora(model: PreTrainedModel, lora: Lora, *, seed: int) -> PeftModel:
    """Add a LoRA to linear layers, in place; its weights alone need gradients, and are float32 whatever the model's.

    A is Kaiming-uniform, drawn from `seed` alone; B is 0, so that version 0 is the base model exactly. There is no
    dropout: the trainer's log-probs must be the sampler's. The RNG state of the process stays as it was.
    Raises Unrecoverable for a layer that the model has not.
    """
    config = LoraConfig(
        r=lora.rank,
        lora_alpha=cast(int, lora.alpha),
        use_rslora=lora.rslora,
        lora_dropout=0.0,
        target_modules=lora.names or "all-linear",
        task_type="CAUSAL_LM",
    )
    for name in lora.names:
        if not any(
            path.split(".")[-1] == name or path.endswith(f".{name}") for path, _ in model.named_modules()
        ):
            raise Unrecoverable(
                f"the model has no layer {name!r} for a LoRA: it has {', '.join(_linear_names(model))}",
                exit_code=2,
            )
    return wrap_lora(model, config, seed=seed)


def _linear_names(model: PreTrainedModel) -> list[str]:
    head = model.get_output_embeddings()
    linear = [
        path
        for path, part in model.named_modules()
        if isinstance(part, nn.Linear | Conv1D) and part is not head
    ]
    return sorted({path.split(".")[-1] for path in linear})


def wrap_lora(model: PreTrainedModel, config: LoraConfig, *, seed: int) -> PeftModel:
    """PEFT's layers put into `model`, in evaluation mode; only `seed` decides the first weights."""
    # PEFT draws on the CPU, whatever the model's device, and reads an attribute that transformers has renamed.
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "`is_gradient_checkpointing`", FutureWarning)
        torch.default_generator.manual_seed(seed)
        network = get_peft_model(model, config)
    assert isinstance(network, PeftModel)
    return network.eval()


def adapter_files(peft_model: PeftModel) -> dict[str, bytes]:
    """The adapter as PEFT's own two files: name → content. The same weights give the same bytes."""
    # Told nothing about embedding layers, PEFT would ask Hugging Face for the base model's config each time.
    state = get_peft_model_state_dict(peft_model, save_embedding_layers=False)
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in state.items()}
    config = peft_model.peft_config["default"].to_dict() | {"inference_mode": True}
    plain = {name: sorted(value) if isinstance(value, set) else value for name, value in config.items()}
    return {
        "adapter_config.json": json.dumps(plain, indent=2, sort_keys=True).encode(),
        "adapter_model.safetensors": save(tensors, metadata={"format": "pt"}),
    }


@dataclass(frozen=True)
class Adapter:
    """A LoRA that fits its model: every layer's weight becomes W₀ + scaling · B A.

    layers: module path → (A of rank × in, B of out × rank), on the CPU.
    """

    rank: int
    scaling: float
    layers: dict[str, tuple[torch.Tensor, torch.Tensor]]


_TENSOR_NAME = re.compile(r"base_model\.model\.(.+)\.lora_([AB])\.weight")
# Settings of an adapter that say where it came from or which layers it has, which the tensors say, too.
_HARMLESS = {
    "auto_mapping",
    "base_model_name_or_path",
    "ensure_weight_tying",
    "exclude_modules",
    "fan_in_fan_out",
    "inference_mode",
    "layers_pattern",
    "layers_to_transform",
    "lora_alpha",
    "lora_dropout",
    "peft_version",
    "r",
    "revision",
    "target_modules",
    "task_type",
    "use_rslora",
}


def read_adapter(folder: Path, model: PreTrainedModel) -> Adapter:
    """Read a PEFT LoRA and check it against `model`: settings, rank, layers, shapes, and that all is finite.

    Engines take wrong shapes and NaN without a word, then sample nonsense: nothing unchecked reaches them.
    Raises AdapterError.
    """
    rank, scaling = _read_config(folder / "adapter_config.json")
    file = folder / "adapter_model.safetensors"
    try:
        tensors = load_file(file)
    except (OSError, SafetensorError) as error:
        raise AdapterError(f"cannot read the adapter {file} ({error}): fetch or publish it again") from error
    sides: dict[str, dict[str, torch.Tensor]] = {}
    for name, tensor in tensors.items():
        match = _TENSOR_NAME.fullmatch(name)
        if match is None:
            raise AdapterError(f"adapter {file} holds {name!r}: only LoRA on linear layers can be used")
        if not bool(torch.isfinite(tensor).all()):
            raise AdapterError(
                f"adapter {file} has NaN or infinite values in {name!r}: its training broke down"
            )
        sides.setdefault(match[1], {})[match[2]] = tensor
    if not sides:
        raise AdapterError(f"adapter {file} holds no weights: fetch or publish it again")
    layers = {}
    for path, pair in sides.items():
        shapes = {side: tuple(tensor.shape) for side, tensor in pair.items()}
        expected = _expected_shapes(model, path, rank)
        if shapes != expected:
            raise AdapterError(
                f"adapter {file} has shapes {shapes} at {path!r} where the model and the rank {rank} of its "
                f"config need {expected or 'none'}: it is another model's, or its two files do not match"
            )
        layers[path] = (pair["A"], pair["B"])
    return Adapter(rank, scaling, layers)


def _read_config(file: Path) -> tuple[int, float]:
    """(rank, scaling) of an adapter whose config asks for plain LoRA; AdapterError otherwise."""
    try:
        config: Any = json.loads(file.read_bytes())
    except (OSError, ValueError) as error:
        raise AdapterError(f"cannot read {file} ({error}): fetch or publish the adapter again") from error
    if not isinstance(config, dict) or config.get("peft_type") != "LORA":
        raise AdapterError(f"{file} is not a LoRA adapter's config: only LoRA can be used")
    rank, alpha = config.get("r"), config.get("lora_alpha")
    if (
        not isinstance(rank, int)
        or rank < 1
        or not isinstance(alpha, int | float)
        or not math.isfinite(alpha)
    ):
        raise AdapterError(f"{file} has r={rank!r} and lora_alpha={alpha!r}: both must be positive numbers")
    plain = LoraConfig().to_dict()
    for name, value in config.items():
        if name not in _HARMLESS and value and value != plain.get(name):
            raise AdapterError(f"{file} has {name}={value!r}: only plain LoRA can be used, without {name}")
    return rank, alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)


def linear_at(model: PreTrainedModel, path: str) -> nn.Linear | Conv1D | None:
    """The linear layer at `path`, under PEFT's wrapper or not; None where there is none."""
    try:
        module = model.get_submodule(path)
    except AttributeError:
        return None
    module = getattr(module, "base_layer", module)
    return module if isinstance(module, nn.Linear | Conv1D) else None


def _expected_shapes(model: PreTrainedModel, path: str, rank: int) -> dict[str, tuple[int, ...]]:
    layer = linear_at(model, path)
    if layer is None:
        return {}
    weight = layer.weight.T if isinstance(layer, Conv1D) else layer.weight
    outputs, inputs = weight.shape
    return {"A": (rank, inputs), "B": (outputs, rank)}
