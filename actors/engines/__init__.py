"""What samples completions: the protocol every engine keeps.

    load(v1) ─▶ add(requests) ─▶ step() … step() ─▶ those that are done
                load(v2) ─▶ add(requests) ─▶ step() …          v1's go on beside them, under v1

No torch here: an engine's module is imported in the actor that runs it.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from msgspec import Struct

from ...runtime.errors import Unrecoverable

__all__ = ["Engine", "Request", "Sample", "Sampled", "Sampling", "check_requests", "generate", "load_engine"]


class Sampling(Struct, frozen=True, kw_only=True):
    """How tokens are drawn.

    temperature: what logits are divided by; 0 takes the likeliest token (the first of equals).
    max_tokens:  tokens after which a completion is cut off.
    stop:        a completion ends with the token that completes one of these texts, as with an end-of-sequence token.
    """

    temperature: float = 1.0
    max_tokens: int
    stop: tuple[str, ...] = ()


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
    versions:      the policy version that each was sampled under. They differ only where a swap may fall into a
                   completion, and then never decrease.
    finish_reason: "stop" (an end-of-sequence token, or one of the texts to stop at) or "length" (cut off).
    text:          the ids decoded, without special tokens.
    """

    ids: list[int]
    logprobs: list[float]
    versions: list[int]
    finish_reason: str
    text: str


class Sampled(Struct, frozen=True):
    """A completion that has finished. id: what `add` gave for its request."""

    id: int
    sample: Sample


class Engine(Protocol):
    """A model that samples under policy versions: requests join and leave at every token.

    version: the one that requests are added under; −1 until the first `load`.
    dtype:   what it computes in, such as "float32".
    """

    version: int
    dtype: str

    @property
    def versions(self) -> Sequence[int]:
        """The versions that it may still need: keep their folders."""
        ...

    @property
    def running(self) -> int:
        """Requests that were added and that no `step` has returned yet."""
        ...

    def load(self, version: int, digest: str, folder: Path) -> None:
        """Add requests under the adapter in `folder` from now on. digest: SHA-256 published with the version.

        Requests that run finish under the version they began with; in an engine that swaps in flight they go on
        under the new one, as if it had written all that is there. An adapter that is refused (AdapterError)
        changes nothing. When there is no room for one more version, it steps until there is.
        """
        ...

    def add(self, requests: Sequence[Request], sampling: Sampling) -> list[int]:
        """Begin these under the version that is loaded; an id for each, in their order, never given twice.

        Siblings of one prompt are computed from one reading of it. Raises AdapterError before the first `load`,
        and Unrecoverable for what `check_requests` refuses.
        """
        ...

    def step(self) -> list[Sampled]:
        """One more token of each completion that there is room for; those that have finished since the last call.

        Raises AdapterError when log-probs are not finite.
        """
        ...

    def score(self, prompt_ids: Sequence[int], ids: Sequence[int]) -> list[float]:
        """Log-probs of given tokens after a prompt, at temperature 1, computed as if they had been sampled.

        What is kept from one request to the next is used here, too: this shows what completions are made with.
        Others that run go on meanwhile. Raises AdapterError before the first `load`.
        """
        ...

    def encode(self, text: str) -> list[int]:
        """A prompt's token ids, as the model wants it asked."""
        ...

    def encode_answer(self, text: str, ids: Sequence[int]) -> list[int]:
        """Token ids of what is answered to a turn (`ids`) that was sampled, to put between it and the next one.

        In a chat it is a message of its own if the turn has ended with an end-of-sequence token, and then the ids go as
        far as the start of the next turn; else it is just this text.
        """
        ...


def generate(engine: Engine, requests: Sequence[Request], sampling: Sampling) -> list[Sample]:
    """One sample a request, in their order, from an engine that nobody else has added to."""
    ids = engine.add(requests, sampling)
    done = dict[int, Sample]()
    while len(done) < len(ids):
        done.update((sampled.id, sampled.sample) for sampled in engine.step())
    return [done[id] for id in ids]


def check_requests(model: str, room: int | None, requests: Sequence[Request], sampling: Sampling) -> None:
    """Raise Unrecoverable for what no adapter could ever be sampled with. room: most tokens of one sequence."""
    temperature, most = sampling.temperature, sampling.max_tokens
    if not 0 <= temperature < float("inf") or most < 1:
        raise Unrecoverable(
            f"cannot sample with temperature {temperature} and max_tokens {most}: the first must be 0 or "
            f"more, the second at least 1",
            exit_code=2,
        )
    if "" in sampling.stop:
        raise Unrecoverable("cannot stop at an empty text: leave it out of stop", exit_code=2)
    lengths = [len(request.prompt_ids) for request in requests]
    if min(lengths, default=1) == 0:
        raise Unrecoverable("a prompt has no tokens at all: leave empty prompts out of the data", exit_code=2)
    if room is not None and max(lengths, default=0) + most > room:
        raise Unrecoverable(
            f"a prompt of {max(lengths)} tokens and {most} new ones are more than the {room} positions of "
            f"model {model!r}: ask for fewer tokens or leave long prompts out",
            exit_code=2,
        )


def load_engine(
    name: str,
    model: str,
    *,
    max_loras: int,
    max_lora_rank: int,
    max_num_seqs: int,
    inflight_swap: bool = False,
) -> Engine:
    """The engine called `name`, for `model` (as `load_model` takes it), on the best device there is.

    max_loras: versions that may be in use at once. max_lora_rank: the largest rank its adapters will have.
    max_num_seqs: completions it samples at once. inflight_swap: whether a swap may fall into a completion.
    Raises Unrecoverable for a name that no engine has, and for a model or an environment that the engine can't use.
    """
    match name:
        case "transformers":
            from . import transformers

            return transformers.load_engine(
                model, max_loras=max_loras, max_num_seqs=max_num_seqs, inflight_swap=inflight_swap
            )
        case "vllm":
            from .vllm import VllmEngine

            return VllmEngine(
                model,
                max_loras=max_loras,
                max_lora_rank=max_lora_rank,
                max_num_seqs=max_num_seqs,
                inflight_swap=inflight_swap,
            )
    raise Unrecoverable(f"there is no engine {name!r}: choose transformers or vllm", exit_code=2)
