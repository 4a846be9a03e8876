"""torch tensors between processes: their memory travels out of band."""

from __future__ import annotations

import pickle

import pytest
import torch
from rolecall.runtime.wire import decode_body, encode_body

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.bool, torch.uint8, torch.complex64]


def _through(value: object) -> object:
    body, buffers = encode_body(value)
    return decode_body(body, [bytearray(buffer) for buffer in buffers])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (1,), (3, 4), (0, 5), (2, 3, 4)])
def test_a_tensor_arrives_as_it_was(dtype: torch.dtype, shape: tuple[int, ...]):
    tensor = torch.arange(24)[: torch.Size(shape).numel()].reshape(shape).to(dtype)
    arrived = _through(tensor)
    assert isinstance(arrived, torch.Tensor)
    assert arrived.dtype == dtype and arrived.shape == tensor.shape and torch.equal(arrived, tensor)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_large_tensor_is_out_of_band_and_not_copied_by_its_sender(dtype: torch.dtype):
    tensor = torch.ones(1 << 20, dtype=dtype)
    head, buffers = encode_body({"weights": tensor, "name": "w"})
    assert len(head) < 1000
    (buffer,) = buffers
    assert memoryview(buffer).nbytes == tensor.nbytes
    tensor[0] = 2
    assert torch.frombuffer(bytearray(buffer), dtype=dtype)[0] == 2


def test_views_and_strides_arrive_as_values():
    tensor = torch.arange(12.0).reshape(3, 4)
    for view in (tensor.T, tensor[:, 1:3], tensor[::2], tensor.expand(2, 3, 4)):
        arrived = _through(view)
        assert isinstance(arrived, torch.Tensor) and torch.equal(arrived, view)


def test_what_is_more_than_its_bytes_goes_torchs_way():
    for tensor in (
        torch.ones(3, requires_grad=True),
        torch.nn.Parameter(torch.ones(3)),
        torch.ones(2, 2).to_sparse(),
        torch.ones(2, dtype=torch.complex64).conj(),
    ):
        arrived = _through(tensor)
        assert isinstance(arrived, type(tensor))
        assert arrived.requires_grad == tensor.requires_grad
        assert torch.equal(arrived.to_dense(), tensor.to_dense())


def test_shared_tensors_stay_shared():
    tensor = torch.ones(3)
    first, second = pickle.loads(pickle.dumps(_through([tensor, tensor])))
    assert torch.equal(first, second)
    arrived = _through([tensor, tensor])
    assert isinstance(arrived, list) and arrived[0] is arrived[1]
