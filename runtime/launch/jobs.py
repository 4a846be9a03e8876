"""`rolecall launch hf-jobs`: a trainer's job and its workers' jobs, their price before, their end after."""

from __future__ import annotations

import argparse
import os
import random
import re
import secrets
import sys
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path

from msgspec.structs import replace

from ..console import say
from ..errors import RolecallError, Unrecoverable
from ..join import own_settings
from ..recipe import configure, load_recipe
from ..tree import RestartBudget
from .credentials import BEARER, MODEL_TOKEN, TOKEN, model_token, store_and_keys
from .follow import Follower, cancel_and_wait
from .hub import PORT, HubJobs, Job, JobSpec, account, hardware
from .prices import PORT_USD_PER_HOUR, Flavor, Rented, cost_usd, estimate, flavor_named
from .state import FILE, OnHub, launch_name, load, save
from .workers import join_flags

__all__ = ["launch", "status", "stop"]

MAX_RESTARTS = 3  # of one worker, within an hour
TRAINER = "trainer"
# The token reaches `rolecall join` as a file: printf is the shell's own, so no command line ever shows it.
_JOIN = (
    'set -e; umask 077; file=$(mktemp); printf "%s\\n" "$ROLECALL_TOKEN" >"$file"; unset ROLECALL_TOKEN; '
    'exec rolecall join "$0" --token-file "$file" "$@"'
)


def launch(options: argparse.Namespace) -> int:
    """Start the jobs and see them through. Returns the exit code."""
    now = time.time()
    store, keys = store_and_keys(options.bucket, os.environ)
    keys |= model_token(os.environ)
    name = launch_name(options.recipe, now)
    command = _trainer_command(options, store)
    timeout_s = _seconds(options.timeout)
    if options.workers < 1:
        raise Unrecoverable(f"--workers {options.workers}: at least one", exit_code=2)
    api, user = account()
    flavors = hardware(api)
    rented = _rented(options, flavors)
    _agree(estimate(rented, timeout_s), yes=options.yes)
    record = OnHub(
        name=name,
        started=now,
        namespace=options.namespace or user,
        store=store,
        trainer_usd_per_hour=rented[0].usd_per_hour + PORT_USD_PER_HOUR,
        worker_usd_per_hour=rented[1].usd_per_hour,
    )
    save(options.runs, record)  # before there is anything to find
    jobs = HubJobs(api, record.name, record.namespace)
    token = secrets.token_urlsafe(32)
    bearer = os.environ.get(BEARER) or str(api.token)
    job = partial(JobSpec, image=options.image, timeout_s=timeout_s)
    trainer, again = (
        job(
            role=TRAINER, command=[*command, flag, name], secrets=keys | {TOKEN: token},
            flavor=options.trainer_flavor, exposes=True,
        )
        for flag in ("--name", "--resume")
    )  # fmt: skip
    gpus = flavors[options.flavor].gpus
    flags = join_flags(options, gpus=str(gpus) if gpus else "")
    follower = Follower(
        jobs=jobs,
        worker=lambda role, url: job(
            role=role, command=["sh", "-c", _JOIN, url, *flags], secrets=keys | {TOKEN: token, BEARER: bearer},
            flavor=options.flavor,
        ),
        trainer_again=again,
        trainer_budget=_budget(-1),
        ends_at=time.monotonic() + timeout_s,
        budgets={f"worker-{number}": _budget(number) for number in range(options.workers)},
        bearer=bearer,
        stopped=lambda: _is_stopped(options.runs, record.name),
        clock=time.monotonic,
        pause=time.sleep,
        say=lambda text: say(text, sys.stdout),
    )  # fmt: skip
    return _start_and_follow(jobs, trainer, follower, record, options)


def _rented(options: argparse.Namespace, flavors: Mapping[str, Flavor]) -> list[Rented]:
    trainer = flavor_named(options.trainer_flavor, flavors)
    worker = flavor_named(options.flavor, flavors)
    return [
        Rented(TRAINER, 1, options.trainer_flavor, trainer.usd_per_hour),
        Rented("workers", options.workers, options.flavor, worker.usd_per_hour),
        Rented("exposed port", 1, str(PORT), PORT_USD_PER_HOUR),
    ]


def _start_and_follow(
    jobs: HubJobs, trainer: JobSpec, follower: Follower, record: OnHub, options: argparse.Namespace
) -> int:
    how = f"`rolecall launch status {record.name}`, `rolecall launch stop {record.name}`"
    try:
        say(f"launch {record.name}: {how}", sys.stdout)
        say(f"trainer: started as job {jobs.start(trainer).id}", sys.stdout)
        code = follower.follow(until_started=not options.follow)
    except KeyboardInterrupt:
        say(f"the jobs go on, and nothing is started any more, be it lost or yet to come: {how}", sys.stderr)
        return 130
    except RolecallError:
        say(f"jobs may be running: {how}", sys.stderr)
        raise
    say(_summary(record, jobs.jobs()), sys.stdout)
    if options.follow and code == 0:
        say(
            f"the run's folder went with its job; each version of its adapter is in {record.store}",
            sys.stdout,
        )
    return code


def status(record: OnHub) -> int:
    api, _ = account()
    jobs = HubJobs(api, record.name, record.namespace).jobs()
    say(f"{record.name}, started {_clock_time(record.started)}, weights in {record.store}", sys.stdout)
    for job in jobs:
        price = _price(record, job)
        say(
            f"{job.role:<12}{job.stage:<12}{job.flavor:<16}{_clock_time(job.created)}"
            f"{job.running_s / 60:>7.0f} min{cost_usd(job.running_s, price):>9.2f} $  {job.id}  {job.message}".rstrip(),
            sys.stdout,
        )
    say(_summary(record, jobs), sys.stdout)
    return 0


def stop(root: Path, record: OnHub) -> int:
    """End its workers, then its trainer, which so hears from nobody that it has just lost."""
    save(root, replace(record, stopped=True))
    api, _ = account()
    jobs = HubJobs(api, record.name, record.namespace)
    live = [job for job in jobs.jobs() if job.live]
    left: list[Job] = []
    for which in ([job for job in live if job.role != TRAINER], [job for job in live if job.role == TRAINER]):
        left += cancel_and_wait(jobs, which, time.monotonic, time.sleep)
    ended = jobs.jobs()
    say(f"{record.name}: {_summary(record, ended)}", sys.stdout)
    if left:
        names = ", ".join(f"{job.role} ({job.id})" for job in left)
        raise RolecallError(
            f"cancelled, but not ended yet: {names}; look again with `rolecall launch status`"
        )
    return 0


def _trainer_command(options: argparse.Namespace, store: str) -> list[str]:
    """The command of the trainer's job. Raises Unrecoverable (exit code 2) for what it or the workers' would die of."""
    recipe, settings = options.recipe, options.set
    if recipe.endswith(".py"):
        raise Unrecoverable(
            f"{recipe} is a file of this machine, which no job has: put the recipe into a package that the image has",
            exit_code=2,
        )
    for setting in settings:
        if setting.partition("=")[0] in ("store", "rollout_workers"):
            raise Unrecoverable(
                f"--set {setting}: launch sets that itself, from --bucket and --workers", exit_code=2
            )
    ours = [*settings, "rollout_workers=0", f"store={store}"]
    module = load_recipe(recipe)
    config = configure(module, recipe, ours)
    own_settings(module, recipe, {"engine": options.engine, "engine_python": options.engine_python})
    try:
        graph = module.build(config)
    except ValueError as error:
        raise Unrecoverable(f"{recipe} can't be built from these settings: {error}", exit_code=2) from error
    if not any(role.elastic for role in graph):
        raise Unrecoverable(f"recipe {recipe} has no role that other machines may run", exit_code=2)
    flags = [word for setting in ours for word in ("--set", setting)]
    return ["rolecall", "run", recipe, "--proxy", f"0.0.0.0:{PORT}", *flags]


def _agree(price: str, *, yes: bool) -> None:
    say(price, sys.stdout)
    if model_token(os.environ):
        say(f"the jobs may read gated models, by the token in {MODEL_TOKEN}", sys.stdout)
    if yes:
        return
    if not sys.stdin.isatty():
        raise Unrecoverable("nobody is here to agree to that price: say --yes", exit_code=2)
    try:
        agreed = input("go on? [y/N] ").strip().lower() in ("y", "yes")
    except EOFError:
        agreed = False
    if not agreed:
        raise Unrecoverable("nothing was started", exit_code=2)


def _seconds(text: str) -> int:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([smhd])", text)
    if match is None or float(match[1]) == 0:
        raise Unrecoverable(f"--timeout {text}: write it as 90s, 45m, 6h or 1d", exit_code=2)
    return int(float(match[1]) * {"s": 1, "m": 60, "h": 3600, "d": 86400}[match[2]])


def _budget(number: int) -> RestartBudget:
    return RestartBudget(MAX_RESTARTS, 3600.0, random.Random(number))


def _is_stopped(root: Path, name: str) -> bool:
    record = load(root / name / FILE)
    return isinstance(record, OnHub) and record.stopped


def _price(record: OnHub, job: Job) -> float:
    return record.trainer_usd_per_hour if job.role == TRAINER else record.worker_usd_per_hour


def _summary(record: OnHub, jobs: list[Job]) -> str:
    live = [job for job in jobs if job.live]
    spent = sum(cost_usd(job.running_s, _price(record, job)) for job in jobs)
    rate = sum(_price(record, job) for job in live)
    return f"{len(live)} of {len(jobs)} jobs live, {rate:.2f} $ an hour; about {spent:.2f} $ so far"


def _clock_time(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))
