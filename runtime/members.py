"""Who lives where, as the supervisor last said, and which deaths an actor still has to hear of."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable

from .actor import Down
from .control import Member, by_role
from .page import RECEIVERS

__all__ = ["Members"]


class Members:
    """The members of a run by name, in the order of the graph.

    replicas: of each role, the members that are not gone; if all are, the first, so that asking it says so.
    downs:    ends of watched incarnations that the actor has not been told of.
    among:    those of all actors of one process, who need hear of each change but once.
    """

    def __init__(self, among: Members | None = None) -> None:
        self._among = among
        self.by_name: dict[str, Member] = {} if among is None else among.by_name
        self.downs: deque[Down] = deque()
        self.news = False  # since somebody last set it to False
        self._replicas: dict[str, list[str]] | None = None  # None: to be made from by_name
        self._picked: dict[str, str] = {}  # of each role, whom `pick` gave last
        self._watched: set[str] = set()  # names that were asked for, of roles or replicas
        self._ended: dict[str, int] = {}  # of each watched name, the last incarnation whose end was told

    def hear(self, members: Iterable[Member]) -> None:
        """These have changed."""
        for member in members:
            before = self.by_name.get(member.name)
            if before is None and member.role in self._watched:  # its machine has joined since
                self._ended.setdefault(member.name, 0)
            self.by_name[member.name] = member
            if member.name in self._ended:
                if before is not None and before.incarnation != member.incarnation:
                    self._end(before, member.reason, final=False)
                self._look_at(member)
        self._replicas = None
        self.news = True

    @property
    def replicas(self) -> dict[str, list[str]]:
        if self._among is not None:
            return self._among.replicas
        if self._replicas is None:
            self._replicas = by_role(list(self.by_name.values()))
        return self._replicas

    def place(self, name: str) -> int:
        """Its place in the order of the membership, which is the supervisor's, too; -1: it has none on a page."""
        place = list(self.by_name).index(name) if name in self.by_name else -1
        return place if place < RECEIVERS else -1

    def pick(self, role: str, unhandled: Callable[[str], int]) -> str:
        """A replica that is up, or if none is any: of these the one with the fewest messages that it has not handled,
        in turn among equals."""

        def load(name: str) -> tuple[bool, int]:
            member = self.by_name.get(name)
            return member is None or member.state != "up", unhandled(name)

        names = self.replicas.get(role, [role])
        last = self._picked.get(role)
        turn = names.index(last) + 1 if last in names else 0
        picked = self._picked[role] = min((*names[turn:], *names[:turn]), key=load)
        return picked

    def watch(self, role: str) -> None:
        """Give the end of each incarnation of its replicas to `downs`, at once if one is dead already; also of those
        that are yet to join."""
        self._watched.add(role)
        names = [member.name for member in self.by_name.values() if role in (member.role, member.name)]
        for name in names or [role]:
            if name not in self._ended:
                self._ended[name] = 0
                if name in self.by_name:
                    self._look_at(self.by_name[name])

    def watches(self, name: str) -> bool:
        """Whether the ends of its incarnations are to be told."""
        return name in self._ended

    def _look_at(self, member: Member) -> None:
        if member.state in ("down", "gone"):
            self._end(member, member.reason, final=member.state == "gone")

    def _end(self, member: Member, reason: str, *, final: bool) -> None:
        # Incarnations grow, and one that was never started has none.
        if member.incarnation > self._ended[member.name]:
            self._ended[member.name] = member.incarnation
            self.downs.append(Down(member.name, member.incarnation, reason, final))
