"""Following a launch of jobs: what is started again, how often, and when it is over."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from huggingface_hub import HfApi
from rolecall.runtime.launch.follow import Follower
from rolecall.runtime.launch.hub import HubJobs, JobSpec
from rolecall.runtime.launch.jobs import MAX_RESTARTS
from rolecall.runtime.tree import RestartBudget

from .hub import USER, Hub


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[Hub]:
    """The platform with jobs that are only records."""
    with Hub(tmp_path, processes=False) as hub:
        yield hub


class Watch:
    """A follower in a time that passes only while it waits; `each` is what happens at every wait."""

    def __init__(self, hub: Hub, workers: int, each: Callable[[int], None]) -> None:
        self.now, self.waits, self.said, self.stopped, self.each = 0.0, 0, list[str](), False, each
        self.jobs = HubJobs(HfApi(hub.endpoint, hub.token), "a-launch", USER)
        self.jobs.start(JobSpec("trainer", "image", ["x"], {}, "a100-large", 60, exposes=True))
        names = [f"worker-{number}" for number in range(workers)]
        self.follower = Follower(
            jobs=self.jobs,
            worker=lambda role, url: JobSpec(role, "image", [url], {}, "l4x1", 600),
            trainer_again=JobSpec("trainer", "image", ["again"], {}, "a100-large", 60, exposes=True),
            ends_at=1e9,
            trainer_budget=RestartBudget(MAX_RESTARTS, 3600.0, random.Random(1)),
            budgets={name: RestartBudget(MAX_RESTARTS, 3600.0, random.Random(0)) for name in names},
            bearer=hub.reader,
            stopped=lambda: self.stopped,
            clock=lambda: self.now,
            pause=self.pause,
            say=self.said.append,
        )

    def pause(self, seconds: float) -> None:
        self.now += seconds
        self.waits += 1
        assert self.waits < 200, "it never ends"
        self.each(self.waits)

    def follow(self) -> int:
        return self.follower.follow()


def test_a_worker_is_started_again_three_times_an_hour(hub: Hub):
    def each(waits: int) -> None:
        for job in hub.of("worker-0"):
            if job.stage == "RUNNING":
                job.end("ERROR", "exit code 1")
        watch.now += 30
        if watch.now > 600:
            hub.of("trainer")[0].end("COMPLETED")
            hub.of("worker-1")[0].end("COMPLETED")

    watch = Watch(hub, 2, each)
    assert watch.follow() == 0
    assert len(hub.of("worker-0")) == 1 + MAX_RESTARTS
    assert len(hub.of("worker-1")) == 1
    (away,) = [line for line in watch.said if "stays away" in line]
    assert away == (
        "worker-0: it stays away: worker-0 died 4 times (ERROR (exit code 1)) within 3600 s, and 3 restarts are allowed"
    )


def test_losses_of_long_ago_do_not_count(hub: Hub):
    def each(waits: int) -> None:
        watch.now += 1000  # a loss every 2,000 s: two of them are within an hour, never four
        if waits % 2:
            hub.of("worker-0")[-1].end("ERROR")
        if waits == 20:
            hub.of("trainer")[0].end("COMPLETED")
            hub.of("worker-0")[-1].end("COMPLETED")

    watch = Watch(hub, 1, each)
    assert watch.follow() == 0
    assert len(hub.of("worker-0")) == 10  # the trainer ends with the tenth not back yet


def test_what_somebody_cancelled_or_what_has_finished_is_not_started_again(hub: Hub):
    def each(waits: int) -> None:
        hub.of("worker-0")[0].end("CANCELED")
        hub.of("worker-1")[0].end("COMPLETED")
        if waits == 5:
            hub.of("trainer")[0].end("COMPLETED")

    assert Watch(hub, 2, each).follow() == 0
    assert len(hub.jobs) == 3


def test_a_job_that_was_deleted_is_lost(hub: Hub):
    def each(waits: int) -> None:
        if waits == 1:
            del hub.jobs[hub.of("worker-0")[0].id]
        if waits == 4:
            hub.of("trainer")[0].end("COMPLETED")
            hub.of("worker-0")[0].end("COMPLETED")

    watch = Watch(hub, 1, each)
    assert watch.follow() == 0
    assert "worker-0: DELETED (deleted)" in watch.said
    assert len([line for line in watch.said if line.startswith("worker-0: started again")]) == 1


def test_workers_are_started_when_the_run_answers(hub: Hub):
    def each(waits: int) -> None:
        assert hub.of("worker-0") == ([] if waits <= 3 else hub.of("worker-0")[:1])
        hub.asleep = waits < 3
        if waits == 6:
            hub.of("trainer")[0].end("COMPLETED")
            hub.of("worker-0")[0].end("COMPLETED")

    hub.asleep = True
    watch = Watch(hub, 1, each)
    assert watch.follow() == 0
    assert watch.said[:4] == [
        "trainer: RUNNING",
        "trainer: it does not answer yet (status 503)",
        "trainer: it answers",
        f"worker-0: started as job {hub.of('worker-0')[0].id}",
    ]


def test_a_platform_that_is_away_for_a_while_is_asked_again_and_nothing_is_started_twice(hub: Hub):
    def each(waits: int) -> None:
        if waits == 3:
            hub.of("trainer")[0].end("COMPLETED")
            hub.of("worker-0")[0].end("COMPLETED")

    watch = Watch(hub, 1, each)
    hub.lost_answers = 1  # the worker is started, and nobody hears of it
    assert watch.follow() == 0
    assert len(hub.of("worker-0")) == 1
    away = "Hugging Face does not give a job for worker-0 just now (504): trying again"
    assert watch.said.count(away) == 1


def test_a_job_that_the_list_does_not_have_yet_is_not_started_twice(hub: Hub):
    def each(waits: int) -> None:
        hub.lag = set(hub.jobs) if waits < 5 else set()
        if waits == 8:
            hub.of("trainer")[0].end("COMPLETED")
            hub.of("worker-0")[0].end("COMPLETED")

    assert Watch(hub, 1, each).follow() == 0
    assert len(hub.jobs) == 2


def test_a_run_that_has_ended_waits_for_its_workers_and_then_ends_them(hub: Hub):
    def each(waits: int) -> None:
        if waits == 1:
            hub.of("trainer")[0].end("COMPLETED")
        if waits == 3:
            hub.of("worker-0")[0].end("COMPLETED")

    watch = Watch(hub, 2, each)
    assert watch.follow() == 0
    assert {role: hub.of(role)[0].stage for role in ("worker-0", "worker-1")} == {
        "worker-0": "COMPLETED",
        "worker-1": "CANCELED",
    }
    assert 30 <= watch.now < 60


def test_a_lost_run_goes_on_in_another_job_with_workers_that_know_its_address(hub: Hub):
    def each(waits: int) -> None:
        if waits == 2:
            hub.of("trainer")[0].end("ERROR", "exit code 137")
        if len(hub.of("trainer")) == 2 and len(hub.of("worker-1")) == 2:
            for job in [*hub.of("worker-0"), *hub.of("worker-1"), *hub.of("trainer")]:
                if job.stage == "RUNNING":
                    job.end("COMPLETED")

    watch = Watch(hub, 2, each)
    assert watch.follow() == 0
    first, second = hub.of("trainer")
    assert second.spec["command"] == ["again"]
    for role in ("worker-0", "worker-1"):
        before, after = hub.of(role)
        assert (before.stage, after.stage) == ("CANCELED", "COMPLETED")
        assert first.id in before.spec["command"][0] and second.id in after.spec["command"][0]
    assert any(
        line.startswith("trainer: the run goes on from its last checkpoint, in job") for line in watch.said
    )


def test_a_trainer_that_is_lost_again_and_again_ends_the_launch_and_says_why(hub: Hub):
    def each(waits: int) -> None:
        for job in hub.of("trainer"):
            if job.stage == "RUNNING" and hub.of("worker-0"):
                job.end("ERROR", "exit code 137")

    watch = Watch(hub, 2, each)
    assert watch.follow() == 1
    assert hub.live() == [] and len(hub.of("trainer")) == 1 + MAX_RESTARTS
    assert watch.said[-1] == (
        "the trainer's job has failed (ERROR (exit code 137)); what it said last is above. Its checkpoints are in "
        "the bucket: `rolecall run --resume` goes on from there, on any machine"
    )


def test_nothing_is_started_once_what_was_agreed_to_is_spent_nor_for_longer(hub: Hub):
    """Not even a trainer that ended because of it."""

    def each(waits: int) -> None:
        if waits == 2:
            hub.of("worker-0")[0].end("ERROR", "exit code 137")
            watch.now = 1e9 - 50
        if len(hub.of("worker-0")) == 2:
            watch.now = 2e9
            hub.of("worker-0")[1].end("ERROR", "Job timeout")
            hub.of("trainer")[0].end("ERROR", "Job timeout")

    watch = Watch(hub, 1, each)
    assert watch.follow() == 1
    assert len(hub.of("trainer")) == 1 and len(hub.of("worker-0")) == 2
    assert [job.spec["timeoutSeconds"] for job in hub.of("worker-0")] == [600, 60]


def test_a_trainers_start_that_nobody_heard_of_is_found_out(hub: Hub):
    def each(waits: int) -> None:
        if waits == 2:
            hub.of("trainer")[0].end("ERROR", "exit code 137")
            hub.lost_answers = 1
        if len(hub.of("trainer")) == 2 and len(hub.of("worker-0")) == 2:
            for job in [*hub.of("worker-0"), *hub.of("trainer")]:
                if job.stage == "RUNNING":
                    job.end("COMPLETED")

    watch = Watch(hub, 1, each)
    assert watch.follow() == 0
    assert len(hub.of("trainer")) == 2 and hub.live() == []
    assert hub.of("trainer")[1].id in hub.of("worker-0")[1].spec["command"][0]


def test_a_trainer_that_never_answered_is_not_started_again(hub: Hub):
    def each(waits: int) -> None:
        hub.of("trainer")[0].end("ERROR", "exit code 2")

    hub.asleep = True
    assert Watch(hub, 2, each).follow() == 1
    assert len(hub.jobs) == 1


def test_a_trainer_without_workers_to_come_is_not_paid_for(hub: Hub):
    def each(waits: int) -> None:
        for job in hub.of("worker-0"):
            job.end("ERROR", "no space left")

    watch = Watch(hub, 1, each)
    assert watch.follow() == 1
    assert hub.of("trainer")[0].stage == "CANCELED"
    assert watch.said[-1] == "no worker is left, and none will come: ending the trainer too"


def test_whoever_follows_starts_nothing_once_somebody_stops_the_launch(hub: Hub):
    def each(waits: int) -> None:
        watch.stopped = True
        hub.of("worker-0")[0].end("ERROR", "exit code 143")

    watch = Watch(hub, 1, each)
    assert watch.follow() == 130
    assert len(hub.jobs) == 2
