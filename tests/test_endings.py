"""What becomes of messages when somebody ends: the one that told them, or the one that refuses them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from msgspec import msgpack
from rolecall import Actor
from rolecall.runtime.actor import Down
from rolecall.runtime.control import DeadLetter, FromActor
from rolecall.runtime.mailbox import Incoming, Mailbox
from rolecall.runtime.page import Page
from rolecall.runtime.peer import Answers
from rolecall.runtime.process import Life, Spec
from rolecall.runtime.wire import Header, Kind, encode_body

from .graphs import endings
from .processes import Run

slow = pytest.mark.slow
pytestmark = pytest.mark.timeout(60)

# --- a sender that ends ----------------------------------------------------------------------------------

WAYS: dict[str, Callable[[Run], Any]] = {
    "finishes": lambda run: None,
    "is stopped": lambda run: run.supervisor.stop(),
    "is restarted by request": lambda run: run.supervisor.restart("sender"),
    "is taken down": lambda run: run.kill("idle"),
}


class Ending:
    """Lets the sender of graphs/endings.py end, and stops the run when it has. `at_end` acts while it is ending and
    its receiver is in the first of its messages.
    """

    def __init__(self, way: str, at_end: Callable[[Run], None] = lambda run: None) -> None:
        self.way, self.at_end = way, at_end
        self.awaited = {"ending", "holding"}

    def __call__(self, run: Run, kind: str, name: str, value: Any) -> None:
        if kind == "report":
            if "sent" in value:
                WAYS[self.way](run)
            if self.awaited & value.keys():
                self.awaited -= value.keys()
                if not self.awaited:
                    self.at_end(run)
        if (kind, name) == ("state", "sender") and value in ("done", "waiting"):
            run.supervisor.stop()


def settings(way: str, **others: Any) -> dict[str, Any]:
    return {"finishes": way == "finishes", **others}


@slow
@pytest.mark.parametrize("way", [way for way in WAYS if way != "is stopped"])
def test_what_a_sender_told_is_sent_again_although_it_ends(tmp_path: Path, way: str):
    run = Run("endings", tmp_path, settings(way), Ending(way, lambda run: run.kill("target")))
    assert run.go().exit_code == 130
    notes = run.reports["target"][1:]
    assert [note["noted"] for note in notes] == list(range(endings.NOTES))
    assert len({note["incarnation"] for note in notes}) == 1
    assert run.dead_letters == []


@slow
def test_when_the_run_stops_what_was_told_to_one_that_dies_meanwhile_is_a_dead_letter(tmp_path: Path):
    run = Run("endings", tmp_path, {}, Ending("is stopped", lambda run: run.kill("target")))
    assert run.go().exit_code == 130
    methods = ["hold"] + ["note"] * endings.NOTES
    assert sorted(run.dead_letters) == [("target", method, "stopped") for method in methods]


@slow
@pytest.mark.parametrize("way", WAYS)
def test_what_is_not_handled_within_half_the_time_it_has_to_stop_is_a_dead_letter(tmp_path: Path, way: str):
    run = Run("endings", tmp_path, settings(way, hasty=True), Ending(way))
    assert run.go().exit_code == 130
    reason = "sender ended before it heard that this was handled"
    methods = ["hold"] + ["note"] * endings.NOTES
    assert sorted(run.dead_letters) == [("target", method, reason) for method in methods]


# --- one that refuses a message that was interrupted ------------------------------------------------------


class Killed(BaseException):
    """SIGKILL, for an actor without a process."""


class Victim(Actor):
    def die(self) -> None:
        raise Killed


class MortalPage(Page):
    """life: what is told of each note."""

    life: Support

    def done(self, sender: int, seq: int) -> None:
        self.life.instant()
        super().done(sender, seq)
        self.life.instant()


class Support:
    """What an incarnation of a Victim lives on, until its instant number `dies_at`: before and after each word it
    says and each message it notes as done. letters: the dead letters that it has said."""

    def __init__(self, folder: Path, letters: list[DeadLetter], dies_at: int = 0) -> None:
        self.mailbox, page = Mailbox(), MortalPage(folder / "page")
        page.life = self
        page.recover()
        self.page: Page = page
        self.letters, self.dies_at = letters, dies_at
        self.instants = 0
        self.sender_knows = False
        self.chain: tuple[str, ...] = ()
        self.deadline = float("inf")
        self.stopping = self.again = False
        self.downs: deque[Down] = deque()
        self.answers = Answers()
        self.dead_letters: list[tuple[str, str, str]] = []

    def instant(self) -> None:
        self.instants += 1
        if self.instants == self.dies_at:
            raise Killed

    def to_supervisor(self, frame: bytes) -> None:
        self.instant()
        word = msgpack.decode(frame, type=FromActor)
        self.letters += [word] if isinstance(word, DeadLetter) else []
        self.instant()

    def handled(self, message: Incoming) -> None:
        self.instant()
        self.sender_knows = True
        self.instant()

    def expire(self, now: float) -> None:
        pass

    def wait(self, timeout_s: float | None) -> None:
        self.stopping = True

    def wait_for_stop(self, timeout_s: float) -> None: ...

    def now(self) -> float:
        return 1.0

    def now_ns(self) -> int:
        return 1

    def breathe(self) -> None: ...

    def answer(self, message: Incoming, kind: Kind, value: Any) -> None: ...

    def settle(self, timeout_s: float) -> None: ...


def live(folder: Path, support: Support) -> bool:
    """Whether it lives to the end; its mailbox has one message."""
    header = Header(Kind.TELL, 1, 1, 0.0, (), "die")
    support.mailbox.put(Incoming(header, *encode_body(((), {}))))
    try:
        Life(Spec("victim", 2, folder, folder, "", "run", "", Victim, (), {}), support).live()
    except Killed:
        return False
    return True


def test_killed_at_any_instant_of_refusing_a_message_it_still_leaves_a_dead_letter(tmp_path: Path):
    lived, dies_at = False, 0
    while not lived:
        dies_at += 1
        folder = tmp_path / str(dies_at)
        folder.mkdir()
        letters: list[DeadLetter] = []
        assert not live(folder, Support(folder, letters))
        second = Support(folder, letters, dies_at)
        lived = live(folder, second)
        if not second.sender_knows:  # it sends the message again
            assert live(folder, Support(folder, letters))
        reason = "victim died while it handled die, or before its answer was sent"
        assert {(letter.receiver, letter.method, letter.reason) for letter in letters} == {
            ("victim", "die", reason)
        }
    assert dies_at > 10


# --- a tell in a chain of asks ----------------------------------------------------------------------------


@slow
def test_a_tell_breaks_the_chain_and_carries_no_deadline(tmp_path: Path):
    run = Run("chain", tmp_path)
    assert run.go().exit_code == 0
    assert run.reports == {"first": [{"told": "told"}], "last": [{"heard": "hello"}]}
    assert run.dead_letters == []
