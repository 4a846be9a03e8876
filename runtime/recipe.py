"""Loading a recipe: a module with a `Config` dataclass and `build(config) -> Graph`.

A Config's fields may be of the types below, which `--set` holds a value to, or of any with a msgspec.Meta.
"""

from __future__ import annotations

import dataclasses
import difflib
import hashlib
import importlib
import importlib.util
import pkgutil
import re
import sys
import traceback
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any, get_type_hints

import msgspec
from msgspec import Meta

from .errors import Unrecoverable

__all__ = ["AtLeastOne", "AtLeastTwo", "NotNegative", "Positive", "configure", "load_recipe", "recipe_names"]

NotNegative = Annotated[int, Meta(ge=0, le=2**63 - 1, description="whole number from 0 up to 2⁶³ − 1")]
AtLeastOne = Annotated[int, Meta(ge=1, description="whole number from 1 up")]
AtLeastTwo = Annotated[int, Meta(ge=2, description="whole number from 2 up")]
Positive = Annotated[float, Meta(gt=0, le=sys.float_info.max, description="finite number above 0")]


def recipe_names() -> list[str]:
    """The recipes that come with the package."""
    package = importlib.import_module("rolecall.recipes")
    return sorted(module.name for module in pkgutil.iter_modules(package.__path__))


def load_recipe(name: str) -> ModuleType:
    """The module of a recipe: the name of one that comes with the package, a module's dotted name, or a file's path.

    A file gets a module name made from its path, so every process that loads it has the same classes.
    Its own folder comes last in sys.path, so it may import its siblings and shadows nobody.
    Raises Unrecoverable (exit code 2) if there is none, it can't be loaded, or it has no Config or build.
    """
    if name.endswith(".py"):
        module = _load_file(Path(name).resolve())
    elif name in recipe_names():
        module = importlib.import_module(f"rolecall.recipes.{name}")
    elif re.fullmatch(r"[A-Za-z]\w*(\.[A-Za-z]\w*)+", name, re.ASCII):
        module = _import(name)
    else:
        close = difflib.get_close_matches(name, recipe_names(), n=1)
        hint = f"; did you mean {close[0]!r}?" if close else "."
        raise Unrecoverable(
            f"there is no recipe {name!r}{hint} There are: {', '.join(recipe_names())}, or give the path of a "
            ".py file or the dotted name of a module",
            exit_code=2,
        )
    for part in ("Config", "build"):
        if not hasattr(module, part):
            raise Unrecoverable(f"recipe {name} has no `{part}`: it needs a Config and a build", exit_code=2)
    if not (isinstance(module.Config, type) and dataclasses.is_dataclass(module.Config)):
        raise Unrecoverable(
            f"recipe {name}: its Config is no dataclass: put @dataclass above it", exit_code=2
        )
    return module


def _import(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except Exception as error:
        raise Unrecoverable(
            f"recipe {name} can't be imported ({type(error).__name__}: {error}): install its package here",
            exit_code=2,
        ) from error


def _load_file(path: Path) -> ModuleType:
    name = f"rolecall_recipe_{path.stem}_{hashlib.sha256(bytes(path)).hexdigest()[:12]}"
    if name in sys.modules:
        return sys.modules[name]
    if not path.is_file():
        raise Unrecoverable(f"there is no recipe file {path}: check the path", exit_code=2)
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))
    try:
        spec.loader.exec_module(module)
    except BaseException as error:
        del sys.modules[name]  # half a module must not be found by the next load
        if isinstance(error, Unrecoverable) or not isinstance(error, Exception):
            raise
        raise Unrecoverable(
            f"recipe file {path}{_line(error, path)} can't be loaded: {type(error).__name__}: {error}",
            exit_code=2,
        ) from error
    return module


def _line(error: Exception, path: Path) -> str:
    """ ", line 3", if the error came from a line of this file."""
    if isinstance(error, SyntaxError) and error.filename == str(path):
        return f", line {error.lineno}" if error.lineno else ""
    lines = [
        frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(path)
    ]
    return f", line {lines[-1]}" if lines else ""


def configure(
    recipe: ModuleType, name: str, settings: list[str], given: Mapping[str, Any] | None = None
) -> Any:
    """The recipe's Config with `field=value` settings, each converted to its field's type.

    given: the values of the other fields, as a run has them, instead of the defaults.

    Raises Unrecoverable (exit code 2) that names the setting and what would be right.
    """
    hints = get_type_hints(recipe.Config, include_extras=True)
    fields = {field.name: hints[field.name] for field in dataclasses.fields(recipe.Config)}
    values = dict(given or {})
    for setting in settings:
        key, equals, text = setting.partition("=")
        if not equals:
            raise Unrecoverable(f"--set {setting}: write it as field=value", exit_code=2)
        if key not in fields:
            close = difflib.get_close_matches(key, fields, n=1)
            hint = f"; did you mean {close[0]!r}?" if close else "."
            raise Unrecoverable(
                f"{name} has no setting {key!r}{hint} It has: {', '.join(sorted(fields))}", exit_code=2
            )
        values[key] = _convert(name, key, text, fields[key])
    try:
        return recipe.Config(**values)
    except (TypeError, ValueError) as error:  # TypeError: a field without a default was not set
        raise Unrecoverable(f"{name}: {error}", exit_code=2) from error


def _convert(recipe: str, key: str, text: str, kind: Any) -> Any:
    try:
        return msgspec.convert(text, kind, strict=False)
    except msgspec.ValidationError as error:
        described = [meta.description for meta in getattr(kind, "__metadata__", ()) if isinstance(meta, Meta)]
        wanted = next(filter(None, described), f"{getattr(kind, '__name__', kind)}: {error}")
        raise Unrecoverable(f"{recipe}: {key}={text!r} is not a {wanted}", exit_code=2) from error
