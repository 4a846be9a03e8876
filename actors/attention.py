"""Which token of a packed row sees which: one number a token says it all.

Rows hold trees in depth-first order, so whatever sees a token lies in one run of places that begins with it:
`ends` is where that run is over. A query at q sees the key at k if k ≤ q < ends[k].

    places      0 1 2 3 4 5 6 7        prompt 0 1, then branches 2 3 4 and 2 5, then another prompt 6 with 7
    ends        6 6 6 5 5 6 8 8

Imports torch: import it where a trainer starts, not at a recipe's top.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

__all__ = ["BLOCK", "Backend", "attention_mask", "backend_for"]

Backend = Literal["sdpa", "flex_attention"]
"""By transformers' names. flex_attention skips blocks that nobody sees, and needs a GPU that can compile it."""

BLOCK = 128  # places that are attended, or skipped, together


def backend_for(device: str) -> Backend:
    """What rows are attended with on a device."""
    return "flex_attention" if device.startswith("cuda") else "sdpa"


def attention_mask(ends: Tensor, backend: Backend) -> Tensor | BlockMask:
    """Who sees whom, as `backend` takes it. ends: [B, L] int64.

    sdpa: [B, 1, L, L] bool, query (third axis) by key (fourth). flex_attention: a BlockMask, made without ever
    holding L × L; L must be a multiple of BLOCK.
    """
    return _block_mask(ends) if backend == "flex_attention" else _dense_mask(ends)


def _dense_mask(ends: Tensor) -> Tensor:
    places = torch.arange(ends.shape[1], device=ends.device)
    return ((places[:, None] >= places) & (places[:, None] < ends[:, None, :]))[:, None]


def _block_mask(ends: Tensor) -> BlockMask:
    from torch.nn.attention.flex_attention import BlockMask

    def visible(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (key <= query) & (query < ends[row, key])

    rows, length = ends.shape
    blocks = ends.view(rows, length // BLOCK, BLOCK)
    first = torch.arange(0, length, BLOCK, device=ends.device)[
        :, None
    ]  # place of each query block, then by key block
    before = first > first.T
    some = before & (blocks.amax(-1)[:, None] > first)
    every = before & (blocks.amin(-1)[:, None] >= first + BLOCK)
    partly = (some & ~every) | (first == first.T)
    return BlockMask.from_kv_blocks(
        *_listed(partly), *_listed(every), BLOCK_SIZE=BLOCK, mask_mod=visible, seq_lengths=(length, length)
    )


def _listed(chosen: Tensor) -> tuple[Tensor, Tensor]:
    """How many key blocks each query block has, and which, those first: [B, 1, Q] and [B, 1, Q, K] int32."""
    order = chosen.byte().argsort(dim=-1, descending=True, stable=True)
    return chosen.sum(-1)[:, None].int(), order[:, None].int()
