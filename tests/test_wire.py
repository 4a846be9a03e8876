"""How a message looks between two processes."""

from __future__ import annotations

import select
import socket
import threading
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rolecall import ActorDied, Unrecoverable
from rolecall.runtime.peer import together
from rolecall.runtime.sockets import Connection, Parcel
from rolecall.runtime.wire import (
    Header,
    Kind,
    decode_body,
    encode_body,
    encode_call,
    pack_done,
    pack_label,
    pack_message,
    pack_reply,
    seqs_done,
    unpack_messages,
    unpack_replies,
)

KEYS = st.text(max_size=8)
LEAVES = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary()
VALUES = st.recursive(
    LEAVES,
    lambda inner: st.lists(inner) | st.tuples(inner, inner) | st.dictionaries(KEYS, inner),
    max_leaves=20,
)
DTYPES = st.sampled_from(["uint8", "int32", "int64", "float16", "float32", "float64"])
SHAPES = st.lists(st.integers(0, 4), max_size=3).map(tuple)


HEADERS = st.builds(
    Header,
    st.sampled_from([Kind.ASK, Kind.TELL]),
    st.integers(0, 2**63),
    st.integers(0, 2**63),
    st.floats(allow_nan=False),
    st.lists(st.text(max_size=20), max_size=5).map(tuple),
    st.text(max_size=40),
)


def _through(value: Any) -> Any:
    return decode_body(*encode_body(value))


BUFFERS = st.lists(st.binary(max_size=200), max_size=3)


def _received(record: bytes | Parcel) -> bytes | memoryview:
    """As it comes out of a connection."""
    with select.epoll() as poller:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        sender, receiver = Connection(ours, poller), Connection(theirs, poller)
        sender.send(record)
        data = receiver.receive()
        sender.close()
        receiver.close()
    assert data is not None
    return data


def _packed(header: Header, body: bytes, buffers: list[bytes]) -> bytes | Parcel:
    label = pack_label(header.chain, header.method)
    return pack_message(header.kind, header.seq, header.sender, header.deadline, label, body, buffers)


@given(st.lists(st.tuples(HEADERS, st.binary(max_size=100), BUFFERS), max_size=10))
def test_messages_sent_together_come_back_one_by_one(messages: list[tuple[Header, bytes, list[bytes]]]):
    (data,) = together([_packed(*message) for message in messages]) if messages else [b""]
    assert isinstance(data, bytes)
    back = [
        (header, bytes(body), list(map(bytes, buffers))) for header, body, buffers in unpack_messages(data)
    ]
    assert back == messages


@given(HEADERS, st.integers(0, 200_000), st.lists(st.integers(0, 100_000), max_size=3))
def test_a_message_of_any_size_comes_back(header: Header, size: int, sizes: list[int]):
    body = bytes(size)
    buffers = [bytes([index]) * size for index, size in enumerate(sizes)]
    ((back, same, parts),) = unpack_messages(_received(_packed(header, body, buffers)))
    assert (back, bytes(same), list(map(bytes, parts))) == (header, body, buffers)


def test_large_buffers_are_aligned_and_the_receivers_own():
    array = np.arange(100_000, dtype=np.float64)
    body, buffers = encode_call((array,), {})
    record = pack_message(Kind.ASK, 1, 1, 0.0, pack_label((), "put"), body, buffers)
    ((_, body, parts),) = unpack_messages(_received(record))
    (back,), _ = decode_body(body, parts)
    assert back.ctypes.data % 64 == 0
    back[0] = 7.0
    assert array[0] == 0.0
    ((_, body, parts),) = unpack_messages(_received(record))  # sent again, after its receiver had changed it
    np.testing.assert_array_equal(decode_body(body, parts)[0][0], array)


REPLIES = st.tuples(
    st.sampled_from([Kind.ANSWER, Kind.ERROR]), st.integers(0, 2**63), st.binary(max_size=100)
)


@given(st.lists(REPLIES | st.lists(st.integers(0, 2**63), min_size=1, max_size=9), max_size=10))
def test_answers_and_done_tells_sent_together_come_back_one_by_one(replies: list[Any]):
    records, expected = [], []
    for reply in replies:
        if isinstance(reply, list):
            records.append(pack_done(reply))
            expected.append((Kind.DONE, tuple(reply)))
        else:
            records.append(pack_reply(*reply))
            expected.append(reply)
    back = []
    for kind, seq, body, _ in unpack_replies(b"".join(records)):
        back.append((kind, seqs_done(body)) if kind is Kind.DONE else (kind, seq, bytes(body)))
    assert back == expected


@given(VALUES)
def test_a_body_comes_back(value: Any):
    assert _through(value) == value


@given(st.lists(VALUES, max_size=3), st.dictionaries(st.text(max_size=5), VALUES, max_size=2))
def test_a_call_comes_back(args: list[Any], kwargs: dict[str, Any]):
    assert decode_body(*encode_call(tuple(args), kwargs)) == (tuple(args), kwargs)


@given(DTYPES, SHAPES, st.booleans())
def test_an_array_comes_back_with_its_shape_and_dtype(dtype: str, shape: tuple[int, ...], fortran: bool):
    array = np.arange(np.prod(shape, dtype=int)).reshape(shape).astype(dtype)
    if fortran and shape:
        array = np.asfortranarray(array)
    pickle, buffers = encode_call((array,), {})
    back = decode_body(pickle, [bytes(buffer) for buffer in buffers])[0][0]
    assert (back.dtype, back.shape) == (array.dtype, array.shape)
    np.testing.assert_array_equal(back, array)


def test_large_buffers_travel_out_of_band_and_are_not_copied():
    array = np.zeros(1_000_000, dtype=np.float32)
    pickle, (buffer,) = encode_call((array,), {})
    assert len(pickle) < 1000
    assert buffer.nbytes == array.nbytes
    array[3] = 7.0
    assert np.frombuffer(buffer, dtype=np.float32)[3] == 7.0
    assert decode_body(pickle, [buffer])[0][0][3] == 7.0


def test_functions_made_on_the_spot_travel_by_value():
    factor = 3
    assert _through(lambda n: factor * n)(4) == 12


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
    back = _through(error)
    assert type(back) is type(error)
    assert str(back) == str(error)
    assert back.__notes__ == ["(in trainer.step)"]
    assert vars(back) == vars(error)


def test_what_belongs_to_a_process_cannot_be_sent():
    with pytest.raises(TypeError, match="lock"):
        encode_body(threading.Lock())
