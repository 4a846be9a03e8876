"""Graphs as text: one, and the difference of two."""

from __future__ import annotations

from dataclasses import is_dataclass

from .graph import Graph, Role, Subtree
from .recipe import settings_of
from .ref import Ref

__all__ = ["difference", "picture"]


def picture(graph: Graph) -> str:
    """The roles in the order they start, each with what it is wired to."""
    width = max(len(_title(role)) for role in graph)
    lines = [f"{graph.name}: restarts {graph.strategy.value}"]
    for role in graph:
        wires = [f"{argument} ─▶ {target}" for argument, target in role.wires.items()]
        lines.append(f"  {_title(role):<{width}}  {role.actor.__name__:<14}  {', '.join(wires)}".rstrip())
    lines += [f"  {role.name} runs in {role.python}" for role in graph if role.python]
    lines += [f"  {_roles(subtree)}: {_restarts(subtree)}" for subtree in graph.subtrees]
    lines.append(
        f"  until {' and '.join(graph.ends_with)} {'have' if len(graph.ends_with) > 1 else 'has'} finished"
    )
    return "\n".join(lines)


def difference(a: Graph, b: Graph) -> str:
    """What b's graph has otherwise than a's: roles, wires, settings, restarts. Lines marked as in a diff."""
    facts_a, facts_b = _facts(a), _facts(b)
    lines = [f"--- {a.name}", f"+++ {b.name}"]
    for fact in [*facts_a, *(fact for fact in facts_b if fact not in facts_a)]:
        before, after = facts_a.get(fact), facts_b.get(fact)
        if before != after:
            lines += [f"- {fact}: {before}"] if before is not None else []
            lines += [f"+ {fact}: {after}"] if after is not None else []
    return "\n".join(lines) if len(lines) > 2 else f"{a.name} and {b.name} are wired alike"


def _roles(subtree: Subtree) -> str:
    return f"{' and '.join(subtree.roles)} apart"


def _restarts(subtree: Subtree) -> str:
    return f"restarts {subtree.strategy.value}, at most {subtree.max_restarts} in {subtree.within_s:g} s"


def _title(role: Role) -> str:
    if role.elastic:
        return f"{role.name} ×{role.replicas} or more"
    return role.name if role.replicas == 1 else f"{role.name} ×{role.replicas}"


def _texts(value: object) -> dict[str, str]:
    """What an argument is; of one with settings of its own, each, by its dotted name."""
    if isinstance(value, Ref):
        return {"": f"─▶ {value.name}"}
    if is_dataclass(value):
        return {f".{name}": repr(own) for name, own in settings_of(value).items()}
    return {"": repr(value)}


def _facts(graph: Graph) -> dict[str, str]:
    facts = {"restarts": graph.strategy.value, "ends with": ", ".join(graph.ends_with)}
    for role in graph:
        facts[role.name] = role.actor.__name__ + (f" ×{role.replicas}" if role.replicas != 1 else "")
        if role.elastic:
            facts[f"{role.name} elastic"] = "yes"
        if role.python:
            facts[f"{role.name} runs in"] = role.python
        for argument, value in role.kwargs.items():
            facts |= {f"{role.name}.{argument}{name}": text for name, text in _texts(value).items()}
    facts |= {_roles(subtree): _restarts(subtree) for subtree in graph.subtrees}
    return facts
