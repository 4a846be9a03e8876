"""The canary: how a worker proves, after each swap, that it samples the version it names.

    trainer: version 7 = adapter + canary.json (fixed tokens, and their log-probs under exactly these weights)
    worker:  load(7) ─▶ score(those tokens), the way completions are sampled ─▶ equal? sample : Quarantined

A digest proves which files were fetched. It does not prove what the engine computes with: base weights under an
adapter's name, another version's file, or keys and values kept from the version before all carry a good digest.

The canary is a file of the version, so that its digest covers it: whoever checks one checks the other, and vLLM
and PEFT pass over it. Its tokens are the same in every version of a run: a cache that outlived a swap has them.

Imports no torch.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import TYPE_CHECKING, cast

import msgspec

from ..runtime.errors import RolecallError, Unrecoverable

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from .engines import Engine

__all__ = ["CANARY", "TOLERANCE", "Canary", "Quarantined", "attest", "canary_tokens"]

CANARY = "canary.json"

TOLERANCE = {"float32": 1e-3, "bfloat16": 0.25}
"""Nats a token that two ways to compute one log-prob may be apart.

Measured: 2e-5 and 0.09. The canary's own tokens differ by 0.02 from one optimizer step to the next (lr 1e-3) and by
0.5 from the base to the trained model: float32 tells any two versions apart, bfloat16 only those further apart.
"""

_TOKENS = 8
_LEAST_ROOM = 16
_TEXT = (
    "Ann has 12 pens, buys 7, loses 4 and finds 9. The quick brown fox jumps over the lazy dog, while six big "
    "wizards from Quebec pack my box with five dozen jugs. How many pens are left?\n"
)


class Quarantined(RolecallError):
    """An engine does not compute what the trainer published: nothing it samples may leave the worker.

    The worker dies of it, and the death counts against its supervisor's restart budget. Not Unrecoverable, which
    would end the run: a restarted worker has a fresh engine and may be fine, and others may be fine meanwhile. A
    machine that joined the run has a budget of its own, so a bad one ends alone. If it is this machine, or all
    of them because the trainer is what is wrong, the budget is soon spent, and the run ends with this sentence.
    """


class Canary(msgspec.Struct, frozen=True, kw_only=True):
    """prompt_ids, ids: the tokens. logprobs: natural log-prob of each of `ids`, at temperature 1.

    dtype: what the trainer computed them in, such as "float32".
    """

    prompt_ids: list[int]
    ids: list[int]
    logprobs: list[float]
    dtype: str


def canary_tokens(
    tokenizer: PreTrainedTokenizerBase, seed: int, room: int | None = None
) -> tuple[list[int], list[int]]:
    """(prompt, completion) of the canary of a run with this tokenizer and seed.

    The prompt is asked as any other, and cut off where both together would be more than `room` tokens: Unrecoverable
    for less than 16. The completion is of ordinary tokens in an order that no model expects: where log-probs are
    low, a small change of the weights shows most.
    """
    from .model import encode_prompt

    if room is not None and room < _LEAST_ROOM:
        raise Unrecoverable(
            f"the model reads only {room} tokens at once, and the canary that proves each swap needs {_LEAST_ROOM}: "
            "choose a model with more positions",
            exit_code=2,
        )
    ordinary = cast(list[int], tokenizer(_TEXT, add_special_tokens=False)["input_ids"])
    prompt_ids = encode_prompt(tokenizer, _TEXT)[: None if room is None else room - _TOKENS]
    return prompt_ids, random.Random(seed).choices(sorted(set(ordinary)), k=_TOKENS)


def attest(engine: Engine, folder: Path, worker: str) -> None:
    """Check that `engine` computes what the version in `folder`, which it has just loaded, was published with.

    Raises Quarantined.
    """
    who = f"worker {worker} can't prove that it samples version {engine.version}"
    try:
        canary = msgspec.json.decode((folder / CANARY).read_bytes(), type=Canary)
    except (OSError, msgspec.DecodeError) as error:
        raise Quarantined(
            f"{who}: its {CANARY} cannot be read ({error}); let a trainer of this release publish the version"
        ) from error
    found = engine.score(canary.prompt_ids, canary.ids)
    allowed = max(TOLERANCE.get(dtype, 0.25) for dtype in (engine.dtype, canary.dtype))
    off = [abs(one - other) for one, other in zip(found, canary.logprobs, strict=True)]
    wrong = [place for place, by in enumerate(off) if not by <= allowed]  # NaN is wrong, too
    if wrong:
        place = max(wrong, key=lambda place: (off[place] != off[place], off[place]))
        raise Quarantined(
            f"{who}: {len(wrong)} of the canary's {len(off)} log-probs differ from the trainer's, at most by "
            f"{off[place]:.3g} nats ({found[place]:.4g} instead of {canary.logprobs[place]:.4g}, "
            f"{allowed:g} are allowed); nothing was sampled under it: if a restart does not help, compare base "
            f"model, engine and library releases of this machine with the trainer's, or leave it out"
        )
