"""Mistakes as a user makes them: each ends the command within seconds, with one sentence, and leaves no process."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from .commands import Command, proxy_url

pytestmark = pytest.mark.slow

LIMIT_S = 30.0  # imports of torch included, on a busy machine
SMALL = ["--set", "steps=2", "--set", "batch=2", "--set", "group_size=2", "--set", "eval_problems=4"]
NO_ANSWER = 'line 1 of tasks.jsonl needs a text "prompt" (or "question", "problem") and an'


def refused(folder: Path, arguments: list[str], *, code: int = 2, **environment: str) -> str:
    """The one sentence the command ends with."""
    command = Command(arguments, folder, environment)
    got, out, err = command.finish(LIMIT_S)
    assert got == code, out + err
    assert "Traceback" not in out + err
    assert command.processes() == []
    said = [line for line in err.splitlines() if not line.startswith("rolecall: the run's folder is ")]
    assert len(said) == 1 and said[0].startswith("rolecall: "), err
    return said[0].removeprefix("rolecall: ")


def run(folder: Path, *settings: str, code: int = 2, **environment: str) -> str:
    flags = [part for setting in settings for part in ("--set", setting)]
    return refused(folder, ["run", "async_grpo", *SMALL, *flags], code=code, **environment)


def test_a_setting_that_is_not_there(tmp_path: Path):
    assert run(tmp_path, "stepz=4").startswith("async_grpo has no setting 'stepz'; did you mean 'steps'?")


def test_a_value_that_cannot_be(tmp_path: Path):
    assert run(tmp_path, "batch=0") == "async_grpo: batch='0' is not a whole number from 1 up"


def test_a_store_that_cannot_be_reached(tmp_path: Path):
    text = run(
        tmp_path, "store=s3://bucket/runs", AWS_ENDPOINT_URL="http://127.0.0.1:9", AWS_ACCESS_KEY_ID="id",
        AWS_SECRET_ACCESS_KEY="secret", AWS_REGION="us-east-1",
    )  # fmt: skip
    assert text.startswith("the store cannot be used: ")
    assert "http://127.0.0.1:9" in text and "AWS_ENDPOINT_URL" in text
    assert "secret" not in text


def test_a_model_that_cannot_be_loaded(tmp_path: Path):
    model = "nobody/no-such-model"  # others, and other moments: tests/test_model.py
    text = run(tmp_path, f"model={model}", HF_ENDPOINT="http://127.0.0.1:9", HF_HOME=str(tmp_path / "hub"))
    assert text.startswith("cannot load ") and repr(model) in text and "give a folder that holds one" in text


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (None, "can't read the data set tasks.jsonl: No such file or directory; check the path"),
        ("", "the data set tasks.jsonl has no rows: give one with at least one"),
        ('{"prompt": "1+1?"}\n', NO_ANSWER),
    ],
)
def test_a_data_set_that_cannot_be_used(tmp_path: Path, content: str | None, text: str):
    if content is not None:
        (tmp_path / "tasks.jsonl").write_text(content)
    assert run(tmp_path, "train_set=tasks.jsonl").startswith(text)


def test_a_data_set_of_the_hub_out_of_reach(tmp_path: Path):
    pytest.importorskip("datasets")
    text = run(
        tmp_path, "train_set=a/b:main", HF_ENDPOINT="http://127.0.0.1:9", HF_HOME=str(tmp_path / "hub")
    )
    assert text.startswith("can't load the data set a/b:main: ")


@pytest.mark.parametrize(
    ("source", "code", "text"),
    [
        (
            "def mine(prompt, completion): return 1 / 0",
            1,
            "reward function mine raised ZeroDivisionError: division",
        ),
        ("def mine(completion): return 1.0", 2, "reward function mine must take two arguments"),
        ("def yours(prompt, completion): return 1.0", 2, "rewards.py has no function 'mine'; it has: yours"),
        ("def mine(", 2, "the reward's file rewards.py can't be loaded: SyntaxError"),
    ],
)
def test_a_broken_reward_function(tmp_path: Path, source: str, code: int, text: str):
    (tmp_path / "rewards.py").write_text(source + "\n")
    assert run(tmp_path, "reward=rewards.py:mine", code=code).startswith(text)


def join(folder: Path, url: str, *flags: str) -> str:
    return refused(folder, ["join", url, "--token-file", "token", *flags])


def test_joining_what_is_not_there(tmp_path: Path):
    assert join(tmp_path, "http://127.0.0.1:9").startswith("can't read the token file ")
    (tmp_path / "token").touch()
    assert "is empty: copy it again" in join(tmp_path, "http://127.0.0.1:9")
    (tmp_path / "token").write_text("abc\n")
    assert join(tmp_path, "http://127.0.0.1:9").startswith("no run answers at http://127.0.0.1:9 (")
    assert join(tmp_path, "127.0.0.1:9").startswith("no run answers at 127.0.0.1:9 (")
    assert join(tmp_path, "http://127.0.0.1:9", "--workers", "0") == "--workers 0: at least one"


@pytest.fixture
def other_server() -> Iterator[str]:
    """The URL of a web server that is no run."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b"<html>welcome</html>")

        def log_message(self, format: str, *args: object) -> None: ...

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()
    thread.join()


def test_joining_what_is_no_run(tmp_path: Path, other_server: str):
    (tmp_path / "token").write_text("abc\n")
    assert join(tmp_path, other_server).startswith(
        f"what answers at {other_server} is no run: check the address"
    )


def test_joining_with_a_wrong_token_or_without_a_bucket(tmp_path: Path):
    here, there = tmp_path / "here", tmp_path / "there"
    here.mkdir()
    there.mkdir()
    run = Command(["run", "async_grpo", *SMALL, "--proxy", "127.0.0.1:0", "--set", "rollout_workers=0"], here)
    folder = run.run_folder()
    url = proxy_url(folder)
    (there / "token").write_text("wrong\n")
    assert join(there, url).startswith(f"the run at {url} refused the token: copy its token file again")
    (there / "token").write_text((folder / "token").read_text())
    text = join(there, url)
    assert text.startswith("the run keeps its weights in file://, which this machine can't read")
    assert "--set store=s3://bucket/prefix" in text
    assert Command(["stop"], here).finish()[0] == 0
    assert run.finish()[0] == 130
    assert run.processes() == []
