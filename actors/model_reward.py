"""The reward that a language model gives: how likely the answer is to it, once it has read a completion's working.

Its parts that need torch are imported when it starts, for recipes name it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

from ..runtime import idempotent, max_run_s
from .reward import PATIENCE_WITH_A_REWARD_S, Reward
from .types import Prompt

__all__ = ["ModelReward"]


class ModelReward(Reward):
    """Scores completions by a causal language model, on the best device there is.

    model: as `load_model` takes it.
    mark:  stands before the answer, both in a completion and in the data's reference.

    The reward is within [0, 1]: exp of the mean log-probability of the reference's tokens and the end, after the prompt
    and the completion up to the last mark; 0 without a mark. The completion's own answer is not looked at. After
    VeriFree, arXiv 2505.21493, and RLPR, arXiv 2506.18254, which take the product and the mean of these probabilities,
    and the policy itself as the judge.
    """

    preloads = ("torch", "transformers", "rolecall.actors.model")

    def __init__(self, *, model: str, mark: str = "####") -> None:
        self.model, self.mark = model, mark

    def on_start(self) -> None:
        from .model import load_model, load_tokenizer, pick_device

        self.device = pick_device()
        dtype = "float32" if self.device == "cpu" else "bfloat16"
        self.tokenizer = load_tokenizer(self.model)
        self.network = load_model(self.model, device=self.device, dtype=dtype)

    @idempotent
    @max_run_s(PATIENCE_WITH_A_REWARD_S)
    def score(self, prompt: Prompt, completions: Sequence[str]) -> list[float]:
        """One reward a completion."""
        from .model import encode_prompt

        prompt_ids = encode_prompt(self.tokenizer, prompt.text)
        reference = prompt.answer.rpartition(self.mark)[2].strip()
        rows = {
            text: self._row(prompt_ids, f"{text.rpartition(self.mark)[0]}{self.mark} ", reference)
            for text in completions
            if self.mark in text
        }
        rewards = dict(zip(rows, self._likelihood(list(rows.values())), strict=True))
        return [rewards.get(text, 0.0) for text in completions]

    def _row(self, prompt_ids: list[int], start: str, reference: str) -> tuple[list[int], list[int]]:
        """All ids before the reference's first, and the rest. A token may begin before it and reach into it."""
        before, whole = self._ids(start), self._ids(start + reference)
        same = next((i for i, (a, b) in enumerate(zip(before, whole, strict=False)) if a != b), len(before))
        end = self.tokenizer.eos_token_id
        answer = [*whole[same:], end] if isinstance(end, int) else whole[same:]
        return prompt_ids + whole[:same], answer

    def _ids(self, text: str) -> list[int]:
        return cast("list[int]", self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def _likelihood(self, rows: Sequence[tuple[list[int], list[int]]]) -> list[float]:
        """exp of the mean log-probability of each answer after what is before it."""
        import torch

        if not rows:
            return []
        longest = max(len(before) + len(answer) for before, answer in rows)
        # Padded on the right, where no token of theirs looks.
        padded = [before + answer + [0] * (longest - len(before) - len(answer)) for before, answer in rows]
        places = [range(len(before) - 1, len(before) - 1 + len(answer)) for before, answer in rows]
        kept = sorted({place for own in places for place in own})  # of all, logits would be large
        with torch.inference_mode():
            logits = self.network(
                input_ids=torch.tensor(padded, device=self.device),
                logits_to_keep=torch.tensor(kept, device=self.device),
            ).logits
            likelihood: list[float] = []
            for own, (_, answer), scores in zip(places, rows, logits, strict=True):
                predicting = scores[[kept.index(place) for place in own]].float().log_softmax(-1)
                target = torch.tensor(answer, device=self.device).unsqueeze(-1)
                likelihood.append(predicting.gather(-1, target).mean().exp().item())
        return likelihood
