"""The names that actors of two machines have, here and in the run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from rolecall.runtime.control import Member
from rolecall.runtime.directory import Directory, Machine

RUN, GPU = Machine(), Machine("gpu-1", 1)


def directory(here: Machine, there: Machine, *own: str) -> Directory:
    nobody: Any = None
    made = Directory("bridge", Path(), here, there, (), None, nobody, nobody)
    made.own = {name: Member(name, name, 1, "up") for name in own}
    return made


@pytest.mark.parametrize(
    ("here", "name", "in_the_run"),
    [
        (directory(RUN, GPU, "prompts", "rollout-0"), "rollout-0", "rollout-0"),
        (directory(RUN, GPU, "prompts", "rollout-0"), "bridge", "bridge"),
        (directory(RUN, GPU, "prompts", "rollout-0"), "gpu-1/rollout-0", "gpu-1/rollout-0"),
        (directory(GPU, RUN, "rollout-0"), "rollout-0", "gpu-1/rollout-0"),
        (directory(GPU, RUN, "rollout-0"), "bridge", "gpu-1/bridge"),
        (directory(GPU, RUN, "rollout-0"), "/rollout-0", "rollout-0"),
        (directory(GPU, RUN, "rollout-0"), "prompts", "prompts"),
        (directory(GPU, RUN, "rollout-0"), "gpu-2/rollout-0", "gpu-2/rollout-0"),
    ],
)
def test_each_name_means_one_actor_on_both_machines(here: Directory, name: str, in_the_run: str):
    assert here.outward(name) == in_the_run
    assert here.inward(in_the_run) == name


def test_a_bridge_answers_for_its_own_machine_and_the_other():
    here = directory(RUN, GPU)
    members = [
        Member("a", "a", 1, "up"),
        Member("bridge", "bridge", 2, "up"),
        Member("gpu-1/b", "b", 3, "up", node="gpu-1"),
        Member("gpu-2/b", "b", 4, "up", node="gpu-2"),
    ]
    own, far = here.split(members)
    assert ([one.name for one in own], [one.name for one in far]) == (["a"], ["gpu-1/b"])
