"""What samples completions: the protocol every engine keeps.

No torch here: an engine's module is imported in the actor that runs it.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from msgspec import Struct

from ...runtime.errors import Unrecoverable

__all__ = ["Engine", "Request", "Sample", "Sampled", "Sampling", "load_engine"]


class Sampling(Struct, frozen=True, kw_only=True):
    """How tokens are drawn.

    temperature: what logits are divided by; 0 takes the likeliest token (the first of equals).
    max_tokens:  tokens after which a completion is cut off.
    """

    temperature: float = 1.0
    max_tokens: int


class Request(Struct, frozen=True):
    """One completion to sample.

    seed: 0 to 2⁶⁴−1; it alone decides this completion's draws, whatever else is in the batch.
    """

    prompt_ids: list[int]
    seed: int


class Sample(Struct, frozen=True):
    """One completion.

    ids:           sampled token ids, the end-of-sequence token included.
    logprobs:      log-probability of each under the distribution it was drawn from (after temperature), from
                   float32 logits; at temperature 0, where that is always 0, under temperature 1.
    finish_reason: "stop" (an end-of-sequence token) or "length" (cut off).
    text:          the ids decoded, without special tokens.
    """

    ids: list[int]
    logprobs: list[float]
    finish_reason: str
    text: str


class Sampled(Struct, frozen=True):
    """A completion that has finished in an engine where requests join and leave at any time.

    id: what `add` gave for its request. version, digest: of the adapter that sampled all of it.
    """

    id: int
    sample: Sample
    version: int
    digest: str


class Engine(Protocol):
    """A model that samples under one adapter at a time.

    version: the policy version it samples under; −1 until the first `load`.
    digest:  SHA-256 published with that version; empty until then.
    dtype:   what it computes in, such as "float32".
    """

    version: int
    digest: str
    dtype: str

    @property
    def versions(self) -> Sequence[int]:
        """The versions that it may still need: keep their folders."""
        ...

    def load(self, version: int, digest: str, folder: Path) -> None:
        """Switch to the adapter in `folder`, between two requests.

        One that is refused (AdapterError) leaves the old one in place.
        """
        ...

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> list[Sample]:
        """One sample a request, in their order. Raises AdapterError before the first `load`."""
        ...

    def score(self, prompt_ids: Sequence[int], ids: Sequence[int]) -> list[float]:
        """Log-probs of given tokens after a prompt, at temperature 1, computed as if they had been sampled.

        What is kept from one request to the next is used here, too: this shows what completions are made with.
        Raises AdapterError before the first `load`.
        """
        ...

    def encode(self, text: str) -> list[int]:
        """A prompt's token ids, as the model wants it asked."""
        ...


def load_engine(name: str, model: str, *, max_loras: int, max_lora_rank: int, max_num_seqs: int) -> Engine:
    """The engine called `name`, for `model` (as `load_model` takes it), on the best device there is.

    max_loras: versions that may be in use at once, in an engine that keeps several. max_lora_rank: the largest rank
    its adapters will have. max_num_seqs: completions it samples at once. Raises Unrecoverable for a name that no
    engine has, and for a model or an environment that the engine can't use.
    """
    match name:
        case "transformers":
            from . import transformers

            return transformers.load_engine(model)
        case "vllm":
            from .vllm import VllmEngine

            return VllmEngine(
                model, max_loras=max_loras, max_lora_rank=max_lora_rank, max_num_seqs=max_num_seqs
            )
    raise Unrecoverable(f"there is no engine {name!r}: choose transformers or vllm", exit_code=2)
