"""The main job with a real small model: SmolLM2-135M-Instruct on GSM8K, sampled by vLLM, judged by math-verify."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest
from peft import PeftModel
from rolecall.actors.model import encode_prompt, load_model, load_tokenizer

from .commands import Command, lines
from .smollm2 import smollm2
from .test_vllm import PYTHON, in_its_environment

pytestmark = [*in_its_environment, pytest.mark.timeout(600)]

ROWS = Path(__file__).parent / "gsm8k" / "train.jsonl"


def test_its_chat_template_asks():
    text = json.loads(ROWS.read_text().splitlines()[0])["question"]
    tokenizer = load_tokenizer(str(smollm2()))
    asked = tokenizer.decode(encode_prompt(tokenizer, text))
    assert asked == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n"
    )


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # within peft
def test_three_steps_end_to_end(tmp_path: Path):
    model = str(smollm2())
    settings = [
        f"model={model}", f"train_set={ROWS}", f"eval_set={ROWS}", "eval_problems=1", "reward=math_verify",
        "engine=vllm", f"engine_python={PYTHON}", "rollout_workers=1", "max_staleness=0", "steps=3", "batch=2",
        "group_size=6", "max_tokens=40", "temperature=0.8", "lora.rank=4", "lora.alpha=8",
    ]  # fmt: skip
    flags = [part for setting in settings for part in ("--set", setting)]
    room = {"VLLM_CPU_KVCACHE_SPACE": "1"}  # GiB: this model reads up to 8192 tokens
    command = Command(["run", "async_grpo", "--json", *flags], tmp_path, room)
    code, out, err = command.finish(500)
    assert code == 0, err
    result = msgspec.json.decode(out)
    assert (result["steps"], result["restarts"], result["groups_trained"]) == (3, 0, 6)

    metrics = lines(command.run_folder() / "metrics.jsonl")
    assert [line["step"] for line in metrics] == [1, 2, 3]
    # Groups of equal rewards teach nothing, and a step may have only those.
    trained = [line for line in metrics if line["tokens_trained"]]
    assert trained
    for line in trained:  # what vLLM sampled has the same log-probs in the trainer
        assert line["fresh/ratio_mean"] == pytest.approx(1.0, abs=0.001)
        assert line["fresh/log_ratio_max"] < 0.001

    network = PeftModel.from_pretrained(load_model(model, device="cpu", dtype="float32"), result["adapter"])
    learned = [bool(weight.any()) for name, weight in network.named_parameters() if "lora_B" in name]
    assert len(learned) == 30 * 7 and all(learned)
