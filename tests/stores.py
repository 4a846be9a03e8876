"""A weight store over objects that a test can watch, stop or step in on, and small adapters to put there."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path

from rolecall.runtime.cache import Cache
from rolecall.runtime.objects import Objects
from rolecall.runtime.store import PolicyStore

Hook = Callable[[str, str], None]


class Hooked:
    """Objects that call `before` with the method's name and the key, before each request."""

    def __init__(self, objects: Objects, before: Hook) -> None:
        self.objects, self.before = objects, before

    @property
    def place(self) -> str:
        return self.objects.place

    def put(self, key: str, data: bytes, *, if_absent: bool = False, if_match: str | None = None) -> str:
        self.before("put", key)
        return self.objects.put(key, data, if_absent=if_absent, if_match=if_match)

    def get(self, key: str, *, unless: str | None = None) -> tuple[bytes, str] | None:
        self.before("get", key)
        return self.objects.get(key, unless=unless)

    def stream(self, key: str, size: int) -> Iterator[bytes]:
        self.before("get", key)
        return self.objects.stream(key, size)

    def list(self, prefix: str) -> list[str]:
        self.before("list", prefix)
        return self.objects.list(prefix)

    def delete(self, key: str) -> None:
        self.before("delete", key)
        self.objects.delete(key)

    def probe(self) -> None:
        self.objects.probe()


class Killed(Exception):
    """What a killed trainer is like to its store: it asks no more."""


def dying_at(request: int) -> Hook:
    """A hook under which the request of this number, from 0, and all later ones never happen."""
    left = iter(range(request))
    lock = threading.Lock()

    def before(method: str, key: str) -> None:
        with lock:
            if next(left, None) is None:
                raise Killed(f"before {method} {key}")

    return before


def opened(objects: Objects, folder: Path, before: Hook | None = None) -> PolicyStore:
    return PolicyStore(Hooked(objects, before) if before else objects, cache=Cache(folder / "cache"), run="r")


def adapter(name: str) -> dict[str, bytes]:
    return {
        "adapter_model.safetensors": f"weights of {name}".encode() * 100,
        "adapter_config.json": b'{"r": 8}',
    }


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}
