"""Every block of the README runs."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from rolecall.actors.tiny import BASE
from rolecall.actors.tiny.problems import held_out, training
from rolecall.runtime.recipe import recipe_names

from .certificates import make_certificate
from .commands import Command, lines, proxy_url, until
from .hosts import install
from .hub import Hub
from .s3 import S3Server
from .test_run import ROLES, SMALL, check_ledger, check_main_job

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
FEW = [
    "--set",
    "eval_problems=4",
    "--set",
    "batch=4",
    "--set",
    "group_size=4",
]  # where accuracy is not what it shows
BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```$", README, re.M | re.S)


def _commands() -> list[str]:
    """Each command of each sh block, on one line, without its comment."""
    text = "\n".join(body for kind, body in BLOCKS if kind == "sh").replace("\\\n", " ")
    return [
        re.sub(r"\s+", " ", line.partition(" #")[0]).strip() for line in text.splitlines() if line.strip()
    ]


def _arguments(start: str) -> list[str]:
    """The arguments of the README's one command that starts so."""
    (command,) = [command for command in _commands() if command.startswith(start)]
    return shlex.split(command.removeprefix("rolecall "))


def _run(arguments: list[str], folder: Path) -> str:
    code, out, err = Command(arguments, folder).finish(180)
    assert code == 0, err
    return out


def test_every_command_is_run_by_a_test_below():
    tested = re.findall(r'_arguments\("(.*?)"\)', Path(__file__).read_text())
    left = [c for c in _commands() if not any(c.startswith(start) for start in tested)]
    assert (
        left
        == [
            "pip install -e . && rolecall run async_grpo",
            'rolecall sample RUN "Ann has 3 pens, buys 4 and loses 2. How many pens now?"',
            'pip install -e ".[test]" && tests/setup vllm && pytest -n auto --dist loadfile',
            "rolecall run async_grpo --resume async_grpo-20260131-120000-7a81",  # these two: tests/test_resume.py does
            "rolecall run async_grpo --resume async_grpo-20260131-120000-7a81 --set store=s3://my-bucket/rolecall",
            "rolecall compare sync_grpo async_grpo",  # these two: tests/test_compare.py does, with smaller recipes
            "rolecall compare RUN RUN",
            # A comparison has such runs.
            "rolecall run async_grpo --set 'rollout_delay=lognormal(0.45,0.7)' --set max_staleness=12 "
            "--set loss.correction=tis --set steps=5",
            "rolecall run tool_grpo",  # tests/test_run.py does
            "rolecall plan --groups 32000",  # tests/test_simulation.py does
        ]
    )


def test_every_test_that_is_linked_exists():
    links = re.findall(r"\[(test_\w+)\]\((tests/\w+\.py)\)", README)
    assert len(links) > 15
    for name, path in links:
        text = (ROOT / path).read_text()
        assert f"def {name}(" in text or name == Path(path).stem, f"{path} has no {name}"


def test_no_placeholder_is_left():
    assert re.findall(r"@[A-Z]+@|TODO|FIXME|[A-Z]_RESULT", README) == []


def test_the_test_line_is_what_ci_runs():
    ci = (ROOT / ".ci" / "run").read_text()
    commands = [
        'pip install --quiet -e ".[test]"',
        "tests/setup vllm",
        "tests/check",
        "pytest -n auto --dist loadfile",
    ]
    places = [ci.index(f"\n{command}") for command in commands]
    assert places == sorted(places)


def test_the_first_line_and_the_sample(tmp_path: Path):
    out = _run(["run", "async_grpo"], tmp_path)
    ((before, after),) = re.findall(r"held-out accuracy (0\.\d+) → (0\.\d+|1\.00) in", out)
    assert float(before) <= 0.40 and float(after) >= 0.85
    (folder,) = tmp_path.glob("runs/*")
    check_main_job(folder, 40)
    line = next(line for line in out.splitlines() if line.startswith("try it: "))
    program, *arguments = re.findall(r'"[^"]*"|\S+', line.removeprefix("try it: "))
    assert program == "rolecall"
    out = _run([argument.strip('"') for argument in arguments], tmp_path)
    assert "base" in out and "trained" in out and out.count("#### ") >= 4


def test_a_live_run_from_another_terminal(tmp_path: Path):
    command = Command(["run", "async_grpo", *SMALL, "--set", "steps=1000"], tmp_path)
    folder = command.run_folder()
    until(lambda: lines(folder / "metrics.jsonl"))
    shown = _run(_arguments("rolecall ps"), tmp_path)
    assert all(role in shown for role in ROLES)
    follower = Command(_arguments("rolecall logs"), tmp_path)
    assert "restarting rollout-0, rollout-1" in _run(_arguments("rolecall restart"), tmp_path)
    _run(_arguments("rolecall stop"), tmp_path)
    assert command.finish(60)[0] == 130
    assert command.processes() == []
    assert follower.finish(60)[0] == 0
    code, _, err = Command(["ps", folder.name], tmp_path).finish()
    assert code == 2 and "has ended" in err


def test_show_and_diff(tmp_path: Path):
    assert "RolloutWorker" in _run(_arguments("rolecall show sync_grpo"), tmp_path)
    assert _run(_arguments("rolecall show async_grpo --svg"), tmp_path) == ""
    assert (tmp_path / "graph.svg").read_text().startswith("<svg")
    assert "+ buffer: Buffer" in _run(_arguments("rolecall diff sync_grpo"), tmp_path)


def test_every_recipe_is_in_the_table():
    rows = re.findall(r"^\| \[(\w+)\]\(recipes/(\w+)\.py\) \|", README, re.M)
    assert sorted(rows) == [(name, name) for name in recipe_names()]


def test_a_recipe_of_ones_own_is_short():
    (body,) = [body for _, body in BLOCKS if body.startswith("# diary.py\n")]
    assert len([line for line in body.splitlines()[1:] if line.strip()]) <= 20


def test_sync_with_settings(tmp_path: Path):
    out = _run([*_arguments("rolecall run sync_grpo"), *FEW], tmp_path)
    assert "in 5 steps" in out and "groups trained: 20; dropped: none" in out


@pytest.fixture(scope="module")
def another_loss(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run of five steps."""
    folder = tmp_path_factory.mktemp("another-loss")
    arguments = _arguments("rolecall run async_grpo --set loss.kind")
    assert "in 5 steps" in _run([*arguments, *FEW], folder)
    (run,) = folder.glob("runs/*")
    return run


def test_another_loss(another_loss: Path):
    assert all("kl_ref" in line for line in lines(another_loss / "metrics.jsonl"))


def test_a_run_is_foreseen(another_loss: Path):
    folder = another_loss.parent.parent
    profile = [argument.replace("RUN", another_loss.name) for argument in _arguments("rolecall profile")]
    assert "tokens" in _run(profile, folder) and (folder / "profile.json").exists()
    predicted = _run([*_arguments("rolecall simulate"), "--steps", "3"], folder)
    assert "3 steps with 64 workers" in predicted and "GPU-hours: rollout" in predicted


def test_files_of_ones_own(tmp_path: Path):
    for kind, body in BLOCKS:
        if kind == "python":
            name = re.match(r"# (\w+\.py)\n", body)
            assert name, "each python block begins with its file's name"
            (tmp_path / name[1]).write_text(body)
    short = _arguments("rolecall run async_grpo --set 'reward=exact_match")
    assert "in 5 steps" in _run([*short, *FEW], tmp_path)
    [metrics] = tmp_path.glob("runs/*/metrics.jsonl")
    for line in map(json.loads, metrics.read_text().splitlines()):
        parts = line["rewards/exact_match"] + 0.01 * line["rewards/short"]
        assert line["reward"] == pytest.approx(parts)
    assert "in 5 steps" in _run([*_arguments("rolecall run diary.py"), *FEW], tmp_path)
    retry = _arguments("rolecall run tool_grpo --set environment=retry.py")
    assert "in 5 steps" in _run([*retry, *FEW], tmp_path)
    assert "+ diary: Diary\n" in _run(_arguments("rolecall diff async_grpo"), tmp_path)
    (diary,) = tmp_path.glob("runs/diary-*/diary.txt")
    assert "version 5" in diary.read_text() or "step 5" in diary.read_text()


def test_a_model_and_data_of_ones_own(tmp_path: Path):
    import msgspec

    shutil.copytree(BASE, tmp_path / "my-model")
    for name, problems in (("train", training(0)), ("test", held_out(8))):
        rows = [{"question": p.text, "answer": p.answer} for p, _ in zip(problems, range(8), strict=False)]
        (tmp_path / f"{name}.jsonl").write_bytes(b"\n".join(map(msgspec.json.encode, rows)))
    out = _run(_arguments("rolecall run async_grpo --set model=./my-model"), tmp_path)
    assert "in 2 steps" in out


def test_another_machine_joins(tmp_path: Path, s3_server: S3Server):
    """It only dials out. There are no workers but its own, so every group that is trained is one of theirs."""
    here, there = tmp_path / "here", tmp_path / "there"
    here.mkdir()
    there.mkdir()

    def real(argument: str) -> str:
        return argument.replace("my-bucket", s3_server.bucket).replace("0.0.0.0:8700", "127.0.0.1:0")

    started = [real(argument) for argument in _arguments("rolecall run async_grpo --set store=s3")]
    run = Command([*started, *SMALL, "--set", "rollout_workers=0"], here, s3_server.environment())
    folder = run.run_folder()
    url = proxy_url(folder)
    shutil.copyfile(folder / "token", there / "token")
    assert (folder / "token").stat().st_mode & 0o077 == 0
    joined = [
        argument.replace("http://trainer.example:8700", url) for argument in _arguments("rolecall join http:")
    ]
    join = Command(joined, there, s3_server.environment())
    code, _, err = run.finish(180)
    assert code == 0, err
    metrics = check_ledger(folder, 8, 8)
    workers = {worker for line in metrics for worker in line["workers"]}
    assert len(workers) == 2 and all("/rollout-" in worker for worker in workers)
    code, out, err = join.finish(60)
    assert code == 0, err
    assert "the run has finished" in out
    token = (folder / "token").read_text().strip()
    for path in [*folder.rglob("*"), *there.rglob("*")]:
        if path.is_file() and path.name != "token":
            assert token.encode() not in path.read_bytes(), path
    assert run.processes() == [] and join.processes() == []


def test_who_may_do_what(tmp_path: Path, s3_server: S3Server):
    """Over HTTPS, with a worker's token of its own, while other tokens come and go."""
    make_certificate(tmp_path / "cert.pem", tmp_path / "key.pem")

    def real(argument: str) -> str:
        return argument.replace("my-bucket", s3_server.bucket).replace("0.0.0.0:8700", "127.0.0.1:0")

    started = [real(argument) for argument in _arguments("rolecall run async_grpo --proxy")]
    run = Command([*started, *SMALL, "--set", "rollout_workers=0"], tmp_path, s3_server.environment())
    folder = run.run_folder()
    url = proxy_url(folder)
    assert url.startswith("https://")

    def token(arguments: list[str]) -> str:
        return _run([argument.replace("RUN", folder.name) for argument in arguments], tmp_path)

    written = token(_arguments("rolecall token RUN --expires"))
    assert "worker, id " in written and "holds for 12h" in written
    assert ": trainer, id " in token(_arguments("rolecall token RUN --scope"))
    assert token(_arguments("rolecall token RUN --revoke")) == "1f0c9a2b holds no longer\n"
    shutil.copyfile(written.partition(":")[0], tmp_path / "token")
    joined = [
        argument.replace("https://trainer.example:8700", url)
        for argument in _arguments("rolecall join https:")
    ]
    join = Command(joined, tmp_path, s3_server.environment())
    until(lambda: lines(folder / "metrics.jsonl"))
    assert "hold for 10m" in token(_arguments("rolecall token RUN --rotate"))
    code, out, err = run.finish(180)
    assert code == 0, err
    assert f"rolecall join {url} --token-file {folder}/token --ca {tmp_path}/cert.pem\n" in out
    check_ledger(folder, 8, 8)
    code, _, err = join.finish(60)
    assert code == 0, err
    assert run.processes() == [] and join.processes() == []


def test_renting_machines(tmp_path: Path):
    def launch(arguments: list[str], *more: str) -> str:
        code, out, err = Command([*arguments, *more], tmp_path, environment).finish()
        assert code == 0, err
        return out

    (tmp_path / "token").write_text("the-token")
    keys = {"AWS_ACCESS_KEY_ID": "id", "AWS_SECRET_ACCESS_KEY": "key"}
    with Hub(tmp_path / "there", processes=False) as hub:
        environment = hub.environment() | keys | {"PATH": f"{install(tmp_path)}:{os.environ['PATH']}"}
        out = launch(_arguments("rolecall launch hf-jobs"), "--yes", "--no-follow")
        (price,) = [body for _, body in BLOCKS if "if it takes all" in body]
        assert out.startswith(price.removesuffix("go on? [y/N]\n"))
        assert hub.live() == ["trainer", *(f"worker-{number}" for number in range(8))]
        assert "9 of 9 jobs live, 8.91 $ an hour" in launch(_arguments("rolecall launch status"))
        launch(_arguments("rolecall launch stop"))
        assert hub.live() == []
    assert "gpu-1: joined\ngpu-2: joined\n" in launch(_arguments("rolecall launch ssh"))
    launch(_arguments("rolecall launch stop"))
    assert "parallelism: 16" in launch(_arguments("rolecall launch kubernetes"))


def test_the_python_blocks_pass_the_type_checker(tmp_path: Path):
    subprocess.run([ROOT / "tests" / "setup"], check=True)
    for number, (kind, body) in enumerate(BLOCKS):
        if kind == "python":
            (tmp_path / f"block{number}.py").write_text(body)
    (tmp_path / "pyrightconfig.json").write_text(f'{{"extraPaths": ["{ROOT / ".dev"}"]}}')
    command = [sys.executable, "-m", "pyright", "--pythonpath", sys.executable, "-p", str(tmp_path)]
    checked = subprocess.run(command, capture_output=True, text=True)
    assert checked.returncode == 0, checked.stdout
