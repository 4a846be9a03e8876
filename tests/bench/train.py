"""What an optimizer step costs, beside a bare forward and backward of the same packed tokens, and TRL's trainers.

    python -m tests.bench.train [--json] [--rounds 9] [--peers trl,trl_async --scripts FOLDER --python PYTHON]

A step is 16 groups of 8 completions of the tiny model, sampled by itself: `short` as in the main job, and `long`,
prompts of 400 tokens with completions of 30. CPU seconds of one thread, so that other processes count little;
medians of rounds in turn. `--peers` runs TRL's trainers on the same model, task, batch, lengths and threads, by
`peer_trl.py` and `peer_trl_async.py` in FOLDER with an interpreter that has TRL, between the rounds of `short`.

Prints one JSON object. of_bare_x: bare ÷ ours. vs_trl_x, vs_trl_async_x: theirs ÷ ours, of what their process computes
apart from sampling (what the scripts import, `base` and `task`, may lie anywhere on PYTHONPATH). rss_x: our peak
memory ÷ that of TRL's synchronous trainer. flat_x: what the same groups take as one row for each completion, with its
prompt, ÷ ours.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

PROMPTS, GROUP, THREADS = 16, 8, "1"
ROW_TOKENS = 4096
LONG_PROMPT, LONG_COMPLETION = 400, 30
PEER_STEPS = 12
PEERS = {"trl": "peer_trl.py", "trl_async": "peer_trl_async.py"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="print it in one line")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--peers", default="", help="of trl,trl_async")
    parser.add_argument(
        "--scripts", type=Path, help="the folder with the peers' scripts and their base model"
    )
    parser.add_argument("--python", default=sys.executable, help="an interpreter with TRL")
    parser.add_argument("--shape", choices=("short", "long"), help=argparse.SUPPRESS)  # one process for each
    options = parser.parse_args()
    if options.shape:
        print(json.dumps(measure(options.shape, options.rounds)))
        return
    result = {shape: _in_a_process(shape, options.rounds) for shape in ("short", "long")}
    peers = [name for name in options.peers.split(",") if name]
    ours, theirs = [result["short"]["step_cpu_s"]], {name: [] for name in peers}
    for _ in range(3 if peers else 0):
        for name in peers:
            theirs[name].append(_peer(options.python, options.scripts / PEERS[name]))
        ours.append(_in_a_process("short", options.rounds)["step_cpu_s"])
    result["short"]["step_cpu_s"] = statistics.median(ours)
    for name, runs in theirs.items():
        cost = statistics.median(run["step_cpu_s"] for run in runs)
        result[f"vs_{name}_x"] = round(cost / statistics.median(ours), 2)
        result[name] = {"step_cpu_s": round(cost, 3), "rss_mb": max(run["rss_mb"] for run in runs)}
    if "trl" in theirs:
        result["rss_x"] = round(result["short"]["rss_mb"] / result["trl"]["rss_mb"], 2)
    print(json.dumps(result, indent=None if options.json else 2))


def _in_a_process(shape: str, rounds: int) -> dict[str, Any]:
    command = [sys.executable, "-m", "tests.bench.train", "--shape", shape, "--rounds", str(rounds)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=_environment())
    return json.loads(done.stdout.splitlines()[-1])


def _environment() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": THREADS, "HF_HUB_OFFLINE": "1"}


def measure(shape: str, rounds: int) -> dict[str, Any]:
    """One shape, in this process: CPU seconds a step, and their ratios."""
    import torch
    from rolecall.actors.learner import Learner
    from rolecall.actors.lora import Lora
    from rolecall.actors.losses import Loss

    torch.set_num_threads(1)
    learner = Learner(
        "tiny", lora=Lora(), lr=1e-3, loss=Loss(), temperature=1.0, seed=0, row_tokens=ROW_TOKENS
    )
    groups = _sampled() if shape == "short" else _long()
    rss_before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    contenders: dict[str, Callable[[], object]] = {
        "step": lambda: learner.step(groups, version=0),
        "bare": _bare(learner, groups),
        "flat": _bare(learner, [_alone(group, i) for group in groups for i in range(GROUP)]),
    }
    learner.step(groups, version=0)
    rss = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for number in range(rounds + 1):
        for name, run in contenders.items():
            began = time.process_time()
            run()
            if number:  # the first is a warm-up
                times[name].append(time.process_time() - began)
    median = {name: statistics.median(values) for name, values in times.items()}
    return {
        "step_cpu_s": round(median["step"], 4),
        "of_bare_x": round(median["bare"] / median["step"], 3),
        "flat_x": round(median["flat"] / median["step"], 2),
        "rss_mb": rss // 1024,
        "rss_of_step_mb": (rss - rss_before) // 1024,
        "row_fill": learner.step(groups, version=0)["row_fill"],
        "tokens": sum(len(completion.ids) for group in groups for completion in group.completions),
    }


def _bare(learner: Any, groups: Sequence[Any]) -> Callable[[], object]:
    """Forward and backward of the packed rows, as anyone would write it: no loss but a sum, no optimizer."""
    import torch
    from rolecall.actors.attention import attention_mask
    from rolecall.actors.packing import pack

    advantages = [[1.0] * len(group.completions) for group in groups]
    packed = pack(groups, advantages, row_tokens=ROW_TOKENS)
    masks = [attention_mask(batch.ends, "sdpa") for batch in packed.batches]
    policy = learner._policy
    causal = policy.get_base_model()

    def run() -> None:
        for batch, mask in zip(packed.batches, masks, strict=True):
            hidden = causal.base_model(
                input_ids=batch.input_ids, attention_mask=mask, position_ids=batch.position_ids,
                use_cache=False,
            ).last_hidden_state.flatten(0, 1)  # fmt: skip
            logits = causal.get_output_embeddings()(hidden[batch.predictor]).float()
            torch.nn.functional.cross_entropy(logits, batch.target).backward()
        policy.zero_grad()

    return run


def _sampled() -> list[Any]:
    """What the tiny model says to as many problems, with rewards that differ in every group."""
    import torch
    from rolecall.actors.engines import Request, Sampling, generate
    from rolecall.actors.engines.transformers import TransformersEngine
    from rolecall.actors.lora import Lora
    from rolecall.actors.model import adapter_files, add_lora, load_model, load_tokenizer
    from rolecall.actors.tiny.problems import held_out

    def base() -> Any:
        return load_model("tiny", device="cpu", dtype=torch.float32)

    engine = TransformersEngine(base(), load_tokenizer("tiny"))
    with tempfile.TemporaryDirectory() as folder:
        for name, content in adapter_files(add_lora(base(), Lora(), seed=0)).items():
            (Path(folder) / name).write_bytes(content)
        engine.load(0, "", Path(folder))
    prompts = [engine.encode(problem.text) for problem in held_out(PROMPTS)]
    requests = [Request(prompt, i * GROUP + j) for i, prompt in enumerate(prompts) for j in range(GROUP)]
    samples = generate(engine, requests, Sampling(max_tokens=64))
    return [
        _group(i, prompt, [(s.ids, s.logprobs) for s in samples[i * GROUP : (i + 1) * GROUP]])
        for i, prompt in enumerate(prompts)
    ]


def _long() -> list[Any]:
    """Prompts and completions without sense, of the lengths wanted."""
    rng = random.Random(0)

    def tokens(count: int) -> list[int]:
        return [rng.randrange(32, 127) for _ in range(count)]

    answers = [
        [(tokens(LONG_COMPLETION), [-4.5] * LONG_COMPLETION) for _ in range(GROUP)] for _ in range(PROMPTS)
    ]
    return [_group(i, tokens(LONG_PROMPT), own) for i, own in enumerate(answers)]


def _group(id: int, prompt_ids: list[int], answers: Sequence[tuple[list[int], list[float]]]) -> Any:
    from rolecall.actors.types import Completion, Group, Prompt

    completions = [
        Completion(
            ids=ids, logprobs=logprobs, versions=[0] * len(ids), finish_reason="stop", text="", reward=float(place % 2)
        )
        for place, (ids, logprobs) in enumerate(answers)
    ]  # fmt: skip
    prompt = Prompt(id=id, text="", answer="")
    return Group(
        prompt=prompt, prompt_ids=prompt_ids, completions=completions, digests={0: ""}, worker="bench"
    )


def _alone(group: Any, number: int) -> Any:
    from msgspec.structs import replace

    return replace(group, completions=[group.completions[number]])


def _peer(python: str, script: Path) -> dict[str, float]:
    """One run of a peer: CPU seconds a step without sampling, and its peak memory."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out.json"
        command = [
            python,
            str(script),
            str(script.parent / "base"),
            "--steps",
            str(PEER_STEPS),
            "--out",
            str(out),
        ]
        subprocess.run(command, check=True, capture_output=True, cwd=script.parent, env=_environment())
        result = json.loads(out.read_text())
    if "trainer_cpu_s" in result:
        return {"step_cpu_s": result["trainer_cpu_s"] / PEER_STEPS, "rss_mb": result["peak_rss_mb_trainer"]}
    later = result["history"][1:]  # the first is a warm-up
    return {
        "step_cpu_s": statistics.median(step["step_cpu"] - step["gen_cpu"] for step in later),
        "rss_mb": result["peak_rss_mb"],
    }


if __name__ == "__main__":
    main()
