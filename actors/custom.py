"""What a recipe's settings name in a file of the user's own, as "rewards.py:mine"."""

from __future__ import annotations

import importlib.util
from collections.abc import Collection
from pathlib import Path
from typing import Any

from ..runtime import Unrecoverable

__all__ = ["load_from_file"]


def load_from_file(name: str, role: str, built_in: Collection[str]) -> Any:
    """The function or class that "file.py:name" names.

    role: what it is to be, such as "reward", and built_in: the names there are without a file, for the error:
    Unrecoverable (exit code 2) if there is no such thing or its file can't be loaded.
    """
    file, _, function = name.partition(":")
    spec = importlib.util.spec_from_file_location(f"rolecall_{role}_{Path(file).stem}", file)
    if not function or not Path(file).is_file() or spec is None or spec.loader is None:
        raise Unrecoverable(
            f"there is no {role} {name!r}: give {', '.join(built_in)} or the path of a file and a function in it, as "
            f"{role}s.py:mine",
            exit_code=2,
        )
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception as error:  # whatever a user's file raises
        raise Unrecoverable(
            f"the {role}'s file {file} can't be loaded: {type(error).__name__}: {error}", exit_code=2
        ) from error
    if not callable(getattr(module, function, None)):
        known = ", ".join(
            name for name, value in vars(module).items() if callable(value) and name[:1].isalpha()
        )
        raise Unrecoverable(f"{file} has no function {function!r}; it has: {known or 'none'}", exit_code=2)
    return getattr(module, function)
