"""A region's bytes and tensors are the same memory."""

from __future__ import annotations

import pytest
import torch

from ps_protocol.model.layout import Layout
from ps_protocol.model.spec import ALIGNMENT_BYTES, DType, Kind, ModelSpec, ShardMap, Variable
from ps_server.state.region import Region, torch_dtype

from .models import spec_of, whole_layout


@pytest.mark.parametrize("dtype", list(DType), ids=lambda d: d.value)
def test_every_dtype_is_torchs_of_that_name_and_size(dtype: DType) -> None:
    assert torch_dtype(dtype).itemsize == dtype.itemsize
    assert str(torch_dtype(dtype)) == f"torch.{dtype.value}"


def test_bytes_written_are_read_as_tensors_and_back() -> None:
    region = Region(whole_layout(spec_of("SGD", (DType.FLOAT32, DType.BFLOAT16), [{"lr": 0.1}])))
    assert not any(region.bytes)
    assert region.data.data_ptr() % ALIGNMENT_BYTES == 0
    for index, span in enumerate(region.layout.slices):
        tensor = region.slice(index)
        assert tuple(tensor.shape) == span.variable.shape
        region.bytes[span.begin : span.end] = (
            torch.full(span.shape, index, dtype=tensor.dtype).view(-1).view(torch.uint8).numpy().tobytes()
        )
        assert bool((tensor == index).all())
        tensor.fill_(0)
    assert not any(region.bytes)


def test_a_shard_without_slices_has_an_empty_region() -> None:
    variables = (Variable("w", (2,), DType.FLOAT32), Variable("b", (), DType.INT64, Kind.BUFFER))
    spec = ModelSpec("m", "torch.optim.SGD", variables, ({"lr": 0.1},))
    region = Region(Layout.of(ShardMap(1, spec, 1, ()), 0))
    assert (len(region.bytes), region.bytes.readonly) == (0, False)
    assert [region.arena(number).numel() for number in range(2)] == [0, 0]
