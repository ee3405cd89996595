"""Tensors and JSON values as payloads of exchanges."""

from __future__ import annotations

import json
from typing import Any

import torch
from google.protobuf.message import DecodeError

from ps_protocol.cluster.exchange import ExchangeValue, TensorBytes
from ps_protocol.errors import ConfigError, InvalidRequest
from ps_protocol.model.spec import DType
from ps_protocol.wire.convert.exchange import exchange_value_from_bytes, exchange_value_to_bytes

_DTYPES = {getattr(torch, dtype.value): dtype for dtype in DType}


def encode_value(call: str, value: Any) -> bytes:
    """``value`` as given to ``call``. Raises ConfigError for what is neither a tensor that can travel nor JSON."""
    if isinstance(value, torch.Tensor):
        return exchange_value_to_bytes(ExchangeValue(call, tensor=_bytes_of(value)))
    _check_json(value, call)
    return exchange_value_to_bytes(ExchangeValue(call, json.dumps(value)))


def decode_value(payload: bytes, call: str, rank: int) -> Any:
    """The value that worker ``rank`` gave; tensors are on the CPU.

    Raises InvalidRequest when that worker made another call, or its payload is no value.
    """
    try:
        value = exchange_value_from_bytes(payload)
        if value.call != call:
            raise InvalidRequest(
                "workers make different collective calls at the same place of their scripts",
                expected=f"{call}, as this worker",
                actual=f"{value.call[:80]} by worker {rank}",
                remedy="have every worker make the same collective calls in the same order, or give them names",
            )
        return json.loads(value.json) if value.tensor is None else _tensor_of(value.tensor)
    except (DecodeError, ValueError, RecursionError) as error:
        raise InvalidRequest(f"worker {rank} gave no value to {call}", actual=repr(error)[:200]) from error


def _bytes_of(tensor: torch.Tensor) -> TensorBytes:
    dtype = _DTYPES.get(tensor.dtype)
    if dtype is None or tensor.layout is not torch.strided:
        raise ConfigError(
            "workers cannot exchange this tensor",
            expected="a dense tensor of " + ", ".join(each.value for each in DType),
            actual=f"{tensor.dtype}, {tensor.layout}",
        )
    plain = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return TensorBytes(dtype, tuple(tensor.shape), plain.numpy().tobytes())


def _tensor_of(tensor: TensorBytes) -> torch.Tensor:
    dtype = getattr(torch, tensor.dtype.value)
    if not tensor.elements:
        return torch.empty(tensor.shape, dtype=dtype)
    return torch.frombuffer(bytearray(tensor.elements), dtype=dtype).reshape(tensor.shape)


def _check_json(value: Any, call: str) -> None:
    """Raises ConfigError unless ``value`` comes back from JSON as it was."""
    if value is None or type(value) in (bool, int, float, str):
        return
    if type(value) is list:
        for each in value:
            _check_json(each, call)
    elif type(value) is dict and all(type(key) is str for key in value):
        for each in value.values():
            _check_json(each, call)
    else:
        raise ConfigError(
            f"{call} cannot send this value",
            expected="a tensor, or what JSON has: None, bool, int, float, str, lists, and dicts with keys of str",
            actual=repr(value)[:80],
            remedy="send its parts as such values",
        )
