"""Where a completion ends besides an end-of-sequence token: at a text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

__all__ = ["Stops"]

# A token is a byte of text or more, but for special ones and what a decoder leaves out.
_MARGIN = 8


class Stops:
    """Finds texts in token ids. tokenizer: of Hugging Face transformers."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._may_complete: dict[tuple[int, tuple[str, ...]], bool] = {}

    def reached(self, ids: Sequence[int], stop: tuple[str, ...]) -> bool:
        """Whether the last of `ids` completes one of these texts, asked after every token.

        Most tokens can't, which is known by now; for the others only the end is decoded, so that a long completion
        takes no longer than a short one.
        """
        if not stop:
            return False
        key = ids[-1], stop
        if key not in self._may_complete:
            text = self._decode(ids[-1:])
            # Not a character of its own, or nothing by itself: only the tokens before it can tell.
            unclear = not text or "\N{REPLACEMENT CHARACTER}" in text
            self._may_complete[key] = unclear or any(one[-1] in text for one in stop)
        if not self._may_complete[key]:
            return False
        longest = max(len(one.encode()) for one in stop)
        end = self._decode(ids[-longest - _MARGIN :])
        return any(one in end for one in stop)

    def _decode(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False)
