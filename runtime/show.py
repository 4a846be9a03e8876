"""Graphs as text: one, and the difference of two."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, is_dataclass

from .graph import Graph, Role, Subtree
from .recipe import settings_of
from .ref import Ref
from .store import Store

__all__ = ["Wire", "difference", "picture", "title", "wires"]


@dataclass(frozen=True)
class Wire:
    """What a role was given under the name `argument`: a ref to the role `target`, or a store, to which it dashes."""

    role: str
    argument: str
    target: str
    dashed: bool = False

    def __str__(self) -> str:
        return f"{self.argument} {'┄▶' if self.dashed else '─▶'} {self.target}"


def wires(graph: Graph) -> list[Wire]:
    """All of a graph, in the order its roles were added. A store is called by its address if there are several."""
    stores = {value.url for role in graph for value in role.kwargs.values() if isinstance(value, Store)}
    found: list[Wire] = []
    for role in graph:
        found += [Wire(role.name, argument, target) for argument, target in role.wires.items()]
        found += [
            Wire(role.name, argument, f"store {value.url}" if len(stores) > 1 else "store", dashed=True)
            for argument, value in role.kwargs.items()
            if isinstance(value, Store)
        ]
    return found


def title(role: Role) -> str:
    """Its name, and how many there are if not one."""
    if role.elastic:
        return f"{role.name} ×{role.replicas} or more"
    return role.name if role.replicas == 1 else f"{role.name} ×{role.replicas}"


def picture(graph: Graph) -> str:
    """The roles in the order they start, each with what it is wired to."""
    width = max(len(title(role)) for role in graph)
    lines = [f"{graph.name}: restarts {graph.strategy.value}"]
    for role in graph:
        own = ", ".join(str(wire) for wire in wires(graph) if wire.role == role.name)
        lines.append(f"  {title(role):<{width}}  {role.actor.__name__:<14}  {own}".rstrip())
    lines += [f"  {role.name} runs in {role.python}" for role in graph if role.python]
    lines += [f"  {_roles(subtree)}: {_restarts(subtree)}" for subtree in graph.subtrees]
    lines.append(
        f"  until {' and '.join(graph.ends_with)} {'have' if len(graph.ends_with) > 1 else 'has'} finished"
    )
    return "\n".join(lines)


def difference(a: Graph, b: Graph) -> str:
    """Both graphs in one, what only a has marked by - and what only b has by +, and the settings that differ."""
    settings = _marked(_settings(a), _settings(b))
    parts = {
        "actors": _marked(_actors(a), _actors(b)),
        "wires": _marked(_wires(a), _wires(b)),
        "settings": [line for line in settings if line[0] in "-+"],
    }
    if all(line[0] == " " for lines in parts.values() for line in lines):
        return f"{a.name} and {b.name} are wired alike"
    shown = [line for name, lines in parts.items() if lines for line in (name, *lines)]
    return "\n".join([f"--- {a.name}", f"+++ {b.name}", *shown])


def _marked(a: Mapping[str, str], b: Mapping[str, str]) -> list[str]:
    """The lines of both, those with one key next to each other, and otherwise in b's order."""
    keys = list(a)
    before = -1
    for key in b:
        if key not in a:
            keys.insert(before + 1, key)
        before = keys.index(key)
    lines: list[str] = []
    for key in keys:
        if a.get(key) == b.get(key):
            lines.append(f"  {a[key]}")
        else:
            lines += [f"{mark} {side[key]}" for mark, side in (("-", a), ("+", b)) if key in side]
    return lines


def _actors(graph: Graph) -> dict[str, str]:
    return {
        role.name: f"{title(role)}: {role.actor.__name__}"
        + (f", runs in {role.python}" if role.python else "")
        for role in graph
    }


def _wires(graph: Graph) -> dict[str, str]:
    return {f"{wire.role}.{wire.argument}": f"{wire.role}: {wire}" for wire in wires(graph)}


def _settings(graph: Graph) -> dict[str, str]:
    facts = {"restarts": graph.strategy.value, "ends with": ", ".join(graph.ends_with)}
    facts |= {_roles(subtree): _restarts(subtree) for subtree in graph.subtrees}
    for role in graph:
        for argument, value in role.kwargs.items():
            facts |= {f"{role.name}.{argument}{name}": text for name, text in _texts(value).items()}
    return {name: f"{name}: {text}" for name, text in facts.items()}


def _texts(value: object) -> dict[str, str]:
    """What an argument is; of one with settings of its own, each, by its dotted name."""
    if isinstance(value, Ref):
        return {}  # a wire
    if is_dataclass(value):
        return {f".{name}": repr(own) for name, own in settings_of(value).items()}
    return {"": repr(value)}


def _roles(subtree: Subtree) -> str:
    return f"{' and '.join(subtree.roles)} apart"


def _restarts(subtree: Subtree) -> str:
    return f"restarts {subtree.strategy.value}, at most {subtree.max_restarts} in {subtree.within_s:g} s"
