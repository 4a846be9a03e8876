"""Workers on hosts over ssh and in a cluster: what these tools are told, and by which way."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from rolecall.runtime.cli import main
from rolecall.runtime.launch.credentials import AWS

from .commands import until
from .hosts import install

SECRET = 'it\'s "secret" $HOME'  # what a shell would love to read otherwise
HIDDEN = [SECRET, "secret-key", "hf_reader", "hf_models"]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that stands in for hosts and cluster, and this process in it."""
    bin = install(tmp_path)
    (tmp_path / "token").write_text(f"{SECRET}\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", f"{bin}:{os.environ['PATH']}")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret-key")
    monkeypatch.setenv("ROLECALL_BEARER", "hf_reader")
    monkeypatch.setenv("ROLECALL_HF_TOKEN", "hf_models")
    monkeypatch.delenv("ROLECALL_CA", raising=False)
    return tmp_path


def ssh(*hosts: str) -> list[str]:
    return [
        "launch",
        "ssh",
        *hosts,
        "--url",
        "http://trainer:8700/",
        "--token-file",
        "token",
        "--workers",
        "2",
    ]


def command_line(pid: str) -> str:
    path = Path("/proc") / pid / "cmdline"
    return path.read_text().replace("\0", " ") if path.exists() else ""


def test_hosts_join_and_are_told_the_token_on_no_command_line(here: Path, capsys: pytest.CaptureFixture[str]):
    assert main(ssh("a", "ann@b")) == 0
    launch, *lines = capsys.readouterr().out.splitlines()
    name = launch.removeprefix("launch ")
    assert lines == ["a: joined", "ann@b: joined"]
    pids = []
    for host in ("a", "ann@b"):
        folder = here / host / ".rolecall" / name
        pids.append((folder / "pid").read_text().strip())
        called = (here / host / "called").read_text().split(maxsplit=1)[1]
        assert called == f"join http://trainer:8700 --token-file {folder}/token --workers 2\n"
        assert (folder / "token").read_text() == f"{SECRET}\n"
        assert (folder / "token").stat().st_mode & 0o777 == 0o600
        told = (here / host / "environment").read_text()
        for line in ("AWS_SECRET_ACCESS_KEY=secret-key", "ROLECALL_BEARER=hf_reader", "HF_TOKEN=hf_models"):
            assert f"\n{line}\n" in f"\n{told}"
        for text in (command_line(pids[-1]), (folder / "log").read_text(), (here / "ssh.log").read_text()):
            assert text and not any(secret in text for secret in HIDDEN)
    assert not any(secret in (here / "runs" / name / "launch.json").read_text() for secret in HIDDEN)
    assert (here / "ssh.log").read_text().splitlines() in (
        ["a sh -s", "ann@b sh -s"],
        ["ann@b sh -s", "a sh -s"],
    )

    assert main(["launch", "status"]) == 0
    assert capsys.readouterr().out == "".join(
        f"{host}: running: run join-async_grpo, in {here / host}\n" for host in ("a", "ann@b")
    )
    assert main(["launch", "stop"]) == 0
    assert capsys.readouterr().out == "a: ended\nann@b: ended\n"
    until(lambda: not any(command_line(pid) for pid in pids), 5)
    assert not list(here.rglob(".rolecall/*/token"))
    assert main(["launch", "status"]) == 0
    assert capsys.readouterr().out == "a: ended: left the run\nann@b: ended: left the run\n"


def called(here: Path, host: str) -> tuple[str, Path]:
    """How `rolecall` was called on this host, and the launch's folder there."""
    until((here / host / "called").exists)
    return (here / host / "called").read_text().split(maxsplit=1)[1].rstrip(), next(
        (here / host / ".rolecall").iterdir()
    )


def test_hosts_are_told_of_gpus_an_engine_and_a_certificate(here: Path, monkeypatch: pytest.MonkeyPatch):
    certificate = "-----BEGIN CERTIFICATE-----\nMIIB%s'\\n\n-----END CERTIFICATE-----\n"
    (here / "cert.pem").write_text(certificate)
    address = ["--url", "https://trainer:8700", "--token-file", "token"]
    chosen = ["--gpus", "0,3", "--engine", "vllm", "--engine-python", "/opt/my vllm/python"]
    assert main(["launch", "ssh", "a", *address, *chosen, "--ca", "cert.pem"]) == 0
    assert main(["launch", "stop"]) == 0
    monkeypatch.setenv("ROLECALL_CA", "cert.pem")
    assert main(["launch", "ssh", "b", *address]) == 0
    assert main(["launch", "stop"]) == 0
    for host, flags in (("a", " ".join(chosen) + " "), ("b", "")):
        words, folder = called(here, host)
        assert words == (f"join https://trainer:8700 --token-file {folder}/token {flags}--ca {folder}/ca.pem")
        assert (folder / "ca.pem").read_text() == certificate


def test_a_certificate_that_is_not_there_starts_nothing(here: Path, capsys: pytest.CaptureFixture[str]):
    assert main([*ssh("a"), "--ca", "cert.pem"]) == 2
    assert "can't read certificates from cert.pem" in capsys.readouterr().err
    assert not (here / "ssh.log").exists() and not (here / "runs").exists()


def test_hosts_that_do_not_join_say_why_and_the_others_do(here: Path, capsys: pytest.CaptureFixture[str]):
    assert main(ssh("a", "down", "old")) == 1
    out, err = capsys.readouterr()
    assert out.splitlines()[1:] == [
        "a: joined",
        "down: did not join: ssh: connect to host down port 22: No route to host",
        "old: did not join: rolecall: the run at http://trainer:8700 refused the token",
    ]
    assert err == "rolecall: down, old: did not join; the lines above say why\n"
    assert main(["launch", "stop"]) == 1  # for nobody knows what runs on a host that does not answer
    assert capsys.readouterr().out.splitlines()[0] == "a: ended"


def test_stop_kills_no_process_that_only_has_the_number(here: Path):
    assert main(ssh("a")) == 0
    (pid_file,) = here.rglob("pid")
    real = pid_file.read_text()
    with subprocess.Popen(["sleep", "1000"]) as stranger:
        pid_file.write_text(str(stranger.pid))
        assert main(["launch", "stop"]) == 0
        assert stranger.poll() is None
        stranger.kill()
    pid_file.write_text(real)
    assert main(["launch", "stop"]) == 0
    until(lambda: not command_line(real.strip()), 5)


def test_a_host_is_no_option_of_ssh(here: Path, capsys: pytest.CaptureFixture[str]):
    arguments = ssh("-oProxyCommand=touch pwned")
    arguments.insert(2, "--")
    with pytest.raises(SystemExit):
        main(arguments)  # the rest is hosts, too, then
    assert not (here / "ssh.log").exists() and not (here / "pwned").exists()
    assert "--url" in capsys.readouterr().err


# --- kubernetes ------------------------------------------------------------------------------------------

KUBERNETES = [
    "launch",
    "kubernetes",
    "--url",
    "http://trainer:8700",
    "--workers",
    "3",
    "--image",
    "me/rolecall",
]


def optional(key: str) -> dict[str, Any]:
    return {"name": key, "valueFrom": {"secretKeyRef": {"name": "rolecall", "key": key, "optional": True}}}


def test_the_job_that_is_printed(here: Path, capsys: pytest.CaptureFixture[str]):
    assert main(KUBERNETES) == 0
    text = capsys.readouterr().out
    job = yaml.safe_load(text)
    name = job["metadata"]["name"]
    labels = {"app.kubernetes.io/name": "rolecall", "rolecall": name}
    assert job == {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": name, "labels": labels},
        "spec": {
            "parallelism": 3,
            "backoffLimit": 9,
            "podFailurePolicy": {
                "rules": [
                    {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]}
                ]
            },
            "template": {
                "metadata": {"labels": labels},
                "spec": {
                    "restartPolicy": "Never",
                    "terminationGracePeriodSeconds": 60,
                    "containers": [
                        {
                            "name": "worker",
                            "image": "me/rolecall",
                            "command": [
                                "rolecall", "join", "http://trainer:8700",
                                "--token-file", "/run/rolecall/token", "--gpus", "1",
                            ],
                            "env": [optional(key) for key in (*AWS, "ROLECALL_BEARER", "HF_TOKEN")],
                            "volumeMounts": [
                                {"name": "token", "mountPath": "/run/rolecall", "readOnly": True}
                            ],
                            "resources": {"limits": {"nvidia.com/gpu": 1}},
                        }
                    ],
                    "volumes": [
                        {
                            "name": "token",
                            "secret": {
                                "secretName": "rolecall",
                                "items": [{"key": "token", "path": "token"}],
                            },
                        }
                    ],
                },
            },
        },
    }  # fmt: skip
    assert not any(secret in text for secret in HIDDEN)
    assert not (here / "runs").exists() and not (here / "kubectl.log").exists()


def pod(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert main([*KUBERNETES, *arguments]) == 0
    return yaml.safe_load(capsys.readouterr().out)["spec"]["template"]["spec"]


def test_without_a_gpu(here: Path, capsys: pytest.CaptureFixture[str]):
    (container,) = pod(capsys, "--gpus", "0")["containers"]
    assert "resources" not in container and "--gpus" not in container["command"]


def test_pods_are_told_of_gpus_an_engine_and_a_certificate(here: Path, capsys: pytest.CaptureFixture[str]):
    chosen = ["--gpus", "4", "--engine", "vllm", "--engine-python", "/vllm"]
    told = pod(capsys, *chosen, "--ca", "cert.pem")
    (container,) = told["containers"]
    assert container["command"][5:] == [*chosen, "--ca", "/run/rolecall/cert.pem"]
    assert container["resources"] == {"limits": {"nvidia.com/gpu": 4}}
    files = [{"key": "token", "path": "token"}, {"key": "cert.pem", "path": "cert.pem"}]
    assert told["volumes"][0]["secret"]["items"] == files


def test_applied_looked_at_and_ended_with_kubectl(here: Path):
    assert main([*KUBERNETES, "--apply"]) == 0
    name = yaml.safe_load((here / "applied.yaml").read_text())["metadata"]["name"]
    assert main(["launch", "status"]) == 0
    assert main(["launch", "stop", name]) == 0
    assert (here / "kubectl.log").read_text().splitlines() == [
        "apply -f -",
        f"get job,pod -l rolecall={name}",
        f"delete job {name} --ignore-not-found",
    ]
