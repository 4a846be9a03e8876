"""How messages look between two processes of one machine.

A datagram is one ZeroMQ message, of as many records as were waiting to be sent:

    to an actor      frame 0: (header, body) records       frames 1…: large buffers of the one record there is
    back from it     frame 0: (kind, seq, body) records    frames 1…: the same

A header (kind, seq, sender's incarnation, deadline, call chain, method) is never pickled: routing, accounting
and dead letters need no user code. A body is pickle protocol 5 of (method, args, kwargs), or of the answer.
Pickles cross only sockets inside a directory that this user made with mode 0700; nothing from another machine
comes this way.
"""

from __future__ import annotations

import importlib
import pickle
import struct
import sys
from collections.abc import Iterator, Sequence
from enum import IntEnum
from io import BytesIO
from types import FunctionType
from typing import Any

import cloudpickle
from msgspec import Struct, msgpack

__all__ = [
    "Header",
    "Kind",
    "decode_body",
    "encode_body",
    "encode_call",
    "pack_done",
    "pack_message",
    "pack_reply",
    "unpack_messages",
    "unpack_replies",
]


class Kind(IntEnum):
    ASK = 0
    TELL = 1
    ANSWER = 2
    ERROR = 3
    DONE = 4  # a tell was handled: its sender may forget it


class Header(Struct, frozen=True, array_like=True):
    """What is known of a message without opening it.

    seq:      grows with every message of one sender, so (sender, seq) names a message for ever.
    sender:   the sender's incarnation.
    deadline: CLOCK_MONOTONIC seconds after which nobody waits for the answer.
    chain:    names of the actors that wait for this answer, the first asker first.
    """

    kind: Kind
    seq: int
    sender: int
    deadline: float
    chain: tuple[str, ...]
    method: str


_LENGTHS = struct.Struct("=II")
_REPLY = struct.Struct("=BQQ")
_header_encoder = msgpack.Encoder()
_header_decoder = msgpack.Decoder(Header)


def pack_message(header: Header, body: bytes) -> bytes:
    """A record for an actor."""
    head = _header_encoder.encode(header)
    return b"".join((_LENGTHS.pack(len(head), len(body)), head, body))


def unpack_messages(data: bytes) -> Iterator[tuple[Header, memoryview]]:
    """Header and body of each record."""
    view, at = memoryview(data), 0
    while at < len(data):
        head, body = _LENGTHS.unpack_from(data, at)
        middle = at + _LENGTHS.size + head
        at, start = middle + body, at + _LENGTHS.size
        yield _header_decoder.decode(view[start:middle]), view[middle:at]


def pack_reply(kind: Kind, seq: int, body: bytes) -> bytes:
    """A record back to a sender."""
    return _REPLY.pack(kind, seq, len(body)) + body


def pack_done(seqs: Sequence[int]) -> bytes:
    """One record for all these tells."""
    return pack_reply(Kind.DONE, 0, struct.pack(f"={len(seqs)}Q", *seqs))


def unpack_replies(data: bytes) -> Iterator[tuple[Kind, int, memoryview]]:
    """Kind, seq and body of each record; one of several tells comes as several."""
    view, at = memoryview(data), 0
    while at < len(data):
        kind, seq, length = _REPLY.unpack_from(data, at)
        start, at = at + _REPLY.size, at + _REPLY.size + length
        if kind == Kind.DONE:
            for (done,) in struct.iter_unpack("=Q", view[start:at]):
                yield Kind.DONE, done, view[:0]
        else:
            yield Kind(kind), seq, view[start:at]


_ATOMS = frozenset({type(None), bool, int, float, str, bytes})


class _ByValue(Exception):
    """This needs cloudpickle."""


class _Pickler(pickle.Pickler):
    """The C pickler, with the memory of torch's CPU tensors out of band, as numpy's arrays are by themselves.

    In band a 64 MB tensor is copied several times; torch's own reducers know no other way. Functions and
    classes that the receiver could not import are left to cloudpickle, which is slower for all the rest.
    """

    def reducer_override(self, obj: Any) -> Any:
        kind = type(obj)
        if kind.__module__ == "torch" and kind.__name__ == "Tensor" and _is_plain(obj):
            return _reduce_tensor(obj)
        if isinstance(obj, type | FunctionType):
            if obj.__module__ == "__main__" or "<" in obj.__qualname__:
                raise _ByValue
        elif kind.__module__ == "__main__" or "<" in kind.__qualname__:
            raise _ByValue
        return NotImplemented


class _CloudPickler(cloudpickle.Pickler):
    def reducer_override(self, obj: Any) -> Any:
        kind = type(obj)
        if kind.__module__ == "torch" and kind.__name__ == "Tensor" and _is_plain(obj):
            return _reduce_tensor(obj)
        return super().reducer_override(obj)


def _reduce_tensor(tensor: Any) -> Any:
    flat = tensor.contiguous().reshape(-1)
    memory = pickle.PickleBuffer(flat.view(sys.modules["torch"].uint8).numpy())
    return _rebuild_tensor, (memory, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))


def _is_plain(tensor: Any) -> bool:
    """Whether its bytes, dtype and shape are all there is to it. Others (on a GPU, sparse, with gradient) go
    the way torch pickles them."""
    torch = sys.modules["torch"]
    return (
        tensor.device.type == "cpu"
        and tensor.layout is torch.strided
        and not tensor.requires_grad
        and not tensor.is_quantized
        and not (tensor.is_conj() or tensor.is_neg())
        and tensor.numel() > 0
    )


def _rebuild_tensor(memory: Any, dtype: str, shape: tuple[int, ...]) -> Any:
    torch = importlib.import_module("torch")  # here only if the sender had one to send
    return torch.frombuffer(memory, dtype=torch.uint8).view(getattr(torch, dtype)).reshape(shape)


def encode_body(value: Any) -> tuple[bytes, list[Any]]:
    """A pickle, and the large buffers it left out.

    The buffers alias the value's memory: whoever sends must not change it afterwards. Raises what the
    value's own pickling raises.
    """
    if type(value) in _ATOMS:
        return pickle.dumps(value, protocol=5), []
    for pickler in (_Pickler, _CloudPickler):
        buffers: list[pickle.PickleBuffer] = []
        file = BytesIO()
        try:
            pickler(file, protocol=5, buffer_callback=buffers.append).dump(value)
        except _ByValue:
            continue
        return file.getvalue(), [buffer.raw() for buffer in buffers]
    raise AssertionError("cloudpickle takes everything by value")


def encode_call(method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[bytes, list[Any]]:
    """`encode_body` of the three; quicker where nothing can be large or need a reducer."""
    if not kwargs and all(type(argument) in _ATOMS for argument in args):
        return pickle.dumps((method, args, kwargs), protocol=5), []
    return encode_body((method, args, kwargs))


def decode_body(body: bytes | memoryview, buffers: Sequence[Any]) -> Any:
    return pickle.loads(body, buffers=buffers)
