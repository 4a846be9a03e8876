"""Sampling with any causal language model of Hugging Face transformers, on a CPU or a GPU.

    add ─▶ queue ─▶ prefill ─▶ a cohort a version: rows in one key-value cache ─▶ a token a step ─▶ done

Imports torch, transformers and peft: only what runs inside an actor's `on_start` may import this module.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ...runtime.errors import Unrecoverable
from ..model import (
    AdapterError,
    encode_answer,
    encode_prompt,
    eos_ids,
    load_model,
    load_tokenizer,
    pick_device,
    read_adapter,
)
from . import Request, Sample, Sampled, Sampling, check_requests
from .batch import Batch, Forward
from .cohort import Cohort, Row
from .layers import MergedLayers, PeftLayers
from .stops import Stops

__all__ = ["TransformersEngine", "load_engine"]


class TransformersEngine:
    """Samples from `model`, which is the engine's from now on: adapters are put into its layers.

    max_loras:     versions that requests may be under at once, the newest included.
    max_num_seqs:  completions sampled at once; more of them queue.
    inflight_swap: completions that run go on under a version as soon as it is loaded. Their prompts and tokens are
                   read again under it, all in one go.

    version, dtype: as in Engine. Raises Unrecoverable for a model that keeps no key-value cache.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        *,
        max_loras: int = 2,
        max_num_seqs: int = 256,
        inflight_swap: bool = False,
    ) -> None:
        if max_loras < 1 or max_num_seqs < 1:
            raise Unrecoverable(
                f"cannot sample with max_loras={max_loras} and max_num_seqs={max_num_seqs}: there must be room "
                f"for one of each",
                exit_code=2,
            )
        self.version = -1
        self.dtype = str(model.dtype).removeprefix("torch.")
        self._model, self._tokenizer = model.eval(), tokenizer
        self._max_loras, self._max_num_seqs, self._inflight_swap = max_loras, max_num_seqs, inflight_swap
        self._eos, self._stops = eos_ids(model, tokenizer), Stops(tokenizer)
        self._forward = Forward(model)
        # In 16 bits most of a small B·A would be rounded away when added to W, so there it stays a term of
        # its own; in float32 it fits, and merged layers are as fast as the base model's.
        self._layers = MergedLayers(model) if model.dtype == torch.float32 else PeftLayers(model)
        self._digests: dict[int, str] = {}  # of every version there ever was
        self._queue = deque[Row]()
        self._cohorts: list[Cohort] = []
        self._finished: list[Sampled] = []
        self._next_id = 0

    @property
    def versions(self) -> list[int]:
        """The one that requests are added under, and those that some are still under."""
        return self._layers.versions

    @property
    def running(self) -> int:
        """Requests that were added and that no `step` has returned yet."""
        return len(self._queue) + sum(len(cohort.rows) for cohort in self._cohorts) + len(self._finished)

    def load(self, version: int, digest: str, folder: Path) -> None:
        """Add requests under the PEFT adapter in `folder` from now on; those that run finish under their own.

        When `max_loras` versions are in use, it steps until one is not: what finishes meanwhile is returned by
        the next `step`. With `inflight_swap` those that run go on under the new version instead. A refused
        adapter (AdapterError) changes nothing.
        """
        known = self._digests.get(version, digest)
        if known != digest:
            raise AdapterError(
                f"version {version} had the digest {known} before, and has {digest} now: a version never changes, "
                f"publish other weights under another number"
            )
        if version not in self._layers.versions:
            adapter = read_adapter(folder, self._model)
            while not self._inflight_swap and len(self._busy()) >= self._max_loras:
                self._advance()
            self._layers.add(version, adapter)
        swapped = version != self.version
        self.version, self._digests[version] = version, digest
        if swapped and self._inflight_swap:
            self._rewind()
        self._let_go()

    def encode(self, text: str) -> list[int]:
        """A prompt's token ids, as the model wants it asked."""
        return encode_prompt(self._tokenizer, text)

    def encode_answer(self, text: str, ids: Sequence[int]) -> list[int]:
        """Token ids of what is answered to a turn (`ids`) that was sampled; see Engine."""
        return encode_answer(self._tokenizer, text, ended=ids[-1] in self._eos)

    def add(self, requests: Sequence[Request], sampling: Sampling) -> list[int]:
        """Queue requests under the version that is loaded; an id for each, in their order.

        A request's tokens depend on its own seed alone, within the rounding of the model's dtype. Each distinct
        prompt among those that start in one step is computed once. Raises AdapterError before the first `load`,
        and Unrecoverable for settings or prompts that no adapter could be sampled with.
        """
        self._check(requests, sampling)
        ids = list(range(self._next_id, self._next_id + len(requests)))
        self._next_id += len(requests)
        self._queue.extend(
            Row(id, self.version, request, sampling) for id, request in zip(ids, requests, strict=True)
        )
        return ids

    def step(self) -> list[Sampled]:
        """One more token of each completion that there is room for; those finished since the last call.

        Raises AdapterError when log-probs are not finite: the requests of that version, which are all lost, are
        dropped then, and those of others go on.
        """
        self._advance()
        finished, self._finished = self._finished, []
        return finished

    @torch.inference_mode()
    def score(self, prompt_ids: Sequence[int], ids: Sequence[int]) -> list[float]:
        """Log-probs of `ids` after the prompt, at temperature 1: one reading, for nothing is kept between requests.

        It takes about as long as a step. Raises as `add` does.
        """
        self._check([Request([*prompt_ids, *ids[:-1]], 0)], Sampling(max_tokens=1))
        if not ids:
            return []
        self._layers.use(self.version)
        logprobs = torch.log_softmax(Batch.logits_of(self._forward, prompt_ids, ids).float(), dim=-1)
        return logprobs[range(len(ids)), ids].tolist()

    def _check(self, requests: Sequence[Request], sampling: Sampling) -> None:
        if self.version < 0:
            raise AdapterError("no adapter is loaded: load one first, the base model is no policy version")
        room = getattr(self._model.config.get_text_config(), "max_position_embeddings", None)
        check_requests(
            self._model.name_or_path or "", room if isinstance(room, int) else None, requests, sampling
        )

    @torch.inference_mode()
    def _advance(self) -> None:
        """A token for every row; those that are done join `_finished`."""
        self._start()
        for cohort in self._cohorts[:]:
            self._layers.use(cohort.version)
            done = cohort.draw(self._eos, self._stops)
            if not cohort.finite:
                self._abandon(cohort.version)
                raise AdapterError(
                    f"version {cohort.version} gives log-probs that are not finite: its training broke down"
                )
            self._finish(done)
            if not cohort.rows:
                self._cohorts.remove(cohort)
                self._let_go()
            else:
                cohort.extend()

    def _start(self) -> None:
        """Prefill what is queued, as far as there is room, and have it join the rows of its version."""
        room = self._max_num_seqs - sum(len(cohort.rows) for cohort in self._cohorts)
        starting = dict[int, list[Row]]()
        while room > 0 and self._queue:
            row = self._queue.popleft()
            starting.setdefault(row.version, []).append(row)
            room -= 1
        for version, rows in starting.items():
            self._layers.use(version)
            running = [cohort for cohort in self._cohorts if cohort.version == version]
            others = [cohort for cohort in self._cohorts if cohort.version != version]
            self._cohorts = others + Cohort.begin(self._forward, rows, running)

    def _finish(self, rows: Sequence[Row]) -> None:
        if not rows:
            return
        texts = self._tokenizer.batch_decode(
            [row.ids for row in rows], skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        for row, text in zip(rows, texts, strict=True):
            sample = Sample(row.ids, row.logprobs, row.versions, row.finish_reason, text)
            self._finished.append(Sampled(row.id, sample))

    def _rewind(self) -> None:
        """Have all that run be read again, under the version that is loaded."""
        under_way = sorted((row for cohort in self._cohorts for row in cohort.rows), key=lambda row: row.id)
        self._queue.extendleft(reversed(under_way))
        self._cohorts = []
        for row in self._queue:
            row.version = self.version

    def _abandon(self, version: int) -> None:
        self._queue = deque(row for row in self._queue if row.version != version)
        self._cohorts = [cohort for cohort in self._cohorts if cohort.version != version]
        self._let_go()

    def _busy(self) -> set[int]:
        """The versions that requests are under."""
        return {row.version for row in self._queue} | {cohort.version for cohort in self._cohorts}

    def _let_go(self) -> None:
        """Forget the versions that nobody needs."""
        for version in set(self._layers.versions) - self._busy() - {self.version}:
            self._layers.drop(version)


def load_engine(
    model: str, *, max_loras: int = 2, max_num_seqs: int = 256, inflight_swap: bool = False
) -> TransformersEngine:
    """An engine for `model` (as `load_model` takes it) on the best device there is.

    float32 on a CPU, bfloat16 elsewhere: what the trainer computes in as well.
    """
    device = pick_device()
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    return TransformersEngine(
        load_model(model, device=device, dtype=dtype),
        load_tokenizer(model),
        max_loras=max_loras,
        max_num_seqs=max_num_seqs,
        inflight_swap=inflight_swap,
    )
