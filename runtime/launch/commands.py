"""The flags of `rolecall launch …`. What a command needs is imported when it is given."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

from ..errors import Unrecoverable
from .state import InCluster, OnHosts, OnHub, find_launch
from .workers import add_engine_flags

__all__ = ["add_launch_commands"]


def add_launch_commands(launch: argparse.ArgumentParser) -> None:
    commands = launch.add_subparsers(required=True, metavar="WHERE")

    def command(
        name: str, function: Callable[[argparse.Namespace], int], help: str
    ) -> argparse.ArgumentParser:
        added = commands.add_parser(name, help=help, description=help)
        added.set_defaults(command=function)
        added.add_argument(
            "--runs", type=Path, default=Path("runs"), help="where it is noted (default: ./runs)"
        )
        return added

    _add_jobs_flags(command("hf-jobs", _jobs, "rent a trainer and its workers as jobs on Hugging Face"))
    _add_ssh_flags(command("ssh", _ssh, "start workers on hosts over ssh"))
    _add_kubernetes_flags(command("kubernetes", _kubernetes, "print a Job for workers, or apply it"))
    status = command("status", _status, "what runs of a launch, since when, and what it has cost")
    stop = command("stop", _stop, "end a launch: its workers, then its trainer")
    for added in (status, stop):
        added.add_argument("launch", nargs="?", help="a launch's name (default: the newest)")


def _add_jobs_flags(jobs: argparse.ArgumentParser) -> None:
    jobs.add_argument("recipe", help="a recipe's name")
    jobs.add_argument(
        "--set", action="append", default=[], metavar="FIELD=VALUE", help="change one of its settings"
    )
    jobs.add_argument(
        "--workers", type=int, default=1, help="how many jobs, each with a worker for every GPU (default: 1)"
    )
    jobs.add_argument("--flavor", required=True, help="the workers' hardware, as `hf jobs hardware` lists it")
    jobs.add_argument("--trainer-flavor", required=True, help="the trainer's hardware")
    jobs.add_argument(
        "--bucket", required=True, help="namespace/name of a Storage Bucket, or s3://name/prefix"
    )
    jobs.add_argument("--image", required=True, help="a Docker image that has rolecall")
    jobs.add_argument("--timeout", default="6h", help="of each job, as 45m or 6h (default: 6h)")
    jobs.add_argument("--namespace", help="who pays, if not you: an organization")
    jobs.add_argument("--yes", action="store_true", help="agree to the price beforehand")
    jobs.add_argument(
        "--follow", action=argparse.BooleanOptionalAction, default=True,
        help="stay until the run ends, and start lost workers again (default)",
    )  # fmt: skip
    add_engine_flags(jobs)


def _add_ssh_flags(ssh: argparse.ArgumentParser) -> None:
    ssh.add_argument("hosts", nargs="+", metavar="HOST", help="as ssh knows it")
    ssh.add_argument("--url", required=True, help="the run's proxy, as http://host:port")
    ssh.add_argument("--token-file", type=Path, required=True, help="the run's token file")
    ssh.add_argument(
        "--workers", type=int, help="how many on each host (default: 1, or one for each GPU of --gpus)"
    )
    ssh.add_argument("--gpus", default="", help="of each host: how many, or which, as in 0,1,3")
    add_engine_flags(ssh)
    ssh.add_argument("--ca", type=Path, metavar="FILE", help="certificates to check the run's by")
    ssh.add_argument("--rolecall", default="rolecall", help="where it is there (default: on the path)")


def _add_kubernetes_flags(kubernetes: argparse.ArgumentParser) -> None:
    kubernetes.add_argument("--url", required=True, help="the run's proxy, as http://host:port")
    kubernetes.add_argument("--workers", type=int, required=True, help="how many pods")
    kubernetes.add_argument("--image", required=True, help="an image that has rolecall")
    kubernetes.add_argument(
        "--gpus", type=int, default=1, help="of each pod, each with a worker (default: 1)"
    )
    add_engine_flags(kubernetes)
    kubernetes.add_argument("--secret", default="rolecall", help="with the key token (default: rolecall)")
    kubernetes.add_argument("--ca", metavar="KEY", help="its key with certificates to check the run's by")
    kubernetes.add_argument("--apply", action="store_true", help="have kubectl apply it")


def _jobs(options: argparse.Namespace) -> int:
    _check_hub()
    from . import jobs

    return jobs.launch(options)


def _ssh(options: argparse.Namespace) -> int:
    from . import ssh

    return ssh.launch(options)


def _kubernetes(options: argparse.Namespace) -> int:
    from . import kubernetes

    return kubernetes.launch(options)


def _status(options: argparse.Namespace) -> int:
    match find_launch(options.runs, options.launch):
        case OnHub() as record:
            _check_hub()
            from . import jobs

            return jobs.status(record)
        case OnHosts() as record:
            from . import ssh

            return ssh.status(record)
        case InCluster() as record:
            from . import kubernetes

            return kubernetes.status(record)


def _stop(options: argparse.Namespace) -> int:
    match find_launch(options.runs, options.launch):
        case OnHub() as record:
            _check_hub()
            from . import jobs

            return jobs.stop(options.runs, record)
        case OnHosts() as record:
            from . import ssh

            return ssh.stop(record)
        case InCluster() as record:
            from . import kubernetes

            return kubernetes.stop(record)


def _check_hub() -> None:
    try:
        import huggingface_hub  # noqa: F401
    except ModuleNotFoundError as error:
        raise Unrecoverable(
            "jobs on Hugging Face need its client: pip install 'rolecall[hub]'", exit_code=2
        ) from error
