"""Values of collectives as payloads and back. Costs less than a second."""

import math

import pytest
import torch

from ps_protocol.errors import ConfigError, InvalidRequest
from ps_protocol.v1 import common_pb2
from ps_protocol.v1 import coordinator_pb2 as pb
from ps_worker.collectives import decode_tensor, decode_value, encode_value


@pytest.mark.parametrize(
    "tensor",
    [
        torch.tensor(3.5),
        torch.arange(6, dtype=torch.float64).reshape(2, 3).t(),
        torch.tensor([1.0, math.nan, -math.inf], dtype=torch.bfloat16),
        torch.tensor([True, False]),
        torch.zeros(0, 4, dtype=torch.int16),
        torch.tensor([1 << 62, -1]),
    ],
)
def test_a_tensor_comes_back_bit_by_bit(tensor: torch.Tensor) -> None:
    again = decode_value(encode_value("call", tensor), "call", 0)
    assert (again.dtype, again.shape) == (tensor.dtype, tensor.shape)
    assert torch.equal(again.nan_to_num(7), tensor.nan_to_num(7))
    again.zero_()  # its memory is its own


@pytest.mark.parametrize("value", [None, True, -3, 0.1, "ä", [], [1, ["x", None]], {"a": {"b": [1.5]}}])
def test_what_json_has_comes_back_as_it_was(value: object) -> None:
    assert decode_value(encode_value("call", value), "call", 0) == value


@pytest.mark.parametrize("value", [(1, 2), {1: 2}, {"a": {3}}, object(), [b"x"], 1j])
def test_other_values_are_refused_before_they_change(value: object) -> None:
    with pytest.raises(ConfigError, match="what JSON has"):
        encode_value("call", value)


@pytest.mark.parametrize("tensor", [torch.zeros(2, dtype=torch.complex64), torch.eye(2).to_sparse()])
def test_tensors_that_cannot_travel_are_refused(tensor: torch.Tensor) -> None:
    with pytest.raises(ConfigError, match="cannot exchange this tensor"):
        encode_value("call", tensor)


def test_a_value_of_another_worker_that_is_no_tensor_is_refused_where_tensors_are_exchanged() -> None:
    assert decode_tensor(encode_value("all_gather", torch.ones(2)), "all_gather", 3).tolist() == [1.0, 1.0]
    with pytest.raises(InvalidRequest, match="worker 3 gave no tensor to all_gather"):
        decode_tensor(encode_value("all_gather", [1.0]), "all_gather", 3)


def test_another_call_of_another_worker_is_named() -> None:
    with pytest.raises(InvalidRequest, match="expected: broadcast, as this worker; actual: all_gather by worker 3"):
        decode_value(encode_value("all_gather", 1), "broadcast", 3)


@pytest.mark.parametrize(
    "payload",
    [
        b"\xff\xff",
        pb.ExchangeValue(call="c", json="{").SerializeToString(),
        pb.ExchangeValue(call="c", json="[" * 100_000).SerializeToString(),
        pb.ExchangeValue(call="c").SerializeToString(),
        pb.ExchangeValue(call="c", tensor=pb.TensorValue(dtype=99)).SerializeToString(),
        pb.ExchangeValue(
            call="c", tensor=pb.TensorValue(dtype=common_pb2.DTYPE_FLOAT32, shape=[1 << 40], elements=b"1234")
        ).SerializeToString(),
        pb.ExchangeValue(
            call="c", tensor=pb.TensorValue(dtype=common_pb2.DTYPE_FLOAT32, shape=[1] * 65, elements=b"1234")
        ).SerializeToString(),
    ],
)
def test_payloads_that_are_no_value_are_refused(payload: bytes) -> None:
    with pytest.raises(InvalidRequest):
        decode_value(payload, "c", 1)
