"""Loading a recipe: a module with a `Config` dataclass and `build(config) -> Graph`.

A Config's fields may be of the types below, which `--set` holds a value to, or of any with a msgspec.Meta; or of
a dataclass, whose own fields are settings with dotted names, as in `--set loss.kind=gspo`.
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
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

import msgspec
from msgspec import Meta

from .errors import Unrecoverable

__all__ = [
    "AtLeastOne",
    "AtLeastTwo",
    "NotNegative",
    "Positive",
    "configure",
    "from_saved",
    "load_recipe",
    "recipe_names",
    "settings_of",
]

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


def configure(recipe: ModuleType, name: str, settings: list[str]) -> Any:
    """The recipe's Config with `field=value` settings, each converted to its field's type.

    Raises Unrecoverable (exit code 2) that names the setting and what would be right.
    """
    fields = _fields(recipe.Config)
    values: dict[str, Any] = {}
    for setting in settings:
        key, equals, text = setting.partition("=")
        if not equals:
            raise Unrecoverable(f"--set {setting}: write it as field=value", exit_code=2)
        if key not in fields:
            raise _no_setting(name, key, fields)
        values[key] = _convert(name, key, text, fields[key])
    try:
        return _with(recipe.Config, None, values)
    except (TypeError, ValueError) as error:  # TypeError: a field without a default was not set
        raise Unrecoverable(f"{name}: {error}", exit_code=2) from error


def settings_of(config: Any) -> dict[str, Any]:
    """Each setting's value by its dotted name."""
    settings: dict[str, Any] = {}
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if dataclasses.is_dataclass(value):
            settings |= {f"{field.name}.{key}": own for key, own in settings_of(value).items()}
        else:
            settings[field.name] = value
    return settings


def from_saved(kind: Any, saved: object) -> Any:
    """The dataclass `kind` from what `dataclasses.asdict` made of one, by way of JSON.

    Raises TypeError for what it has no field for, and whatever it raises for values that can't be.
    """
    if not isinstance(saved, Mapping):
        raise TypeError(f"{kind.__name__} cannot be {saved!r}")
    parts = _parts(kind)
    return kind(
        **{key: from_saved(parts[key], value) if key in parts else value for key, value in saved.items()}
    )


def _parts(kind: Any) -> dict[str, Any]:
    """The fields that are dataclasses, and so hold settings of their own."""
    hints = get_type_hints(kind)
    return {
        f.name: hints[f.name] for f in dataclasses.fields(kind) if dataclasses.is_dataclass(hints[f.name])
    }


def _fields(kind: Any) -> dict[str, Any]:
    """The type of each setting by its dotted name."""
    hints, parts = get_type_hints(kind, include_extras=True), _parts(kind)
    fields: dict[str, Any] = {}
    for field in dataclasses.fields(kind):
        if field.name in parts:
            own = _fields(parts[field.name])
            fields |= {f"{field.name}.{key}": hint for key, hint in own.items()}
        else:
            fields[field.name] = hints[field.name]
    return fields


def _with(kind: Any, base: Any, values: Mapping[str, Any]) -> Any:
    """`base`, or where it is None a new `kind`, with these values by dotted name."""
    own = {key: value for key, value in values.items() if "." not in key}
    for name, part in _parts(kind).items():
        start = f"{name}."
        below = {key.removeprefix(start): value for key, value in values.items() if key.startswith(start)}
        if below:
            own[name] = _with(part, _default(kind, name) if base is None else getattr(base, name), below)
    return kind(**own) if base is None else dataclasses.replace(base, **own)


def _default(kind: Any, name: str) -> Any:
    (field,) = [field for field in dataclasses.fields(kind) if field.name == name]
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return None if field.default is dataclasses.MISSING else field.default


def _no_setting(recipe: str, key: str, fields: Mapping[str, Any]) -> Unrecoverable:
    below = [name for name in fields if name.startswith(f"{key}.")]
    if below:
        return Unrecoverable(
            f"{recipe}: {key} is several settings; set one of them: {', '.join(below)}", exit_code=2
        )
    close = difflib.get_close_matches(key, fields, n=1)
    hint = f"; did you mean {close[0]!r}?" if close else "."
    return Unrecoverable(
        f"{recipe} has no setting {key!r}{hint} It has: {', '.join(sorted(fields))}", exit_code=2
    )


def _convert(recipe: str, key: str, text: str, kind: Any) -> Any:
    try:
        return msgspec.convert(text, kind, strict=False)
    except msgspec.ValidationError as error:
        described = [meta.description for meta in getattr(kind, "__metadata__", ()) if isinstance(meta, Meta)]
        wanted = next(filter(None, described), f"{getattr(kind, '__name__', kind)}: {error}")
        if choices := _choices(kind):
            wanted = f"value it can have: {', '.join(choices)}"
        raise Unrecoverable(f"{recipe}: {key}={text!r} is not a {wanted}", exit_code=2) from error


def _choices(kind: Any) -> list[str]:
    """The values of a Literal, or of one that may also be None."""
    kinds = [kind] if get_origin(kind) is Literal else get_args(kind)
    literals = [one for one in kinds if get_origin(one) is Literal]
    return [str(value) for literal in literals for value in get_args(literal)]
