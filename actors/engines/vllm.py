"""Sampling with vLLM: requests join and leave the batch at every token, and policy versions live side by side.

    load(v) ─▶ checked ─▶ an adapter of its own in vLLM ──────────┐
    add(requests) ─▶ queue ─▶ step() … step() ─▶ finished ones ◀──┘ each wholly under the version it began with,
                                                                    or, swapped in flight, on under the newest

vLLM's own engine loop is stepped by hand in this process, so a swap falls between two tokens and nobody waits.
In flight, each request is taken out of vLLM and asked for anew, with what it has written as part of its prompt: keys
and values are the new version's from the first token on, and siblings share them as always.
vLLM keeps what it knows of an adapter by its number, and what it has computed of a prompt by its name: a version
has a name and a number that no other ever gets.

Imports torch, transformers and peft, and vLLM when an engine starts: only what runs inside an actor's `on_start`
may import this module.
"""

from __future__ import annotations

import itertools
import logging
import math
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ...runtime.errors import RolecallError, Unrecoverable
from ..model import AdapterError, encode_answer, encode_prompt, eos_ids, load_tokenizer, read_adapter
from . import Request, Sample, Sampled, Sampling, check_requests
from .stops import Stops
from .vllm_start import check_vllm, first_line, import_vllm, installed, start, without_weights

__all__ = ["VllmEngine"]

log = logging.getLogger("rolecall")

_COLDEST, _HOTTEST = (
    0.01,
    2.0,
)  # above 0: what is colder it takes as this in silence, what is hotter it refuses
_MOST_SEQS = 1024  # for each vLLM sets memory aside at its start
_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # what vLLM has room for


class VllmEngine:
    """Samples from `model` ("tiny", a folder or a Hugging Face id) under the adapters that are loaded.

    max_loras:      versions that live at once, at least 2: the newest, and those that requests are still under.
    max_lora_rank:  the largest rank of an adapter; vLLM takes room and time for it, whatever they have.
    max_num_seqs:   completions sampled at once, 1,024 at most; more of them queue.
    max_model_len:  tokens of prompt and completion together; by default what the model can take.
    kv_cache_bytes: memory for keys and values; by default 256 MiB on a CPU, and on a GPU all that vLLM finds.
    inflight_swap:  whether `load` makes requests that run go on under the new version. It costs the keys and values
                    of all of them, computed anew in one go.

    Computes in float32 on a CPU, in bfloat16 elsewhere: what the trainer computes in as well. In vLLM's process
    it is the only engine. Raises Unrecoverable where vLLM is missing, of another release than those supported,
    or can't serve this model with this memory.

    version, dtype: as in Engine.
    prompt_tokens:  tokens in the prompts of all finished requests, with what they had written when they were swapped
                    last; cached_tokens: those that vLLM had computed before, for a sibling.
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
        inflight_swap: bool = False,
    ) -> None:
        if max_loras < 2 or not 1 <= max_lora_rank <= _RANKS[-1]:
            raise Unrecoverable(
                f"cannot start vLLM with max_loras={max_loras} and max_lora_rank={max_lora_rank}: a swap needs "
                f"room for 2 adapters or more, and vLLM takes ranks from 1 to {_RANKS[-1]}",
                exit_code=2,
            )
        release = check_vllm(installed())
        self.version = -1
        self.prompt_tokens = self.cached_tokens = 0
        self._model, self._max_loras = model, max_loras
        self._max_lora_rank = next(rank for rank in _RANKS if rank >= max_lora_rank)
        self._tokenizer = load_tokenizer(model)
        self._stops = Stops(self._tokenizer)
        path = self._tokenizer.name_or_path  # the folder, or the id where Hugging Face can be reached
        self._shell = without_weights(path)
        self._eos = sorted(eos_ids(self._shell, self._tokenizer))
        self._adapters: dict[int, Any] = {}  # what vLLM knows each version as
        self._digests: dict[int, str] = {}  # of every version there ever was
        self._running: dict[str, _Run] = {}  # by the name that vLLM has for it
        self._waiting: list[Sampled] = []  # finished while somebody else's were waited for
        self._ids, self._names = itertools.count(), itertools.count()
        self._broken = ""
        self._vllm = import_vllm()
        max_num_seqs = min(max_num_seqs, _MOST_SEQS)
        self._inflight_swap = inflight_swap
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
        return sorted(self._adapters)

    @property
    def running(self) -> int:
        """Requests that were added and that no `step` has returned yet."""
        return len(self._running) + len(self._waiting)

    def load(self, version: int, digest: str, folder: Path) -> None:
        """Add requests under the adapter in `folder` from now on; what becomes of those that run: see the class.

        When `max_loras` versions are still in use, it steps until one is not: what finishes meanwhile is
        returned by the next `step`. A refused adapter (AdapterError) leaves the old one in place.
        """
        self._check_usable()
        known = self._digests.get(version, digest)
        if known != digest:
            raise AdapterError(
                f"version {version} had the digest {known} before, and has {digest} now: a version never "
                f"changes, publish other weights under another number"
            )
        if version not in self._adapters:
            self._admit(version, folder)
        self.version, self._digests[version] = version, digest
        if self._inflight_swap:
            self._go_on()
        self._let_go()

    def encode(self, text: str) -> list[int]:
        """A prompt's token ids, as the model wants it asked."""
        return encode_prompt(self._tokenizer, text)

    def encode_answer(self, text: str, ids: Sequence[int]) -> list[int]:
        """Token ids of what is answered to a turn (`ids`) that was sampled; see Engine."""
        return encode_answer(self._tokenizer, text, ended=ids[-1] in self._eos)

    def add(self, requests: Sequence[Request], sampling: Sampling) -> list[int]:
        """Queue requests under the version that is loaded; an id for each, in their order.

        A request's tokens depend on its own seed alone, within the rounding of the model's dtype, as long as no
        swap falls into them. Siblings of one prompt are queued side by side, so that it is computed once. Raises
        AdapterError before the first `load`, and Unrecoverable for what `check_requests` refuses and for a temperature
        that vLLM can't take.
        """
        self._check_loaded()
        check_requests(self._model, self._room, requests, sampling)
        if sampling.temperature and not _COLDEST <= sampling.temperature <= _HOTTEST:
            raise Unrecoverable(
                f"vLLM can't sample with temperature {sampling.temperature}: choose {_COLDEST} to {_HOTTEST}, or 0 for "
                f"the likeliest tokens",
                exit_code=2,
            )
        runs = [_Run(next(self._ids), request.prompt_ids, request.seed, sampling) for request in requests]
        self._begin(_side_by_side(runs))
        return [run.id for run in runs]

    def score(self, prompt_ids: Sequence[int], ids: Sequence[int]) -> list[float]:
        """Log-probs of `ids` after the prompt, at temperature 1. Others that run go on meanwhile.

        For each token a request like any other samples one token in its place. vLLM's own log-probs of a prompt
        would not do: for them it computes the prompt anew, so that they are right beside a stale prefix cache.
        Raises as `add` and `step` do.
        """
        self._check_loaded()
        sampling = Sampling(max_tokens=1)
        check_requests(self._model, self._room, [Request([*prompt_ids, *ids[:-1]], 0)], sampling)
        runs = [
            _Run(next(self._ids), [*prompt_ids, *ids[:place]], 0, sampling, scored=token)
            for place, token in enumerate(ids)
        ]
        self._begin(runs)
        done = self._wait_for({run.id for run in runs})
        return [done[run.id].logprobs[0] for run in runs]

    def step(self) -> list[Sampled]:
        """One token for each completion of the batch; those that have finished since the last call.

        Raises AdapterError when log-probs are not finite: NaN would stay in vLLM's memory of keys and values, and
        reach other completions, so that this engine samples no more.
        """
        finished, self._waiting = self._waiting, []
        return finished + self._advance()

    def _begin(self, runs: Iterable[_Run]) -> None:
        """Have vLLM take them from where they are, under the version that is loaded."""
        for run in runs:
            # A name is never given twice: vLLM may still be computing a token for a request that was taken out.
            name = str(next(self._names))
            run.version = self.version
            prompt = {"prompt_token_ids": [*run.prompt_ids, *run.ids]}
            parameters = self._parameters(run)
            self._engine.add_request(name, prompt, parameters, lora_request=self._adapters[run.version])
            self._running[name] = run

    def _go_on(self) -> None:
        """Have all that run go on under the version that is loaded, as if it had written what is there."""
        names = [name for name, run in self._running.items() if run.version != self.version]
        self._engine.abort_request(names)
        self._begin(_side_by_side([self._running.pop(name) for name in names]))

    def _wait_for(self, mine: set[int]) -> dict[int, Sample]:
        done = dict[int, Sample]()
        while len(done) < len(mine):
            for sampled in self._advance():
                if sampled.id in mine:
                    done[sampled.id] = sampled.sample
                else:
                    self._waiting.append(sampled)
        return done

    def _advance(self) -> list[Sampled]:
        self._check_usable()
        if not self._running:
            return []
        finished = list[Sampled]()
        for output in self._engine.step():
            self._take(output)
            if self._ends(output):
                finished.append(self._finish(output))
        self._let_go()
        return finished

    def _take(self, output: Any) -> None:
        """What one request has written since it was heard of last."""
        run = self._running[output.request_id]
        [completion] = output.outputs
        ids = list(completion.token_ids) if run.scored is None else [run.scored]
        logprobs = [step[token].logprob for step, token in zip(completion.logprobs, ids, strict=True)]
        if not all(map(math.isfinite, logprobs)):
            self._broken = (
                f"version {run.version} gives log-probs that are not finite: its training broke down, and what "
                f"it left in vLLM's memory would spoil other versions; start the engine again"
            )
            raise AdapterError(self._broken)
        run.ids += ids
        run.logprobs += logprobs
        run.versions += [run.version] * len(ids)

    def _ends(self, output: Any) -> bool:
        """Whether this request is over; vLLM has no tokenizer, so a text to stop at is found here."""
        run = self._running[output.request_id]
        run.stopped = self._stops.reached(run.ids, run.sampling.stop)
        if run.stopped and not output.finished:
            self._engine.abort_request([output.request_id])
        return run.stopped or output.finished

    def _finish(self, output: Any) -> Sampled:
        """What one request became."""
        run = self._running.pop(output.request_id)
        reason = "stop" if run.stopped else output.outputs[0].finish_reason
        if reason not in ("stop", "length"):
            raise RolecallError(f"vLLM ended a completion with {reason!r}")
        self.prompt_tokens += len(output.prompt_token_ids)
        self.cached_tokens += output.num_cached_tokens or 0
        text = self._tokenizer.decode(run.ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        assert isinstance(text, str)
        return Sampled(run.id, Sample(run.ids, run.logprobs, run.versions, reason, text))

    def _admit(self, version: int, folder: Path) -> None:
        """Check the adapter, then hand it to vLLM, which takes nonsense without a word."""
        rank = read_adapter(folder, self._shell).rank
        if rank > self._max_lora_rank:
            raise AdapterError(
                f"adapter {folder} has rank {rank}, and this engine was started for {self._max_lora_rank}: "
                f"start it with max_lora_rank={rank}"
            )
        if len(self._adapters) >= self._max_loras:
            log.info("version %d waits until one of %s is no longer in use", version, self.versions)
        while len(self._adapters) >= self._max_loras:
            self._waiting += self._advance()
        # Numbers start at 1 there.
        adapter = self._vllm.lora(f"v{version}", version + 1, str(folder))
        try:
            self._engine.add_lora(adapter)
        except (ValueError, RuntimeError) as error:
            raise AdapterError(
                f"vLLM can't serve the adapter {folder} ({first_line(error)}): publish one that it supports"
            ) from error
        self._adapters[version] = adapter

    def _let_go(self) -> None:
        """Have vLLM forget the versions that nobody needs."""
        needed = {self.version, *(run.version for run in self._running.values())}
        for version in self._adapters.keys() - needed:
            self._engine.remove_lora(self._adapters.pop(version).lora_int_id)

    def _check_loaded(self) -> None:
        self._check_usable()
        if self.version < 0:
            raise AdapterError("no adapter is loaded: load one first, the base model is no policy version")

    def _check_usable(self) -> None:
        if self._broken:
            raise AdapterError(self._broken)

    def _parameters(self, run: _Run) -> Any:
        scored = [] if run.scored is None else [run.scored]
        # What is written so far is needed to go on from there, or to stop; else it is less work to hear of it once.
        in_parts = self._inflight_swap or run.sampling.stop
        return self._vllm.parameters(
            temperature=run.sampling.temperature,
            max_tokens=run.sampling.max_tokens - len(run.ids),
            seed=_seed_at(run.seed, len(run.ids)),
            stop_token_ids=self._eos,
            logprobs=len(scored),  # of these, and always the sampled token's
            logprob_token_ids=scored or None,
            detokenize=False,
            output_kind=self._vllm.delta if in_parts else self._vllm.final_only,
        )


@dataclass
class _Run:
    """A request, and what has come of it: ids, logprobs and versions as in Sample, to be filled.

    scored:  the token whose log-prob is wanted, instead of that of the one token it samples.
    version: the one it is in vLLM under.
    stopped: whether it has come to a text to stop at.
    """

    id: int
    prompt_ids: list[int]
    seed: int
    sampling: Sampling
    scored: int | None = None
    version: int = -1
    stopped: bool = False
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)


def _side_by_side(runs: Iterable[_Run]) -> list[_Run]:
    """Siblings of one prompt next to each other, prompts in the order of their first."""
    families = dict[tuple[int, ...], list[_Run]]()
    for run in runs:
        families.setdefault(tuple(run.prompt_ids), []).append(run)
    return list(itertools.chain.from_iterable(families.values()))


def _seed_at(seed: int, position: int) -> int:
    """The seed to go on with after so many tokens: a new one, or the first draws would come again."""
    if position > 0:
        return random.Random(f"{seed} at {position}").getrandbits(63)
    return seed % 2**63  # vLLM keeps them in 64 bits with a sign, and takes −1 for none
