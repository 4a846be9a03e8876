"""Graphs as drawings: all of them is there, and nothing lies on anything else."""

from __future__ import annotations

import random
from itertools import combinations
from xml.etree import ElementTree

import pytest
from rolecall import Actor, Graph, Ref
from rolecall.runtime.recipe import load_recipe, recipe_names
from rolecall.runtime.show import wires
from rolecall.runtime.store import Store
from rolecall.runtime.svg import Box, draw, layout

SVG = "{http://www.w3.org/2000/svg}"


class Anybody(Actor):
    def __init__(self, *others: Ref[Anybody], weights: Store | None = None, **more: Ref[Anybody]) -> None: ...


def made_up(seed: int) -> Graph:
    """Up to twelve actors, each with refs to some of those before it, and some with a store."""
    rng = random.Random(seed)
    graph, refs = Graph("made_up"), list[Ref[Anybody]]()
    for number in range(rng.randint(1, 12)):
        asked = rng.sample(refs, rng.randint(0, min(3, len(refs))))
        weights = Store() if rng.random() < 0.4 else None
        name = f"a_role_with_number_{number}" if rng.random() < 0.2 else f"role{number}"
        refs.append(graph.add(name, Anybody, weights=weights, **{f"to_{ref.name}": ref for ref in asked}))
    return graph


def of_recipe(name: str) -> Graph:
    recipe = load_recipe(name)
    return recipe.build(recipe.Config())


GRAPHS = [*map(of_recipe, recipe_names()), *map(made_up, range(40))]
NAMES = [*recipe_names(), *(f"seed {seed}" for seed in range(40))]


@pytest.mark.parametrize("graph", GRAPHS, ids=NAMES)
def test_every_role_and_every_wire_is_drawn(graph: Graph):
    root = ElementTree.fromstring(draw(graph))
    texts = [text.text for text in root.iter(f"{SVG}text")]
    for role in graph:
        assert any(text is not None and text.split(" ")[0] == role.name for text in texts)
        assert role.actor.__name__ in texts
    drawn = [(g.get("data-from"), g.findtext(f"{SVG}text"), g.get("data-to")) for g in root.iter(f"{SVG}g")]
    assert drawn == [(wire.role, wire.argument, wire.target) for wire in wires(graph)]
    for g, wire in zip(root.iter(f"{SVG}g"), wires(graph), strict=True):
        strokes = [path.get("class") for path in g.iter(f"{SVG}path")]
        assert strokes.count("head") == 1
        assert {"dashed" in str(stroke) for stroke in strokes if stroke != "head"} == {wire.dashed}


def _apart(one: Box, other: Box) -> bool:
    return (
        abs(one.x - other.x) >= (one.width + other.width) / 2 - 0.01
        or abs(one.y - other.y) >= (one.height + other.height) / 2 - 0.01
    )


@pytest.mark.parametrize("graph", GRAPHS, ids=NAMES)
def test_nothing_lies_on_anything_else(graph: Graph):
    """Boxes, labels, and the places where wires pass a column; between columns are curves alone."""
    drawn = layout(graph)
    boxes = [box for column in drawn.columns for box in column]
    for one, other in combinations(boxes, 2):
        assert _apart(one, other), f"{one.name} {one.lines} lies on {other.name} {other.lines}"
    width, height = drawn.size
    for box in boxes:
        assert box.width / 2 <= box.x <= width - box.width / 2
        assert 40 + box.height / 2 <= box.y <= height - box.height / 2  # below the title
    for column, following in zip(drawn.columns, drawn.columns[1:], strict=False):
        if column and following:
            assert max(box.x + box.room / 2 for box in column) < min(b.x - b.room / 2 for b in following)


def test_wires_of_a_column_apart_pass_the_boxes_between():
    graph = of_recipe("async_grpo")
    path = next(
        path for wire, path in layout(graph).wires if (wire.role, wire.argument) == ("rollout", "reward")
    )
    assert [bool(box.lines) for box in path] == [True, True, False, False, True]


def test_names_are_escaped():
    graph = Graph("a<b&c")
    graph.add("one", Anybody, weights=Store("s3://there/a"))
    graph.add("two", Anybody, weights=Store("s3://there/b"))
    texts = [text.text for text in ElementTree.fromstring(draw(graph)).iter(f"{SVG}text")]
    assert "a<b&c" in texts and "store s3://there/a" in texts


def test_it_is_the_same_each_time():
    assert draw(made_up(3)) == draw(made_up(3))
