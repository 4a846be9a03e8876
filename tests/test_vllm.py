"""VllmEngine against a plain transformers and peft forward of the very same tokens, and the main job with it.

One process goes through everything (tests/vllm_engine.py, in vLLM's own environment); each test looks at a part.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
from peft import LoraConfig
from rolecall.actors.canary import CANARY, Canary, canary_tokens
from rolecall.actors.engines import Request, Sample, Sampling, generate, load_engine
from rolecall.actors.engines.vllm_start import check_vllm
from rolecall.actors.model import adapter_files, load_tokenizer, wrap_lora
from rolecall.runtime.errors import Unrecoverable
from safetensors.torch import load_file, save_file

from .commands import Command, lines
from .test_engine import adapter, engine_under, fresh, reference

ROOT = Path(__file__).parent.parent
PYTHON = ROOT / ".dev" / "vllm" / "bin" / "python"
CLOSE = 1e-3  # nats a token

in_its_environment = [
    pytest.mark.slow,
    pytest.mark.skipif(not PYTHON.exists(), reason=f"there is no {PYTHON}: make it with `tests/setup vllm`"),
]


def refused_adapters(folder: Path) -> dict[str, Path]:
    """By what is wrong with them."""
    other = adapter("qwen2", folder / "of another model", 1)
    wide = adapter("tiny", folder / "rank", 1, rank=16)
    poisoned = adapter("tiny", folder / "nan", 1)
    file = poisoned / "adapter_model.safetensors"
    tensors = load_file(file)
    tensors[min(tensors)][0, 0] = float("nan")
    save_file(tensors, file)
    bare = adapter("tiny", folder / "without target_modules", 1)  # which vLLM wants, and nobody needs
    config = bare / "adapter_config.json"
    left = {name: value for name, value in json.loads(config.read_text()).items() if name != "target_modules"}
    config.write_text(json.dumps(left))
    return {"shapes": other, "rank": wide, "nan": poisoned, "bare": bare, "missing": folder / "nowhere"}


def adapter_of_the_head(folder: Path) -> Path:
    """One that changes the last layer, too, which most don't."""
    config = LoraConfig(
        r=4, target_modules=["q_proj", "lm_head"], task_type="CAUSAL_LM", init_lora_weights=False
    )
    folder.mkdir()
    for name, content in adapter_files(wrap_lora(fresh("tiny"), config, seed=3)).items():
        (folder / name).write_bytes(content)
    return folder


def with_canary(folder: Path) -> Path:
    """The adapter's log-probs of a run's canary, by peft."""
    prompt_ids, ids = canary_tokens(load_tokenizer("tiny"), 0)
    logprobs = reference("tiny", folder, Request(prompt_ids, 0), Sample(ids, [], [], "length", ""), 1.0)
    canary = Canary(prompt_ids=prompt_ids, ids=ids, logprobs=logprobs, dtype="float32")
    (folder / CANARY).write_bytes(msgspec.json.encode(canary))
    return folder


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("adapters")
    return {
        "one": with_canary(adapter("tiny", folder / "one", 1)),
        "two": with_canary(adapter("tiny", folder / "two", 2)),
        "head": adapter_of_the_head(folder / "head"),
        "broken": adapter("tiny", folder / "broken", 1, std=1e37),
    }


@pytest.fixture(scope="module")
def seen(folders: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the engine did."""
    folder = tmp_path_factory.mktemp("vllm")
    refused = refused_adapters(folder)
    job, result = folder / "job.json", folder / "result.json"
    names = {name: str(path) for name, path in folders.items()}
    job.write_text(json.dumps({"folders": names, "refused": {name: str(refused[name]) for name in refused}}))
    command = [str(PYTHON), str(ROOT / "tests" / "vllm_engine.py"), str(job), str(result)]
    environment = {"OMP_NUM_THREADS": "1", **os.environ}
    done = subprocess.run(command, check=False, capture_output=True, text=True, cwd=folder, env=environment)
    assert done.returncode == 0, done.stderr[-5000:]
    return json.loads(result.read_text())


def differences(samples: list[dict[str, Any]], folders: dict[str, Path]) -> list[float]:
    """The largest difference from peft's log-probs in each sample, each token under the adapter it is stamped with."""
    found = []
    for told in samples:
        request, temperature = Request(told["prompt_ids"], 0), told["temperature"] or 1.0
        sample = Sample(told["ids"], told["logprobs"], told["versions"], told["finish_reason"], told["text"])
        assert len(sample.ids) == len(sample.logprobs) == len(sample.versions)
        by_peft = {
            name: reference("tiny", folders[name], request, sample, temperature)
            for name in set(told["adapters"])
        }
        expected = [by_peft[name][place] for place, name in enumerate(told["adapters"])]
        found.append(max(abs(one - other) for one, other in zip(sample.logprobs, expected, strict=True)))
    return found


def well_ended(samples: list[dict[str, Any]], most: int) -> None:
    tokenizer = load_tokenizer("tiny")
    for told in samples:
        stopped = told["finish_reason"] == "stop"
        assert stopped or told["finish_reason"] == "length"
        assert (told["ids"][-1] == 1) == stopped
        assert 1 not in told["ids"][:-1]
        assert len(told["ids"]) <= most if stopped else len(told["ids"]) == most
        assert told["text"] == tokenizer.decode(told["ids"][: -1 if stopped else None])


def same(ones: list[dict[str, Any]], others: list[dict[str, Any]]) -> None:
    assert [one["ids"] for one in ones] == [other["ids"] for other in others]
    for one, other in zip(ones, others, strict=True):
        assert one["logprobs"] == pytest.approx(other["logprobs"], abs=1e-4)


class TestEngine:
    pytestmark = in_its_environment

    def test_logprobs_are_peft_s_own_under_each_version_before_and_after_swaps(
        self, seen: dict[str, Any], folders: dict[str, Path]
    ):
        samples = seen["swaps"]["samples"]
        assert len(samples) == 24
        for version in (1, 2, 3):
            for temperature in (1.0, 0.7):
                under = [
                    told
                    for told in samples
                    if (set(told["versions"]), told["temperature"]) == ({version}, temperature)
                ]
                assert len(under) == 4
                assert max(differences(under, folders)) < CLOSE
        wrong = {"one": folders["two"], "two": folders["one"]}
        assert min(differences(samples, wrong)) > 10 * CLOSE  # so the check above can tell them apart

    def test_a_version_is_kept_as_long_as_requests_are_under_it(self, seen: dict[str, Any]):
        assert seen["swaps"]["versions"] == [[1], [1, 2], [2], [3]]
        assert seen["swaps"]["running"] == 0

    def test_more_versions_than_there_is_room_for_wait_and_nothing_is_mixed_up(
        self, seen: dict[str, Any], folders: dict[str, Path]
    ):
        more = seen["more"]
        assert more["most"] == 2 and more["versions"] == [13]
        under = [set(told["versions"]) for told in more["samples"]]
        assert [under.count({version}) for version in (10, 11, 12, 13)] == [4, 4, 4, 4]
        assert max(differences(more["samples"], folders)) < CLOSE

    def test_a_seed_means_the_same_tokens_alone_or_in_any_batch(self, seen: dict[str, Any]):
        together = seen["seeds"]["together"]
        same(together, seen["seeds"]["alone"])
        same(together, seen["seeds"]["reversed"])
        assert len({tuple(told["ids"]) for told in together}) == len(together) == 8

    def test_a_completion_ends_with_the_token_that_completes_a_text(
        self, seen: dict[str, Any], folders: dict[str, Path]
    ):
        """And is the same until then, with all its log-probs; those that were cut off leave nothing behind."""
        stops, tokenizer = seen["stops"], load_tokenizer("tiny")
        same(stops["free"], stops["after"])
        assert stops["running"] == 0
        ended = 0
        for free, stopped in zip(stops["free"], stops["stopped"], strict=True):
            texts = [tokenizer.decode(free["ids"][: n + 1]) for n in range(len(free["ids"]))]
            ends = [n + 1 for n, text in enumerate(texts) if "=" in text or "\n#" in text]
            length = ends[0] if ends else len(free["ids"])
            assert stopped["ids"] == free["ids"][:length]
            assert stopped["logprobs"] == pytest.approx(free["logprobs"][:length], abs=1e-4)
            assert len(stopped["versions"]) == length
            assert stopped["finish_reason"] == ("stop" if ends else free["finish_reason"])
            ended += bool(ends)
        assert ended > 0
        assert max(differences(stops["stopped"], folders)) < CLOSE

    def test_the_prompt_of_siblings_is_computed_once(self, seen: dict[str, Any], folders: dict[str, Path]):
        siblings = seen["siblings"]
        lengths = [len(told["prompt_ids"]) for told in siblings["samples"]]
        assert min(lengths) > 64
        assert siblings["prompt_tokens"] == sum(lengths)
        whole_blocks = [(length - 1) // 32 * 32 for length in lengths]
        assert siblings["cached_tokens"] == sum(whole_blocks[2:])  # of all but the first of either prompt
        assert siblings["order"] == [0, 2, 4, 6, 1, 3, 5, 7]
        assert max(differences(siblings["samples"], folders)) < CLOSE

    def test_greedy_is_what_the_transformers_engine_takes(
        self, seen: dict[str, Any], folders: dict[str, Path]
    ):
        engine = engine_under("tiny", folders["one"])
        for told in seen["greedy"]:
            [sample] = generate(
                engine, [Request(told["prompt_ids"], 0)], Sampling(temperature=0, max_tokens=24)
            )
            assert told["ids"] == sample.ids and told["text"] == sample.text
            assert told["logprobs"] == pytest.approx(sample.logprobs, abs=CLOSE)

    def test_an_end_token_stops_and_the_limit_cuts_off(self, seen: dict[str, Any]):
        assert {told["finish_reason"] for told in seen["many"]} == {"stop", "length"}
        well_ended(seen["many"], 20)
        assert seen["none"] == []

    @pytest.mark.parametrize(
        ("name", "sentence"),
        [
            ("shapes", "it is another model's"),
            ("rank", "has rank 16, and this engine was started for 8: start it with max_lora_rank=16"),
            ("nan", "NaN or infinite values"),
            ("bare", "vLLM can't serve the adapter"),
            ("missing", "cannot read"),
            ("changed", "a version never changes"),
        ],
    )
    def test_an_adapter_is_refused_in_a_sentence(self, seen: dict[str, Any], name: str, sentence: str):
        refusal = seen["refusals"]["says"][name]
        assert refusal["error"] == "AdapterError"
        assert sentence in refusal["says"] and "\n" not in refusal["says"]

    def test_a_refused_adapter_leaves_the_old_one_in_place(self, seen: dict[str, Any]):
        assert seen["refusals"]["before"] == seen["refusals"]["after"]

    def test_each_version_proves_itself_while_others_run(self, seen: dict[str, Any]):
        *honest, swapped, rest = seen["canaries"]
        assert [one["says"] for one in honest] == ["", "", ""]
        assert all(one["cached_tokens"] > 0 for one in honest)  # it goes through the prefix cache
        assert swapped["error"] == "Quarantined" and "version 52" in swapped["says"]
        assert len(rest["samples"]) == 12

    def test_the_base_under_an_adapter_s_name_is_found_out(self, seen: dict[str, Any]):
        assert seen["base"]["error"] == "Quarantined"
        assert "worker w can't prove that it samples version 55" in seen["base"]["says"]

    def test_a_stale_prefix_cache_is_found_out(self, seen: dict[str, Any]):
        first, second = seen["one_name"]
        assert first["error"] == "" and second["error"] == "Quarantined"
        assert second["cached_tokens"] > first["cached_tokens"]  # those of the version before

    def test_the_base_is_never_sampled_in_silence(self, seen: dict[str, Any]):
        assert seen["unloaded"]["error"] == "AdapterError"
        assert "no adapter is loaded" in seen["unloaded"]["says"]

    def test_what_can_never_be_sampled_is_unrecoverable(self, seen: dict[str, Any]):
        words = [
            "no tokens",
            "more than the 512",
            "max_tokens 0",
            "temperature -1.0",
            "temperature 0.001",
            "choose 0.01 to 2.0",
        ]
        for refusal, word in zip(seen["never"], words, strict=True):
            assert refusal["error"] == "Unrecoverable" and word in refusal["says"]

    def test_too_little_memory_is_said_at_the_start(self, seen: dict[str, Any]):
        assert seen["too_small"]["error"] == "Unrecoverable"
        assert "KV cache" in seen["too_small"]["says"] and "kv_cache_bytes" in seen["too_small"]["says"]

    def test_an_engine_that_gave_nan_samples_no_more(self, seen: dict[str, Any]):
        for refusal in seen["breakdown"]:
            assert refusal["error"] == "AdapterError"
            assert "version 40 gives log-probs that are not finite" in refusal["says"]


class TestInFlight:
    pytestmark = in_its_environment

    def test_each_token_is_of_the_version_it_is_stamped_with(
        self, seen: dict[str, Any], folders: dict[str, Path]
    ):
        samples = seen["in_flight"]["swaps"]["samples"]
        assert len(samples) == 16 and {told["temperature"] for told in samples} == {1.0, 0.7}
        assert max(differences(samples, folders)) < CLOSE
        wrong = folders | {"one": folders["two"], "two": folders["one"]}
        assert min(differences(samples, wrong)) > 10 * CLOSE
        well_ended(samples, 24)

    def test_a_swap_falls_between_two_tokens_of_all_that_run(self, seen: dict[str, Any]):
        versions = [told["versions"] for told in seen["in_flight"]["swaps"]["samples"]]
        begun = [stamps for stamps in versions if stamps[0] == 101]
        assert len(begun) == 12  # there is room for no more
        for stamps in begun:
            assert stamps == ([101] * 3 + [102] * 3 + [103] * 3 + [105] * 15)[: len(stamps)]
        assert max(map(len, begun)) > 9
        assert all(stamps == sorted(stamps) for stamps in versions)

    def test_no_version_is_kept_for_those_that_run(self, seen: dict[str, Any]):
        assert seen["in_flight"]["swaps"]["versions"] == [[102], [103], [104]]
        assert seen["in_flight"]["swaps"]["running"] == 0
        assert seen["in_flight"]["canaries"]["versions"] == [109]

    def test_what_has_not_begun_is_as_if_it_had_been_added_after_the_swap(self, seen: dict[str, Any]):
        before, after = seen["in_flight"]["not_begun"]
        same(before, after)
        assert {version for told in before for version in told["versions"]} == {112}

    def test_no_draw_comes_again_after_a_swap(self, seen: dict[str, Any]):
        one, other = seen["in_flight"]["draws"]
        assert (one[0], other[0]) == (100, 101)
        assert len({*one, *other}) == 8

    def test_the_last_token_may_be_another_version_s(self, seen: dict[str, Any], folders: dict[str, Path]):
        left = seen["in_flight"]["ends"]["left"]
        well_ended(left, 4)
        assert len(left) == 4 and max(differences(left, folders)) < CLOSE
        assert [105, 105, 105, 106] in [told["versions"] for told in left]

    def test_what_has_finished_waits_for_the_next_step_as_it_is(self, seen: dict[str, Any]):
        ends = seen["in_flight"]["ends"]
        assert ends["running"] == [2, 2, 0]
        assert [told["versions"] for told in ends["kept"]] == [[106], [106]]

    def test_the_prompt_of_siblings_is_computed_once_more(
        self, seen: dict[str, Any], folders: dict[str, Path]
    ):
        siblings = seen["in_flight"]["siblings"]
        assert len(siblings["samples"]) == 8
        lengths = [len(told["prompt_ids"]) for told in siblings["samples"]]
        assert {tuple(told["versions"][:3]) for told in siblings["samples"]} == {(109, 109, 111)}
        assert siblings["prompt_tokens"] == sum(length + 2 for length in lengths)
        assert siblings["cached_tokens"] >= sum(length // 32 * 32 for length in lengths[2:])
        assert max(differences(siblings["samples"], folders)) < CLOSE

    def test_each_version_proves_itself_while_others_go_on(
        self, seen: dict[str, Any], folders: dict[str, Path]
    ):
        canaries = seen["in_flight"]["canaries"]
        assert [one["says"] for one in canaries["canaries"]] == ["", ""]
        assert canaries["refused"]["error"] == "AdapterError"
        assert len(canaries["samples"]) == 4 and max(differences(canaries["samples"], folders)) < CLOSE
        assert {107, 108, 109} == {version for told in canaries["samples"] for version in told["versions"]}


class TestMainJob:
    pytestmark = in_its_environment

    def test_the_main_job_runs_with_it(self, tmp_path: Path):
        settings = ["steps=3", "batch=4", "group_size=4", "eval_problems=8", "rollout_workers=1",
                    "engine=vllm", f"engine_python={PYTHON}"]  # fmt: skip
        flags = [part for setting in settings for part in ("--set", setting)]
        command = Command(["run", "async_grpo", "--json", *flags], tmp_path)
        code, out, err = command.finish(180)
        assert code == 0, err
        assert msgspec.json.decode(out)["restarts"] == 0
        metrics = lines(command.run_folder() / "metrics.jsonl")
        assert sorted(id for line in metrics for id in line["groups"]) == list(range(12))
        # The trainer computes what vLLM said it sampled, with other code, to the third digit.
        fresh_ratios = [line["fresh/ratio_mean"] for line in metrics if "fresh/ratio_mean" in line]
        assert fresh_ratios == pytest.approx([1.0] * len(fresh_ratios), abs=0.001) and fresh_ratios
        log = (command.run_folder() / "logs" / "rollout.log").read_text()
        assert f"rollout runs in a fresh interpreter: it is placed in {PYTHON}" in log
        assert "serves tiny: max_loras=3 versions at once, up to rank 8, 48 completions" in log
        assert "placed" not in (command.run_folder() / "logs" / "evaluator.log").read_text()
        assert command.processes() == []


@pytest.mark.parametrize("release", ["0.27.0", "0.32.0", "0.32.1.post2+cpu"])
def test_releases_that_are_supported(release: str):
    assert check_vllm(release) == release


@pytest.mark.parametrize(
    ("release", "sentence"),
    [
        (None, "vLLM is not installed in "),
        ("0.26.3", "vLLM 0.26.3 in "),
        ("0.33.0", "vLLM 0.33.0 in "),
        ("1.0", "vLLM 1.0 in "),
        ("dev", "vLLM dev in "),
    ],
)
def test_others_are_refused_with_the_way_out(release: str | None, sentence: str):
    with pytest.raises(Unrecoverable, match=sentence) as caught:
        check_vllm(release)
    assert caught.value.exit_code == 2
    assert sys.prefix in str(caught.value) and '"vllm>=0.27,<0.33"' in str(caught.value)


def test_an_engine_that_there_is_not():
    with pytest.raises(
        Unrecoverable, match="there is no engine 'vlm': choose transformers or vllm"
    ) as caught:
        load_engine("vlm", "tiny", max_loras=2, max_lora_rank=8, max_num_seqs=8)
    assert caught.value.exit_code == 2
