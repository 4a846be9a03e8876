"""The prompt source: who is lent what, and when."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from rolecall import Down, NotYet, Unrecoverable
from rolecall.actors import prompts
from rolecall.actors.prompts import PromptSource
from rolecall.actors.types import Lease
from rolecall.runtime.ref import bind_transport

from .fakes import Direct, begin


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture(autouse=True)
def peers() -> Iterator[Direct]:
    """Nobody: workers are watched by name."""
    yield Direct()
    bind_transport(None)


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def source(tmp_path: Path, clock: Clock) -> PromptSource:
    """4 steps of 2 groups, at most 1 version behind; version 0 is out."""
    made = started(tmp_path, clock)
    made.advance(0, 0, {})
    return made


def started(folder: Path, clock: Clock | None = None, **changes) -> PromptSource:
    settings = {"dataset": "tiny", "seed": 0, "groups_per_step": 2, "steps": 4, "max_staleness": 1}
    made = PromptSource(**(settings | changes), lease_s=600.0, clock=clock or Clock())
    begin(made, folder, "prompts")
    made.spare(-99)  # all is lent that may be
    return made


def ask(
    source: PromptSource,
    worker: str = "w",
    *,
    after: Lease | None = None,
    delivered: list[int] | None = None,
    holding: Sequence[int] = (),
    count: int = 2,
    wait: bool = False,
    incarnation: int = 1,
) -> Lease:
    """One `next`; without word on them, all groups of the lease before count as delivered."""
    number, ids = (after.number, ids_of(after)) if after else (0, [])
    told = dict.fromkeys(ids if delivered is None else delivered, number)
    return source.next(worker, incarnation, number, dict.fromkeys(holding, number), told, count, wait)


def said_by(source: PromptSource, sender: str) -> PromptSource:
    """Its next messages come from there."""
    source.context = replace(source.context, sender=lambda: sender)
    return source


def ids_of(lease: Lease) -> list[int]:
    return [prompt.id for prompt in lease.prompts]


def test_prompts_come_in_the_order_of_the_data_set(source: PromptSource):
    first = ask(source, count=3)
    assert ids_of(first) == [0, 1, 2]
    assert [(prompt.text, prompt.answer) for prompt in first.prompts] == [source.rows[id] for id in range(3)]
    assert (first.version, first.finished) == (0, False)


def test_nothing_is_lent_before_a_version_is_out(tmp_path: Path):
    source = started(tmp_path)
    assert ids_of(ask(source)) == []
    with pytest.raises(NotYet):
        ask(source, wait=True)
    source.advance(0, 0, {})
    assert ids_of(ask(source, wait=True)) == [0, 1]


@pytest.mark.parametrize(("max_staleness", "admitted"), [(0, 2), (1, 4), (3, 8)])
def test_no_more_is_admitted_than_can_be_trained_in_time(tmp_path: Path, max_staleness: int, admitted: int):
    source = started(tmp_path, steps=10, max_staleness=max_staleness)
    source.advance(0, 0, {})
    first = ask(source, "w1", count=admitted)
    assert len(first.prompts) == admitted
    assert ids_of(ask(source, "w2", count=99)) == []
    source.advance(1, 1, {})
    assert ids_of(ask(source, "w2", count=99)) == [admitted, admitted + 1]


def test_who_asks_in_vain_has_a_share_of_what_comes_next(tmp_path: Path):
    """12 may be under way: 4 for each of three, once they want as many."""
    source = started(tmp_path, steps=99, groups_per_step=4, max_staleness=2)
    source.advance(0, 0, {})
    first = ask(source, "greedy", count=99)
    assert len(first.prompts) == 12
    assert ids_of(ask(source, "late", count=5)) == ids_of(ask(source, "later", count=1)) == []
    source.advance(1, 1, {})
    assert (
        ids_of(ask(source, "greedy", after=first, holding=range(5, 12), delivered=[*range(5)], count=5)) == []
    )
    late = ask(source, "late", count=5)
    assert ids_of(late) == [12, 13, 14, 15]
    source.advance(2, 2, {})
    assert ids_of(ask(source, "later", count=1)) == [16]
    source.leave("greedy", 1, {})  # 5 to 11 are to be lent again
    assert len(ask(source, "late", after=late, holding=ids_of(late), delivered=[], count=9).prompts) == 9


def test_who_has_his_share_is_tried_again_when_it_has_grown(tmp_path: Path):
    """Not whenever there is a prompt for others: a thousand would be tried for each of them."""
    source = started(tmp_path, steps=99, groups_per_step=4, max_staleness=2)
    source.advance(0, 0, {})
    first = ask(source, "greedy", count=99)
    assert ids_of(ask(source, "late", count=5)) == []
    source.advance(1, 1, {})
    with pytest.raises(NotYet) as waits:  # it has 10, and 7 are for each of the two
        ask(source, "greedy", after=first, holding=range(2, 12), delivered=[0, 1], count=2, wait=True)
    until = waits.value.until
    assert until is not None and not until()
    number = first.number
    source.hold("greedy", 1, number, dict.fromkeys(range(9, 12), number), dict.fromkeys(range(2, 9), number))
    assert until()  # it has 3, and 4 are for each
    again = ask(
        source, "greedy", after=first, holding=range(9, 12), delivered=[*range(9)], count=2, wait=True
    )
    assert ids_of(again) == [12]


def test_nobody_waits_for_the_share_of_who_wants_no_more(source: PromptSource):
    ask(source, "idle", count=1)
    busy = ask(source, "busy", count=99)
    assert ids_of(busy) == [1, 2, 3]
    source.advance(1, 1, {})
    assert ids_of(ask(source, "busy", after=busy, holding=[1, 2, 3], delivered=[], count=99)) == [4, 5]


def test_who_waits_is_tried_again_when_there_may_be_a_prompt_and_now_and_then(
    source: PromptSource, clock: Clock
):
    """So that a thousand waiting cost nothing, and none of them is forgotten."""
    ask(source, "greedy", count=99)
    with pytest.raises(NotYet) as waits:
        ask(source, wait=True)
    until = waits.value.until
    assert until is not None and not until()
    source.step()
    assert not until()
    clock.now = 301.0
    source.step()
    assert until()
    source.step()
    assert not until()
    source.give_back([0])
    assert until()
    assert ids_of(ask(source, wait=True)) == [0] and not until()
    source.advance(1, 1, {})
    assert until()


def test_a_version_every_two_steps_admits_two_steps_at_once(tmp_path: Path):
    source = started(tmp_path, steps=10, max_staleness=0, publish_every=2)
    source.advance(0, 0, {})
    assert len(ask(source, count=99).prompts) == 4


def test_no_prompt_is_beyond_the_last_step(source: PromptSource):
    source.advance(3, 3, {})
    lease = ask(source, count=99)
    assert ids_of(lease) == list(range(8)) and not lease.finished
    source.advance(4, 4, {})
    assert ask(source, "late", wait=True).finished  # even one that waits hears of it
    assert ids_of(ask(source, "late")) == []


def test_two_workers_never_get_the_same(source: PromptSource):
    assert ids_of(ask(source, "a")) == [0, 1]
    assert ids_of(ask(source, "b")) == [2, 3]


def test_what_was_not_delivered_is_lent_again_and_first(source: PromptSource):
    first = ask(source, count=3)
    assert ids_of(ask(source, after=first, delivered=[0, 2], count=2)) == [1, 3]


def test_a_new_incarnation_gets_what_died_with_the_old_one(source: PromptSource):
    assert ids_of(ask(source)) == [0, 1]
    assert ids_of(ask(source, incarnation=2)) == [0, 1]


def test_an_old_incarnation_gets_nothing(source: PromptSource):
    ask(source, incarnation=2)
    late = ask(source, incarnation=1, wait=True)
    assert ids_of(late) == [] and late.number == 0
    assert ids_of(ask(source, "other")) == [2, 3]


def test_a_request_made_again_for_a_lost_answer_gets_the_same(source: PromptSource):
    first = ask(source)
    lost = ask(source, after=first)
    assert ids_of(lost) == [2, 3]
    again = ask(source, after=first)
    assert ids_of(again) == [2, 3] and again.number > lost.number


def test_word_of_an_older_lease_settles_nothing_of_a_newer_one(source: PromptSource):
    """Group 0 was delivered, dropped, and is lent to the same worker again, by an answer that is lost."""
    first = ask(source, count=1)
    source.give_back([0])
    lost = ask(source, after=first, count=1)
    again = ask(source, after=first, count=1)
    assert ids_of(lost) == ids_of(again) == [0]


def test_what_is_held_is_not_lent_again_however_often_more_is_asked_for(source: PromptSource):
    first = ask(source, count=3)
    second = ask(source, after=first, delivered=[1], holding=[0, 2], count=9)
    assert ids_of(second) == [3]
    word = ({0: first.number, 3: second.number}, {2: first.number})
    source.hold("w", 1, second.number, *word)
    assert source.ledger.loans.keys() == {0, 3}
    assert ids_of(ask(source, "other", count=9)) == []
    source.hold("w", 1, second.number, {3: second.number}, {})  # 0 was refused
    assert ids_of(ask(source, "other", count=9)) == [0]


def test_who_leaves_gives_back_what_is_on_its_way_to_him_too(source: PromptSource):
    first = ask(source, count=2)
    ask(source, after=first, holding=[1], delivered=[0], count=1)
    source.leave("w", 1, {0: first.number})
    assert not source.ledger.loans
    assert ids_of(ask(source, after=first, holding=[1], delivered=[], count=9, wait=True)) == []
    assert ids_of(ask(source, "other", count=9)) == [1, 2, 3]
    assert ids_of(ask(source, incarnation=2, count=9)) == []


def test_the_prompts_of_a_worker_that_died_are_lent_anew_at_once(
    source: PromptSource, peers: Direct, tmp_path: Path, clock: Clock
):
    ask(source, "a", incarnation=7)
    ask(source, "b", incarnation=8)
    assert peers.watched == ["a", "b"]
    source.on_down(Down("a", 6, "of a life before", final=False))
    source.on_down(Down("never heard of", 9, "killed by SIGKILL", final=True))
    assert source.ledger.loans.keys() == {0, 1, 2, 3}
    source.on_down(Down("a", 7, "killed by SIGKILL", final=False))
    assert source.ledger.loans.keys() == {2, 3}
    assert ids_of(ask(source, "a", incarnation=7, wait=True)) == []  # what it still asked for
    assert ids_of(ask(source, "a", incarnation=9)) == [0, 1]
    started(tmp_path, clock)
    assert peers.watched[2:] == ["a", "b"]


def test_word_that_crosses_a_lease_on_its_way_does_not_take_it_back(source: PromptSource):
    first = ask(source)
    second = ask(source, after=first)
    source.hold("w", 1, first.number, {}, {})
    assert source.ledger.loans.keys() == set(ids_of(second))


def test_what_is_held_from_an_older_lease_is_not_what_is_lent_now(source: PromptSource):
    """Group 0 was dropped, and is lent to the same worker again, by an answer that is lost."""
    first = ask(source, count=1)
    source.give_back([0])
    ask(source, after=first, holding=[0], delivered=[], count=1)
    assert ids_of(ask(source, after=first, holding=[0], delivered=[], count=1)) == [0]


def test_an_older_word_of_a_worker_changes_nothing(source: PromptSource):
    first = ask(source)
    second = ask(source, after=first)
    late = ask(source, count=2)  # the first request, doubled on its way
    assert ids_of(late) == [] and late.number == 0
    source.hold("w", 0, second.number, {}, {})
    source.leave("w", 0, {})
    assert source.ledger.loans.keys() == set(ids_of(second))


def test_a_worker_that_says_so_keeps_its_prompts_for_as_long_as_it_likes(source: PromptSource, clock: Clock):
    lease = ask(source, "slow")
    assert lease.hold_s < 600.0 / 2
    for _ in range(20):
        clock.now += lease.hold_s
        source.hold("slow", 1, lease.number, dict.fromkeys(ids_of(lease), lease.number), {})
        source.step()
    assert source.ledger.loans.keys() == {0, 1} and not source.ledger.returned


def test_a_word_that_waits_here_renews_nothing(source: PromptSource, clock: Clock):
    """Its worker may be dead by now."""
    lease = ask(source, "vanished", count=4)
    for _ in range(3):
        clock.now += 250.0
        with pytest.raises(NotYet):
            ask(source, "vanished", after=lease, holding=ids_of(lease), delivered=[], wait=True)
        source.step()
    assert ids_of(ask(source, "other", count=9)) == [0, 1, 2, 3]


def test_a_dropped_group_is_sampled_again(source: PromptSource):
    first = ask(source)
    second = ask(source, after=first)
    source.give_back([1])
    assert ids_of(ask(source, after=second)) == [1]


def test_a_group_dropped_before_its_worker_reports_it_is_not_lost(source: PromptSource):
    first = ask(source)
    source.give_back([0])
    assert ids_of(ask(source, after=first)) == [0, 2]


def test_giving_back_twice_is_giving_back_once(source: PromptSource):
    first = ask(source)
    ask(source, after=first, count=0)
    source.give_back([0])
    source.give_back([0])
    assert ids_of(ask(source, "other", count=9)) == [0, 2, 3]


@pytest.mark.parametrize("count", [-5, -1])
def test_fewer_than_no_prompts_are_none(source: PromptSource, count: int):
    first = ask(source)
    source.give_back(ids_of(first))
    assert ids_of(ask(source, count=count)) == []
    assert ids_of(ask(source, count=3)) == [0, 1, 2]


def test_what_was_never_lent_cannot_be_given_back(source: PromptSource):
    source.give_back([7])
    assert ids_of(ask(source, count=99)) == [0, 1, 2, 3]


def test_a_worker_that_has_vanished_loses_its_lease(source: PromptSource, clock: Clock):
    ask(source, "vanished")
    clock.now = 599.0
    source.step()
    assert source.step() == 5.0
    assert ids_of(ask(source, "other")) == [2, 3]
    clock.now = 601.0
    source.step()
    assert ids_of(ask(source, "third")) == [0, 1]


def test_after_a_restart_it_knows_what_it_has_lent(source: PromptSource, tmp_path: Path, clock: Clock):
    first = ask(source, "a", count=3)
    source.advance(1, 1, {})
    source.give_back([1])
    clock.now = 10_000.0
    restarted = started(tmp_path, clock)
    restarted.step()  # takes nothing back: a lease's time begins anew: the clock may be another machine's
    assert ids_of(ask(restarted, "b", count=9)) == [1, 3, 4, 5]
    assert ask(restarted, "a", after=first, count=0).version == 1


@pytest.mark.parametrize("version", [1, 2])
def test_without_staleness_a_version_starts_afresh(tmp_path: Path, version: int):
    """The trainer went back from step 2 to a checkpoint at 1, and its workers have lost what they gave it."""
    source = started(tmp_path, max_staleness=0)
    source.advance(0, 0, {})
    lease = ask(source, "a")
    source.advance(1, 1, {})
    lease = ask(source, "a", after=lease, delivered=[])
    assert ids_of(lease) == [2, 3]
    source.advance(1, version, {})
    if version == 1:  # nothing new: what is being sampled is still wanted
        assert ids_of(ask(source, "b")) == []
    else:
        assert ids_of(ask(source, "b")) == [2, 3]


def test_without_staleness_what_a_worker_had_that_died_is_lent_to_others_last(tmp_path: Path):
    """Its groups may be whole, and with the trainer already."""
    source = started(tmp_path, max_staleness=0, groups_per_step=4)
    source.advance(0, 0, {})
    assert [ids_of(ask(source, name, count=1)) for name in ("a", "b")] == [[0], [1]]
    for name in ("a", "b"):
        source.on_down(Down(name, 1, "killed", final=False))
    assert ids_of(ask(source, "c", count=1)) == [2]
    assert ids_of(ask(source, "b", count=2, incarnation=2)) == [1, 3]
    assert ids_of(ask(source, "d", count=1)) == [0]


def test_the_long_poll_for_a_newer_version(source: PromptSource):
    assert source.policy(-1) == 0
    with pytest.raises(NotYet):
        source.policy(0)
    source.advance(1, 1, {})
    assert source.policy(0) == 1


def test_a_broken_data_set_is_found_at_the_start(tmp_path: Path):
    (tmp_path / "empty.jsonl").write_text("\n")
    with pytest.raises(Unrecoverable, match=r"empty.jsonl has no rows") as caught:
        started(tmp_path, dataset=str(tmp_path / "empty.jsonl"))
    assert caught.value.exit_code == 2


def test_who_waits_and_says_nothing_new_costs_no_write(tmp_path: Path):
    source = started(tmp_path)
    with pytest.raises(NotYet):
        ask(source, wait=True)
    (ledger,) = tmp_path.rglob("ledger.jsonl")
    before = ledger.stat()
    with pytest.raises(NotYet):
        ask(source, wait=True)
    assert ledger.stat() == before
    source.advance(0, 0, {})
    assert ledger.stat() != before


@pytest.mark.parametrize("sender", ["gpu-2/rollout", "gpu-1/rollout-1", "proxy", "rollout-1", "trainer"])
@pytest.mark.parametrize("worker", ["gpu-1/rollout", "rollout-0"])
def test_nobody_speaks_for_another(source: PromptSource, peers: Direct, sender: str, worker: str):
    said_by(source, worker)
    lease = ask(source, worker, incarnation=5)
    said_by(source, sender)
    source.leave(worker, 9, {})
    source.hold(worker, 9, lease.number, {}, {})
    assert ids_of(ask(source, worker, incarnation=10, count=1)) == [2]
    assert source.ledger.loans.keys() == {0, 1, 2}
    said_by(source, worker)
    assert ids_of(ask(source, worker, after=lease, incarnation=5)) == [3]  # its own word counts as before
    assert peers.watched == [worker]


def test_workers_that_hold_nothing_are_forgotten_after_a_lease(
    source: PromptSource, clock: Clock, tmp_path: Path
):
    said_by(source, "proxy")
    first = ask(source, "done", count=1)
    ask(source, "done", after=first, count=0)
    held = ask(source, "holds", count=1)
    clock.now = 500.0
    source.hold("holds", 1, held.number, {1: held.number}, {})
    ask(source, "later", count=0)
    clock.now = 601.0
    source.step()
    assert source.ledger.workers.keys() == {"proxy/holds", "proxy/later"}
    clock.now = 1101.0
    source.hold("holds", 1, held.number, {1: held.number}, {})
    clock.now = 1300.0
    source.step()
    assert source.ledger.workers.keys() == {"proxy/holds"}
    restarted = started(tmp_path, clock)
    assert restarted.ledger.workers.keys() == {"proxy/holds"}
    clock.now = 9000.0
    restarted.step()
    clock.now = 18000.0
    restarted.step()
    assert restarted.ledger.workers == {} and restarted.ledger.returned.keys() == {1}


def test_invented_names_do_not_pile_up(source: PromptSource, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(prompts, "MAX_WORKERS", 3)
    ask(said_by(source, "rollout"), "rollout", count=1)
    for number in range(50):
        ask(said_by(source, "proxy"), f"invented {number}", count=0)
    assert source.ledger.workers.keys() == {"rollout", "proxy/invented 48", "proxy/invented 49"}
    assert source._spoke.keys() == source.ledger.workers.keys()


def test_another_goes_on_from_a_snapshot(tmp_path: Path, source: PromptSource):
    first = ask(source, count=3)
    ask(source, after=first, delivered=[0], holding=[1], count=0)  # 2 was refused
    state = source.snapshot()
    (tmp_path / "other").mkdir()
    other = started(tmp_path / "other")
    early = ask(other, "early")
    other.restore(state)
    with pytest.raises(NotYet):
        ask(other, "early", after=early, wait=True)  # no version is out here
    other.leave("early", 1, {})
    other.advance(1, 5, {})
    lease = ask(other, count=99)
    assert ids_of(lease) == [1, 2, 3, 4, 5] and lease.number > first.number
    assert ids_of(ask(other, holding=[1, 2, 3, 4, 5], after=lease, count=99)) == []
    other.restore(state)  # the trainer died over it
    assert ids_of(ask(other, "late", count=99)) == [1, 2, 3, 4, 5]


def test_what_was_lent_to_the_runs_own_workers_is_lent_anew_when_the_run_is_started_again(
    tmp_path: Path, peers: Direct
):
    """It may be started with fewer of them, or more, under other names; a machine that has joined goes on."""
    began = 1 << 20  # what incarnations of the first start are below
    source = started(tmp_path)
    source.advance(0, 0, {})
    own, joined = (
        ask(source, "rollout-1", incarnation=5),
        ask(source, "gpu-1/rollout", incarnation=(1 << 40) + 3),
    )
    again = PromptSource(dataset="tiny", seed=0, groups_per_step=2, steps=4, max_staleness=1)
    begin(again, tmp_path, "prompts", incarnation=began + 1)
    assert set(again.ledger.loans) == set(ids_of(joined))
    assert ids_of(ask(again, "rollout", incarnation=began + 2, count=99)) == ids_of(own)
    restarted = PromptSource(dataset="tiny", seed=0, groups_per_step=2, steps=4, max_staleness=1)
    begin(restarted, tmp_path, "prompts", incarnation=began + 7)  # in the same start: they live
    assert set(restarted.ledger.loans) == {*ids_of(joined), *ids_of(own)}
