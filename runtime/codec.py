"""How messages between machines look: data only, of the types that handlers' signatures name.

Between processes of one machine bodies are pickles. Between machines they are msgpack, decoded by the annotations
of the handler, so nothing from another machine is ever unpickled, and whatever its signature does not allow is
refused before anything sees it. Arrays of numpy travel as (dtype, shape, bytes).
"""

from __future__ import annotations

import inspect
import math
import sys
from collections.abc import Mapping
from functools import lru_cache
from typing import Any, get_type_hints

import msgspec
from msgspec import Struct, msgpack

from .actor import Actor
from .errors import ActorDied, ActorStopped, AskTimeout, DeadlockError, RolecallError, Unrecoverable

__all__ = ["Codec", "Refused", "decode_error", "encode_error"]

MAX_BYTES = 48 << 20  # less than a request may bring
_ARRAY = 1  # msgpack's number for our extension
_NUMBERS = "biufc"  # numpy's kinds of dtype without references
_MAX_TEXT = 64 << 10  # characters of an exception and its notes
_PLAIN: dict[str, type[RolecallError]] = {
    error.__name__: error for error in (ActorStopped, AskTimeout, DeadlockError, RolecallError)
}


class Refused(RolecallError):
    """This can't travel between machines; the sentence names the handler and the type."""


class _Failure(Struct, array_like=True):
    """An exception. text: of ActorDied, its reason."""

    kind: str
    text: str
    notes: list[str]
    name: str = ""
    maybe_executed: bool = False
    exit_code: int = 1


class Codec:
    """Encodes for, and decodes by, the handlers of these roles' classes. Raises Refused."""

    def __init__(self, roles: Mapping[str, type[Actor]]) -> None:
        self._roles = dict(roles)

    def encode_call(self, role: str, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bytes:
        """msgpack of {argument: value}, those that were given."""
        handler = self._handler(role, method)
        try:
            bound = inspect.signature(handler.function).bind(None, *args, **kwargs)
        except TypeError as error:
            raise Refused(f"{handler.name}: {error}") from error
        return handler.encode(dict(list(bound.arguments.items())[1:]), "its arguments")

    def decode_call(self, role: str, method: str, data: bytes) -> dict[str, Any]:
        """The arguments, by name."""
        handler = self._handler(role, method)
        given = handler.decode(handler.arguments, data, "its arguments")
        return {
            key: value for key, value in msgspec.structs.asdict(given).items() if value is not msgspec.UNSET
        }

    def encode_answer(self, role: str, method: str, value: Any) -> bytes:
        return self._handler(role, method).encode(value, "its answer")

    def decode_answer(self, role: str, method: str, data: bytes) -> Any:
        handler = self._handler(role, method)
        return handler.decode(handler.answer, data, "its answer")

    def _handler(self, role: str, method: str) -> _Handler:
        actor = self._roles.get(role)
        if actor is None:
            raise Refused(f"no role is called {role!r} here: both machines need the same recipe")
        return _handler(actor, method)


def encode_error(error: BaseException) -> bytes:
    """What its asker on another machine hears of an exception."""
    kind = type(error).__name__
    failure = _Failure(
        kind, str(error)[:_MAX_TEXT], [note[:_MAX_TEXT] for note in getattr(error, "__notes__", [])]
    )
    if isinstance(error, ActorDied):
        failure.text, failure.name, failure.maybe_executed = error.reason, error.name, error.maybe_executed
    elif isinstance(error, Unrecoverable):
        failure.exit_code = error.exit_code
    return msgpack.encode(failure)


def decode_error(data: bytes) -> RolecallError:
    """Rolecall's own errors become themselves again, others RolecallError("ValueError: …")."""
    try:
        failure = msgpack.decode(data, type=_Failure)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        return RolecallError(f"an exception from another machine can't be read: {error}")
    if failure.kind == "ActorDied":
        error = ActorDied(failure.name, failure.text, maybe_executed=failure.maybe_executed)
    elif failure.kind == "Unrecoverable":
        error = Unrecoverable(failure.text, exit_code=failure.exit_code)
    elif failure.kind in _PLAIN:
        error = _PLAIN[failure.kind](failure.text)
    else:
        error = RolecallError(f"{failure.kind}: {failure.text}")
    for note in failure.notes:
        error.add_note(note)
    return error


class _Handler:
    """A handler, and decoders of what its signature names."""

    def __init__(self, actor: type[Actor], method: str) -> None:
        self.name = f"{actor.__name__}.{method}"
        self.function = inspect.getattr_static(actor, method, None)
        if method.startswith("_") or hasattr(Actor, method) or not inspect.isfunction(self.function):
            raise Refused(f"{self.name} is no message: other machines can send only public handlers")
        try:
            hints = get_type_hints(self.function, include_extras=True)
        except (NameError, TypeError) as error:
            raise Refused(f"{self.name}: its annotations can't be read: {error}") from error
        fields: list[Any] = []
        for parameter in list(inspect.signature(self.function).parameters.values())[1:]:
            if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
                raise Refused(f"{self.name}: {parameter} can't travel between machines: name each argument")
            kind = self._checked(hints, parameter.name)
            # What was not given is left to the handler's own default.
            unset = () if parameter.default is parameter.empty else (msgspec.UNSET,)
            fields.append((parameter.name, kind, *unset))
        arguments = msgspec.defstruct(f"{method}_arguments", fields, forbid_unknown_fields=True, kw_only=True)
        self.arguments = self._decoder(arguments)
        self.answer = self._decoder(self._checked(hints, "return"))

    def _checked(self, hints: dict[str, Any], what: str) -> Any:
        label = "its answer" if what == "return" else f"its argument {what!r}"
        if what not in hints:
            raise Refused(
                f"{self.name}: {label} has no type, so it can't travel between machines: annotate it"
            )
        try:
            strange = _strange(msgspec.inspect.type_info(hints[what]))
        except TypeError as error:
            raise Refused(f"{self.name}: {label} can't travel between machines: {error}") from error
        if strange:
            raise Refused(
                f"{self.name}: {label} has the type {strange}, which is not data: only data travels"
            )
        return hints[what]

    @staticmethod
    def _decoder(kind: Any) -> msgpack.Decoder[Any]:
        return msgpack.Decoder(kind, dec_hook=_expect_array, ext_hook=_open_array)

    def encode(self, value: Any, what: str) -> bytes:
        try:
            data = _encoder.encode(value)
        except (TypeError, ValueError, OverflowError, RecursionError) as error:
            raise Refused(f"{self.name}: {what} can't travel between machines: {error}") from error
        if len(data) > MAX_BYTES:
            raise Refused(
                f"{self.name}: {what} can't travel between machines: {len(data)} bytes, and one takes "
                f"{MAX_BYTES}; send it in parts, or by way of the store"
            )
        return data

    def decode(self, decoder: msgpack.Decoder[Any], data: bytes, what: str) -> Any:
        try:
            return decoder.decode(data)
        except (msgspec.DecodeError, ValueError, TypeError, OverflowError, RecursionError) as error:
            raise Refused(f"{self.name}: {what} came from another machine and is refused: {error}") from error


_handler = lru_cache(4096)(_Handler)


def _strange(info: msgspec.inspect.Type) -> str:
    """The first class in a type that is not data; empty if there is none."""
    seen: set[Any] = set()
    todo: list[Any] = [info]
    while todo:
        one = todo.pop()
        if isinstance(one, msgspec.inspect.CustomType):
            if not _is_array_type(one.cls):
                return f"{getattr(one.cls, '__module__', '')}.{getattr(one.cls, '__qualname__', one.cls)}"
        elif isinstance(one, list | tuple):
            todo += one
        elif isinstance(one, msgspec.inspect.Type | msgspec.inspect.Field):
            key = getattr(one, "cls", None)
            if key is None or key not in seen:
                seen.add(key)
                todo += [getattr(one, name) for name in one.__struct_fields__]
    return ""


def _is_array_type(kind: Any) -> bool:
    kind = getattr(kind, "__origin__", kind)
    return getattr(kind, "__module__", "") == "numpy" and getattr(kind, "__name__", "") == "ndarray"


def _encode_strange(value: Any) -> Any:
    kind = type(value)
    if kind.__module__ == "numpy":
        numpy = sys.modules["numpy"]
        if isinstance(value, numpy.generic) and value.dtype.kind in _NUMBERS[:4]:
            return value.item()
        if kind is numpy.ndarray and value.dtype.kind in _NUMBERS:
            return msgpack.Ext(_ARRAY, msgpack.encode((value.dtype.str, value.shape, value.tobytes())))
        raise TypeError(f"an array of dtype {getattr(value, 'dtype', kind)} is not data")
    raise TypeError(f"a value of type {kind.__module__}.{kind.__qualname__} is not data")


_encoder = msgpack.Encoder(enc_hook=_encode_strange)


def _open_array(code: int, data: memoryview) -> Any:
    if code != _ARRAY:
        raise ValueError(f"unknown extension {code}")
    import numpy

    name, shape, memory = msgpack.decode(data, type=tuple[str, tuple[int, ...], bytes])
    if len(name) > 8 or name[1:2] not in _NUMBERS:
        raise ValueError(f"unknown dtype {name[:16]!r}")
    dtype = numpy.dtype(name)
    if min(shape, default=0) < 0 or math.prod(shape) * dtype.itemsize != len(memory):
        raise ValueError(f"{len(memory)} bytes are no {shape} array of {name}")
    return numpy.frombuffer(bytearray(memory), dtype).reshape(shape)  # a bytearray's memory can be written to


def _expect_array(kind: Any, value: Any) -> Any:
    if not _is_array_type(type(value)):
        raise ValueError(f"expected an array, got {type(value).__name__}")
    return value
