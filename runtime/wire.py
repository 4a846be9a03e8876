"""How messages look between two processes of one machine.

A datagram holds as many records as were waiting to be sent:

    to an actor      head (kind, seq, sender, deadline), label (call chain, method), body, buffers
    back from it     head (kind, seq), body, buffers

Heads and labels are never pickled: routing, accounting and dead letters need no user code. A body is pickle
protocol 5 of (args, kwargs), or of the answer; buffers are the large parts it left out. A record that is too
large for a datagram goes beside it (see sockets). Pickles cross only sockets inside a directory that this user
made with mode 0700; nothing from another machine comes this way.
"""

from __future__ import annotations

import importlib
import pickle
import struct
import sys
from collections.abc import Iterator, Sequence
from enum import IntEnum
from functools import lru_cache
from io import BytesIO
from types import FunctionType
from typing import Any

import cloudpickle
from msgspec import Struct, msgpack

from .sockets import MAX_DATAGRAM, Parcel

__all__ = [
    "Header",
    "Kind",
    "decode_body",
    "encode_body",
    "encode_call",
    "pack_done",
    "pack_heard",
    "pack_label",
    "pack_message",
    "pack_reply",
    "seqs_done",
    "unpack_messages",
    "unpack_replies",
]


class Kind(IntEnum):
    ASK = 0
    TELL = 1
    ANSWER = 2
    ERROR = 3
    DONE = 4  # a tell was handled: its sender may forget it
    HEARD = 5  # answers have arrived, on another machine: who gave them may forget them


class Header(Struct, frozen=True, gc=False):
    """What is known of a message without opening it.

    seq:      grows with every message of one sender, so (sender, seq) names a message for ever.
    sender:   the sender's incarnation.
    deadline: CLOCK_MONOTONIC seconds after which nobody waits for the answer.
    chain:    names of the actors that wait for this answer, the first asker first, the sender last; of a tell, for
              which nobody waits, its sender alone.
    """

    kind: Kind
    seq: int
    sender: int
    deadline: float
    chain: tuple[str, ...]
    method: str


_HEAD = struct.Struct("=BHIQQQd")  # kind, label's length, buffers, body's length, seq, sender, deadline
_REPLY = struct.Struct("=BIQQ")  # kind, buffers, body's length, seq
_ALIGNMENT = 64  # of large buffers, for whoever computes on them
_KINDS = tuple(Kind)


@lru_cache(4096)
def pack_label(chain: tuple[str, ...], method: str) -> bytes:
    return msgpack.encode((chain, method))


@lru_cache(4096)
def _open_label(label: bytes) -> tuple[tuple[str, ...], str]:
    return msgpack.decode(label, type=tuple[tuple[str, ...], str])


def pack_message(
    kind: Kind, seq: int, sender: int, deadline: float, label: bytes, body: bytes, buffers: Sequence[Any] = ()
) -> bytes | Parcel:
    """A record for an actor; as in `Header`, with chain and method as `pack_label` packs them."""
    head = _HEAD.pack(kind, len(label), len(buffers), len(body), seq, sender, deadline)
    return _record(head + label, body, buffers)


def unpack_messages(data: bytes | memoryview) -> Iterator[tuple[Header, bytes | memoryview, Sequence[Any]]]:
    """Header, body and buffers of each record."""
    at = 0
    while at < len(data):
        kind, label_size, count, body_size, seq, sender, deadline = _HEAD.unpack_from(data, at)
        body_at = at + _HEAD.size + label_size
        chain, method = _open_label(bytes(data[at + _HEAD.size : body_at]))
        end = body_at + body_size
        body, buffers = data[body_at:end], ()
        if count:
            buffers, end = _open_buffers(data, at, end, count)
        at = end
        yield Header(_KINDS[kind], seq, sender, deadline, chain, method), body, buffers


def pack_reply(kind: Kind, seq: int, body: bytes, buffers: Sequence[Any] = ()) -> bytes | Parcel:
    """A record back to a sender."""
    return _record(_REPLY.pack(kind, len(buffers), len(body), seq), body, buffers)


def pack_done(seqs: Sequence[int]) -> bytes:
    """One record for all these tells."""
    body = struct.pack(f"={len(seqs)}Q", *seqs)
    return _REPLY.pack(Kind.DONE, 0, len(body), 0) + body


def pack_heard(sender: int, seqs: Sequence[int]) -> bytes | Parcel:
    """One record for the answers to all these asks of that sender."""
    body = struct.pack(f"={len(seqs)}Q", *seqs)
    return pack_message(Kind.HEARD, 0, sender, 0.0, pack_label((), ""), body)


def seqs_done(body: bytes | memoryview) -> Sequence[int]:
    """Which messages a record of kind DONE or HEARD is about."""
    return struct.unpack(f"={len(body) // 8}Q", body)


def unpack_replies(
    data: bytes | memoryview,
) -> Iterator[tuple[Kind, int, bytes | memoryview, Sequence[Any]]]:
    """Kind, seq, body and buffers of each record."""
    at = 0
    while at < len(data):
        kind, count, body_size, seq = _REPLY.unpack_from(data, at)
        end = at + _REPLY.size + body_size
        body, buffers = data[at + _REPLY.size : end], ()
        if count:
            buffers, end = _open_buffers(data, at, end, count)
        at = end
        yield _KINDS[kind], seq, body, buffers


def _record(head: bytes, body: bytes, buffers: Sequence[Any]) -> bytes | Parcel:
    if not buffers:
        return head + body if len(body) < MAX_DATAGRAM // 2 else Parcel([head, body])
    chunks: list[bytes | memoryview] = [
        head,
        body,
        struct.pack(f"={len(buffers)}Q", *(len(buffer) for buffer in buffers)),
    ]
    size = sum(map(len, chunks))
    for buffer in buffers:
        padding = -size % _ALIGNMENT
        chunks += [bytes(padding), buffer]
        size += padding + len(buffer)
    return b"".join(chunks) if size <= MAX_DATAGRAM else Parcel(chunks)


def _open_buffers(data: bytes | memoryview, start: int, at: int, count: int) -> tuple[list[Any], int]:
    """The buffers of the record that begins at `start`, whose sizes stand at `at`; and where it ends."""
    sizes = struct.unpack_from(f"={count}Q", data, at)
    at += 8 * count
    buffers: list[Any] = []
    for size in sizes:
        at += (start - at) % _ALIGNMENT
        part = data[at : at + size]
        # Writable either way: what lies beside is mapped copy-on-write, what came with others is copied.
        buffers.append(bytearray(part) if isinstance(part, bytes) else part)
        at += size
    return buffers, at


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


def encode_body(value: Any) -> tuple[bytes, list[memoryview]]:
    """A pickle, and the buffers it left out, which alias the value's memory.

    Raises what the value's own pickling raises.
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


def encode_call(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[bytes, list[memoryview]]:
    """`encode_body` of the two; quicker where nothing can need a reducer."""
    for argument in args:
        if type(argument) not in _ATOMS:
            break
    else:
        if not kwargs:
            return pickle.dumps((args, kwargs), protocol=5), []
    return encode_body((args, kwargs))


def decode_body(body: bytes | memoryview, buffers: Sequence[Any]) -> Any:
    return pickle.loads(body, buffers=buffers)
