"""The command line: its flags, what it prints, its exit codes."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
from pathlib import Path

import pytest
from rolecall.runtime.cli import main
from rolecall.runtime.recipe import recipe_names
from rolecall.runtime.remote import is_own_authority
from rolecall.runtime.runs import RunFolder, RunInfo, create_run, find_run

from .certificates import make_certificate
from .commands import Command

FLAGS = {
    "run": ["--json", "--name", "--proxy", "--resume", "--runs", "--set", "--tls-cert", "--tls-key"],
    "show": ["--set", "--svg"],
    "diff": [],
    "compare": ["--budget", "--json", "--price", "--runs", "--seeds", "--set", "--target"],
    "ps": ["--json", "--runs"],
    "logs": ["--follow", "--runs"],
    "restart": ["--runs"],
    "stop": ["--runs"],
    "sample": ["--runs"],
    "join": ["--ca", "--engine", "--engine-python", "--gpus", "--runs", "--token-file", "--workers"],
    "token": ["--expires", "--grace", "--revoke", "--rotate", "--runs", "--scope"],
    "profile": ["--output", "--runs"],
    "simulate": ["--away", "--json", "--preempt", "--profile", "--seed", "--set", "--steps", "--workers"],
    "plan": ["--groups", "--json", "--prices", "--profile"],
    "launch": [],  # its own commands are in test_launch.py
}


def help_of(capsys: pytest.CaptureFixture[str], *command: str) -> str:
    with pytest.raises(SystemExit) as caught:
        main([*command, "--help"])
    assert caught.value.code == 0
    return capsys.readouterr().out


def output(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(list(arguments)) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    return captured.out


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The one sentence on stderr."""
    assert main(list(arguments)) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("rolecall: ") and captured.err.count("\n") == 1
    return captured.err.removeprefix("rolecall: ").rstrip()


RECIPES = ", ".join(recipe_names())


def test_commands_and_flags_are_these(capsys: pytest.CaptureFixture[str]):
    """A new knob belongs into a recipe's Config; a new flag needs a reason, and a line here."""
    listed = re.findall(r"^    (\w+) ", help_of(capsys), re.MULTILINE)
    assert listed == list(FLAGS)
    for command, flags in FLAGS.items():
        found = set(re.findall(r"--[a-z-]+", help_of(capsys, command)))
        assert sorted(found - {"--help"}) == flags, command


def test_show_lists_every_role_and_setting(capsys: pytest.CaptureFixture[str]):
    from rolecall.recipes import async_grpo

    out = output(capsys, "show", "async_grpo", "--set", "steps=7", "--set", "model=a/b")
    graph = async_grpo.build(async_grpo.Config())
    for role in graph:
        assert re.search(rf"^  {role.name}\b.*{role.actor.__name__}", out, re.MULTILINE)
    settings = dict(re.findall(r"^  ([\w.]+) = (.*)$", out, re.MULTILINE))
    fields = dict.fromkeys(name.partition(".")[0] for name in settings)
    assert list(fields) == list(async_grpo.Config.__dataclass_fields__)
    assert settings["loss.kind"] == "'grpo'"
    assert (settings["steps"], settings["model"], settings["lr"]) == ("7", "'a/b'", "0.001")


def test_diff_marks_the_edges(capsys: pytest.CaptureFixture[str]):
    out = output(capsys, "diff", "sync_grpo", "async_grpo")
    assert "- trainer: groups ─▶ rollout\n+ trainer: groups ─▶ buffer\n" in out
    assert "+ rollout: sink ─▶ buffer" in out


def test_show_draws_into_a_file(capsys: pytest.CaptureFixture[str], tmp_path: Path):
    assert output(capsys, "show", "sync_grpo", "--svg", str(tmp_path / "graph.svg")) == ""
    assert (tmp_path / "graph.svg").read_text().startswith("<svg")
    assert main(["show", "sync_grpo", "--svg", str(tmp_path / "nowhere" / "graph.svg")]) == 2
    assert "nowhere/graph.svg: No such file or directory" in capsys.readouterr().err


def test_a_recipe_may_be_a_file(capsys: pytest.CaptureFixture[str], tmp_path: Path):
    path = tmp_path / "mine.py"
    path.write_text("from rolecall.recipes.sync_grpo import Config, build\n")
    assert output(capsys, "show", str(path)) == output(capsys, "show", "sync_grpo")


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["async_grp"], "there is no recipe 'async_grp'; did you mean 'async_grpo'? There are: "
         + RECIPES),
        (["quux"], f"there is no recipe 'quux'. There are: {RECIPES}, or give the path of a .py file or the dotted "
         "name of a module"),
        (["missing.py"], "there is no recipe file {here}/missing.py: check the path"),
        (["async_grpo", "--set", "stepz=4"], "async_grpo has no setting 'stepz'; did you mean 'steps'? It has: batch,"),
        (["async_grpo", "--set", "steps"], "--set steps: write it as field=value"),
        (["async_grpo", "--set", "steps=many"], "async_grpo: steps='many' is not a whole number from 1 up"),
        (["async_grpo", "--set", "steps=0"], "async_grpo: steps='0' is not a whole number from 1 up"),
        (["async_grpo", "--set", "steps=-1"], "async_grpo: steps='-1' is not a whole number from 1 up"),
        (["async_grpo", "--set", "steps=2.5"], "async_grpo: steps='2.5' is not a whole number from 1 up"),
        (["async_grpo", "--set", "batch=0"], "async_grpo: batch='0' is not"),
        (["async_grpo", "--set", "engine=vlm"], "async_grpo: engine='vlm' is not a value it can have: transformers, "
         "vllm"),
        (["async_grpo", "--set", "group_size=1"], "async_grpo: group_size='1' is not a whole number from 2 up"),
        (["async_grpo", "--set", "max_tokens=0"], "async_grpo: max_tokens='0' is not"),
        (["async_grpo", "--set", "temperature=0"], "async_grpo: temperature='0' is not a finite number above 0"),
        (["async_grpo", "--set", "temperature=nan"], "async_grpo: temperature='nan' is not a finite number above 0"),
        (["async_grpo", "--set", "lr=inf"], "async_grpo: lr='inf' is not a finite number above 0"),
        (["async_grpo", "--set", "lr=-0.1"], "async_grpo: lr='-0.1' is not a finite number above 0"),
        (["async_grpo", "--set", "lora.rank=0"], "a LoRA of rank 0: engines serve 1 to 256"),
        (["async_grpo", "--set", "lora.alpha=0"], "a LoRA's alpha is above 0 and finite, not 0.0"),
        (["async_grpo", "--set", "eval_problems=0"], "async_grpo: eval_problems='0' is not"),
        (["async_grpo", "--set", "eval_every=0"], "async_grpo: eval_every='0' is not"),
        (["async_grpo", "--set", "max_staleness=-1"], "async_grpo: max_staleness='-1' is not a whole number from 0 up"),
        (["async_grpo", "--set", "seed=-1"], "async_grpo: seed='-1' is not a whole number from 0 up"),
        (["async_grpo", "--set", "seed=9999999999999999999"], "async_grpo: seed='9999999999999999999' is not"),
        (["async_grpo", "--set", "rollout_workers=-1"], "async_grpo: rollout_workers='-1' is not"),
        (["async_grpo", "--set", "rollout_workers=0"], "nobody would do rollout: ask for at least one here, or"),
        (["sync_grpo", "--set", "rollout_workers=0"], "sync_grpo can't be built from these settings: rollout needs"),
        (["async_grpo", "--set", "store=http://x"], "'http://x' is not a place for a store: a store is s3://"),
        (["async_grpo", "--proxy", "8700"], "--proxy 8700: write it as HOST:PORT, as in 127.0.0.1:8700"),
        (["async_grpo", "--proxy", "here:70000"], "--proxy here:70000: write it as HOST:PORT"),
        (["async_grpo", "--tls-cert", "c"], "--tls-cert and --tls-key belong together, and to --proxy"),
        (["async_grpo", "--tls-cert", "c", "--tls-key", "k"], "--tls-cert and --tls-key belong together, and to"),
        (["async_grpo", "--proxy", "127.0.0.1:0", "--tls-cert", "c", "--tls-key", "k"], "can't read {here}/c: check"),
        (["async_grpo", "--proxy", "127.0.0.1:0", "--tls-cert", "file", "--tls-key", "file"],
         "can't read certificates from {here}/file: "),
        (["async_grpo", "--runs", "file/runs"], "can't make the run's folder file/runs/async_grpo-"),
    ],
)  # fmt: skip
def test_a_mistake_is_one_sentence_and_leaves_nothing_behind(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    arguments: list[str], text: str,
):  # fmt: skip
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    assert refused(capsys, "run", *arguments).startswith(text.format(here=tmp_path.resolve()))
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_certificate_is_its_own_authority_or_another_is(tmp_path: Path):
    own, key, signed = tmp_path / "own.pem", tmp_path / "key.pem", tmp_path / "signed.pem"
    make_certificate(own, key)
    assert is_own_authority(own)
    request = ["openssl", "req", "-new", "-key", key, "-subj", "/CN=trainer"]
    made = subprocess.run(request, check=True, capture_output=True).stdout
    sign = ["openssl", "x509", "-req", "-CA", own, "-CAkey", key, "-CAcreateserial", "-out", signed]
    subprocess.run(sign, input=made, check=True, capture_output=True)
    assert not is_own_authority(signed)


@pytest.mark.parametrize("command", ["run", "show"])
def test_every_command_with_settings_checks_them(capsys: pytest.CaptureFixture[str], command: str):
    assert "did you mean 'batch'?" in refused(capsys, command, "sync_grpo", "--set", "bach=3")


def test_argparse_mistakes_are_exit_code_2(capsys: pytest.CaptureFixture[str]):
    for arguments in (
        [],
        ["runn"],
        ["run"],
        ["run", "async_grpo", "--sett", "a=b"],
        ["join", "http://x"],
        ["logs"],
        ["restart"],
    ):
        with pytest.raises(SystemExit) as caught:
            main(arguments)
        assert caught.value.code == 2
    assert "invalid choice: 'runn'" in capsys.readouterr().err


def past_run(root: Path, name: str, *, started: float) -> RunFolder:
    run = RunFolder(root / name)
    run.path.mkdir(parents=True)
    run.write_info(RunInfo(id=name, recipe="async_grpo", config={}, started=started, pid=0))
    return run


def test_runs_that_are_not_there(capsys: pytest.CaptureFixture[str], tmp_path: Path):
    root = str(tmp_path / "runs")
    assert refused(capsys, "ps", "--runs", root).startswith(f"there is no live run in {root}: start one with")
    past_run(tmp_path / "runs", "old", started=1.0)
    assert refused(capsys, "stop", "--runs", root).startswith("there is no live run in")
    for command in (["ps"], ["restart", "trainer"], ["stop"]):
        text = refused(capsys, *command, "old", "--runs", root)
        assert text == "run old is not live: it has ended"
    text = refused(capsys, "sample", "older", "hello", "--runs", root)
    assert text == f"there is no run 'older'; the newest in {root} are: old"
    assert "run old has no adapter to sample from" in refused(
        capsys, "sample", "old", "hello", "--runs", root
    )


def test_a_run_is_found_by_path_by_name_or_as_the_newest(tmp_path: Path):
    for name, started in (("a", 3.0), ("b", 5.0), ("c", 4.0)):
        past_run(tmp_path, name, started=started)
    assert find_run(tmp_path, None).path.name == "b"
    assert find_run(tmp_path, "a").path == tmp_path / "a"
    assert find_run(tmp_path / "elsewhere", str(tmp_path / "c")).info.started == 4.0


def test_a_run_has_the_name_it_is_given(capsys: pytest.CaptureFixture[str], tmp_path: Path):
    run = create_run(tmp_path, "async_grpo", {}, name="mine")
    assert (run.path.name, run.info.id) == ("mine", "mine")
    for name, text in (
        ("mine", "there is a run mine already: choose"),
        ("my run", "a run can't be called 'my run'"),
    ):
        said = refused(capsys, "run", "async_grpo", "--runs", str(tmp_path), "--name", name)
        assert said.startswith(text)


def test_what_cannot_be_resumed(capsys: pytest.CaptureFixture[str], tmp_path: Path):
    root = tmp_path / "runs"
    past_run(root, "old", started=1.0)

    def resume(recipe: str, run: str, *settings: str) -> str:
        return refused(capsys, "run", recipe, "--runs", str(root), "--resume", run, *settings)

    assert resume("sync_grpo", "old") == "run old is one of async_grpo, not of sync_grpo"
    text = f"there is nothing of a run 'oldd' to resume, neither in {root} nor in the store file://: give its name,"
    assert resume("async_grpo", "oldd").startswith(text)
    store = f"file://{tmp_path}/store"
    assert f"nor in the store {store}" in resume("async_grpo", "oldd", "--set", f"store={store}")
    assert resume("async_grpo", "over/there").startswith(
        "over/there is no run folder, for it has no run.json"
    )
    assert resume("async_grpo", "old", "--set", "steps=0").startswith("async_grpo: steps='0' is not a")
    assert [path.name for path in root.iterdir()] == ["old"]


def test_two_runs_of_one_second_have_two_folders(tmp_path: Path):
    runs = [create_run(tmp_path, "/some/where/mine.py", {"steps": 3}) for _ in range(3)]
    assert len({run.path for run in runs}) == 3
    assert all(run.path.name.startswith("mine-") and not run.live for run in runs)
    assert runs[0].info.config == {"steps": 3}


NOTED = """
from dataclasses import dataclass
from types import SimpleNamespace

from rolecall import Actor, Finished, Graph
from beside import LAST

class Counter(Actor):
    def on_start(self):
        self.count = 0

    def step(self):
        self.count += 1
        self.report(count=self.count)
        if self.count == LAST:
            raise Finished
        return 0.0

@dataclass
class Config:
    pass

def build(config):
    graph = Graph("noted")
    graph.until(graph.add("counter", Counter))
    return graph

outcome = SimpleNamespace(
    progress=lambda reports: "".join(f"counted → {r['count']}" for r in reports.values()),
    report=lambda run: {"counted": LAST},
    describe=lambda run, result: f"counted → {result['counted']}",
)
"""


@pytest.fixture
def noted(tmp_path: Path) -> Path:
    """A folder with a recipe, what it imports, and files named like what it must not import."""
    (tmp_path / "noted.py").write_text(NOTED)
    (tmp_path / "beside.py").write_text("LAST = 3\n")
    for name in ("random.py", "rolecall/__init__.py", "rolecall/runtime/__init__.py", "msgspec.py"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("raise AssertionError('shadowed')\n")
    return tmp_path


@pytest.mark.slow
def test_a_working_directory_shadows_nothing_and_a_recipe_has_siblings(noted: Path):
    code, out, err = Command(["run", "noted.py"], noted).finish()
    assert code == 0, err
    assert out.endswith("counted → 3\n")


@pytest.mark.slow
def test_an_ascii_terminal_does_not_end_a_run(noted: Path):
    code, out, err = Command(["run", "noted.py"], noted, {"PYTHONIOENCODING": "ascii"}).finish()
    assert code == 0, err
    assert out.endswith("counted ? 3\n")


@pytest.mark.slow
def test_readers_that_go_away_do_not_end_a_run(noted: Path):
    command = Command(["run", "noted.py", "--json"], noted)
    assert command.process.stderr is not None and command.process.stdout is not None
    command.process.stderr.close()
    assert json.loads(command.process.stdout.read())["counted"] == 3
    assert command.process.wait() == 0
    command = Command(["run", "noted.py"], noted)
    assert command.process.stderr is not None and command.process.stdout is not None
    command.process.stdout.close()
    assert command.process.stderr.read() == ""
    assert command.process.wait() == 0


@pytest.mark.slow
def test_an_interrupt_during_start_up_says_nothing(tmp_path: Path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    (tmp_path / "long.py").write_text(
        # `with`: an interrupt that came while a forgotten file is closed would be ignored.
        f"import time\nwith open({str(pipe)!r}, 'w') as pipe:\n    pipe.write('here')\n"
        "while True:\n    time.sleep(0.01)\n"
    )
    command = Command(["run", "long.py"], tmp_path)
    with pipe.open() as opened:
        assert opened.read(4) == "here"
        command.process.send_signal(signal.SIGINT)
    assert command.finish() == (130, "", "")
