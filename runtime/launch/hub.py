"""A launch's jobs on Hugging Face, through huggingface_hub, which is only imported with this module."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace

import httpx
from huggingface_hub import HfApi, JobInfo, get_token
from huggingface_hub.errors import HfHubHTTPError, HTTPError  # type: ignore[reportPrivateImportUsage]

from ..errors import RolecallError, Unrecoverable
from .prices import Flavor, usd_per_hour

__all__ = ["PORT", "HubJobs", "Job", "JobSpec", "Unreachable", "account", "answers", "hardware"]

PORT = 8700  # of the run's proxy, in the trainer's container
LABEL = "rolecall"  # its value is the launch's name
LIVE = ("SCHEDULING", "RUNNING")
GONE = "DELETED"


class Unreachable(RolecallError):
    """The platform did not answer, or only that it can't just now. What runs there goes on."""


@dataclass(frozen=True)
class Job:
    """One job as the platform has it. created: seconds since 1970; running_s: how long it has run, or ran.

    stage: SCHEDULING, RUNNING, COMPLETED, CANCELED, ERROR or DELETED. url: of its exposed port, if it has one.
    """

    id: str
    role: str
    stage: str
    message: str
    flavor: str
    created: float
    running_s: float
    url: str

    @property
    def live(self) -> bool:
        return self.stage in LIVE


@dataclass(frozen=True)
class JobSpec:
    """What a job is to be. secrets: never a part of its command, its environment or its labels."""

    role: str
    image: str
    command: list[str]
    secrets: Mapping[str, str]
    flavor: str
    timeout_s: int
    exposes: bool = False


def account() -> tuple[HfApi, str]:
    """A client, and the name of the user it acts for. Raises Unrecoverable (exit code 2) without a token."""
    token = get_token()
    if token is None:
        raise Unrecoverable(
            "you are not logged in at Hugging Face: `hf auth login`, or set HF_TOKEN", exit_code=2
        )
    api = HfApi(endpoint=os.environ.get("HF_ENDPOINT"), token=token)
    with _translated("who you are"):
        return api, api.whoami()["name"]


def hardware(api: HfApi) -> dict[str, Flavor]:
    """Each flavor there is, by its name, as the platform has it now."""
    with _translated("the price list"):
        listed = api.list_jobs_hardware()
    return {
        each.name: Flavor(
            usd_per_hour(each.unit_cost_usd, each.unit_label),
            int(each.accelerator.quantity) if each.accelerator and each.accelerator.type == "gpu" else 0,
        )
        for each in listed
    }


class HubJobs:
    """The jobs of one launch. Raises Unreachable for what may pass, Unrecoverable for what will not."""

    def __init__(self, api: HfApi, name: str, namespace: str) -> None:
        self.api, self.name, self.namespace = api, name, namespace
        self._started: dict[str, Job] = {}

    def start(self, spec: JobSpec) -> Job:
        labels = {LABEL: self.name, "role": spec.role, "name": f"{self.name}-{spec.role}"}
        with _translated(f"a job for {spec.role}"):
            info = self.api.run_job(
                image=spec.image, command=spec.command, secrets=dict(spec.secrets), flavor=spec.flavor,
                timeout=spec.timeout_s, labels=labels, expose=[PORT] if spec.exposes else None,
                namespace=self.namespace,
            )  # fmt: skip
        self._started[info.id] = _job(info)
        return self._started[info.id]

    def jobs(self) -> list[Job]:
        """All of them, also those that have ended, the oldest first."""
        with _translated("the list of jobs"):
            listed = self.api.list_jobs(labels={LABEL: self.name}, namespace=self.namespace)
            found = {info.id: _job(info) for info in listed}
        for id in self._started.keys() - found.keys():  # too new for the list, or deleted
            found[id] = self._inspect(self._started[id])
        return sorted(found.values(), key=lambda job: job.created)

    def cancel(self, job: Job) -> None:
        """End a job; one that has ended by itself meanwhile is left as it is."""
        try:
            with _translated(f"the end of {job.role}"):
                self.api.cancel_job(job_id=job.id, namespace=self.namespace)
        except Unrecoverable:
            if self._inspect(job).live:
                raise

    def last_lines(self, job: Job, count: int) -> list[str]:
        """What it printed last."""
        with _translated(f"the log of {job.role}"):
            return list(self.api.fetch_job_logs(job_id=job.id, namespace=self.namespace, tail=count))[-count:]

    def _inspect(self, job: Job) -> Job:
        with _translated(f"job {job.id}"):
            try:
                return _job(self.api.inspect_job(job_id=job.id, namespace=self.namespace))
            except HfHubHTTPError as error:
                if error.response.status_code != 404:
                    raise
                return replace(job, stage=GONE, message="deleted")


def answers(url: str, bearer: str) -> str:
    """Empty if the run's proxy answers through the platform's gateway; else what came instead."""
    try:
        response = httpx.get(f"{url}/healthz", headers={"Authorization": f"Bearer {bearer}"}, timeout=10.0)
    except httpx.TransportError as error:
        return str(error) or type(error).__name__
    return "" if response.status_code == 200 else f"status {response.status_code}"


def _job(info: JobInfo) -> Job:
    running_s = info.durations.running_secs if info.durations else None
    return Job(
        id=info.id,
        role=(info.labels or {}).get("role", ""),
        stage=str(getattr(info.status.stage, "value", info.status.stage)),
        message=info.status.message or "",
        flavor=str(info.flavor or ""),
        created=info.created_at.timestamp() if info.created_at else 0.0,
        running_s=float(running_s or 0),
        url=(info.status.expose_urls or [""])[0],
    )


@contextmanager
def _translated(what: str) -> Iterator[None]:
    """The client's errors as ours: one that may pass is Unreachable."""
    try:
        yield
    except HfHubHTTPError as error:
        code = error.response.status_code
        if code in (408, 429) or code >= 500:
            raise Unreachable(f"Hugging Face does not give {what} just now ({code})") from error
        wayout = {
            401: "log in again with `hf auth login`",
            402: "add credit at https://huggingface.co/settings/billing",
            403: "use a token that may start and manage jobs there",
        }.get(code, "correct what it names")
        said = error.server_message or f"status {code}"
        raise Unrecoverable(f"Hugging Face refuses {what} ({said}): {wayout}", exit_code=2) from error
    except HTTPError as error:
        reason = str(error) or type(error).__name__
        raise Unreachable(f"Hugging Face does not answer about {what} ({reason})") from error
