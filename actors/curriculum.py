"""Which rows are worth sampling: those that are now and then solved, now and then not."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path

import msgspec

from ..runtime.files import write_whole
from .data import Dataset, Row

__all__ = ["Curriculum"]

WEIGHT = 0.5  # of a row's newest success rate in what is remembered of it
LEAST = 0.1  # chance of a row that was always or never solved: it may have become worth it
REMEMBERED = 200_000  # rows, of a data set without an end
KEPT = 10_000  # trained prompts whose rows are remembered, for a trainer that goes back to a checkpoint
MOST_SKIPPED = 50  # rows in a row, before one is taken whatever it is


class _State(msgspec.Struct):
    """rates: success rate of each row that was seen, by its digest. cursor: the next row to consider.

    planned: prompts have rows below this number. rows: of each that may be lent, its row. trained: the last of those
    that were, in that order.
    """

    rates: dict[str, float] = {}
    cursor: int = 0
    planned: int = 0
    rows: dict[int, int] = {}
    trained: list[int] = []


class Curriculum:
    """An endless sequence of rows out of another: a Dataset that skips what is too easy or too hard by now.

    A group has a gradient only if its completions differ in reward, so of a row that is solved with probability p the
    chance to be taken is 4·p·(1 − p), and never less than LEAST; rows that nobody has tried are taken. What a prompt's
    row is, is decided once and kept in `file`: whoever samples it again samples the same.
    """

    def __init__(self, dataset: Dataset, file: Path, *, seed: int) -> None:
        self._dataset, self._file, self._seed = dataset, file, seed
        self._state = msgspec.json.decode(file.read_bytes(), type=_State) if file.exists() else _State()

    def __getitem__(self, index: int) -> Row:
        """The row of a prompt that is planned."""
        return self._dataset[self._state.rows[index]]

    def learn(self, successes: Mapping[int, float]) -> None:
        """How much of a prompt's completions was right, 0 to 1, by its number."""
        state = self._state
        for id, rate in successes.items():
            key = _digest(self[id])
            before = state.rates.get(key, rate)
            state.rates[key] = before + WEIGHT * (rate - before)
            state.trained.append(id)
        for key in list(state.rates)[: max(0, len(state.rates) - REMEMBERED)]:
            del state.rates[key]
        for id in state.trained[:-KEPT]:
            state.rows.pop(id, None)
        del state.trained[:-KEPT]

    def plan(self, until: int) -> None:
        """Decide the rows of the prompts below number `until`, by what is known by now."""
        state = self._state
        while state.planned < until:
            state.rows[state.planned] = self._choose()
            state.planned += 1
        write_whole(self._file, self.snapshot())

    def snapshot(self) -> bytes:
        return msgspec.json.encode(self._state)

    def restore(self, state: bytes) -> None:
        self._state = msgspec.json.decode(state, type=_State)
        write_whole(self._file, state)

    def _choose(self) -> int:
        state = self._state
        for _ in range(MOST_SKIPPED):
            rate = state.rates.get(_digest(self._dataset[state.cursor]))
            if rate is None or self._draw(state.cursor) < max(LEAST, 4 * rate * (1 - rate)):
                break
            state.cursor += 1
        state.cursor += 1
        return state.cursor - 1

    def _draw(self, index: int) -> float:
        key = f"{self._seed}/{index}".encode()
        return int.from_bytes(hashlib.blake2b(key, digest_size=8).digest()) / 2**64


def _digest(row: Row) -> str:
    return hashlib.blake2b(row[0].encode(), digest_size=8).hexdigest()
