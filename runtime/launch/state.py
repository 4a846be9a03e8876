"""What a launch leaves behind so that another terminal finds it: runs/NAME/launch.json. No secret is in it."""

from __future__ import annotations

import contextlib
import re
import secrets
import time
from pathlib import Path

import msgspec

from ..errors import Unrecoverable
from ..files import write_whole

__all__ = ["FILE", "InCluster", "Launch", "OnHosts", "OnHub", "find_launch", "launch_name", "load", "save"]

FILE = "launch.json"


class Launch(msgspec.Struct, frozen=True, kw_only=True, tag_field="engine"):
    """name: also the label, or the folder, by which its machines are found; started: seconds since 1970."""

    name: str
    started: float


class OnHub(Launch, frozen=True, kw_only=True, tag="hf-jobs"):
    """Jobs on Hugging Face. …_usd_per_hour: as agreed to; the trainer's with its exposed port.

    stopped: somebody has asked for its end, so whoever follows it starts nothing again.
    """

    namespace: str
    store: str
    trainer_usd_per_hour: float
    worker_usd_per_hour: float
    stopped: bool = False


class OnHosts(Launch, frozen=True, kw_only=True, tag="ssh"):
    """Processes on hosts, each with the folder ~/.rolecall/NAME there."""

    hosts: list[str]


class InCluster(Launch, frozen=True, kw_only=True, tag="kubernetes"):
    """A Job that was applied with kubectl."""


_Known = OnHub | OnHosts | InCluster


def launch_name(stem: str, now: float) -> str:
    """`stem`, the time, and two drawn bytes; letters, digits and dashes, as labels and cluster names want it."""
    plain = re.sub(r"[^a-z0-9]+", "-", stem.lower()).strip("-") or "run"
    return f"{plain}-{time.strftime('%Y%m%d-%H%M%S', time.localtime(now))}-{secrets.token_hex(2)}"


def save(root: Path, launch: Launch) -> None:
    """Write, or overwrite, the launch's file below `root`. Raises Unrecoverable (exit code 2) if it can't."""
    folder = root / launch.name
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_whole(folder / FILE, msgspec.json.format(msgspec.json.encode(launch), indent=2))
    except OSError as error:
        raise Unrecoverable(
            f"can't write {folder / FILE}: {error.strerror}; choose another place with --runs", exit_code=2
        ) from error


def load(path: Path) -> OnHub | OnHosts | InCluster:
    try:
        return msgspec.json.decode(path.read_bytes(), type=_Known)
    except msgspec.DecodeError as error:
        raise Unrecoverable(f"{path} is damaged ({error}): choose another launch", exit_code=2) from error


def find_launch(root: Path, name: str | None) -> OnHub | OnHosts | InCluster:
    """A launch by its name; without one the newest below `root`. Raises Unrecoverable (exit code 2) for none."""
    if name is not None and (root / name / FILE).exists():
        return load(root / name / FILE)
    launches: list[OnHub | OnHosts | InCluster] = []
    for path in root.glob(f"*/{FILE}"):
        with contextlib.suppress(Unrecoverable):  # one damaged file must not hide the others
            launches.append(load(path))
    launches.sort(key=lambda launch: launch.started)
    if name is not None:
        known = ", ".join(launch.name for launch in launches[-5:]) or "none"
        raise Unrecoverable(f"there is no launch {name!r}; the newest in {root} are: {known}", exit_code=2)
    if not launches:
        raise Unrecoverable(
            f"nothing was launched from {root}: start with `rolecall launch hf-jobs`", exit_code=2
        )
    return launches[-1]
