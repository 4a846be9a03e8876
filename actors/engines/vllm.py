"""Sampling with vLLM: requests join and leave the batch at every token, and policy versions live side by side.

    load(v) ─▶ checked ─▶ an adapter of its own in vLLM ──────────┐
    add(requests) ─▶ queue ─▶ step() … step() ─▶ finished ones ◀──┘ each wholly under the version it began with

vLLM's own engine loop is stepped by hand in this process, so a swap falls between two tokens and nobody waits.
vLLM keeps what it knows of an adapter by its number, and what it has computed of a prompt by its name: a version
has a name and a number that no other ever gets.

Imports torch, transformers and peft, and vLLM when an engine starts: only what runs inside an actor's `on_start`
may import this module.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...runtime.errors import RolecallError, Unrecoverable
from ..model import AdapterError, encode_prompt, eos_ids, load_tokenizer, read_adapter
from . import Request, Sample, Sampled, Sampling
from .vllm_start import check_vllm, first_line, import_vllm, installed, start, without_weights

__all__ = ["VllmEngine"]

log = logging.getLogger("rolecall")

_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # what vLLM has room for


class VllmEngine:
    """Samples from `model` ("tiny", a folder or a Hugging Face id) under the adapters that are loaded.

    max_loras:      versions that live at once, at least 2: the newest, and those that requests are still under.
    max_lora_rank:  the largest rank of an adapter; vLLM takes room and time for it, whatever they have.
    max_num_seqs:   completions sampled at once; more of them queue.
    max_model_len:  tokens of prompt and completion together; by default what the model can take.
    kv_cache_bytes: memory for keys and values; by default 256 MiB on a CPU, and on a GPU all that vLLM finds.

    Computes in float32 on a CPU, in bfloat16 elsewhere: what the trainer computes in as well. In vLLM's process
    it is the only engine. Raises Unrecoverable where vLLM is missing, of another release than those supported,
    or can't serve this model with this memory.

    version, digest, dtype: as in Engine; requests are added under these.
    prompt_tokens:   tokens in the prompts of all finished requests; cached_tokens: those that vLLM had computed
                     before, for a sibling.
    """

    def __init__(
        self,
        model: str,
        *,
        max_loras: int = 4,
        max_lora_rank: int = 16,
        max_num_seqs: int = 256,
        max_model_len: int | None = None,
        kv_cache_bytes: int | None = None,
    ) -> None:
        if max_loras < 2 or not 1 <= max_lora_rank <= _RANKS[-1]:
            raise Unrecoverable(
                f"cannot start vLLM with max_loras={max_loras} and max_lora_rank={max_lora_rank}: a swap needs "
                f"room for 2 adapters or more, and vLLM takes ranks from 1 to {_RANKS[-1]}",
                exit_code=2,
            )
        release = check_vllm(installed())
        self.version, self.digest = -1, ""
        self.prompt_tokens = self.cached_tokens = 0
        self._model, self._max_loras = model, max_loras
        self._max_lora_rank = next(rank for rank in _RANKS if rank >= max_lora_rank)
        self._tokenizer = load_tokenizer(model)
        path = self._tokenizer.name_or_path  # the folder, or the id where Hugging Face can be reached
        self._shell = without_weights(path)
        self._eos = sorted(eos_ids(self._shell, self._tokenizer))
        self._loaded: dict[int, _Loaded] = {}
        self._digests: dict[int, str] = {}  # of every version there ever was
        self._running: dict[int, _Loaded] = {}  # by request
        self._waiting: list[Sampled] = []  # finished while somebody else's were waited for
        self._scoring: dict[int, int] = {}  # requests of one token, by the token whose log-prob is wanted
        self._next_id = 0
        self._broken = ""
        self._vllm = import_vllm()
        wanted = {
            "max_loras": max_loras,
            "max_cpu_loras": max_loras,  # so that it never evicts one, to read it again from its folder
            "max_lora_rank": self._max_lora_rank,
            "max_num_seqs": max_num_seqs,
            "max_model_len": max_model_len,
        }
        self._engine = start(self._vllm, model, path, wanted, kv_cache_bytes)
        self.dtype = str(self._engine.model_config.dtype).removeprefix("torch.")
        self._room = int(self._engine.model_config.max_model_len)
        log.info(
            "vLLM %s serves %s: max_loras=%d versions at once, up to rank %d, %d completions of up to %d tokens",
            release, model, max_loras, self._max_lora_rank, max_num_seqs, self._room,
        )  # fmt: skip

    @property
    def versions(self) -> list[int]:
        """The versions that vLLM holds: the one requests are added under, and those that some are still under."""
        return sorted(self._loaded)

    @property
    def running(self) -> int:
        """Requests that were added and have not finished."""
        return len(self._running)

    def load(self, version: int, digest: str, folder: Path) -> None:
        """Add requests under the adapter in `folder` from now on; those that run finish under their own.

        When `max_loras` versions are still in use, it steps until one is not: what finishes meanwhile is
        returned by the next `step`. A refused adapter (AdapterError) leaves the old one in place.
        """
        self._check_usable()
        if self._digests.setdefault(version, digest) != digest:
            raise AdapterError(
                f"version {version} had the digest {self._digests[version]} before, and has {digest} now: a "
                f"version never changes, publish other weights under another number"
            )
        if version not in self._loaded:
            self._admit(version, digest, folder)
        self.version, self.digest = version, digest
        self._let_go()

    def encode(self, text: str) -> list[int]:
        """A prompt's token ids, as the model wants it asked."""
        return encode_prompt(self._tokenizer, text)

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> list[Sample]:
        """One sample a request, in their order. Others that run go on meanwhile.

        A request's tokens depend on its own seed alone, within the rounding of the model's dtype. Raises as
        `add` and `step` do.
        """
        ids = self.add(requests, sampling)
        done = self._wait_for(ids)
        return [done[id] for id in ids]

    def add(self, requests: Sequence[Request], sampling: Sampling) -> list[int]:
        """Queue requests under the version that is loaded; an id for each, in their order.

        Siblings of one prompt are queued side by side, so that it is computed once. Raises AdapterError before
        the first `load`, and Unrecoverable for settings or prompts that no adapter could be sampled with.
        """
        self._check_loaded()
        _check(self._model, self._room, requests, sampling)
        first: dict[tuple[int, ...], int] = {}
        ranks = [first.setdefault(tuple(request.prompt_ids), len(first)) for request in requests]
        ids = [-1] * len(requests)
        for place in sorted(range(len(requests)), key=ranks.__getitem__):
            request = requests[place]
            ids[place] = self._queue(request.prompt_ids, self._parameters(request.seed, sampling))
        return ids

    def score(self, prompt_ids: Sequence[int], ids: Sequence[int]) -> list[float]:
        """Log-probs of `ids` after the prompt, at temperature 1. Others that run go on meanwhile.

        For each token a request like any other samples one token in its place. vLLM's own log-probs of a prompt
        would not do: for them it computes the prompt anew, so that they are right beside a stale prefix cache.
        Raises as `add` and `step` do.
        """
        self._check_loaded()
        sampling = Sampling(max_tokens=1)
        _check(self._model, self._room, [Request([*prompt_ids, *ids[:-1]], 0)], sampling)
        mine = []
        for place, token in enumerate(ids):
            parameters = self._parameters(0, sampling, logprob_token_ids=[token])
            mine.append(self._queue([*prompt_ids, *ids[:place]], parameters))
            self._scoring[mine[-1]] = token
        done = self._wait_for(mine)
        return [done[id].logprobs[0] for id in mine]

    def _queue(self, prompt_ids: list[int], parameters: Any) -> int:
        """The id of a new request under the version that is loaded."""
        id = self._next_id
        self._next_id += 1
        loaded = self._loaded[self.version]
        prompt = {"prompt_token_ids": prompt_ids}
        self._engine.add_request(str(id), prompt, parameters, lora_request=loaded.adapter)
        self._running[id] = loaded
        return id

    def _wait_for(self, ids: list[int]) -> dict[int, Sample]:
        mine, done = set(ids), dict[int, Sample]()
        while len(done) < len(ids):
            for sampled in self._advance():
                if sampled.id in mine:
                    done[sampled.id] = sampled.sample
                else:
                    self._waiting.append(sampled)
        return done

    def step(self) -> list[Sampled]:
        """One token for each completion of the batch; those that have finished since the last call.

        Raises AdapterError when log-probs are not finite: NaN would stay in vLLM's memory of keys and values, and
        reach other completions, so that this engine samples no more.
        """
        finished, self._waiting = self._waiting, []
        return finished + self._advance()

    def _advance(self) -> list[Sampled]:
        self._check_usable()
        if not self._running:
            return []
        finished = [self._finish(output) for output in self._engine.step() if output.finished]
        self._let_go()
        return finished

    def _finish(self, output: Any) -> Sampled:
        """What one request became."""
        id = int(output.request_id)
        loaded = self._running.pop(id)
        [completion] = output.outputs
        ids = [self._scoring.pop(id)] if id in self._scoring else list(completion.token_ids)
        logprobs = [step[token].logprob for step, token in zip(completion.logprobs, ids, strict=True)]
        if not all(map(math.isfinite, logprobs)):
            self._broken = (
                f"version {loaded.version} gives log-probs that are not finite: its training broke down, and what "
                f"it left in vLLM's memory would spoil other versions; start the engine again"
            )
            raise AdapterError(self._broken)
        if completion.finish_reason not in ("stop", "length"):
            raise RolecallError(f"vLLM ended a completion with {completion.finish_reason!r}")
        self.prompt_tokens += len(output.prompt_token_ids)
        self.cached_tokens += output.num_cached_tokens or 0
        text = self._tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        assert isinstance(text, str)
        sample = Sample(ids, logprobs, completion.finish_reason, text)
        return Sampled(id, sample, loaded.version, loaded.digest)

    def _admit(self, version: int, digest: str, folder: Path) -> None:
        """Check the adapter, then hand it to vLLM, which takes nonsense without a word."""
        rank = read_adapter(folder, self._shell).rank
        if rank > self._max_lora_rank:
            raise AdapterError(
                f"adapter {folder} has rank {rank}, and this engine was started for {self._max_lora_rank}: "
                f"start it with max_lora_rank={rank}"
            )
        if len(self._loaded) >= self._max_loras:
            log.info("version %d waits until one of %s is no longer in use", version, self.versions)
        while len(self._loaded) >= self._max_loras:
            self._waiting += self._advance()
        # Numbers start at 1 there.
        adapter = self._vllm.lora(f"v{version}", version + 1, str(folder))
        try:
            self._engine.add_lora(adapter)
        except (ValueError, RuntimeError) as error:
            raise AdapterError(
                f"vLLM can't serve the adapter {folder} ({first_line(error)}): publish one that it supports"
            ) from error
        self._loaded[version] = _Loaded(version, digest, adapter)

    def _let_go(self) -> None:
        """Have vLLM forget the versions that nobody needs."""
        needed = {self.version, *(loaded.version for loaded in self._running.values())}
        for version in self._loaded.keys() - needed:
            self._engine.remove_lora(self._loaded.pop(version).adapter.lora_int_id)

    def _check_loaded(self) -> None:
        self._check_usable()
        if self.version < 0:
            raise AdapterError("no adapter is loaded: load one first, the base model is no policy version")

    def _check_usable(self) -> None:
        if self._broken:
            raise AdapterError(self._broken)

    def _parameters(self, seed: int, sampling: Sampling, logprob_token_ids: list[int] | None = None) -> Any:
        return self._vllm.parameters(
            temperature=sampling.temperature,
            max_tokens=sampling.max_tokens,
            seed=seed % 2**63,  # it keeps them in 64 bits with a sign, and takes −1 for none
            stop_token_ids=self._eos,
            logprobs=len(logprob_token_ids or ()),  # of these, and always the sampled token's
            logprob_token_ids=logprob_token_ids,
            detokenize=False,
            output_kind=self._vllm.final_only,
        )


@dataclass(frozen=True)
class _Loaded:
    """A version, and what vLLM knows it as."""

    version: int
    digest: str
    adapter: Any


def _check(model: str, room: int, requests: Sequence[Request], sampling: Sampling) -> None:
    """Raise Unrecoverable for what can never be sampled."""
    temperature, most = sampling.temperature, sampling.max_tokens
    if not 0 <= temperature < float("inf") or most < 1:
        raise Unrecoverable(
            f"cannot sample with temperature {temperature} and max_tokens {most}: the first must be 0 or "
            f"more, the second at least 1",
            exit_code=2,
        )
    lengths = [len(request.prompt_ids) for request in requests]
    if min(lengths, default=1) == 0:
        raise Unrecoverable("a prompt has no tokens at all: leave empty prompts out of the data", exit_code=2)
    if max(lengths, default=0) + most > room:
        # vLLM would cut the completion off there, as if it had been asked for less.
        raise Unrecoverable(
            f"a prompt of {max(lengths)} tokens and {most} new ones are more than the {room} that vLLM has room for "
            f"with model {model!r}: ask for fewer tokens or leave long prompts out",
            exit_code=2,
        )
