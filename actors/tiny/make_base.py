"""Make the tiny base model that ships in `base/`: a byte-level BPE tokenizer and a Llama of 0.55 M parameters.

    python -m rolecall.actors.tiny.make_base OUT --seed 4      (two minutes of one core)

For the first 80 % of the steps it learns worked solutions only, then 60 % of its examples are bare answers. So
the base shows its working half the time, and guesses, mostly wrong, the other half: reinforcement learning has a
habit to change and not only noise to cut. Seed 4 is what ships: at temperature 1 it works 46 % of the problems
out and is right on 34 % (70 % of those it worked out, 3 % of the rest).
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from .problems import Kind, Problem, held_out, held_out_texts, problem

__all__ = ["STEPS", "fraction_right", "make_model", "make_tokenizer", "save", "train"]

STEPS = 540
_BATCH = 32
_WORKED_ONLY, _DIRECT_SHARE = 0.8, 0.6
_MUON_LR, _ADAM_LR, _WARMUP_STEPS = 0.02, 3e-3, 30
_IGNORED = -100
_PAD, _EOS = "<pad>", "<eos>"


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level BPE over the task's own text; every digit is a token, so that sums are seen digit by digit."""
    rng = random.Random(12345)
    corpus = [drawn.text + drawn.worked for drawn in (problem(rng) for _ in range(2000))]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(  # pyright: ignore[reportAttributeAccessIssue]
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()  # pyright: ignore[reportAttributeAccessIssue]
    trainer = trainers.BpeTrainer(
        vocab_size=512,
        special_tokens=[_PAD, _EOS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(corpus, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=_PAD,
        eos_token=_EOS,
        padding_side="left",
        model_max_length=512,
        clean_up_tokenization_spaces=False,
    )


def make_model(tokenizer: PreTrainedTokenizerFast, seed: int) -> LlamaForCausalLM:
    """The untrained network, float32; only `seed` decides its weights."""
    config = LlamaConfig(
        vocab_size=-(-len(tokenizer) // 64) * 64,
        hidden_size=128,
        intermediate_size=512,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": 1000.0},
        initializer_range=0.08,
        rms_norm_eps=1e-5,
        pad_token_id=cast(int, tokenizer.pad_token_id),
        eos_token_id=cast(int, tokenizer.eos_token_id),
        bos_token_id=None,
    )
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        return LlamaForCausalLM(config)


class Muon:
    """Momentum, then an update made nearly orthogonal by Newton-Schulz steps (Jordan et al., Muon, 2024).

    In float32, one chain of products for all matrices of a shape; torch's own works in bfloat16, which many CPUs
    only emulate.
    """

    def __init__(self, parameters: list[nn.Parameter], lr: float, momentum: float = 0.95) -> None:
        self.lr, self._momentum = lr, momentum
        by_shape: dict[torch.Size, list[nn.Parameter]] = {}
        for parameter in parameters:
            by_shape.setdefault(parameter.shape, []).append(parameter)
        self._groups = [(group, torch.zeros(len(group), *shape)) for shape, group in by_shape.items()]

    @torch.no_grad()
    def step(self, scale: float) -> None:
        """Update by `scale` × the learning rate."""
        for group, average in self._groups:
            gradient = torch.stack([cast(torch.Tensor, parameter.grad) for parameter in group])
            average.lerp_(gradient, 1 - self._momentum)
            update = _orthogonal(gradient.lerp(average, self._momentum))
            rate = scale * self.lr * max(1, update.shape[1] / update.shape[2]) ** 0.5
            for parameter, change in zip(group, update, strict=True):
                parameter.sub_(change, alpha=rate)


def _orthogonal(matrices: torch.Tensor) -> torch.Tensor:
    """The nearest orthogonal matrices, roughly: five quintic Newton-Schulz steps towards singular values of 1."""
    tall = matrices.shape[1] > matrices.shape[2]
    x = matrices.transpose(1, 2) if tall else matrices
    x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)
    for _ in range(5):
        square = x @ x.transpose(1, 2)
        x = 3.4445 * x + (-4.775 * square + 2.0315 * square @ square) @ x
    return x.transpose(1, 2) if tall else x


def _batches(
    tokenizer: PreTrainedTokenizerFast, rng: random.Random, steps: int
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """(token ids, targets) of each step, batch × length; targets are ignored on prompts and padding."""
    kept = held_out_texts()
    for step in range(steps):
        direct = _DIRECT_SHARE if step >= _WORKED_ONLY * steps else 0.0
        events = rng.randint(2, 5)  # one length a batch: little padding
        examples: list[tuple[Problem, str]] = []
        while len(examples) < _BATCH:
            drawn = problem(rng, Kind(fewest=events, most=events))
            if drawn.text not in kept:
                examples.append((drawn, drawn.direct if rng.random() < direct else drawn.worked))
        prompts = cast(list[list[int]], tokenizer([drawn.text for drawn, _ in examples])["input_ids"])
        answers = cast(list[list[int]], tokenizer([answer for _, answer in examples])["input_ids"])
        longest = max(len(p) + len(a) + 1 for p, a in zip(prompts, answers, strict=True))
        ids = torch.full((_BATCH, longest), cast(int, tokenizer.pad_token_id))
        targets = torch.full((_BATCH, longest), _IGNORED)
        for row, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
            end = len(prompt) + len(answer) + 1
            ids[row, :end] = torch.tensor([*prompt, *answer, tokenizer.eos_token_id])
            targets[row, len(prompt) : end] = ids[row, len(prompt) : end]
        yield ids, targets


def train(
    model: LlamaForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    *,
    seed: int,
    steps: int,
    report: Callable[[int, float], None] = lambda step, loss: None,
) -> list[float]:
    """Warm the model up, in place, and return the loss of every step (nats a token)."""
    named = list(model.named_parameters())
    hidden = [p for name, p in named if p.ndim == 2 and "embed" not in name]
    others = [p for name, p in named if p.ndim != 2 or "embed" in name]
    muon = Muon(hidden, _MUON_LR)
    adam = torch.optim.AdamW(others, lr=_ADAM_LR, betas=(0.9, 0.98), weight_decay=0.0)
    losses = []
    for step, (ids, targets) in enumerate(_batches(tokenizer, random.Random(seed), steps)):
        scale = min(1.0, (step + 1) / _WARMUP_STEPS) * max(0.05, 1 - step / steps)
        adam.param_groups[0]["lr"] = _ADAM_LR * scale
        mask = ids.ne(cast(int, tokenizer.pad_token_id)).long()
        states = model.model(input_ids=ids, attention_mask=mask).last_hidden_state[:, :-1]
        wanted = targets[:, 1:] != _IGNORED  # most positions are prompt: no logits there
        loss = nn.functional.cross_entropy(model.lm_head(states[wanted]), targets[:, 1:][wanted])
        model.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        adam.step()
        muon.step(scale)
        losses.append(loss.item())
        report(step + 1, losses[-1])
    return losses


def fraction_right(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, count: int) -> float:
    """Share of `count` held-out problems whose likeliest completion ends in the right answer."""
    kept = held_out(count)
    network: Any = model.eval()
    encoded: Any = tokenizer([problem.text for problem in kept], return_tensors="pt", padding=True)
    with torch.inference_mode():
        rows = network.generate(**encoded, do_sample=False, max_new_tokens=64)[
            :, encoded["input_ids"].shape[1] :
        ]
    texts = tokenizer.batch_decode(rows, skip_special_tokens=True)
    right = [text.endswith(f"#### {problem.answer}") for text, problem in zip(texts, kept, strict=True)]
    return sum(right) / count


def save(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """Write the five files of `base/`."""
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    # transformers 5 writes a class name that older readers, such as some of vLLM's, do not know.
    file = folder / "tokenizer_config.json"
    config = json.loads(file.read_text())
    config.pop("backend", None)
    file.write_text(json.dumps(config | {"tokenizer_class": "PreTrainedTokenizerFast"}, indent=1))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path)
    parser.add_argument("--seed", type=int, default=4)
    parser.add_argument("--steps", type=int, default=STEPS)
    settings = parser.parse_args()
    torch.set_num_threads(1)  # sums in one order: the same machine makes the same model

    def report(step: int, loss: float) -> None:
        if step % 90 == 0:
            sys.stdout.write(f"step {step} loss {loss:.4f}\n")
            sys.stdout.flush()

    tokenizer = make_tokenizer()
    model = make_model(tokenizer, settings.seed)
    train(model, tokenizer, seed=settings.seed, steps=settings.steps, report=report)
    save(model, tokenizer, settings.out)
    sys.stdout.write(f"right on {fraction_right(model, tokenizer, 256):.0%} of 256 held-out problems\n")


if __name__ == "__main__":
    main()
