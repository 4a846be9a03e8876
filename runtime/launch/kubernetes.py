"""`rolecall launch kubernetes`: workers as a Job whose lost pods the cluster replaces."""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from typing import Any

import yaml

from ..console import say
from ..errors import RolecallError, Unrecoverable
from .credentials import AWS, BEARER, HF_TOKEN
from .state import InCluster, launch_name, save
from .workers import join_flags

__all__ = ["launch", "manifest", "status", "stop"]

RESTARTS_PER_WORKER = 3


_MOUNT = "/run/rolecall"


def manifest(
    *, name: str, url: str, workers: int, image: str, secret: str, gpus: int, flags: list[str], ca: str | None
) -> dict[str, Any]:
    """A batch/v1 Job. Without `completions` it is a queue's: whoever ends well, at the run's end, is not replaced,
    whoever fails is. A pod that the cluster itself takes away costs nothing of `backoffLimit`.

    secret: with the key `token`, and the AWS_* variables, ROLECALL_BEARER and HF_TOKEN as far as they are needed.
    flags: more of `rolecall join`; ca: the secret's key with certificates.
    """
    variables = [
        {"name": key, "valueFrom": {"secretKeyRef": {"name": secret, "key": key, "optional": True}}}
        for key in (*AWS, BEARER, HF_TOKEN)
    ]
    files = ["token", ca] if ca else ["token"]
    trust = ["--ca", f"{_MOUNT}/{ca}"] if ca else []
    container: dict[str, Any] = {
        "name": "worker",
        "image": image,
        "command": ["rolecall", "join", url, "--token-file", f"{_MOUNT}/token", *flags, *trust],
        "env": variables,
        "volumeMounts": [{"name": "token", "mountPath": _MOUNT, "readOnly": True}],
    }
    if gpus:
        container["resources"] = {"limits": {"nvidia.com/gpu": gpus}}
    token = {"secretName": secret, "items": [{"key": key, "path": key} for key in files]}
    pod = {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": 60,
        "containers": [container],
        "volumes": [{"name": "token", "secret": token}],
    }
    taken_away = {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]}
    labels = {"app.kubernetes.io/name": "rolecall", "rolecall": name}
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": name, "labels": labels},
        "spec": {
            "parallelism": workers,
            "backoffLimit": RESTARTS_PER_WORKER * workers,
            "podFailurePolicy": {"rules": [taken_away]},
            "template": {"metadata": {"labels": labels}, "spec": pod},
        },
    }


def launch(options: argparse.Namespace) -> int:
    """Print the Job, or have kubectl apply it."""
    for flag, value, least in (("workers", options.workers, 1), ("gpus", options.gpus, 0)):
        if value < least:
            raise Unrecoverable(f"--{flag} {value}: at least {least}", exit_code=2)
    now = time.time()
    record = InCluster(name=launch_name("rolecall-workers", now), started=now)
    job = manifest(
        name=record.name, url=options.url.rstrip("/"), workers=options.workers, image=options.image,
        secret=options.secret, gpus=options.gpus, ca=options.ca,
        flags=join_flags(options, gpus=str(options.gpus) if options.gpus else ""),
    )  # fmt: skip
    text = yaml.safe_dump(job, sort_keys=False)
    if not options.apply:
        say(text.rstrip(), sys.stdout)
        return 0
    save(options.runs, record)
    return _kubectl("apply", "-f", "-", input=text)


def status(record: InCluster) -> int:
    return _kubectl("get", "job,pod", "-l", f"rolecall={record.name}")


def stop(record: InCluster) -> int:
    return _kubectl("delete", "job", record.name, "--ignore-not-found")


def _kubectl(*arguments: str, input: str | None = None) -> int:
    try:
        code = subprocess.run(["kubectl", *arguments], input=input, text=True, check=False).returncode  # noqa: S607
    except FileNotFoundError as error:
        raise Unrecoverable("there is no kubectl on this machine: install it", exit_code=2) from error
    if code:
        raise RolecallError(f"kubectl {arguments[0]} ended with {code}: it said why above")
    return 0
