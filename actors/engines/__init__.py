"""What samples completions: the protocol every engine keeps.

No torch here: an engine's module is imported in the actor that runs it.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from msgspec import Struct

__all__ = ["Engine", "Request", "Sample", "Sampling"]


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


class Engine(Protocol):
    """A model that samples under one adapter at a time.

    version: the policy version it samples under; −1 until the first `load`.
    digest:  SHA-256 published with that version; empty until then.
    """

    version: int
    digest: str

    def load(self, version: int, digest: str, folder: Path) -> None:
        """Switch to the adapter in `folder`, between two requests.

        One that is refused (AdapterError) leaves the old one in place.
        """
        ...

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> list[Sample]:
        """One sample a request, in their order. Raises AdapterError before the first `load`."""
        ...

    def encode(self, text: str) -> list[int]:
        """A prompt's token ids, as the model wants it asked."""
        ...
