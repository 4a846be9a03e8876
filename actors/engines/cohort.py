"""Completions under way under one policy version: which of them each row of a batch is, and how tokens are drawn.

Imports torch and transformers: only what runs inside an actor's `on_start` may import this module.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence

import numpy as np
import torch

from . import Request, Sampling
from .batch import Batch, Forward
from .stops import Stops

__all__ = ["Cohort", "Row"]

# Dropping finished rows copies the cache of all the others: wait until it pays.
_DROP_BELOW = 0.75
# Tokens of one prefill, padding included: what it computes must fit beside the caches.
_PREFILL_TOKENS = 16384


class Row:
    """A completion under way: what was asked for, and what has become of it so far."""

    def __init__(self, id: int, version: int, request: Request, sampling: Sampling) -> None:
        self.id, self.version = id, version
        self.ids: list[int] = []
        self.logprobs: list[float] = []
        self.versions: list[int] = []
        self.temperature, self.max_tokens, self.stop = (
            sampling.temperature,
            sampling.max_tokens,
            sampling.stop,
        )
        self.finish_reason = ""
        self._prompt_ids = request.prompt_ids
        # Philox is a counter-based generator: streams of different seeds need no warm-up and do not overlap.
        stream = np.random.Generator(np.random.Philox(key=request.seed))
        self.uniforms = stream.random(sampling.max_tokens).data  # in [0, 1), one for each token

    @property
    def read(self) -> tuple[int, ...]:
        """The tokens that come before the next."""
        return (*self._prompt_ids, *self.ids)


class Cohort:
    """Rows under one version.

    rows:    those that are not done.
    version: theirs.
    finite:  whether all log-probs so far are.
    """

    def __init__(self, batch: Batch, rows: Sequence[Row]) -> None:
        """rows: the batch's, in its order."""
        self.version, self.finite = rows[0].version, True
        self._hold(batch, rows)
        self._chosen = torch.empty(0)

    @classmethod
    def begin(cls, forward: Forward, rows: Sequence[Row], running: Sequence[Cohort]) -> list[Cohort]:
        """Read these rows, and have them join those that run, which are used up; all are under one version.

        What several of the new ones have in common is read once. One cohort where the model lets batches be
        merged, else those there were and new ones.
        """
        started = list[tuple[Batch, list[int], list[Row]]]()
        for piece in _pieces(rows):
            distinct: dict[tuple[int, ...], int] = {}
            owners = [distinct.setdefault(row.read, len(distinct)) for row in piece]
            started.append((Batch(forward, list(distinct)), owners, piece))
        if not started[0][0].mergeable:
            return [*running, *(cls(Batch.gather([(batch, at)]), piece) for batch, at, piece in started)]
        parts = [(cohort._batch, cohort._places, cohort.rows) for cohort in running] + started
        batch = Batch.gather([(batch, at) for batch, at, _ in parts])
        return [cls(batch, [row for _, _, rows in parts for row in rows])]

    def _hold(self, batch: Batch, rows: Sequence[Row]) -> None:
        self.rows, self._batch = list(rows), batch
        self._places = list(
            range(len(rows))
        )  # of `rows` in the batch, which keeps those that are done a while
        device = batch.logits.device
        temperatures = [row.temperature for row in rows]
        self._greedy = self._divisor = None
        if 0 in temperatures:
            self._greedy = torch.tensor([temperature == 0 for temperature in temperatures], device=device)
        if any(temperature not in (0, 1) for temperature in temperatures):
            self._divisor = torch.tensor([value or 1.0 for value in temperatures], device=device)[:, None]

    def draw(self, eos: Collection[int], stops: Stops) -> list[Row]:
        """Add a token to every row; those that are done by it, which leave."""
        uniforms = [0.0] * len(self._batch)
        for place, row in zip(self._places, self.rows, strict=True):
            uniforms[place] = row.uniforms[len(row.ids)]
        self._chosen, logprobs = _draw(self._batch.logits, uniforms, self._divisor, self._greedy)
        tokens, values = self._chosen.tolist(), logprobs.tolist()
        rows, places, done = list[Row](), list[int](), list[Row]()
        for place, row in zip(self._places, self.rows, strict=True):
            token, value = tokens[place], values[place]
            row.ids.append(token)
            row.logprobs.append(value)
            row.versions.append(self.version)
            self.finite = self.finite and math.isfinite(value)
            if token in eos or stops.reached(row.ids, row.stop):
                row.finish_reason = "stop"
                done.append(row)
            elif len(row.ids) == row.max_tokens:
                row.finish_reason = "length"
                done.append(row)
            else:
                rows.append(row)
                places.append(place)
        self.rows, self._places = rows, places
        return done

    def extend(self) -> None:
        """Read the tokens that were drawn."""
        if len(self.rows) < _DROP_BELOW * len(self._batch):
            self._chosen = self._chosen[self._places]
            self._hold(Batch.gather([(self._batch, self._places)]), self.rows)
        self._batch.extend(self._chosen)


def _pieces(rows: Sequence[Row]) -> Iterator[list[Row]]:
    """The rows in parts that one prefill can take, those of one length, and of one prompt, side by side."""
    piece, distinct = list[Row](), set[tuple[int, ...]]()
    for row in sorted(rows, key=lambda row: (len(row.read), row.read)):
        if row.read not in distinct and (len(distinct) + 1) * len(row.read) > _PREFILL_TOKENS and piece:
            yield piece
            piece, distinct = [], set()
        piece.append(row)
        distinct.add(row.read)
    yield piece


def _draw(
    logits: torch.Tensor,
    uniforms: Sequence[float],
    divisor: torch.Tensor | None,
    greedy: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """One token for each row of `logits` (rows × vocabulary), and its log-prob (float32).

    divisor: rows × 1, what to divide them by. greedy: rows, where the likeliest is taken.

    By inversion: the first token whose cumulative probability exceeds u. (torch.multinomial would draw a
    number for every token of the vocabulary.) The sum is in float64: in float32 its rounding shifts rare
    tokens, and a u rounded up to 1 could pick a token of probability 0.
    """
    logits = logits.float()
    if divisor is not None:
        logits = logits / divisor
    logprobs = torch.log_softmax(logits, dim=-1)
    cumulative = logprobs.exp().cumsum(dim=-1, dtype=torch.float64)
    point = cumulative[:, -1:] * torch.tensor(uniforms, dtype=torch.float64, device=logits.device)[:, None]
    chosen = torch.searchsorted(cumulative, point, right=True)
    chosen = chosen.clamp(max=logits.shape[-1] - 1)  # only NaN reaches past the end; it is reported later
    if greedy is not None:
        chosen = torch.where(greedy[:, None], logits.argmax(dim=-1, keepdim=True), chosen)
    return chosen.squeeze(1), logprobs.gather(1, chosen).squeeze(1)
