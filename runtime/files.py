"""Files that are whole or not there, whenever a kill comes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from msgspec import json

__all__ = ["first_incarnation", "read_lines", "start_of", "write_whole"]

_STARTS = 1 << 20  # of actors, between two starts of their run


def write_whole(path: Path, data: bytes) -> None:
    """Write `data` aside, then move it into place: a reader sees the old file or the new one."""
    aside = path.with_name(f"{path.name}.new")
    aside.write_bytes(data)
    aside.replace(path)


def first_incarnation(folder: Path) -> int:
    """Called once at each start of the run in `folder`: what its incarnations begin above.

    They grow over all starts of a run: what an actor has written down of another's holds for the next start.
    """
    path = folder / "starts"
    starts = int(path.read_text()) if path.exists() else 0
    folder.mkdir(parents=True, exist_ok=True)
    write_whole(path, str(starts + 1).encode())
    return starts * _STARTS


def start_of(incarnation: int) -> int:
    """Which start of the run this was in, of an actor on the run's own machine."""
    return incarnation // _STARTS


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The objects of a .jsonl file, without a last line that is not whole yet; none if there is no file."""
    if not path.exists():
        return []
    whole = [line for line in path.read_bytes().splitlines(keepends=True) if line.endswith(b"\n")]
    return [json.decode(line) for line in whole]
