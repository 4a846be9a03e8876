"""What came of the messages of a run of graphs/chaos.py, judged by what its senders and receivers wrote down.

A message is running at a death if it is the last its receiver had begun; it is handled once its handler got to its
last line. Defects are:

lost              of a sender that lives to the end: a tell that was neither handled nor became a dead letter with a
                  reason; an ask that was answered and not handled. Of a sender that was killed: such an ask, too, and
                  such a tell if the sender knew that it had left: if it knew how a later ask to the same receiver
                  ended. The rest may be lost with their sender: a tell leaves it within about a millisecond, and it
                  alone could send again what its receiver's own death has cost. For this second reason nothing is
                  said of what NotYet had set aside for a sender that was killed.
twice_not_running handled again; unless it is idempotent and was running at its receiver's death (`ran_again`), or is
                  such an ask whose answer died with its receiver before the asker had it (`answers_lost`)
out_of_order      of one sender to one receiver, over all incarnations of the receiver: begun for the first time
                  after a later one, or again out of turn. Not those that raise NotYet, which lets others overtake
unresolved        asks that ended with neither an answer nor ActorDied: with AskTimeout, say, or not at all
misreported       an ask that had begun, said to have not; more dead letters than there are messages for them
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence, Set
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

IDEMPOTENT = {"keep", "keep_waiting", "settle"}
NOT_YET = {"wait", "mortal_wait", "keep_waiting", "settle"}  # these raise it
KNOWN = {
    "answered",
    "wrong",
    "told",
    "died",
    "unbegun",
    "",
}  # outcomes; "wrong" is an answer to something else


class Sent(NamedTuple):
    """A message. sender: one incarnation; how: ask or tell; outcome: "" if its sender never knew one.

    Times are CLOCK_MONOTONIC, in ns.
    """

    sender: str
    number: int
    receiver: str
    method: str
    how: str
    at: int = 0
    outcome: str = ""
    known_at: int = 0

    @property
    def key(self) -> tuple[str, int, str]:
        return self.sender, self.number, self.receiver


class Begun(NamedTuple):
    """One try of a message. fate: "end", "aside" (NotYet), or "begin" if its receiver died over it."""

    receiver: str
    incarnation: int
    sender: str
    number: int
    fate: str
    at: int = 0

    @property
    def key(self) -> tuple[str, int, str]:
        return self.sender, self.number, self.receiver


class Verdict(NamedTuple):
    """Each a sentence about one message. The last two are no defects."""

    lost: list[str]
    twice_not_running: list[str]
    out_of_order: list[str]
    unresolved: list[str]
    misreported: list[str]
    answers_lost: list[str]
    ran_again: list[str]


def judge(
    sent: Sequence[Sent],
    begun: Sequence[Begun],
    dead_letters: Mapping[tuple[str, str], int],
    living: Set[str],
) -> Verdict:
    """sent: each sender's in order. begun: each receiver's in order, incarnation after incarnation.

    dead_letters: how many have a reason, by receiver and method. living: the senders that were never killed.
    """
    messages = {message.key: message for message in sent}
    tries = defaultdict[tuple[str, int, str], list[Begun]](list)
    last = {(one.receiver, one.incarnation): one.key for one in begun}
    for one in begun:
        if one.fate != "aside":
            tries[one.key].append(one)
    running = {one.key for one in begun if last[one.receiver, one.incarnation] == one.key}
    twice, answers_lost, ran_again = _repeated(messages, tries, last)
    lost, misreported = _lost(sent, tries, running, dead_letters, living)
    unresolved = [
        f"{message} has no answer"
        for message in sent
        if message.outcome not in KNOWN or (message.sender in living and not message.outcome)
    ]
    return Verdict(
        lost, twice, _out_of_order(messages, begun), unresolved, misreported, answers_lost, ran_again
    )


def _repeated(
    messages: Mapping[tuple[str, int, str], Sent],
    tries: Mapping[tuple[str, int, str], Sequence[Begun]],
    last: Mapping[tuple[str, int], tuple[str, int, str]],
) -> tuple[list[str], list[str], list[str]]:
    twice, answers_lost, ran_again = list[str](), list[str](), list[str]()
    for key, runs in tries.items():
        message = messages[key]
        for before, again in pairwise(runs):
            died = message.method in IDEMPOTENT and before.incarnation < again.incarnation
            unheard = message.how == "ask" and not 0 < message.known_at < again.at
            if died and last[before.receiver, before.incarnation] == key:
                kind = ran_again
            else:
                kind = answers_lost if died and unheard else twice
            kind.append(f"{message}: {before}, and {again}")
    return twice, answers_lost, ran_again


def _out_of_order(messages: Mapping[tuple[str, int, str], Sent], begun: Sequence[Begun]) -> list[str]:
    wrong = list[str]()
    seen = defaultdict[tuple[str, str], set[int]](set)
    highest = defaultdict[tuple[str, str], int](int)
    previous = dict[tuple[str, str], Begun]()
    for one in begun:
        if messages[one.key].method in NOT_YET:
            continue
        line = one.sender, one.receiver
        before = previous.get(line)
        turned_back = before and before.incarnation == one.incarnation and one.number <= before.number
        if turned_back or (one.number < highest[line] and one.number not in seen[line]):
            wrong.append(f"{one} came after {before}, and {highest[line]} was the highest")
        seen[line].add(one.number)
        highest[line] = max(one.number, highest[line])
        previous[line] = one
    return wrong


def _lost(
    sent: Sequence[Sent],
    tries: Mapping[tuple[str, int, str], Sequence[Begun]],
    running: Set[tuple[str, int, str]],
    dead_letters: Mapping[tuple[str, str], int],
    living: Set[str],
) -> tuple[list[str], list[str]]:
    left = defaultdict[tuple[str, str], int](
        int
    )  # below this number a sender's tells have left for a receiver
    for message in sent:
        if message.how == "ask" and message.outcome in ("answered", "died"):
            left[message.sender, message.receiver] = message.number
    lost, misreported = list[str](), list[str]()
    unhandled = defaultdict[tuple[str, str], list[Sent]](list)
    maybe_dead = Counter[tuple[str, str]]()
    for message in sent:
        runs = tries.get(message.key, ())
        ended = any(one.fate == "end" for one in runs)
        if message.how == "ask":
            if message.outcome == "answered" and not ended:
                lost.append(f"{message} was never handled")
            if message.outcome == "unbegun" and runs:
                misreported.append(f"{message} had begun: {runs[0]}")
            continue
        where = message.receiver, message.method
        maybe_dead[where] += not ended or message.key in running
        has_left = message.number < left[message.sender, message.receiver] and message.method not in NOT_YET
        if not ended and (message.sender in living or has_left):
            unhandled[where].append(message)
    for where, missing in unhandled.items():
        count = len(missing) - dead_letters.get(where, 0)
        if count > 0:
            never = [message for message in missing if message.key not in tries]
            lost += [f"{message} (or another like it)" for message in (never + missing)[:count]]
    for where, count in dead_letters.items():
        misreported += [f"a dead letter of {where} too many"] * (count - maybe_dead[where])
    return lost, misreported


# --- what was written down -------------------------------------------------------------------------------


def read_sent(folder: Path) -> tuple[list[Sent], set[str]]:
    """What all senders of a run have sent, and those of them that were the last of their name."""
    sent, living = list[Sent](), set[str]()
    for actor in sorted((folder / "state").glob("steady-*")) + sorted((folder / "state").glob("mortal-*")):
        for incarnation in _incarnations(actor):
            sender = f"{actor.name}.{incarnation}"
            messages = list[Sent]()
            ends = dict[int, tuple[str, int]]()
            for what, number, *words in _lines(actor, incarnation):
                if what == "end":
                    ends[int(number)] = words[0], int(words[1])
                else:
                    messages.append(Sent(sender, int(number), words[0], words[1], what, int(words[2])))
            for message in messages:
                outcome, known_at = ends.get(message.number, ("", 0))
                sent.append(message._replace(outcome=outcome, known_at=known_at))
        living.add(f"{actor.name}.{_incarnations(actor)[-1]}")
    return sent, living


def read_begun(folder: Path) -> tuple[list[Begun], list[str]]:
    """What all receivers of a run have begun, and what came corrupted."""
    begun, corrupt = list[Begun](), list[str]()
    for actor in sorted((folder / "state").glob("lone")) + sorted((folder / "state").glob("pool-*")):
        for incarnation in _incarnations(actor):
            for what, sender, number, _method, at in _lines(actor, incarnation):
                if what == "begin":
                    begun.append(Begun(actor.name, incarnation, sender, int(number), "begin", int(at)))
                elif what == "corrupt":
                    corrupt.append(f"{actor.name}.{incarnation} got a corrupt {sender} {number}")
                else:
                    begun[-1] = begun[-1]._replace(fate=what)
    return begun, corrupt


def _incarnations(actor: Path) -> list[int]:
    return sorted(int(path.name) for path in (actor / "records").iterdir())


def _lines(actor: Path, incarnation: int) -> Iterator[list[str]]:
    """The words of each whole line."""
    with (actor / "records" / str(incarnation)).open() as file:
        yield from (line.split() for line in file if line.endswith("\n"))
