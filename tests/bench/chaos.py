"""A run of tests/graphs/chaos.py whose processes are killed, crashed and stopped at random moments.

    python -m tests.bench.chaos --seconds 120 --seed 0 [--json] [--keep FOLDER]

Struck are receivers, half of the senders, the fork server and children of actors: with SIGKILL, SIGSEGV, SIGSTOP and
SIGCONT a moment later, and with SIGSTOP for good (actors only if the supervisor looks for frozen ones). The other
senders are only stopped for moments: for each of their messages somebody lives who must know what became of it.

Prints counts. Those that must be 0 are lost, twice_not_running, out_of_order, unresolved and misreported, which
tests/judge.py defines, and
    orphans     processes of the run that are alive 2 s after it
    corrupt     payloads and answers that are not what was sent
    unexpected  deaths that have other causes than our blows, and a run that did not finish
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import tempfile
import threading
import time
import uuid
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from heapq import heappop, heappush
from pathlib import Path
from typing import Any

from rolecall.runtime.supervisor import Outcome

from ..judge import judge, read_begun, read_sent
from ..processes import Run, wait_for_ends

MARK = "ROLECALL_CHAOS_MARK"
GRACE_S = 45.0  # for the senders to settle: more than the deadline of an ask
GAP_S = 0.2  # between two blows, on average; but some come in pairs
PAIRED = 0.2
PAUSE_S = (0.01, 0.6)
MISS_S, RETRY_S = 2.0, 0.005
TARGETS = {"receiver": 50, "mortal": 25, "steady": 8, "forkserver": 5, "grandchild": 12}
ROLES = {
    "receiver": ("lone", "pool"),
    "mortal": ("mortal",),
    "steady": ("steady",),
    "grandchild": ("lone", "pool", "mortal", "steady"),
}
BLOWS = {"SIGKILL": 55, "SIGSEGV": 15, "SIGSTOP, SIGCONT": 27, "SIGSTOP": 3}
ONLY = {"steady": {"SIGSTOP, SIGCONT"}, "forkserver": set(BLOWS) - {"SIGSTOP"}}
ZEROS = (
    "lost", "twice_not_running", "out_of_order", "unresolved", "misreported", "orphans", "corrupt", "unexpected",
)  # fmt: skip


@dataclass
class Killer(threading.Thread):
    """Strikes for `seconds` once all are up, then lets all go on, writes `over` into the run's folder and sees to it
    that the run ends.

    finds_frozen: whether the supervisor kills what is stopped for good; nobody is, otherwise.
    """

    run_: Run
    seconds: float
    rng: random.Random
    finds_frozen: bool
    by_signal: Counter[str] = field(default_factory=Counter)
    by_target: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        super().__init__(daemon=True)
        self.ended = threading.Event()  # the run has
        self._stopped: list[tuple[float, int]] = []  # until when, and a pidfd

    def __hash__(self) -> int:
        return id(self)

    def run(self) -> None:
        while not self.ended.is_set() and any(c.state != "up" for c in self.run_.supervisor.children):
            self._wait(time.monotonic() + RETRY_S)
        strike_at = time.monotonic()
        over_at = strike_at + self.seconds
        try:
            while strike_at < over_at and not self.ended.is_set():
                self._wait(strike_at)
                self._strike()
                paired = self.rng.random() < PAIRED
                strike_at += self.rng.uniform(0.0, 0.02) if paired else self.rng.expovariate(1 / GAP_S)
            while self._stopped:
                self._wait(self._stopped[0][0])
        finally:
            (self.run_.folder / "over").touch()
        for _ in range(2):  # an orderly end, then one by force
            if not self.ended.wait(GRACE_S):
                self.run_.supervisor.stop()

    def _wait(self, until: float) -> None:
        """And let those go on whose time has come."""
        while self._stopped and self._stopped[0][0] <= until:
            at, pidfd = heappop(self._stopped)
            self.ended.wait(max(0.0, at - time.monotonic()))
            _send(pidfd, signal.SIGCONT)
            os.close(pidfd)
        self.ended.wait(max(0.0, until - time.monotonic()))

    def _strike(self) -> None:
        """One blow at one process; waits a while if there is no such process now."""
        kind = _draw(self.rng, TARGETS)
        blows = {blow: weight for blow, weight in BLOWS.items() if blow in ONLY.get(kind, BLOWS)}
        if not self.finds_frozen and kind != "grandchild":
            blows.pop("SIGSTOP", None)
        blow, place, pause_s = _draw(self.rng, blows), self.rng.random(), self.rng.uniform(*PAUSE_S)
        give_up_at = time.monotonic() + MISS_S
        while (pidfd := self._open(kind, place)) is None:
            if time.monotonic() > give_up_at or self.ended.is_set():
                return
            self._wait(time.monotonic() + RETRY_S)
        hit = _send(pidfd, signal.Signals[blow.split(",")[0]])
        self.by_signal[blow] += hit
        self.by_target[kind] += hit
        if hit and "SIGCONT" in blow:
            heappush(self._stopped, (time.monotonic() + pause_s, pidfd))
        else:
            os.close(pidfd)

    def _open(self, kind: str, place: float) -> int | None:
        """A pidfd of a process that is surely one of the run's: it was before and after this was opened."""
        pid = self._pid(kind, place)
        if pid is None:
            return None
        try:
            pidfd = os.pidfd_open(pid)
        except ProcessLookupError:
            return None
        if self._pid(kind, place) == pid:
            return pidfd
        os.close(pidfd)
        return None

    def _pid(self, kind: str, place: float) -> int | None:
        """The process of this kind at `place`, in [0, 1), among all of them; None if there is none now."""
        supervisor = self.run_.supervisor
        if kind == "forkserver":
            forks = supervisor._forks
            return None if forks is None else forks.pid
        alive = [child.pid for child in supervisor.children if child.alive and child.role.name in ROLES[kind]]
        if kind == "grandchild":
            alive = [child for child in map(_child_of, alive) if child is not None]
        return alive[int(place * len(alive))] if alive else None


def _draw(rng: random.Random, weights: Mapping[str, int]) -> str:
    return rng.choices(list(weights), list(weights.values()))[0]


def _child_of(pid: int) -> int | None:
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return int(children[0]) if children else None


def _send(pidfd: int, number: signal.Signals) -> bool:
    """Whether there was still a process."""
    try:
        signal.pidfd_send_signal(pidfd, number)
    except ProcessLookupError:
        return False
    return True


# --- the run ---------------------------------------------------------------------------------------------


def play(seconds: float, seed: int, folder: Path) -> dict[str, Any]:
    """One run, judged; what `--json` prints. Files that show what happened stay in `folder`."""
    mark = uuid.uuid4().hex
    os.environ[MARK] = mark  # inherited by every process of the run, however far removed
    run = Run("chaos", folder, {"seed": seed})
    killer = Killer(run, seconds, random.Random(seed), hasattr(run.supervisor, "frozen_s"))
    killer.start()
    try:
        outcome = run.go()
        orphans = wait_for_ends(marked(mark), 2.0)
        for pid in orphans:
            os.kill(pid, signal.SIGKILL)
    finally:
        del os.environ[MARK]
        killer.ended.set()
        killer.join()
    return {
        "seconds": seconds,
        "seed": seed,
        "kills": {
            "total": killer.by_signal.total(),
            "by_signal": dict(killer.by_signal),
            "by_target": dict(killer.by_target),
        },
        "deaths": len(run.deaths),
        **_judged(run),
        "orphans": [f"process {pid}" for pid in orphans],
        "unexpected": _unexpected(run, outcome),
    }


def _judged(run: Run) -> dict[str, Any]:
    sent, living = read_sent(run.folder)
    begun, corrupt = read_begun(run.folder)
    with_reason = [(receiver, method) for receiver, method, reason in run.dead_letters if reason]
    verdict = judge(sent, begun, Counter(with_reason), living)
    asks = [message for message in sent if message.how == "ask"]
    return {
        "sent": len(sent),
        "handled": sum(one.fate == "end" for one in begun),
        "told_of_death": sum(message.outcome == "died" for message in asks),
        "slowest_ask_s": round(max(message.known_at - message.at for message in asks) / 1e9, 3),
        "dead_letters_with_reason": len(with_reason),
        **verdict._asdict(),
        "answers_lost": len(verdict.answers_lost),
        "ran_again": len(verdict.ran_again),
        "corrupt": corrupt
        + [f"{message} got a wrong answer" for message in asks if message.outcome == "wrong"],
    }


def _unexpected(run: Run, outcome: Outcome) -> list[str]:
    ours = ("killed by SIGKILL", "killed by SIGSEGV")
    deaths = [
        f"{name} died: {reason}" for name, reason in run.deaths if reason not in ours and "hung" not in reason
    ]
    return deaths + [outcome.story] * (outcome.exit_code != 0)


def marked(mark: str) -> list[int]:
    """Every live process with this mark in its environment."""
    found = list[int]()
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                if f"{MARK}={mark}".encode() in (entry / "environ").read_bytes():
                    found.append(int(entry.name))
            except (FileNotFoundError, ProcessLookupError, PermissionError):
                continue  # it has just ended, or is somebody else's
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--keep", type=Path, help="an empty folder for the logs and records")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        result = play(options.seconds, options.seed, options.keep or Path(folder))
    examples = {name: result[name][:5] for name in ZEROS if result[name]}
    result |= {name: len(result[name]) for name in ZEROS}
    result["examples"] = examples
    if options.json:
        print(json.dumps(result))
    else:
        for name, value in result.items():
            print(f"{name:<25} {value}")


if __name__ == "__main__":
    main()
