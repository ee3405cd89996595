"""Which codec stands for which wire format: total, by test, against the enum."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

import torch

from ps_protocol.wire.codecs.blocks import Int8Codec
from ps_protocol.wire.codecs.cast import CastCodec
from ps_protocol.wire.codecs.codec import Codec
from ps_protocol.wire.codecs.raw import RawCodec
from ps_protocol.wire.codecs.topk import TopKCodec
from ps_protocol.wire.formats import Wire, WireFormat

CODECS: Mapping[WireFormat, Callable[[Wire], Codec]] = MappingProxyType(
    {
        WireFormat.RAW: lambda wire: RawCodec(),
        WireFormat.BF16: lambda wire: CastCodec(torch.bfloat16),
        WireFormat.FP16: lambda wire: CastCodec(torch.float16),
        WireFormat.INT8: lambda wire: Int8Codec(),
        WireFormat.TOPK: lambda wire: TopKCodec(wire.ratio),
    }
)


def codec_of(wire: Wire) -> Codec:
    """A new codec for ``wire``, for one thread."""
    return CODECS[wire.format](wire)
