"""Layouts, payload codecs and values that the tests of codecs share."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import torch
from hypothesis import strategies as st

from ps_protocol.model.layout import Layout
from ps_protocol.model.spec import DType, Kind, ModelSpec, ShardMap, Slice, Variable
from ps_protocol.wire.codecs import codec_of
from ps_protocol.wire.codecs.codec import PIECE_ELEMENTS
from ps_protocol.wire.formats import Wire

WIRES = [Wire.parse(text) for text in ("raw", "bf16", "fp16", "int8", "topk:0.01", "topk:0.3", "topk:1.0")]
KEEPING = [Wire.parse(text) for text in ("int8", "topk:0.01", "topk:0.3")]


def layout_of(*variables: tuple, shards: int = 1, cuts: int = 1) -> list[Layout]:
    """One layout per shard, without padding; a variable is (shape, dtype, kind).

    Each is cut into ``cuts`` slices, which are dealt round the shards.
    """
    named = tuple(Variable(f"v{i}", shape, dtype, kind, 0) for i, (shape, dtype, kind) in enumerate(variables))
    slices = []
    for i, v in enumerate(named):
        edges = sorted({v.rows * c // cuts for c in range(cuts + 1)})
        slices += [Slice(i, a, b, len(slices) % shards) for a, b in pairwise(edges)]
    spec = ModelSpec("model", "torch.optim.SGD", named, ({"lr": 1.0},))
    shard_map = ShardMap(1, spec, shards, tuple(slices), alignment_bytes=1)
    return [Layout.of(shard_map, shard) for shard in range(shards)]


def flat_layout(elements: int, dtype: DType = DType.FLOAT32) -> Layout:
    return layout_of(((elements,), dtype, Kind.PARAMETER))[0]


@st.composite
def values(draw, *, finite: bool = True):
    """A flat float32 or float64 array: normal numbers of any size mixed with drawn, special and zero elements."""
    dtype = draw(st.sampled_from([np.float32, np.float64]))
    info = np.finfo(dtype)
    n = draw(st.one_of(st.integers(1, 1100), st.sampled_from([1, 255, 256, 257, 512, 513, PIECE_ELEMENTS + 3])))
    width = 32 if dtype is np.float32 else 64
    least, most = float(info.tiny), float(info.max)
    special = [0.0, -0.0, least, least / 3, -least / 1e5, most, -most, 65504.0, 65520.0, 1e-7]
    if not finite:
        special += [float("nan"), float("inf"), float("-inf")]
    drawn = draw(st.lists(st.floats(width=width, allow_nan=not finite, allow_infinity=not finite), max_size=10))
    picked = draw(st.lists(st.sampled_from(special), max_size=5))
    size = draw(st.sampled_from([0.0, 1e-40, 1e-9, 1.0, 1e6, 1e37]))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    made = rng.standard_normal(n) * size
    pool = np.array([*drawn, *picked])
    if len(pool):
        share = draw(st.sampled_from([0.0, 0.01, 1.0]))
        where = rng.random(n) < share
        where[rng.integers(n)] = True
        made[where] = rng.choice(pool, int(where.sum()))
    with np.errstate(over="ignore"):
        made = made.astype(dtype)
    return made if not finite else np.nan_to_num(made)


def region_of(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of ``tensor``, sharing its memory."""
    return tensor.contiguous().view(-1).view(torch.uint8)


def bits(values: torch.Tensor | np.ndarray) -> bytes:
    return values.tobytes() if isinstance(values, np.ndarray) else values.contiguous().numpy().tobytes()


def encoded(wire: Wire, source: np.ndarray) -> np.ndarray:
    codec = codec_of(wire)
    out = np.full(codec.encoded_bytes(len(source), source.dtype), 0xA5, np.uint8)
    codec.encode(source, out)
    return out


def decoded(wire: Wire, data: np.ndarray, like: np.ndarray) -> np.ndarray:
    codec = codec_of(wire)
    codec.check(data, len(like), like.dtype)
    out = np.full_like(like, np.nan)
    codec.decode(data, out)
    return out
