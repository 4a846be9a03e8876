"""What travels between machines: data of known types, and nothing else."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import cloudpickle
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import Struct, msgpack
from rolecall import Actor, ActorDied, ActorStopped, AskTimeout, DeadlockError, RolecallError, Unrecoverable
from rolecall.runtime import codec
from rolecall.runtime.codec import Codec, Refused, decode_error, encode_error


class Part(Struct, frozen=True):
    id: int
    scores: list[float]
    children: list[Part] = []


@dataclass(frozen=True)
class Plain:
    text: str
    data: bytes


class Secret:
    """No data."""


class Desk(Actor):
    def put(self, part: Part, plain: Plain | None = None, *, at: float = 0.0) -> dict[str, int]: ...
    def fit(
        self, xs: npt.NDArray[np.float32], more: dict[str, np.ndarray], bias: np.ndarray | None = None
    ) -> np.ndarray: ...
    def loose(self, anything: Any) -> Any: ...
    def bare(self, part) -> None: ...
    def silent(self, part: int): ...
    def call(self, function: Callable[[], int]) -> None: ...
    def keep(self, secrets: list[Secret]) -> None: ...
    def many(self, *parts: int) -> None: ...
    def show(self) -> Secret: ...
    def _hidden(self) -> None: ...


CODEC = Codec({"desk": Desk})
parts = st.recursive(
    st.builds(Part, st.integers(-(2**63), 2**63 - 1), st.lists(st.floats(allow_nan=False))),
    lambda inner: st.builds(Part, st.just(1), st.just([]), st.lists(inner, max_size=3)),
    max_leaves=5,
)
plains = st.none() | st.builds(Plain, st.text(), st.binary())


@given(parts, plains, st.floats(allow_nan=False))
def test_what_goes_in_comes_out(part: Part, plain: Plain | None, at: float):
    data = CODEC.encode_call("desk", "put", (part,), {"plain": plain, "at": at})
    assert CODEC.decode_call("desk", "put", data) == {"part": part, "plain": plain, "at": at}


def test_an_argument_that_was_not_given_is_left_to_its_default():
    data = CODEC.encode_call("desk", "put", (Part(1, []),), {})
    assert CODEC.decode_call("desk", "put", data) == {"part": Part(1, [])}


@given(st.dictionaries(st.text(), st.integers(-(2**63), 2**63 - 1)))
def test_answers(answer: dict[str, int]):
    assert CODEC.decode_answer("desk", "put", CODEC.encode_answer("desk", "put", answer)) == answer


@pytest.mark.parametrize("dtype", ["float32", "float64", "int8", "uint64", "bool", "complex64", ">f4"])
@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 3, 4)])
def test_arrays(dtype: str, shape: tuple[int, ...]):
    xs = np.arange(np.prod(shape, dtype=int)).reshape(shape).astype(dtype)
    given = CODEC.decode_call(
        "desk", "fit", CODEC.encode_call("desk", "fit", (xs, {"a": xs.T}), {"bias": xs})
    )
    assert given["xs"].dtype == xs.dtype and given["xs"].shape == shape
    assert (given["xs"] == xs).all() and (given["more"]["a"] == xs.T).all()
    given["xs"][...] = 0  # a handler may write into what it was given


@given(st.binary(max_size=200))
def test_bytes_that_mean_nothing_are_refused_or_data(data: bytes):
    for method in ("put", "fit", "loose"):
        try:
            given = CODEC.decode_call("desk", method, data)
        except Refused as error:
            assert f"Desk.{method}" in str(error)
        else:
            assert set(given) <= {"part", "plain", "at", "xs", "more", "anything", "bias"}


def test_a_pickle_is_never_opened():
    class Trap:
        def __reduce__(self) -> Any:
            return pytest.fail, ("a pickle was opened",)

    for data in (pickle.dumps(Trap()), cloudpickle.dumps(Trap())):
        for method in ("put", "loose"):
            with pytest.raises(Refused, match="came from another machine"):
                CODEC.decode_call("desk", method, data)
        wrapped = msgpack.encode({"anything": data})
        assert CODEC.decode_call("desk", "loose", wrapped) == {"anything": data}  # bytes stay bytes


@pytest.mark.parametrize(
    ("dtype", "shape", "memory"),
    [("|O", (1,), b"8bytes!!"), ("<f4", (2,), b"123"), ("<f4", (-1, -1), b"1234"), ("<f4", (2**40,), b""),
     ("i4,O", (1,), b"12"), ("<M8", (1,), b"8bytes!!"), ("x" * 99, (1,), b"")],
)  # fmt: skip
def test_arrays_that_are_none(dtype: str, shape: tuple[int, ...], memory: bytes):
    array = msgpack.Ext(1, msgpack.encode((dtype, shape, memory)))
    with pytest.raises(Refused, match=r"Desk\.fit"):
        CODEC.decode_call("desk", "fit", msgpack.encode({"xs": array, "more": {}}))


@pytest.mark.parametrize(
    ("method", "complaint"),
    [
        ("bare", "Desk.bare: its argument 'part' has no type"),
        ("silent", "Desk.silent: its answer has no type"),
        (
            "call",
            "Desk.call: its argument 'function' has the type collections.abc.Callable, which is not data",
        ),
        ("keep", "Secret, which is not data"),
        ("show", "Desk.show: its answer has the type"),
        ("many", r"Desk.many: \*parts"),
        ("_hidden", "Desk._hidden is no message"),
        ("on_stop", "Desk.on_stop is no message"),
        ("report", "Desk.report is no message"),
        ("context", "is no message"),
        ("none", "Desk.none is no message"),
        ("__init__", "is no message"),
    ],
)
def test_handlers_that_other_machines_cannot_ask(method: str, complaint: str):
    with pytest.raises(Refused, match=complaint):
        CODEC.encode_call("desk", method, (), {})
    with pytest.raises(Refused, match=complaint):
        CODEC.decode_call("desk", method, b"\x80")


@pytest.mark.parametrize("value", [Secret(), [Secret()], 2**70, np.array([Secret()]), lambda: 1])
def test_values_that_are_no_data(value: Any):
    with pytest.raises(Refused, match=r"Desk\.loose: its arguments can't travel"):
        CODEC.encode_call("desk", "loose", (value,), {})
    with pytest.raises(Refused, match=r"Desk\.loose: its answer can't travel"):
        CODEC.encode_answer("desk", "loose", value)


def test_what_is_too_large(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(codec, "MAX_BYTES", 100)
    CODEC.encode_answer("desk", "loose", bytes(50))
    with pytest.raises(Refused, match=r"Desk\.loose: its answer can't travel between machines: 202 bytes"):
        CODEC.encode_answer("desk", "loose", bytes(200))


def test_wrong_types_and_unknown_arguments():
    for body in (
        {"part": 3},
        {"part": {"id": "1", "scores": []}},
        {},
        {"part": {"id": 1, "scores": []}, "x": 1},
    ):
        with pytest.raises(Refused, match=r"Desk\.put: its arguments came from another machine"):
            CODEC.decode_call("desk", "put", msgpack.encode(body))
    with pytest.raises(Refused, match="no role is called 'other'"):
        CODEC.decode_call("other", "put", b"\x80")
    with pytest.raises(Refused, match="too many positional"):
        CODEC.encode_call("desk", "loose", (1, 2), {})


@pytest.mark.parametrize(
    "error",
    [ActorStopped("x has stopped"), AskTimeout("late"), RolecallError("no"), DeadlockError("a → b → a"),
     ActorDied("x", "killed", maybe_executed=True), Unrecoverable("never", exit_code=2)],
)  # fmt: skip
def test_known_errors_become_themselves_again(error: RolecallError):
    error.add_note("(in desk.put)")
    again = decode_error(encode_error(error))
    assert type(again) is type(error)
    assert (str(again), again.__notes__) == (str(error), ["(in desk.put)"])
    if isinstance(error, ActorDied) and isinstance(again, ActorDied):
        assert (again.name, again.reason, again.maybe_executed) == ("x", "killed", True)
    if isinstance(again, Unrecoverable):
        assert again.exit_code == 2


def test_other_errors_are_told():
    assert str(decode_error(encode_error(KeyError("x")))) == "KeyError: 'x'"
    assert "can't be read" in str(decode_error(b"\xc1"))
