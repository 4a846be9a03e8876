"""Groups into rows of tokens: the prompt once, then its completions as the branches of a tree.

    prompt ──▶ 1 2 + 7 = 1 9 ──▶ / 1 9 - 4 …      one row; a token sees the prompt and the tokens that
                        └──────▶ \\n # # # # …     lead to it, so siblings that begin alike share the start

A token is forwarded once however many siblings share it, and the last token of a completion, after which
nothing is predicted, not at all. Log-probabilities are those of the sequences forwarded one by one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..runtime.errors import Unrecoverable
from .types import Completion, Group, Prompt

__all__ = ["Batch", "Packed", "pack", "pack_answers"]

MAX_PADDING = 1 / 8  # share of a batch; a row that would bring more starts the next batch


@dataclass(frozen=True, kw_only=True)
class Batch:
    """A micro-batch of B rows, L tokens long, that hold N sampled tokens.

    input_ids, position_ids: [B, L] int64; positions of each completion go on from the prompt's.
    attention_mask:          [B, 1, L, L] bool: query (third axis) may see key (fourth); padding sees itself.
    predictor:               [N] int64: place in the flattened [B·L] of the token that predicts this one;
                             for the first token of a completion the prompt's last.
    target:                  [N] int64: the sampled token.
    lp_gen, advantage:       [N] float32.
    loss_mask:               [N] bool: true where the token is trained: where the policy sampled it.
    completion:              [N] int64: number of its completion, counted through all groups given to `pack`.
    tokens:                  places of [B, L] that are not padding.
    """

    input_ids: Tensor
    position_ids: Tensor
    attention_mask: Tensor
    predictor: Tensor
    target: Tensor
    lp_gen: Tensor
    advantage: Tensor
    loss_mask: Tensor
    completion: Tensor
    tokens: int

    def to(self, device: torch.device | str) -> Batch:
        """The same batch with its tensors on `device`."""
        tensors = {name: value.to(device) for name, value in vars(self).items() if isinstance(value, Tensor)}
        return replace(self, **tensors)


@dataclass(frozen=True, kw_only=True)
class Packed:
    """One optimizer step's micro-batches.

    trained_tokens: sampled tokens with a true loss mask, over all batches.
    skipped_groups: groups left out because every advantage is 0: they carry no gradient.
    fill:           share of the batches' places that are not padding; 1 when there are none.
    """

    batches: list[Batch]
    trained_tokens: int
    skipped_groups: int
    fill: float


class _Branch(NamedTuple):
    """A completion in its row: the first `shared` of its inputs are those of the branch before it."""

    completion: Completion
    number: int
    advantage: float
    ids: np.ndarray
    shared: int


class _Row(NamedTuple):
    prompt: np.ndarray
    branches: list[_Branch]
    length: int


def pack(
    groups: Sequence[Group],
    advantages: Sequence[Sequence[float]],
    *,
    row_tokens: int,
    mask_truncated: bool = False,
) -> Packed:
    """Lay groups out in micro-batches of at most `row_tokens` places, padding included.

    advantages:     one per completion of each group; a group of zeros is not packed.
    row_tokens:     a group that needs more gets several rows, each with the prompt.
    mask_truncated: false loss mask on completions with finish_reason "length".

    Tokens that an environment wrote have a false loss mask.

    Raises Unrecoverable when a prompt with one completion is longer than `row_tokens`, ValueError when a prompt
    is empty or a completion lacks a log-probability for a token.
    """
    rows: list[_Row] = []
    number, skipped = 0, 0
    for group, values in zip(groups, advantages, strict=True):
        if any(values):
            rows += _rows(group, values, number, row_tokens)
        else:
            skipped += 1
        number += len(group.completions)
    rows.sort(key=lambda row: row.length, reverse=True)
    batches = [_batch(together, mask_truncated) for together in _cut(rows, row_tokens)]
    places = sum(batch.input_ids.numel() for batch in batches)
    return Packed(
        batches=batches,
        trained_tokens=sum(int(batch.loss_mask.sum()) for batch in batches),
        skipped_groups=skipped,
        fill=sum(batch.tokens for batch in batches) / places if places else 1.0,
    )


def pack_answers(prompt_ids: list[int], answers: Sequence[list[int]]) -> Batch:
    """A prompt and its answers in one row, with every token trained: to compute log-probs, not to learn."""
    completions = [
        Completion(ids=ids, logprobs=[0.0] * len(ids), versions=[0] * len(ids), finish_reason="stop", text="")
        for ids in answers
    ]
    prompt = Prompt(id=0, text="", answer="")
    group = Group(prompt=prompt, prompt_ids=prompt_ids, completions=completions, digests={}, worker="")
    row_tokens = len(prompt_ids) + sum(map(len, answers))
    return pack([group], [[1.0] * len(answers)], row_tokens=row_tokens).batches[0]


def _rows(group: Group, advantages: Sequence[float], first: int, row_tokens: int) -> list[_Row]:
    """The group's completions in rows; sorted, so that each shares its start with the one before it."""
    _check(group)
    prompt = np.asarray(group.prompt_ids)
    rows: list[_Row] = []
    branches: list[_Branch] = []
    length = len(prompt)
    order = sorted(range(len(group.completions)), key=lambda i: group.completions[i].ids)
    for i in order:
        completion = group.completions[i]
        ids = np.asarray(completion.ids)
        inputs = len(ids) - 1
        shared = _shared(branches[-1].ids[:-1], ids[:-1]) if branches else 0
        if branches and length + inputs - shared > row_tokens:
            rows.append(_Row(prompt, branches, length))
            branches, length, shared = [], len(prompt), 0
        length += inputs - shared
        if length > row_tokens:
            raise Unrecoverable(
                f"group {group.id}: its prompt and one completion take {length} tokens, a row holds "
                f"row_tokens={row_tokens}: set that to the longest prompt plus the longest completion, or more",
                exit_code=2,
            )
        branches.append(_Branch(completion, first + i, advantages[i], ids, shared))
    return [*rows, _Row(prompt, branches, length)]


def _check(group: Group) -> None:
    if not group.prompt_ids:
        raise ValueError(
            f"group {group.id} of {group.worker} has an empty prompt: nothing predicts a first token"
        )
    for completion in group.completions:
        if len(completion.ids) != len(completion.logprobs) or not completion.ids:
            raise ValueError(
                f"group {group.id} of {group.worker} has a completion of {len(completion.ids)} tokens with "
                f"{len(completion.logprobs)} log-probabilities: it needs one for each, and at least one token"
            )
        if completion.mask and len(completion.mask) != len(completion.ids):
            raise ValueError(
                f"group {group.id} of {group.worker} has a completion of {len(completion.ids)} tokens with a mask of "
                f"{len(completion.mask)}: it needs one value for each, or none at all"
            )


def _shared(a: np.ndarray, b: np.ndarray) -> int:
    """Length of the common start."""
    n = min(len(a), len(b))
    different = a[:n] != b[:n]
    return int(different.argmax()) if different.any() else n


def _cut(rows: Sequence[_Row], row_tokens: int) -> list[list[_Row]]:
    """Batches of rows, given longest first: within the budget, and without much padding."""
    batches: list[list[_Row]] = []
    used = 0
    for row in rows:
        if batches:
            longest, count = batches[-1][0].length, len(batches[-1]) + 1
            padding = 1 - (used + row.length) / (longest * count)
            if longest * count <= row_tokens and padding <= MAX_PADDING:
                batches[-1].append(row)
                used += row.length
                continue
        batches.append([row])
        used = row.length
    return batches


def _batch(rows: Sequence[_Row], mask_truncated: bool) -> Batch:
    size, length = len(rows), rows[0].length
    ids = np.zeros((size, length), np.int64)
    positions = np.zeros((size, length), np.int64)
    visible = np.zeros((size, length, length), bool)
    visible[:, range(length), range(length)] = True
    predictors: list[np.ndarray] = []
    for i, row in enumerate(rows):
        predictors += [i * length + p for p in _write(row, ids[i], positions[i], visible[i])]

    branches = [branch for row in rows for branch in row.branches]
    counts = np.array([len(branch.ids) for branch in branches])
    trained = np.concatenate([_trained(branch.completion, mask_truncated) for branch in branches])
    lp_gen = np.concatenate([np.asarray(branch.completion.logprobs, np.float32) for branch in branches])

    def spread(values: Sequence[float], dtype: type) -> Tensor:
        return torch.from_numpy(np.repeat(np.array(values, dtype), counts))

    return Batch(
        input_ids=torch.from_numpy(ids),
        position_ids=torch.from_numpy(positions),
        attention_mask=torch.from_numpy(visible)[:, None],
        predictor=torch.from_numpy(np.concatenate(predictors)),
        target=torch.from_numpy(np.concatenate([branch.ids for branch in branches])),
        lp_gen=torch.from_numpy(lp_gen),
        advantage=spread([branch.advantage for branch in branches], np.float32),
        loss_mask=torch.from_numpy(trained),
        completion=spread([branch.number for branch in branches], np.int64),
        tokens=sum(row.length for row in rows),
    )


def _trained(completion: Completion, mask_truncated: bool) -> np.ndarray:
    """[ids] bool."""
    if mask_truncated and completion.finish_reason == "length":
        return np.zeros(len(completion.ids), np.bool_)
    return np.array(completion.mask or [True] * len(completion.ids), np.bool_)


def _write(row: _Row, ids: np.ndarray, positions: np.ndarray, visible: np.ndarray) -> list[np.ndarray]:
    """Fill one row in place; give for each branch the places that predict its tokens."""
    start = end = len(row.prompt)
    ids[:start], positions[:start] = row.prompt, np.arange(start)
    visible[:start, :start] = np.tri(start, dtype=bool)
    visible[start : row.length, :start] = True
    path = np.empty(0, np.int64)  # places of the tokens that lead to the end of the last branch
    predictors: list[np.ndarray] = []
    for branch in row.branches:
        inputs, shared = branch.ids[:-1], path[: branch.shared]
        new = slice(end, end + len(inputs) - branch.shared)
        ids[new] = inputs[branch.shared :]
        positions[new] = np.arange(start + branch.shared, start + len(inputs))
        visible[new, shared] = True
        visible[new, new] = np.tri(new.stop - end, dtype=bool)
        path = np.concatenate([shared, np.arange(end, new.stop)])
        predictors.append(np.concatenate([[start - 1], path]))
        end = new.stop
    return predictors
