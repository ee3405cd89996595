"""Where tests put a model's variables: real devices, and on machines without them stand-ins on the CPU.

Flat memory takes only ``torch.device("cpu")`` for the host. "cpu:1" is a device of its own to it, with a packed mirror
and copies both ways, although torch puts it in the same memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import pytest
import torch
from torch import nn

from ps_worker.model.bindings import Bindings

HOST = torch.device("cpu")
ONE = torch.device("cpu", 1)
TWO = torch.device("cpu", 2)

Devices = tuple[torch.device, ...]


def _cuda(count: int, *devices: torch.device | str) -> object:
    found = torch.cuda.device_count()
    missing = pytest.mark.skipif(found < count, reason=f"needs {count} CUDA devices, and torch finds {found}")
    return pytest.param(
        tuple(map(torch.device, devices)), marks=[pytest.mark.gpu, missing], id="+".join(map(str, devices))
    )


STAND_INS = [
    pytest.param((HOST,), id="cpu"),
    pytest.param((ONE,), id="one"),
    pytest.param((HOST, ONE), id="cpu+one"),
    pytest.param((ONE, TWO), id="one+two"),
    pytest.param((TWO, HOST, ONE, ONE), id="mixed"),
]
REAL = [
    _cuda(1, "cuda:0"),
    _cuda(1, "cpu", "cuda:0"),
    _cuda(2, "cuda:0", "cuda:1"),
    _cuda(2, "cuda:1", "cpu", "cuda:0"),
]
everywhere = pytest.mark.parametrize("devices", [*STAND_INS, *REAL])


@contextmanager
def placed(module: nn.Module, devices: Sequence[torch.device]) -> Iterator[None]:
    """In the block, the variables of ``module`` are on ``devices`` in turn: parameters first, then buffers."""
    variables = [*module.parameters(), *module.buffers()]
    if all(device.type == "cpu" for device in devices):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(
                Bindings, "devices", property(lambda b: [devices[i % len(devices)] for i in range(len(b.variables))])
            )
            yield
        return
    for number, variable in enumerate(variables):
        variable.data = variable.data.to(devices[number % len(devices)])
    yield


def module_of(*parameters: torch.Tensor, buffers: Sequence[torch.Tensor] = ()) -> nn.Module:
    """A module with these values, named p0, p1, … and b0, b1, …"""
    module = nn.Module()
    for number, value in enumerate(parameters):
        module.register_parameter(f"p{number}", nn.Parameter(value))
    for number, value in enumerate(buffers):
        module.register_buffer(f"b{number}", value)
    return module


def mixed_module(seed: int = 0) -> nn.Module:
    """Several dtypes, a scalar, an empty variable, variables of many rows, buffers."""
    generator = torch.Generator().manual_seed(seed)

    def values(shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)

    return module_of(
        values((3, 2)),
        values(()),
        values((10, 2), torch.float64),
        values((9,)),
        values((5,), torch.bfloat16),
        values((0, 4)),
        values((16, 3), torch.float16),
        values((13, 2), torch.float64),
        buffers=[values((3,)), torch.tensor(7), values((9, 2))],
    )


def bytes_of(tensor: torch.Tensor) -> bytes:
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
