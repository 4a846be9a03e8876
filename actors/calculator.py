"""The worked example of an environment: a calculator that fills in what a sum makes.

policy  12+7=          environment  19          policy  ⏎19-4=          …          policy  ⏎#### 15
"""

from __future__ import annotations

import re

from .reward import exact_match
from .types import Prompt, Turn

__all__ = ["Calculator"]

_SUM = re.compile(r"(\d{1,9})([+-])(\d{1,9})=$")


class Calculator:
    """Answers a turn that ends in a sum of two numbers and "=" with its result. Any other turn is the last one, and
    gets 1 if it ends in `#### N` with the N of the reference answer, else 0.

    Turns must stop at "=". The result has no line break behind it: the policy writes that itself, as a part of
    whatever token it likes.
    """

    def reset(self, prompt: Prompt) -> str:
        """Nothing is said before the first turn."""
        self._prompt, self._written = prompt, ""
        return ""

    def step(self, answer: str) -> Turn:
        """The result, or the end."""
        self._written += answer
        asked = _SUM.search(self._written)
        if asked is None:
            return Turn(reward=exact_match(self._prompt, self._written), done=True)
        first, second = int(asked[1]), int(asked[3])
        result = str(first + second if asked[2] == "+" else first - second)
        self._written += result
        return Turn(text=result)
