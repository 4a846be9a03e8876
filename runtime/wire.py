"""How a message looks between two processes of one machine.

    frame 0   header: kind, seq, sender's incarnation, deadline, call chain   never pickled
    frame 1   body: pickle protocol 5 of (method, args, kwargs), or of the answer
    frame 2…  the body's large buffers, out of band

Routing, accounting and dead letters read the header alone, so they need no user code. Pickles cross only
sockets inside a directory that this user made with mode 0700; nothing from another machine comes this way.
"""

from __future__ import annotations

import pickle
import sys
from collections.abc import Sequence
from enum import IntEnum
from io import BytesIO
from typing import Any

import cloudpickle
from msgspec import Struct, msgpack

__all__ = ["Header", "Kind", "decode_body", "decode_header", "encode_body", "encode_header"]


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


_header_encoder = msgpack.Encoder()
_header_decoder = msgpack.Decoder(Header)


def encode_header(header: Header) -> bytes:
    return _header_encoder.encode(header)


def decode_header(frame: bytes) -> Header:
    return _header_decoder.decode(frame)


class _Pickler(cloudpickle.Pickler):
    """cloudpickle, with the memory of torch's CPU tensors out of band, as numpy's arrays are by themselves.

    In band a 64 MB tensor is copied several times; torch's own reducers know no other way.
    """

    def reducer_override(self, obj: Any) -> Any:
        kind = type(obj)
        if kind.__module__ == "torch" and kind.__name__ == "Tensor" and _is_plain(obj):
            flat = obj.contiguous().reshape(-1)
            memory = pickle.PickleBuffer(flat.view(sys.modules["torch"].uint8).numpy())
            return _rebuild_tensor, (memory, str(obj.dtype).removeprefix("torch."), tuple(obj.shape))
        return super().reducer_override(obj)


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
    import torch

    return torch.frombuffer(memory, dtype=torch.uint8).view(getattr(torch, dtype)).reshape(shape)


def encode_body(value: Any) -> list[Any]:
    """[pickle, *buffers]. The buffers alias the value's memory: whoever sends must not change it afterwards."""
    buffers: list[pickle.PickleBuffer] = []
    file = BytesIO()
    _Pickler(file, protocol=5, buffer_callback=buffers.append).dump(value)
    return [file.getvalue(), *(buffer.raw() for buffer in buffers)]


def decode_body(frames: Sequence[Any]) -> Any:
    return pickle.loads(frames[0], buffers=frames[1:])
