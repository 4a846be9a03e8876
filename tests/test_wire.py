"""How a message looks between two processes."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rolecall import ActorDied, Unrecoverable
from rolecall.runtime.wire import Header, Kind, decode_body, decode_header, encode_body, encode_header

KEYS = st.text(max_size=8)
LEAVES = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary()
VALUES = st.recursive(
    LEAVES,
    lambda inner: st.lists(inner) | st.tuples(inner, inner) | st.dictionaries(KEYS, inner),
    max_leaves=20,
)
DTYPES = st.sampled_from(["uint8", "int32", "int64", "float16", "float32", "float64"])
SHAPES = st.lists(st.integers(0, 4), max_size=3).map(tuple)


@given(
    st.builds(
        Header,
        st.sampled_from(Kind),
        st.integers(0, 2**63),
        st.integers(0, 2**63),
        st.floats(allow_nan=False),
        st.lists(st.text(max_size=20), max_size=5).map(tuple),
        st.text(max_size=40),
    )
)
def test_a_header_comes_back(header: Header):
    assert decode_header(encode_header(header)) == header


@given(VALUES)
def test_a_body_comes_back(value: Any):
    assert decode_body(encode_body(value)) == value


@given(DTYPES, SHAPES, st.booleans())
def test_an_array_comes_back_with_its_shape_and_dtype(dtype: str, shape: tuple[int, ...], fortran: bool):
    array = np.arange(np.prod(shape, dtype=int)).reshape(shape).astype(dtype)
    if fortran and shape:
        array = np.asfortranarray(array)
    back = decode_body([bytes(frame) for frame in encode_body(("put", (array,), {}))])[1][0]
    assert (back.dtype, back.shape) == (array.dtype, array.shape)
    np.testing.assert_array_equal(back, array)


def test_large_buffers_travel_out_of_band_and_are_not_copied():
    array = np.zeros(1_000_000, dtype=np.float32)
    pickle, buffer = encode_body(("put", (array,), {}))
    assert len(pickle) < 1000
    assert buffer.nbytes == array.nbytes
    array[3] = 7.0
    assert np.frombuffer(buffer, dtype=np.float32)[3] == 7.0
    assert decode_body([pickle, buffer])[1][0][3] == 7.0


def test_functions_made_on_the_spot_travel_by_value():
    factor = 3
    assert decode_body(encode_body(lambda n: factor * n))(4) == 12


@pytest.mark.parametrize(
    "error",
    [
        ActorDied("trainer", "killed by SIGKILL", maybe_executed=True),
        Unrecoverable("there is no model 'x'", exit_code=2),
        KeyError("x"),
    ],
)
def test_errors_come_back_with_their_notes(error: Exception):
    error.add_note("(in trainer.step)")
    back = decode_body(encode_body(error))
    assert type(back) is type(error)
    assert str(back) == str(error)
    assert back.__notes__ == ["(in trainer.step)"]
    assert vars(back) == vars(error)


def test_what_belongs_to_a_process_cannot_be_sent():
    with pytest.raises(TypeError, match="lock"):
        encode_body(threading.Lock())
