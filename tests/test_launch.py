"""Renting machines as jobs: what is agreed to, what is started again, what is told to whom, and what stays: nothing."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import re
import signal
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import HfApi
from rolecall import Unrecoverable
from rolecall.runtime.cli import main
from rolecall.runtime.launch.credentials import store_and_keys
from rolecall.runtime.launch.hub import HubJobs, JobSpec
from rolecall.runtime.launch.prices import cost_usd, usd_per_hour
from rolecall.runtime.link import join
from rolecall.runtime.recipe import load_recipe
from rolecall.runtime.remote import TOKEN_HEADER, fetch_about

from .commands import Command, lines, until
from .hub import USER, Hub
from .processes import GRAPHS
from .s3 import S3Server
from .test_join import RECIPE, TESTS
from .test_run import check_ledger

Desk = load_recipe(str(GRAPHS / "door.py")).Desk
KEYS = {"AWS_ACCESS_KEY_ID": "HFAKsecretid", "AWS_SECRET_ACCESS_KEY": "secret-secret-key"}

ENGINELESS = """
from dataclasses import dataclass

@dataclass
class Config:
    store: str = ""
    rollout_workers: int = 0

def build(config):
    raise AssertionError
"""


def arguments(
    *more: str, recipe: str = "async_grpo", bucket: str = "ann/weights", workers: int = 2
) -> list[str]:
    return [
        "launch", "hf-jobs", recipe, "--workers", str(workers), "--flavor", "l4x1", "--trainer-flavor",
        "a100-large", "--bucket", bucket, "--image", "ann/rolecall", *more,
    ]  # fmt: skip


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """The platform with jobs that are only records; this process is logged in there, and in an empty folder."""
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    with Hub(tmp_path / "there", processes=False) as hub:
        for name, value in (hub.environment() | KEYS).items():
            monkeypatch.setenv(name, value)
        monkeypatch.delenv("AWS_ENDPOINT_URL", raising=False)
        yield hub


def refused(capsys: pytest.CaptureFixture[str], arguments: list[str], code: int = 2) -> str:
    assert main(arguments) == code
    return capsys.readouterr().err.removeprefix("rolecall: ").rstrip()


def help_of(capsys: pytest.CaptureFixture[str], *command: str) -> str:
    with pytest.raises(SystemExit):
        main(["launch", *command, "--help"])
    return capsys.readouterr().out


def posts(hub: Hub) -> list[str]:
    return [url for method, url, _ in hub.asked if method == "POST"]


def test_commands_and_flags_are_these(capsys: pytest.CaptureFixture[str]):
    engine = ["--engine", "--engine-python"]
    flags = {
        "hf-jobs": ["--bucket", *engine, "--flavor", "--follow", "--image", "--namespace", "--no-follow", "--runs",
                    "--set", "--timeout", "--trainer-flavor", "--workers", "--yes"],
        "ssh": ["--ca", *engine, "--gpus", "--rolecall", "--runs", "--token-file", "--url", "--workers"],
        "kubernetes": ["--apply", "--ca", *engine, "--gpus", "--image", "--runs", "--secret", "--url", "--workers"],
        "status": ["--runs"],
        "stop": ["--runs"],
    }  # fmt: skip
    assert re.findall(r"^    ([a-z-]+)(?: |$)", help_of(capsys), re.MULTILINE) == list(flags)
    for command, expected in flags.items():
        found = set(re.findall(r"--[a-z-]+", help_of(capsys, command)))
        assert sorted(found - {"--help"}) == expected, command


# --- the price -------------------------------------------------------------------------------------------


def test_the_price_is_named_before_anything_is_started_and_nobody_there_means_no(
    hub: Hub, capsys: pytest.CaptureFixture[str]
):
    assert main(arguments("--timeout", "2h")) == 2
    out, err = capsys.readouterr()
    assert out == (
        "trainer        1 × a100-large           2.50 $/h\n"
        "workers        2 × l4x1                 1.60 $/h\n"
        "exposed port   1 × 8700                 0.01 $/h\n"
        "together 4.11 $ an hour, 8.22 $ if it takes all 2 h\n"
    )
    assert err == "rolecall: nobody is here to agree to that price: say --yes\n"
    assert posts(hub) == []
    assert not Path("runs").exists()


@pytest.mark.parametrize(
    ("typed", "code", "jobs"), [("y\n", 0, 3), ("\n", 2, 0), ("no\n", 2, 0), ("\4", 2, 0)]
)
def test_at_a_terminal_it_asks(hub: Hub, monkeypatch: pytest.MonkeyPatch, typed: str, code: int, jobs: int):
    ours, theirs = pty.openpty()
    with os.fdopen(theirs) as terminal:
        monkeypatch.setattr(sys, "stdin", terminal)
        os.write(ours, typed.encode())
        assert main(arguments("--no-follow")) == code
    os.close(ours)
    assert len(hub.jobs) == jobs


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        (
            ["--flavor", "l4x2"],
            "there is no hardware 'l4x2'; did you mean 'l4x4'? There is: a100-large, cpu-basic, l4x1, l4x4",
        ),
        (["--timeout", "6"], "--timeout 6: write it as 90s, 45m, 6h or 1d"),
        (["--workers", "0"], "--workers 0: at least one"),
        (["--bucket", "weights"], "--bucket weights: write it as namespace/name or as s3://name/prefix"),
        (
            ["--set", "store=s3://x"],
            "--set store=s3://x: launch sets that itself, from --bucket and --workers",
        ),
        (["--set", "stepz=3"], "async_grpo has no setting 'stepz'; did you mean 'steps'?"),
    ],
)
def test_mistakes_cost_nothing(hub: Hub, capsys: pytest.CaptureFixture[str], flags: list[str], text: str):
    assert refused(capsys, arguments("--yes", *flags)).startswith(text)
    assert posts(hub) == []


def test_a_recipe_in_a_file_has_to_be_in_the_image(hub: Hub, capsys: pytest.CaptureFixture[str]):
    mine = [word if word != "async_grpo" else "mine.py" for word in arguments("--yes")]
    assert "mine.py is a file of this machine, which no job has" in refused(capsys, mine)


def test_an_engine_that_no_worker_could_have_costs_nothing(
    hub: Hub, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "engineless").mkdir()
    (tmp_path / "engineless" / "recipe.py").write_text(ENGINELESS)
    monkeypatch.syspath_prepend(tmp_path)
    mistaken = arguments("--yes", "--engine-python", "/vllm", recipe="engineless.recipe")
    assert refused(capsys, mistaken).startswith("--engine-python: recipe engineless.recipe has no setting")
    assert posts(hub) == []


@pytest.mark.parametrize(
    ("status", "code", "text"),
    [
        (401, 2, "log in again with `hf auth login`"),
        (402, 2, "add credit at https://huggingface.co/settings/billing"),
        (503, 1, "Hugging Face does not give who you are just now (503)"),
    ],
)
def test_a_platform_that_refuses(
    hub: Hub, capsys: pytest.CaptureFixture[str], status: int, code: int, text: str
):
    hub.fail = [status]
    assert text in refused(capsys, arguments("--yes"), code)


def test_minutes_that_have_begun_are_paid_whole():
    assert cost_usd(61, 0.6) == pytest.approx(0.02)
    assert cost_usd(0, 0.6) == 0
    assert usd_per_hour(0.5, "minute") == 30
    with pytest.raises(Unrecoverable, match="by the 'fortnight'"):
        usd_per_hour(1, "fortnight")


# --- what a job is told ----------------------------------------------------------------------------------


def test_a_launch_is_one_trainer_and_its_workers(hub: Hub):
    assert main(arguments("--yes", "--no-follow", "--timeout", "90m", "--set", "steps=7")) == 0
    trainer, *workers = [job.spec for job in hub.jobs.values()]
    assert trainer["command"] == [
        "rolecall", "run", "async_grpo", "--proxy", "0.0.0.0:8700", "--set", "steps=7",
        "--set", "rollout_workers=0", "--set", "store=s3://weights/rolecall",
        "--name", trainer["labels"]["rolecall"],
    ]  # fmt: skip
    assert trainer["expose"] == {"ports": [8700], "portsPublic": []}
    (id,) = [job.id for job in hub.of("trainer")]
    for number, worker in enumerate(workers):
        assert worker["command"][3:] == [f"{hub.endpoint}/gateway/{id}--8700", "--gpus", "1"]
        assert worker["labels"]["role"] == f"worker-{number}"
        assert "expose" not in worker
    assert {spec["flavor"] for spec in workers} == {"l4x1"} and trainer["flavor"] == "a100-large"
    for spec in (trainer, *workers):
        assert (spec["timeoutSeconds"], spec["dockerImage"]) == (5400, "ann/rolecall")
        assert spec["labels"]["rolecall"] == next(Path("runs").iterdir()).name
        assert spec["secrets"]["AWS_ENDPOINT_URL"] == "https://s3.hf.co/ann"
        assert KEYS.items() <= spec["secrets"].items()
        assert spec["secrets"]["ROLECALL_TOKEN"] == trainer["secrets"]["ROLECALL_TOKEN"]
    assert not {"ROLECALL_BEARER", "HF_TOKEN"} & trainer["secrets"].keys()
    assert workers[0]["secrets"]["ROLECALL_BEARER"] == hub.token


@pytest.mark.parametrize(
    ("flavor", "flags"),
    [("cpu-basic", []), ("l4x4", ["--gpus", "4", "--engine", "vllm", "--engine-python", "/vllm"])],
)
def test_a_workers_job_has_one_worker_for_each_gpu_and_an_engine_of_its_own(
    hub: Hub, flavor: str, flags: list[str]
):
    assert main(arguments("--yes", "--no-follow", "--flavor", flavor, *flags[2:])) == 0
    assert hub.of("worker-0")[0].spec["command"][4:] == flags
    assert "--engine" not in hub.of("trainer")[0].spec["command"]


def test_secrets_are_told_as_secrets_and_nowhere_else(
    hub: Hub, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setenv("ROLECALL_BEARER", hub.reader)
    monkeypatch.setenv("ROLECALL_HF_TOKEN", "hf_that-may-only-read")
    assert main(arguments("--yes", "--no-follow")) == 0
    assert main(["launch", "status"]) == 0
    assert main(["launch", "stop"]) == 0
    hidden = {hub.token, hub.reader, "hf_that-may-only-read", *KEYS.values()}
    seen = [*capsys.readouterr(), *(path.read_text() for path in Path().rglob("*") if path.is_file())]
    for _, url, body in hub.asked:
        spec: dict[str, Any] = json.loads(body) if body else {}
        hidden |= set(spec.pop("secrets", {}).values())
        seen += [url, json.dumps(spec)]
    hidden -= {"https://s3.hf.co/ann", "us-east-1"}
    assert len(hidden) == 6  # the three tokens of the platform, the bucket's two keys, the run's token
    assert not [(secret, text) for secret in hidden for text in seen if secret in text]
    for job in hub.jobs.values():
        assert job.spec["secrets"].get("ROLECALL_BEARER") != hub.token
        assert job.spec["secrets"]["HF_TOKEN"] == "hf_that-may-only-read"
    assert "the jobs may read gated models, by the token in ROLECALL_HF_TOKEN\n" in seen[0]


def test_where_a_bucket_is():
    s3 = {**KEYS, "AWS_ENDPOINT_URL": "http://here", "AWS_PROFILE": "mine", "HOME": "/root"}
    assert store_and_keys("s3://name/a/b", s3) == (
        "s3://name/a/b",
        {**KEYS, "AWS_ENDPOINT_URL": "http://here"},
    )
    store, keys = store_and_keys("team/weights", s3)
    assert store == "s3://weights/rolecall"
    assert keys == KEYS | {
        "AWS_ENDPOINT_URL": "https://s3.hf.co/team", "AWS_REGION": "us-east-1", "AWS_DEFAULT_REGION": "us-east-1",
    }  # fmt: skip
    with pytest.raises(Unrecoverable, match="AWS_SECRET_ACCESS_KEY is not set: the jobs need keys"):
        store_and_keys("team/weights", {"AWS_ACCESS_KEY_ID": "x"})


def test_what_a_gateway_asks_for_goes_beside_the_runs_token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    heard: list[tuple[str | None, str | None]] = []

    class Gateway(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            heard.append((self.headers[TOKEN_HEADER], self.headers["Authorization"]))
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b'{"name": "here-1", "number": 1, "lease_s": 30.0}')

        do_POST = do_GET

    token = tmp_path / "token"
    token.write_text("the-token")
    with HTTPServer(("127.0.0.1", 0), Gateway) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        url = f"http://127.0.0.1:{server.server_port}"
        for number, bearer in enumerate(("", "hf_reader")):
            monkeypatch.setenv("ROLECALL_BEARER", bearer)
            fetch_about(f"{url}/{number}", token)
            join(f"{url}/{number}", token, "here")
        server.shutdown()
        thread.join()
    assert heard == [("the-token", None)] * 2 + [("the-token", "Bearer hf_reader")] * 2


# --- status and stop -------------------------------------------------------------------------------------


def test_status_says_what_runs_since_when_and_what_it_has_cost(hub: Hub, capsys: pytest.CaptureFixture[str]):
    assert main(arguments("--yes", "--no-follow")) == 0
    for job in hub.jobs.values():
        job.began -= 3601 - 60
    hub.of("worker-1")[0].end("ERROR", "exit code 137")
    capsys.readouterr()
    assert main(["launch", "status"]) == 0
    out = capsys.readouterr().out.splitlines()
    assert re.fullmatch(
        r"async-grpo-\d{8}-\d{6}-[0-9a-f]{4}, started .*, weights in s3://weights/rolecall", out[0]
    )
    rows = [re.sub(r"\S+ \S+ +59 min", "SINCE", re.sub(r" +", " ", line)) for line in out[1:4]]
    rows = [re.sub(r" [0-9a-f]{24}", "", row) for row in rows]
    assert rows == [
        "trainer RUNNING a100-large SINCE 2.51 $",
        "worker-0 RUNNING l4x1 SINCE 0.80 $",
        "worker-1 ERROR l4x1 SINCE 0.80 $ exit code 137",
    ]
    assert out[4] == "2 of 3 jobs live, 3.31 $ an hour; about 4.11 $ so far"


def test_stop_ends_the_workers_first_and_finds_what_no_file_knows_of(
    hub: Hub, capsys: pytest.CaptureFixture[str]
):
    hub.lost_answers = 1  # the trainer is started, and the launcher does not hear of it
    assert main(arguments("--yes")) == 1
    assert "jobs may be running: `rolecall launch status" in capsys.readouterr().err
    (trainer,) = hub.jobs.values()
    worker = JobSpec("worker-0", "x", ["x"], {}, "l4x1", 60)
    HubJobs(HfApi(hub.endpoint, hub.token), trainer.spec["labels"]["rolecall"], USER).start(worker)
    assert main(["launch", "stop"]) == 0
    assert hub.live() == []
    cancelled = [url.split("/")[-2] for url in posts(hub) if url.endswith("/cancel")]
    assert [hub.jobs[id].role for id in cancelled] == ["worker-0", "trainer"]
    assert main(["launch", "stop"]) == 0  # again costs nothing
    assert len([url for url in posts(hub) if url.endswith("/cancel")]) == 2


def test_of_two_launches_the_newer_is_meant_or_the_one_that_is_named(
    hub: Hub, capsys: pytest.CaptureFixture[str]
):
    assert main(arguments("--yes", "--no-follow")) == 0
    assert main(arguments("--yes", "--no-follow", workers=1)) == 0
    first, second = dict.fromkeys(job.spec["labels"]["rolecall"] for job in hub.jobs.values())
    capsys.readouterr()
    for arguments_, name, live in (([], second, 3), ([first], first, 0)):
        assert main(["launch", "stop", *arguments_]) == 0
        assert capsys.readouterr().out.startswith(f"{name}: 0 of ")
        assert len(hub.live()) == live


def test_a_launch_that_is_not_there(hub: Hub, capsys: pytest.CaptureFixture[str]):
    assert refused(capsys, ["launch", "stop"]).startswith("nothing was launched from runs: start with")
    assert main(arguments("--yes", "--no-follow")) == 0
    name = next(Path("runs").iterdir()).name
    capsys.readouterr()
    assert (
        refused(capsys, ["launch", "status", "x"])
        == f"there is no launch 'x'; the newest in runs are: {name}"
    )
    (Path("runs") / name / "launch.json").write_text("{")
    assert "launch.json is damaged" in refused(capsys, ["launch", "status", name])


# --- all of it -------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_ctrl_c_leaves_the_jobs_alone_and_stop_ends_who_follows(tmp_path: Path):
    with Hub(tmp_path / "there", processes=False) as hub:
        environment = hub.environment() | KEYS
        hub.asleep = True
        for last, live in (("trainer", ["trainer"]), ("worker-0", ["trainer", "worker-0"])):
            command = Command(arguments("--yes", workers=1), tmp_path, environment)
            hub.wait_for(last)
            os.kill(command.process.pid, signal.SIGINT)
            code, _, err = command.finish()
            assert (code, hub.live()) == (130, live)
            assert err.startswith(
                "the jobs go on, and nothing is started any more, be it lost or yet to come: `rolecall launch status "
            )
            assert Command(["launch", "stop"], tmp_path, environment).finish()[0] == 0
            hub.jobs.clear()
            hub.asleep = False
        second = Command(arguments("--yes", workers=1), tmp_path, environment)
        hub.wait_for("worker-0")
        assert Command(["launch", "stop"], tmp_path, environment).finish()[0] == 0
        assert second.finish()[0] == 130
        assert len(hub.jobs) == 2 and hub.live() == []


@pytest.mark.slow
def test_a_run_on_rented_jobs_outlives_a_lost_worker_and_a_lost_trainer_and_leaves_nothing(
    tmp_path: Path, s3_server: S3Server, monkeypatch: pytest.MonkeyPatch
):
    """The worker's machine is taken away before it has done anything, the trainer's in the middle of the run."""
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.setenv(
        "PYTHONPATH", os.pathsep.join(filter(None, [str(TESTS), os.environ.get("PYTHONPATH", "")]))
    )
    bucket = f"s3://{s3_server.bucket}/launched"
    with Hub(tmp_path / "there") as hub:
        environment = hub.environment() | s3_server.environment() | {"ROLECALL_BEARER": hub.reader}
        command = Command(
            arguments("--yes", "--set", "steps=8", recipe=RECIPE, bucket=bucket, workers=1), here, environment
        )
        worker = hub.wait_for("worker-0")
        command_lines = _all_command_lines()
        worker.kill()
        lost = hub.of("trainer")[0]
        until(lambda: [file for file in lost.folder.glob("runs/*/metrics.jsonl") if len(lines(file)) >= 3])
        lost.kill()
        code, out, err = command.finish(120)
        assert code == 0, out + err
        assert Command(["launch", "stop"], here, environment).finish()[0] == 0
        assert [job.stage for job in hub.of("trainer")] == ["ERROR", "COMPLETED"]
        assert [job.stage for job in hub.of("worker-0")] == ["ERROR", "CANCELED", "COMPLETED"]
        [folder] = hub.of("trainer")[1].folder.glob("runs/*")
        check_ledger(folder, 8, 4)
        assert "worker-0: ERROR (exit code 137)\nworker-0: started again as job " in out
        assert f"each version of its adapter is in {bucket}" in out
        assert [job.role for job in hub.jobs.values() if _is_alive(job.id)] == []
        hidden = [hub.token, hub.reader, s3_server.access_key, s3_server.secret_key]
        hidden.append(hub.of("trainer")[0].spec["secrets"]["ROLECALL_TOKEN"])
    for path in tmp_path.rglob("*"):
        if path.is_file() and path.name != "token" and not path.name.startswith("tmp."):
            found = [secret for secret in hidden if secret.encode() in path.read_bytes()]
            assert found == [], path
    assert f"rolecall run {RECIPE} --proxy" in command_lines
    assert not any(secret in out + err + command_lines for secret in hidden)


def _all_command_lines() -> str:
    """Of every process there is now, as any user of the machine can read them."""
    text = ""
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                text += (entry / "cmdline").read_text(errors="replace").replace("\0", " ") + "\n"
    return text


def _is_alive(id: str) -> bool:
    """Whether any process of this job is left, however far removed."""
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                if f"JOB_ID={id}".encode() in (entry / "environ").read_bytes():
                    return True
            except (FileNotFoundError, ProcessLookupError, PermissionError):
                continue
    return False
