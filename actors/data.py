"""Data sets: rows of (prompt text, reference answer), by index, from wherever the name says they are."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Protocol

from ..runtime import Unrecoverable
from .tiny import problems

__all__ = ["Dataset", "Row", "load_dataset"]

Row = tuple[str, str]

_CONNECT_TIMEOUT_S = 5.0
_TINY = {"tiny": problems.PLAIN, "tiny-hard": problems.HARD}


class Dataset(Protocol):
    """An endless, seeded sequence of rows: row i is the same whenever and wherever it is asked for."""

    def __getitem__(self, index: int, /) -> Row: ...


def load_dataset(name: str, *, seed: int) -> Dataset:
    """The training sequence called `name`.

    "tiny", "tiny-hard": templated word problems, never one of the held-out ones.
    "tasks.jsonl":  a file of JSON lines with "prompt" (or "question", "problem") and "answer" ("solution").
    "owner/name", "owner/name:config", "owner/name:config:split": a data set of the Hugging Face hub.

    Rows of a file or a hub data set are shuffled anew for every pass. Raises Unrecoverable (exit code 2),
    naming the data set and the way out, if it can't be read, has no rows, or a row lacks a column.
    """
    if name in _TINY:
        return _Problems(problems.training(seed, _TINY[name]))
    rows = _read_jsonl(Path(name)) if name.endswith((".jsonl", ".json")) else _read_hub(name)
    if not rows:
        raise Unrecoverable(f"the data set {name} has no rows: give one with at least one", exit_code=2)
    return _Shuffled(rows, seed)


def load_rows(name: str, count: int) -> list[Row]:
    """The first `count` rows of a data set to evaluate on, or all there are; for "tiny" and "tiny-hard" the held-out problems.

    Raises Unrecoverable (exit code 2) as `load_dataset` does, and for more held-out problems than there are.
    """
    if name in _TINY:
        if count > problems.HELD_OUT:
            raise Unrecoverable(
                f"{count} problems to evaluate on were asked for; {name} has {problems.HELD_OUT}: ask for fewer",
                exit_code=2,
            )
        return [(problem.text, problem.answer) for problem in problems.held_out(count, _TINY[name])]
    dataset = load_dataset(name, seed=0)
    assert isinstance(dataset, _Shuffled)
    return list(dataset.rows[:count])


class _Problems:
    def __init__(self, source: Iterator[problems.Problem]) -> None:
        self._drawn: list[Row] = []
        self._source = source

    def __getitem__(self, index: int) -> Row:
        missing = index + 1 - len(self._drawn)
        for problem in itertools.islice(self._source, max(0, missing)):
            self._drawn.append((problem.text, problem.answer))
        return self._drawn[index]


class _Shuffled:
    def __init__(self, rows: Sequence[Row], seed: int) -> None:
        self.rows, self._seed = rows, seed
        self._pass, self._order = -1, list(range(len(rows)))

    def __getitem__(self, index: int) -> Row:
        which, at = divmod(index, len(self.rows))
        if which != self._pass:
            self._pass, self._order = which, list(range(len(self.rows)))
            random.Random(f"{self._seed}/{which}").shuffle(self._order)
        return self.rows[self._order[at]]


def _read_jsonl(path: Path) -> list[Row]:
    try:
        lines = path.read_text("utf-8").split("\n")  # splitlines would cut at U+2028, which JSON allows
    except OSError as error:
        raise Unrecoverable(
            f"can't read the data set {path}: {error.strerror}; check the path", exit_code=2
        ) from error
    except UnicodeDecodeError as error:
        raise Unrecoverable(f"the data set {path} is not UTF-8: {error}", exit_code=2) from error
    rows = []
    for number, line in enumerate(lines, 1):
        if line.strip():
            where = f"line {number} of {path}"
            try:
                values = json.loads(line)
            except json.JSONDecodeError as error:
                raise Unrecoverable(
                    f"{where} is not JSON ({error}): give one object a line", exit_code=2
                ) from error
            rows.append(_row(values, where))
    return rows


def _read_hub(name: str) -> list[Row]:
    try:
        import datasets
        from datasets.exceptions import DatasetsError
    except ImportError as error:
        raise Unrecoverable(
            f"the data set {name} comes from the Hugging Face hub: pip install 'rolecall[hub]', or give the path "
            "of a .jsonl file",
            exit_code=2,
        ) from error
    repository, _, rest = name.partition(":")
    config, _, split = rest.partition(":")
    _stay_offline_without_network()
    try:
        table = datasets.load_dataset(repository, config or None, split=split or "train")
    except (OSError, ValueError, RuntimeError, DatasetsError) as error:
        first_line = next(iter(str(error).splitlines()), type(error).__name__)
        raise Unrecoverable(
            f"can't load the data set {name}: {first_line}; check the name (owner/name:config:split) and the "
            "connection",
            exit_code=2,
        ) from error
    return [_row(row, f"row {number} of {name}") for number, row in enumerate(table)]


def _stay_offline_without_network() -> None:
    """Else the hub's client would retry for half a minute before it looked into its cache."""
    import datasets.config
    import httpx
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        return
    try:
        httpx.head(constants.ENDPOINT, timeout=_CONNECT_TIMEOUT_S)
    except httpx.HTTPError:
        constants.HF_HUB_OFFLINE = datasets.config.HF_HUB_OFFLINE = True


def _row(values: object, where: str) -> Row:
    if isinstance(values, dict):
        text = next((values[key] for key in ("prompt", "question", "problem") if key in values), None)
        answer = next((values[key] for key in ("answer", "solution") if key in values), None)
        if isinstance(text, str) and isinstance(answer, str | int | float):
            return text, str(answer)
    raise Unrecoverable(
        f'{where} needs a text "prompt" (or "question", "problem") and an "answer" (or "solution")',
        exit_code=2,
    )
