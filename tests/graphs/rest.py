"""Prompts and a buffer of two groups behind a proxy, and no trainer: whoever comes over HTTP may be one."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from rolecall import Actor, Graph, Ref
from rolecall.actors.buffer import Buffer
from rolecall.actors.prompts import PromptSource
from rolecall.runtime.proxy import add_proxy
from rolecall.runtime.store import Store

CAPACITY = 2


class Publisher(Actor):
    """Publishes version 0."""

    def __init__(self, prompts: Ref[PromptSource], weights: Store) -> None:
        self.prompts, self.weights = prompts, weights

    def on_start(self) -> None:
        store = self.weights.open(self.context.run, self.context.folder)
        store.publish({"adapter.bin": b"weights"}, version=0, step=0, epoch=store.take_epoch())
        self.prompts.ask(PromptSource.advance, 0, 0, {})


@dataclass(frozen=True, kw_only=True)
class Config:
    token_file: str
    groups: int = 6


def build(config: Config) -> Graph:
    graph, weights = Graph("rest"), Store()
    prompts = graph.add("prompts", PromptSource, dataset="tiny", seed=0, groups_per_step=config.groups, steps=1,
                        max_staleness=0)  # fmt: skip
    # One more than the prompts' own, or a step would wait for all that is lent, for which there is always room.
    graph.add("buffer", Buffer, capacity=CAPACITY, max_staleness=1, prompts=prompts, weights=weights)
    graph.add("publisher", Publisher, prompts=prompts, weights=weights)
    about = {"run": "run", "config": {"group_size": 2}}
    add_proxy(graph, host="127.0.0.1", port=0, token_file=Path(config.token_file), about=about)
    return graph
