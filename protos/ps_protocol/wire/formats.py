"""How float32 and float64 elements are sent: wire formats, what users write for them, and their form in messages."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from ps_protocol.errors import ConfigError, InvalidRequest
from ps_protocol.v1 import common_pb2 as pb
from ps_protocol.wire.convert.fields import EnumNumbers

DEFAULT_RATIO = 0.01
"""Share of the elements that top-k sends by default."""


class WireFormat(enum.Enum):
    """How the elements of a payload are written; the values are what users write."""

    RAW = "raw"
    BF16 = "bf16"
    FP16 = "fp16"
    INT8 = "int8"
    TOPK = "topk"


_FORMATS = EnumNumbers(WireFormat, pb.WireFormat.DESCRIPTOR, WireFormat.RAW)


def _is_ratio(ratio: float) -> bool:
    """Whether top-k can send this share of the elements; NaN is none."""
    return 0.0 < ratio <= 1.0


@dataclass(frozen=True, slots=True)
class Wire:
    """A wire format with its argument. ``str`` gives what ``parse`` reads. Raises ConfigError for a wrong ratio."""

    format: WireFormat = WireFormat.RAW
    #: Top-k: share of the elements that are sent, in (0, 1]. The default for every other format.
    ratio: float = DEFAULT_RATIO

    def __post_init__(self) -> None:
        if self.format is not WireFormat.TOPK and self.ratio != DEFAULT_RATIO:
            raise ConfigError(f"the wire format {self.format.value} takes no ratio", actual=str(self.ratio))
        if not _is_ratio(self.ratio):
            raise ConfigError("the ratio of top-k is out of range", expected="0 < ratio <= 1", actual=str(self.ratio))

    @classmethod
    def parse(cls, text: str | None) -> Wire:
        """Read "raw", "bf16", "fp16", "int8", "topk" or "topk:RATIO"; None is raw. Raises ConfigError."""
        if text is None:
            return cls()
        name, colon, ratio = text.partition(":")
        try:
            wire_format = WireFormat(name)
            share = float(ratio) if colon else DEFAULT_RATIO
        except ValueError:
            raise _not_a_wire(text) from None
        if colon and (wire_format is not WireFormat.TOPK or not _is_ratio(share)):
            raise _not_a_wire(text)
        return cls(wire_format, share)

    def __str__(self) -> str:
        return f"{self.format.value}:{self.ratio!r}" if self.format is WireFormat.TOPK else self.format.value


RAW = Wire()
"""Elements as they are in memory."""


def _not_a_wire(text: str) -> ConfigError:
    plain = ", ".join(f.value for f in WireFormat)
    return ConfigError("not a wire format", expected=f"{plain}, or topk:RATIO with 0 < RATIO <= 1", actual=repr(text))


def wire_to_pb(wire: Wire) -> pb.Wire:
    """The wire form of a wire format."""
    return pb.Wire(format=_FORMATS.numbers[wire.format], ratio=wire.ratio if wire.format is WireFormat.TOPK else 0.0)


def wire_from_pb(message: pb.Wire) -> Wire:
    """An empty message is raw. Raises InvalidRequest for a format unknown here or a ratio out of range."""
    wire_format = _FORMATS.member(message.format, "wire format")
    if wire_format is not WireFormat.TOPK:
        return Wire(wire_format)
    if not _is_ratio(message.ratio):
        raise InvalidRequest("the ratio of top-k is out of range", expected="0 < ratio <= 1", actual=str(message.ratio))
    return Wire(wire_format, message.ratio)
