"""The buffer: what it takes in, refuses, hands out and remembers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace
from rolecall import AskTimeout, Down, NotYet, Unrecoverable
from rolecall.actors.buffer import Buffer
from rolecall.actors.prompts import PromptSource
from rolecall.actors.types import Group
from rolecall.runtime.ref import Call, bind_transport

from .fakes import Direct, Published, begin, digest_of, group, ref


@pytest.fixture
def published() -> Published:
    return Published(newest=9)


@pytest.fixture
def peers(tmp_path: Path) -> Iterator[Direct]:
    """A prompt source with 40 prompts on loan to `w`."""
    direct = Direct()
    source = PromptSource(dataset="tiny", seed=0, groups_per_step=2, steps=20, max_staleness=19)
    direct.actors["prompts"] = source
    begin(source, tmp_path, "prompts")
    source.advance(0, 1, {})  # no step of these tests would make a group of version 1 stale
    source.spare(-40)
    source.next("w", 1, 0, {}, {}, 40, False)
    yield direct
    bind_transport(None)


@pytest.fixture
def buffer(tmp_path: Path, peers: Direct, published: Published) -> Buffer:
    return started(tmp_path, published)


def started(folder: Path, published: Published, capacity: int = 4, max_staleness: int = 2) -> Buffer:
    made = Buffer(
        capacity=capacity, max_staleness=max_staleness, prompts=ref("prompts"), weights=published.store
    )
    begin(made, folder, "buffer")
    return made


def returned(peers: Direct) -> list[int]:
    source = peers.actors["prompts"]
    assert isinstance(source, PromptSource)
    return sorted(source.ledger.returned)


def take(buffer: Buffer, step: int, groups: int = 2, version: int = 0, durable: int = 0) -> list[int]:
    return [member.id for member in buffer.take(step, groups, version, durable).groups]


def test_groups_come_out_whole(buffer: Buffer):
    given = [group(0), group(1)]
    assert [buffer.put(member) for member in given] == ["accepted", "accepted"]
    batch = buffer.take(1, 2, 0, 0)
    assert batch.groups == given
    assert (batch.dropped, batch.depth) == ({}, 0)


def test_too_few_groups_are_waited_for(buffer: Buffer):
    buffer.put(group(0))
    with pytest.raises(NotYet):
        take(buffer, 1)
    buffer.put(group(1))
    assert take(buffer, 1) == [0, 1]


def test_the_oldest_policy_goes_first(buffer: Buffer):
    for id, version in [(0, 2), (1, 1), (2, 0), (3, 1)]:
        buffer.put(group(id, version))
    assert take(buffer, 1, version=2) == [2, 1]
    assert take(buffer, 2, version=2) == [3, 0]


def test_a_full_one_makes_workers_wait(buffer: Buffer):
    for id in range(4):
        buffer.put(group(id))
    with pytest.raises(NotYet):
        buffer.put(group(4))
    take(buffer, 1)
    assert buffer.put(group(4)) == "accepted"


def test_a_batch_larger_than_the_buffer_is_an_error_not_a_wait(buffer: Buffer):
    with pytest.raises(Unrecoverable, match="buffer of 4 groups can never give 5 at once") as caught:
        take(buffer, 1, groups=5)
    assert caught.value.exit_code == 2


def test_the_same_group_again_is_accepted_once(buffer: Buffer):
    """Its first answer was lost: in every state the group may be in by now."""
    first = group(0)
    assert buffer.put(first) == buffer.put(first) == "accepted"
    buffer.put(group(1))
    assert take(buffer, 1) == [0, 1]
    assert buffer.put(first) == "accepted"
    assert buffer.record.dropped == {}
    with pytest.raises(NotYet):
        take(buffer, 2)


def test_another_group_of_the_same_prompt_is_a_duplicate(buffer: Buffer):
    buffer.put(group(0))
    buffer.put(group(1))
    assert buffer.put(group(0, reward=0.5)) == "duplicate"  # waiting
    take(buffer, 1)
    assert buffer.put(group(0, reward=0.5)) == "duplicate"  # handed out
    for id in (2, 3):
        buffer.put(group(id))
    take(buffer, 2, durable=1)
    assert buffer.put(group(0)) == "duplicate"  # trained
    assert buffer.record.dropped == {"duplicate": 3}


def test_what_no_version_sampled_is_refused(buffer: Buffer, peers: Direct):
    assert buffer.put(group(0, digest="another adapter's")) == "unknown"
    assert buffer.put(group(1, version=10)) == "unknown"  # 10 was never published
    assert buffer.record.dropped == {"unknown": 2}
    assert buffer.put(group(0)) == "accepted"
    assert returned(peers) == []  # still on loan: the worker says that they were not delivered


def test_a_completion_of_a_version_that_is_not_published_yet_is_refused(buffer: Buffer):
    whole = group(0, version=9)
    newer = msgspec.structs.replace(whole.completions[1], versions=[10])
    digests = whole.digests | {10: digest_of(10)}
    mixed = msgspec.structs.replace(whole, completions=[whole.completions[0], newer], digests=digests)
    assert buffer.put(mixed) == "unknown"
    assert buffer.put(whole) == "accepted"


def test_a_group_of_several_versions_is_attested_for_each_and_as_stale_as_its_oldest_token(buffer: Buffer):
    """Its completions went on under a new version in flight."""

    def mixed(id: int, digests: dict[int, str]) -> Group:
        whole = group(id, version=7)
        long = {"ids": [1, 2, 3], "logprobs": [-1.0, -1.0, -1.0], "versions": [7, 8, 8]}
        first = msgspec.structs.replace(whole.completions[0], **long)
        return msgspec.structs.replace(whole, completions=[first, whole.completions[1]], digests=digests)

    right = {7: digest_of(7), 8: digest_of(8)}
    assert mixed(0, right).version == 7
    assert buffer.put(mixed(0, right)) == "accepted"
    assert buffer.put(mixed(1, right | {8: digest_of(7)})) == "unknown"
    assert buffer.put(mixed(1, right | {7: "another adapter's"})) == "unknown"
    assert buffer.put(mixed(1, {7: digest_of(7)})) == "malformed"
    assert buffer.put(mixed(1, right | {9: digest_of(9)})) == "malformed"
    assert take(buffer, 1, version=10) == []
    assert buffer.record.dropped["stale"] == 1
    assert buffer.put(mixed(1, right)) == "stale"


def test_a_step_waits_for_what_it_would_make_stale(buffer: Buffer, peers: Direct):
    """Version 1 is the oldest that may be trained at 3, and of it 5 is still being sampled."""
    for id in (4, 6, 7):
        buffer.put(group(id, version=2))
    prompts = peers.actors["prompts"]
    assert isinstance(prompts, PromptSource)
    lent = {id: loan.lease for id, loan in prompts.ledger.loans.items()}
    prompts.hold("w", 1, 1, {5: lent[5]}, {id: lent[id] for id in lent if id != 5})
    with pytest.raises(NotYet):
        take(buffer, 1, version=3)
    assert take(buffer, 1, version=2) == [4, 6]  # it would still be fresh enough after this one
    buffer.put(group(5, version=1))
    assert take(buffer, 2, version=3) == [5, 7]


def test_a_step_does_not_wait_for_what_is_stale_already_or_lost(buffer: Buffer, peers: Direct):
    prompts = peers.actors["prompts"]
    assert isinstance(prompts, PromptSource)
    for id in (4, 6):
        buffer.put(group(id, version=4))
    assert take(buffer, 1, version=4) == [4, 6]
    for id in (8, 9):
        buffer.put(group(id, version=3))
    with pytest.raises(NotYet):
        take(buffer, 2, version=3)
    prompts.on_down(Down("w", 1, "killed by SIGKILL", final=False))
    buffer.put(group(10, version=3))  # whatever comes next has it ask again
    assert take(buffer, 2, version=3) == [8, 9]


class Late:
    done = True

    def result(self) -> list[int]:
        raise AskTimeout("no answer from prompts within the deadline")


def test_a_question_whose_time_was_over_is_asked_again(buffer: Buffer):
    for id in (20, 21):
        buffer.put(group(id, version=4))
    buffer._lent[1, 4] = 2, Late()
    with pytest.raises(AskTimeout):
        take(buffer, 1, version=4)
    assert take(buffer, 1, version=4) == [20, 21]


class Slow:
    """An answer that is there in the next round."""

    def __init__(self, value: list[int]) -> None:
        self.value, self.done = value, False

    def result(self) -> list[int]:
        return self.value


def test_what_a_dead_trainer_still_asks_for_holds_up_no_other(
    buffer: Buffer, peers: Direct, monkeypatch: pytest.MonkeyPatch
):
    """Both are tried again whenever one of them has its answer, and the older one first."""
    asked: list[Slow] = []

    def ask_soon(name: str, call: Call, timeout_s: float) -> Slow:
        asked.append(Slow(peers.ask([name], call, timeout_s)[0]))
        return asked[-1]

    monkeypatch.setattr(peers, "ask_soon", ask_soon)
    for id in (20, 21):
        buffer.put(group(id, version=4))
    for version in (4, 5):
        with pytest.raises(NotYet):
            take(buffer, 1, version=version)
    for answer in asked:
        answer.done = True
    assert take(buffer, 1, version=4) == take(buffer, 1, version=5) == [20, 21]


def test_what_a_step_waits_for_is_taken_in_by_a_full_buffer_too(buffer: Buffer, peers: Direct):
    for id in range(20, 24):
        buffer.put(group(id, version=3))
    with pytest.raises(NotYet):
        buffer.put(group(5, version=1))
    with pytest.raises(NotYet):
        take(buffer, 1, version=3)
    assert buffer.put(group(5, version=1)) == "accepted"
    with pytest.raises(NotYet):
        buffer.put(group(45, version=3))  # which nobody waits for


NAN, INFINITY = float("nan"), float("inf")


@pytest.mark.parametrize(
    "wrong",
    [
        {"reward": NAN},  # what it is when the worker leaves it out
        {"reward": -INFINITY},
        {"reward": 1e300},
        {"logprobs": []},
        {"logprobs": [-1.0, -1.0]},
        {"logprobs": [NAN]},
        {"logprobs": [-INFINITY]},
        {"logprobs": [0.5]},
        {"ids": [], "logprobs": []},
        {"ids": [-1]},
        {"ids": [2**31]},
        {"ids": [2**70]},
        {"versions": [-1]},
        {"versions": [2**70]},
        {"versions": []},
        {"ids": [1, 2], "logprobs": [-1.0, -1.0], "versions": [0]},
        {"ids": [1, 2], "logprobs": [-1.0, -1.0], "versions": [1, 0]},
        {"finish_reason": "tired"},
        {"mask": [True, True]},
        {"mask": [False]},
    ],
)
def test_a_completion_nobody_could_train_is_refused(buffer: Buffer, wrong: dict[str, Any]):
    whole = group(0)
    broken = msgspec.structs.replace(whole.completions[1], **wrong)
    assert (
        buffer.put(msgspec.structs.replace(whole, completions=[whole.completions[0], broken])) == "malformed"
    )
    assert buffer.record.dropped == {"malformed": 1}
    assert buffer.put(whole) == "accepted"


def test_a_completion_of_several_turns_is_accepted(buffer: Buffer):
    whole = group(0)
    turns = {
        "ids": [1, 2, 3],
        "logprobs": [-1.0, 0.0, -1.0],
        "versions": [0] * 3,
        "mask": [True, False, True],
    }
    several = msgspec.structs.replace(whole.completions[1], **turns)
    assert (
        buffer.put(msgspec.structs.replace(whole, completions=[whole.completions[0], several])) == "accepted"
    )


@pytest.mark.parametrize(
    "wrong", [{"completions": []}, {"prompt_ids": []}, {"prompt_ids": [-1]}, {"prompt_ids": [2**31]}]
)
def test_a_group_nobody_could_train_is_refused(buffer: Buffer, wrong: dict[str, Any]):
    assert buffer.put(msgspec.structs.replace(group(0), **wrong)) == "malformed"


@pytest.mark.parametrize("id", [-1, 2**62, 2**70])
def test_a_prompt_no_run_can_lend_is_refused(buffer: Buffer, id: int):
    assert buffer.put(group(id)) == "malformed"


@pytest.mark.parametrize(("step", "durable"), [(0, 0), (4, 0), (2**40, 0), (1, 1), (3, 3), (3, 2**40)])
def test_a_made_up_step_is_refused_and_changes_nothing(buffer: Buffer, step: int, durable: int):
    for id in range(4):
        buffer.put(group(id))
    take(buffer, 1)
    take(buffer, 2, durable=1)
    with pytest.raises(ValueError, match="the last step that was given groups is 2"):
        take(buffer, step, durable=durable, version=9)
    assert buffer.record.version == 0
    assert take(buffer, 2) == [2, 3]


def test_the_next_step_is_known_after_a_restart(tmp_path: Path, buffer: Buffer, published: Published):
    for id in range(4):
        buffer.put(group(id))
    take(buffer, 1)
    restarted = started(tmp_path, published)
    with pytest.raises(ValueError, match="ask for step 2"):
        take(restarted, 3)
    assert take(restarted, 2, durable=1) == [2, 3]


def test_a_version_published_later_is_known_then(buffer: Buffer, published: Published):
    assert buffer.put(group(0, version=10)) == "unknown"
    published.newest = 10
    assert buffer.put(group(0, version=10)) == "accepted"


@pytest.mark.parametrize(("version", "answer"), [(5, "accepted"), (4, "stale")])
def test_what_is_too_old_on_arrival_is_refused(buffer: Buffer, version: int, answer: str):
    with pytest.raises(NotYet):
        take(buffer, 1, version=7)  # the trainer is at 7, two more are allowed
    assert buffer.put(group(0, version)) == answer


def test_an_old_group_is_stale_though_its_version_is_gone(buffer: Buffer, published: Published):
    with pytest.raises(NotYet):
        take(buffer, 1, version=9)
    assert buffer.put(group(0, 3, digest="whatever: the manifest was collected")) == "stale"


def test_what_grew_too_old_inside_is_dropped_and_sampled_again(buffer: Buffer, peers: Direct):
    buffer.put(group(0, 1))
    buffer.put(group(1, 2))
    batch = buffer.take(1, 2, 4, 0)
    assert batch.groups == [] and batch.dropped == {"stale": 1} and batch.depth == 1
    assert returned(peers) == [0]
    assert buffer.put(group(0, 4)) == "accepted"
    assert take(buffer, 1, version=4) == [1, 0]


def test_a_batch_is_the_same_however_often_it_is_taken(buffer: Buffer):
    for id in range(4):
        buffer.put(group(id))
    first = take(buffer, 1)
    assert take(buffer, 2, version=1) == [2, 3]
    assert take(buffer, 1, version=2) == first  # the trainer died and is back at its checkpoint
    assert take(buffer, 1, version=9) == first  # too old by now, but what the step was made of
    assert take(buffer, 2, version=9) == [2, 3]


def test_a_restart_forgets_nothing(tmp_path: Path, buffer: Buffer, published: Published):
    for id in range(4):
        buffer.put(group(id))
    take(buffer, 1)
    buffer.put(group(4))
    buffer.put(group(0, reward=0.5))
    restarted = started(tmp_path, published)
    assert restarted.record.dropped == {"duplicate": 1}
    assert take(restarted, 1) == [0, 1]
    assert restarted.put(group(5)) == "accepted"
    with pytest.raises(NotYet):
        restarted.put(group(6))  # full as before
    assert take(restarted, 2) == [2, 3]
    again = started(tmp_path, published)
    assert take(again, 1) == [0, 1] and take(again, 2) == [2, 3] and take(again, 3) == [4, 5]


def test_what_is_durable_leaves_the_disk_but_stays_known(
    tmp_path: Path, buffer: Buffer, published: Published
):
    for id in (1, 0, 2, 3):
        buffer.put(group(id))
    take(buffer, 1)
    take(buffer, 2, durable=1)
    assert sorted(path.name for path in buffer.state_folder.glob("*.group")) == ["2.group", "3.group"]
    restarted = started(tmp_path, published)
    assert restarted.put(group(1, reward=0.5)) == "duplicate"
    assert take(restarted, 2) == [2, 3]
    assert (restarted.record.trained_below, restarted.record.trained) == (2, set())


def test_a_kill_between_two_writes_leaves_no_broken_group(
    tmp_path: Path, buffer: Buffer, published: Published
):
    buffer.put(group(0))
    (buffer.state_folder / "1.new").write_bytes(b"half a gro")
    restarted = started(tmp_path, published)
    assert restarted.put(group(1)) == "accepted"
    assert take(restarted, 1) == [0, 1]


def test_the_digest_of_a_version_for_those_without_the_store(buffer: Buffer):
    assert buffer.digest(9) == digest_of(9)
    assert buffer.digest(10) == ""


def test_another_goes_on_from_a_snapshot(tmp_path: Path, buffer: Buffer, published: Published):
    for id in range(4):
        buffer.put(group(id))
    assert take(buffer, 1) == [0, 1]
    state = buffer.snapshot()
    (tmp_path / "other").mkdir()
    other = started(tmp_path / "other", published)
    assert other.put(group(0)) == other.put(group(5)) == "accepted"  # before anybody told it what there was
    other.restore(state)
    for one in (other, started(tmp_path / "other", published)):  # and its next incarnation
        assert take(one, 1) == [0, 1]
        assert [one.put(group(id, version=1)) for id in range(3)] == ["duplicate"] * 3
    assert take(other, 2, durable=1) == [2, 3]
    assert take(other, 3, 1, durable=2) == [5]
    assert [other.put(group(id)) for id in range(4)] == ["duplicate"] * 4


def long_group(id: int, length: int, version: int = 0) -> Group:
    made = group(id, version)
    longer = [
        replace(one, ids=[1] * length, logprobs=[-1.0] * length, versions=[version] * length)
        for one in made.completions
    ]
    return replace(made, completions=longer)


def test_what_is_dropped_is_counted_by_its_length(tmp_path: Path, peers: Direct, published: Published):
    """So that one can see whether it is the long ones."""
    buffer = started(tmp_path, published, capacity=30, max_staleness=1)
    for id in range(20):
        assert buffer.put(long_group(id, 10 * (id + 1), version=1)) == "accepted"
    assert len(take(buffer, 1, groups=10, version=1)) == 10
    batch = buffer.take(2, 20, 3, 0)
    assert batch.dropped == {"stale": 10} and batch.groups == []
    assert batch.dropped_deciles == {"stale": [0, 0, 0, 0, 1, 2, 2, 2, 2, 1]}
    assert buffer.put(long_group(30, 5)) == "stale"
    assert buffer.put(long_group(31, 999)) == "stale"
    again = started(tmp_path, published, capacity=30, max_staleness=1)
    assert again.record.dropped_deciles == {"stale": [1, 0, 0, 0, 1, 2, 2, 2, 2, 2]}


def test_what_a_snapshot_brings_back_stays_although_it_was_done_with_here(
    buffer: Buffer, tmp_path: Path, published: Published
):
    for id in (0, 1):
        buffer.put(group(id))
    assert take(buffer, 1) == [0, 1]
    state = buffer.snapshot()
    with pytest.raises(NotYet):
        take(buffer, 2, durable=1)
    buffer.restore(state)
    assert take(buffer, 1) == [0, 1]
    assert take(started(tmp_path, published), 1) == [0, 1]
