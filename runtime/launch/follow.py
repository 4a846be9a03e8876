"""Seeing a launch of jobs through: workers once the run's door answers, lost ones again, an end to all of it.

Each tick looks at the jobs as the platform has them and does what is missing, so it matters little what
happened between two ticks, or that a request's answer was lost.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from math import ceil

from ..tree import RestartBudget
from .hub import HubJobs, Job, JobSpec, Unreachable, answers

__all__ = ["Follower", "cancel_and_wait"]

POLL_S = 3.0
FAREWELL_S = (
    30.0  # how long the workers of a run that has ended may take to hear of it before they are cancelled
)
STOP_S = 60.0  # how long a cancelled job may take to end
LOG_LINES = 15


@dataclass
class Follower:
    """One launch, followed from its trainer's start to its end.

    worker: makes the job of a role, given the run's address. trainer_again: the job that goes on with the run from its
    bucket. bearer: what the platform's gateway asks for. budgets: of each worker's role, how often it may be lost;
    trainer_budget: likewise. ends_at: by the clock, when what was agreed to has been spent: nothing is started
    then, nor for longer. stopped: whether somebody else ends the launch.
    clock: seconds; pause: waits so many of them; say: prints a line.
    """

    jobs: HubJobs
    worker: Callable[[str, str], JobSpec]
    trainer_again: JobSpec
    budgets: dict[str, RestartBudget]
    trainer_budget: RestartBudget
    ends_at: float
    bearer: str
    stopped: Callable[[], bool]
    clock: Callable[[], float]
    pause: Callable[[float], None]
    say: Callable[[str], object]
    _told: dict[str, str] = field(default_factory=dict)
    _not_before: dict[str, float] = field(default_factory=dict)
    _judged: set[str] = field(default_factory=set)
    _out: set[str] = field(default_factory=set)
    _started: set[str] = field(default_factory=set)
    _open: bool = False
    _begun: bool = False

    def follow(self, *, until_started: bool = False) -> int:
        """Until the trainer's job has ended, or until all workers have been started. Returns the exit code.

        0 the run finished, 1 it was lost, 130 it was stopped.
        """
        while True:
            try:
                code = self._tick()
                self._told.pop("platform", None)
            except Unreachable as error:  # what runs goes on; so does whoever looks
                self._tell("platform", f"{error}: trying again")
                code = None
            if code is not None:
                return code
            if until_started and self._started == self.budgets.keys():
                return 0
            self.pause(POLL_S)

    def _tick(self) -> int | None:
        jobs = self.jobs.jobs()
        [*_, trainer] = [job for job in jobs if job.role == "trainer"]
        # Workers from before it were those of a trainer that was lost, and knew another address.
        newest = {job.role: job for job in jobs if job.created >= trainer.created}
        for role, job in newest.items():
            self._tell(role, f"{role}: {_described(job)}")
        if not trainer.live:
            again = trainer.stage in ("ERROR", "DELETED") and not self.stopped() and self._go_on(trainer)
            return None if again else self._end(trainer)
        if self.stopped():
            self.say("stopped from elsewhere")
            return 130
        if trainer.stage == "RUNNING" and not self._open:
            problem = answers(trainer.url, self.bearer)
            self._open = not problem
            self._begun |= self._open
            self._tell(
                "door", f"trainer: it does not answer yet ({problem})" if problem else "trainer: it answers"
            )
        if self._open:
            for role in self.budgets:
                self._keep(role, newest.get(role), trainer.url)
        if self._out >= self.budgets.keys():
            self.say("no worker is left, and none will come: ending the trainer too")
            cancel_and_wait(self.jobs, [trainer], self.clock, self.pause)
            return 1
        return None

    def _go_on(self, trainer: Job) -> bool:
        """Start the run again from its bucket, in another job; whether it may be."""
        if not self._begun or self.clock() >= self.ends_at:  # what it died of, it would die of again
            return False
        if trainer.id not in self._judged:
            self._judged.add(trainer.id)
            wait_s = self.trainer_budget.spend("trainer", _described(trainer), self.clock())
            if wait_s is None:
                self.say(f"trainer: it stays away: {self.trainer_budget.story}")
                return False
            self._not_before = {"trainer": self.clock() + wait_s}
            self._open = False
            self._started.clear()
        cancel_and_wait(self.jobs, self._others(trainer), self.clock, self.pause)
        if self.clock() < self._not_before["trainer"]:
            return True
        job = self._start(self.trainer_again)
        self.say(f"trainer: the run goes on from its last checkpoint, in job {job.id}")
        return True

    def _keep(self, role: str, job: Job | None, url: str) -> None:
        """Start a worker that was never started, or was lost and has restarts left."""
        if role in self._out or (job is not None and (job.live or job.stage == "COMPLETED")):
            self._started.add(role)
            return
        if job is not None and job.stage == "CANCELED":  # somebody wanted that
            self._out.add(role)
            return
        if job is not None and job.id not in self._judged:
            self._judged.add(job.id)
            wait_s = self.budgets[role].spend(role, _described(job), self.clock())
            if wait_s is None:
                self._out.add(role)
                self.say(f"{role}: it stays away: {self.budgets[role].story}")
                return
            self._not_before[role] = self.clock() + wait_s
        if self._not_before.get(role, 0.0) <= self.clock() < self.ends_at:
            again = "again " if job is not None else ""
            started = self._start(self.worker(role, url))
            self._started.add(role)
            self.say(f"{role}: started {again}as job {started.id}")

    def _start(self, spec: JobSpec) -> Job:
        left_s = 60 * ceil((self.ends_at - self.clock()) / 60)  # jobs are paid for by the minute
        return self.jobs.start(replace(spec, timeout_s=min(spec.timeout_s, left_s)))

    def _end(self, trainer: Job) -> int:
        left = self._others(trainer)
        until = self.clock() + (FAREWELL_S if trainer.stage == "COMPLETED" else 0.0)
        while left and self.clock() < until:
            self.pause(POLL_S)
            left = self._others(trainer)
        cancel_and_wait(self.jobs, left, self.clock, self.pause)
        for line in self.jobs.last_lines(trainer, LOG_LINES) if trainer.stage != "DELETED" else []:
            self.say(f"  {line.rstrip()}")
        if trainer.stage == "COMPLETED":
            return 0
        if trainer.stage == "CANCELED":
            return 130
        self.say(
            f"the trainer's job has failed ({_described(trainer)}); what it said last is above. Its checkpoints are in "
            "the bucket: `rolecall run --resume` goes on from there, on any machine"
        )
        return 1

    def _others(self, trainer: Job) -> list[Job]:
        """That live: workers, and trainers whose start nobody has heard of."""
        return [job for job in self.jobs.jobs() if job.live and job.id != trainer.id]

    def _tell(self, about: str, text: str) -> None:
        """Say it unless it was the last thing said about that."""
        if self._told.get(about) != text:
            self._told[about] = text
            self.say(text)


def cancel_and_wait(
    jobs: HubJobs, which: Sequence[Job], clock: Callable[[], float], pause: Callable[[float], None]
) -> list[Job]:
    """Cancel these and wait until they have ended; those that have not after STOP_S."""
    for job in which:
        jobs.cancel(job)
    ids = {job.id for job in which}
    until = clock() + STOP_S
    while left := [job for job in jobs.jobs() if job.live and job.id in ids]:
        if clock() > until:
            break
        pause(1.0)
    return left


def _described(job: Job) -> str:
    return f"{job.stage} ({job.message})" if job.message else job.stage
