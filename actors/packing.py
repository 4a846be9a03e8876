"""Groups into rows of tokens: the prompt once, then its completions as the branches of a tree.

    prompt ──▶ 1 2 + 7 = 1 9 ──▶ / 1 9 - 4 …      one tree; a token sees the prompt and the tokens that
                        └──────▶ \\n # # # # …     lead to it, so siblings that begin alike share the start

A row holds one tree, and rows of about the same length make a batch; or, joined, a batch is one row of many trees.

A token is forwarded once however many siblings share it, and the last token of a completion, after which
nothing is predicted, not at all. Log-probabilities are those of the sequences forwarded one by one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import ceil, log2
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..runtime.errors import Unrecoverable
from .attention import BLOCK
from .types import Completion, Group, Prompt

__all__ = ["Batch", "Packed", "pack", "pack_answers"]

MAX_PADDING = 1 / 8  # share of a batch; a row that would bring more starts the next batch


@dataclass(frozen=True, kw_only=True)
class Batch:
    """A micro-batch of B rows, L tokens long, that hold N sampled tokens.

    input_ids, position_ids: [B, L] int64; positions of each completion go on from the prompt's.
    ends:                    [B, L] int64: what may see each token, see `attention`; padding sees itself.
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
    ends: Tensor
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

    trained_tokens:    sampled tokens with a true loss mask, over all batches.
    trained_sequences: completions that have one.
    skipped_groups:    groups left out because every advantage is 0.
    fill:              share of the batches' places that are not padding; 1 when there are none.
    """

    batches: list[Batch]
    trained_tokens: int
    trained_sequences: int
    skipped_groups: int
    fill: float


class _Branch(NamedTuple):
    """A completion in its row: the first `shared` of its inputs are those of the branch before it."""

    completion: Completion
    number: int
    advantage: float
    ids: np.ndarray
    shared: int


class _Tree(NamedTuple):
    prompt: np.ndarray
    branches: list[_Branch]
    length: int


def pack(
    groups: Sequence[Group],
    advantages: Sequence[Sequence[float]],
    *,
    row_tokens: int,
    joined: bool = False,
    mask_truncated: bool = False,
    keep_zeros: bool = False,
) -> Packed:
    """Lay groups out in micro-batches of at most `row_tokens` places, padding included.

    advantages:     one per completion of each group.
    row_tokens:     a group that needs more gets several trees, each with the prompt.
    joined:         lay trees one behind the other in one row, of BLOCK places, twice that, four times … and at most
                    row_tokens: for what attends block by block, and is compiled for each length.
    mask_truncated: false loss mask on completions with finish_reason "length".
    keep_zeros:     pack groups whose advantages are all 0, too: they have a gradient if the loss has a KL.

    Tokens that an environment wrote have a false loss mask.

    Raises Unrecoverable when a prompt with one completion is longer than `row_tokens`, ValueError when a prompt
    is empty, a completion lacks a log-probability for a token, or row_tokens are no whole BLOCKs but joined.
    """
    if joined and row_tokens % BLOCK:
        raise ValueError(f"joined rows are made of blocks of {BLOCK}: row_tokens={row_tokens} is no multiple")
    trees: list[_Tree] = []
    number, skipped = 0, 0
    for group, values in zip(groups, advantages, strict=True):
        if keep_zeros or any(values):
            trees += _trees(group, values, number, row_tokens)
        else:
            skipped += 1
        number += len(group.completions)
    trees.sort(key=lambda tree: tree.length, reverse=True)
    rows = _join(trees, row_tokens) if joined else _cut(trees, row_tokens)
    batches = [_batch(together, length, mask_truncated) for together, length in rows]
    places = sum(batch.input_ids.numel() for batch in batches)
    return Packed(
        batches=batches,
        trained_tokens=sum(int(batch.loss_mask.sum()) for batch in batches),
        trained_sequences=sum(len(batch.completion[batch.loss_mask].unique()) for batch in batches),
        skipped_groups=skipped,
        fill=sum(batch.tokens for batch in batches) / places if places else 1.0,
    )


def pack_answers(prompt_ids: list[int], answers: Sequence[list[int]], *, joined: bool = False) -> Batch:
    """A prompt and its answers in one row, with every token trained: to compute log-probs, not to learn."""
    completions = [
        Completion(ids=ids, logprobs=[0.0] * len(ids), versions=[0] * len(ids), finish_reason="stop", text="")
        for ids in answers
    ]
    prompt = Prompt(id=0, text="", answer="")
    group = Group(prompt=prompt, prompt_ids=prompt_ids, completions=completions, digests={}, worker="")
    row_tokens = BLOCK * ceil((len(prompt_ids) + sum(map(len, answers))) / BLOCK)
    return pack([group], [[1.0] * len(answers)], row_tokens=row_tokens, joined=joined).batches[0]


def _trees(group: Group, advantages: Sequence[float], first: int, row_tokens: int) -> list[_Tree]:
    """The group's completions; sorted, so that each shares its start with the one before it."""
    _check(group)
    prompt = np.asarray(group.prompt_ids)
    trees: list[_Tree] = []
    branches: list[_Branch] = []
    length = len(prompt)
    order = sorted(range(len(group.completions)), key=lambda i: group.completions[i].ids)
    for i in order:
        completion = group.completions[i]
        ids = np.asarray(completion.ids)
        inputs = len(ids) - 1
        shared = _shared(branches[-1].ids[:-1], ids[:-1]) if branches else 0
        if branches and length + inputs - shared > row_tokens:
            trees.append(_Tree(prompt, branches, length))
            branches, length, shared = [], len(prompt), 0
        length += inputs - shared
        if length > row_tokens:
            raise Unrecoverable(
                f"group {group.id}: its prompt and one completion take {length} tokens, a row holds "
                f"row_tokens={row_tokens}: set that to the longest prompt plus the longest completion, or more",
                exit_code=2,
            )
        branches.append(_Branch(completion, first + i, advantages[i], ids, shared))
    return [*trees, _Tree(prompt, branches, length)]


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


_Rows = list[tuple[list[list[_Tree]], int]]
"""Of each batch its rows, as the trees they hold, and their length."""


def _cut(trees: Sequence[_Tree], row_tokens: int) -> _Rows:
    """Batches of trees in rows of their own, given longest first: within the budget, and without much padding."""
    batches: _Rows = []
    used = 0
    for tree in trees:
        if batches:
            rows, longest = batches[-1]
            padding = 1 - (used + tree.length) / (longest * (len(rows) + 1))
            if longest * (len(rows) + 1) <= row_tokens and padding <= MAX_PADDING:
                rows.append([tree])
                used += tree.length
                continue
        batches.append(([[tree]], tree.length))
        used = tree.length
    return batches


def _join(trees: Sequence[_Tree], row_tokens: int) -> _Rows:
    """Batches of one row, into each of which goes the longest tree there still is room for: first fit, decreasing."""
    rows: list[list[_Tree]] = []
    room: list[int] = []
    for tree in trees:
        place = next((i for i, left in enumerate(room) if left >= tree.length), len(rows))
        if place == len(rows):
            rows.append([])
            room.append(row_tokens)
        rows[place].append(tree)
        room[place] -= tree.length
    used = [row_tokens - left for left in room]
    lengths = [min(row_tokens, BLOCK << ceil(log2(max(1, tokens / BLOCK)))) for tokens in used]
    return [([row], length) for row, length in zip(rows, lengths, strict=True)]


def _batch(rows: Sequence[Sequence[_Tree]], length: int, mask_truncated: bool) -> Batch:
    size = len(rows)
    ids = np.zeros((size, length), np.int64)
    positions = np.zeros((size, length), np.int64)
    ends = np.tile(np.arange(1, length + 1), (size, 1))
    predictors: list[np.ndarray] = []
    for i, row in enumerate(rows):
        start = 0
        for tree in row:
            here = slice(start, start + tree.length)
            places = _write(tree, ids[i, here], positions[i, here], ends[i, here])
            ends[i, here] += start
            predictors += [i * length + start + place for place in places]
            start += tree.length

    trees = [tree for row in rows for tree in row]
    branches = [branch for tree in trees for branch in tree.branches]
    counts = np.array([len(branch.ids) for branch in branches])
    trained = np.concatenate([_trained(branch.completion, mask_truncated) for branch in branches])
    lp_gen = np.concatenate([np.asarray(branch.completion.logprobs, np.float32) for branch in branches])

    def spread(values: Sequence[float], dtype: type) -> Tensor:
        return torch.from_numpy(np.repeat(np.array(values, dtype), counts))

    return Batch(
        input_ids=torch.from_numpy(ids),
        position_ids=torch.from_numpy(positions),
        ends=torch.from_numpy(ends),
        predictor=torch.from_numpy(np.concatenate(predictors)),
        target=torch.from_numpy(np.concatenate([branch.ids for branch in branches])),
        lp_gen=torch.from_numpy(lp_gen),
        advantage=spread([branch.advantage for branch in branches], np.float32),
        loss_mask=torch.from_numpy(trained),
        completion=spread([branch.number for branch in branches], np.int64),
        tokens=sum(tree.length for tree in trees),
    )


def _trained(completion: Completion, mask_truncated: bool) -> np.ndarray:
    """[ids] bool."""
    if mask_truncated and completion.finish_reason == "length":
        return np.zeros(len(completion.ids), np.bool_)
    return np.array(completion.mask or [True] * len(completion.ids), np.bool_)


def _write(tree: _Tree, ids: np.ndarray, positions: np.ndarray, ends: np.ndarray) -> list[np.ndarray]:
    """Fill a tree's places, counted from 0, in place; give for each branch the places that predict its tokens."""
    start = end = len(tree.prompt)
    ids[:start], positions[:start] = tree.prompt, np.arange(start)
    ends[:start] = tree.length
    path = np.empty(0, np.int64)  # places of the tokens that lead to the end of the last branch
    predictors: list[np.ndarray] = []
    for branch in tree.branches:
        inputs, shared = branch.ids[:-1], path[: branch.shared]
        new = slice(end, end + len(inputs) - branch.shared)
        ids[new] = inputs[branch.shared :]
        positions[new] = np.arange(start + branch.shared, start + len(inputs))
        path = np.concatenate([shared, np.arange(end, new.stop)])
        ends[path] = new.stop
        predictors.append(np.concatenate([[start - 1], path]))
        end = new.stop
    return predictors
