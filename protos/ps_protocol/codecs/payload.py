"""Between the bytes of a region and one payload, run by run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np

from ps_protocol.codecs.codec import Buffer, Bytes, Codec, DTypeOf, Elements, as_bytes, check_length
from ps_protocol.codecs.raw import RawCodec
from ps_protocol.codecs.registry import codec_of
from ps_protocol.codecs.runs import Run
from ps_protocol.model import DType
from ps_protocol.wire import Wire

_DTYPES: Mapping[DType | None, DTypeOf] = MappingProxyType(
    {DType.FLOAT32: np.dtype(np.float32), DType.FLOAT64: np.dtype(np.float64), None: np.dtype(np.uint8)}
)


@dataclass(frozen=True, slots=True)
class Part:
    """One run, what writes it, and its bytes in the payload."""

    run: Run
    codec: Codec
    dtype: DTypeOf
    place: slice

    def of(self, region: Bytes) -> Elements:
        """The elements of the run in ``region``."""
        return region[self.run.begin : self.run.end].view(self.dtype)

    @property
    def elements(self) -> int:
        """How many elements the run has."""
        return (self.run.end - self.run.begin) // self.dtype.itemsize


class PayloadCodec:
    """Encodes and decodes whole payloads. For one thread at a time: its codec keeps temporaries.

    A payload is its runs in order, without gaps: float32 and float64 runs as the wire format writes them, the others
    as they are. With raw it is the bytes of the ranges. Regions are aligned to 8 bytes, payloads need not be.
    """

    def __init__(self, wire: Wire) -> None:
        self.wire = wire
        self.codec = codec_of(wire)
        self._raw = RawCodec()

    @property
    def keeps_error(self) -> bool:
        """Whether gradients go through ErrorFeedback and parameters, after the first payload, as differences."""
        return self.codec.keeps_error

    def parts(self, runs: Sequence[Run]) -> Iterator[Part]:
        """The runs with their places in the payload."""
        at = 0
        for run in runs:
            codec, dtype = (self._raw if run.dtype is None else self.codec), _DTYPES[run.dtype]
            end = at + codec.encoded_bytes((run.end - run.begin) // dtype.itemsize, dtype)
            yield Part(run, codec, dtype, slice(at, end))
            at = end

    def encoded_bytes(self, runs: Sequence[Run]) -> int:
        """Length of the payload, whatever the values."""
        end = 0
        for part in self.parts(runs):
            end = part.place.stop
        return end

    def encode(self, region: Buffer, runs: Sequence[Run], out: Buffer) -> None:
        """Write the runs of ``region`` to ``out``, of ``encoded_bytes``. Raises InvalidRequest for another length."""
        source, payload = as_bytes(region), self.sized(out, runs)
        for part in self.parts(runs):
            part.codec.encode(part.of(source), payload[part.place])

    def decode(self, data: Buffer, runs: Sequence[Run], region: Buffer) -> None:
        """Set the runs of ``region`` to what ``data`` stands for.

        Raises InvalidRequest when ``data`` is not a payload of these runs; nothing has been written then.
        """
        payload, target = self._checked(data, runs), as_bytes(region)
        for part in self.parts(runs):
            part.codec.decode(payload[part.place], part.of(target))

    def accumulate(self, data: Buffer, runs: Sequence[Run], region: Buffer) -> None:
        """Add what ``data`` stands for to the coded runs of ``region``, and set its other runs.

        The receiver's half of Reference, for formats that keep errors; the others are for ``decode``. Raises as that.
        """
        payload, target = self._checked(data, runs), as_bytes(region)
        for part in self.parts(runs):
            if part.run.dtype is None:
                part.codec.decode(payload[part.place], part.of(target))
            else:
                part.codec.accumulate(payload[part.place], part.of(target))

    def sized(self, out: Buffer, runs: Sequence[Run]) -> Bytes:
        """``out`` as bytes. Raises InvalidRequest unless it is as long as the payload."""
        payload = as_bytes(out)
        check_length(len(payload), self.encoded_bytes(runs))
        return payload

    def _checked(self, data: Buffer, runs: Sequence[Run]) -> Bytes:
        """``data`` as bytes, all of it valid."""
        payload = self.sized(data, runs)
        for part in self.parts(runs):
            part.codec.check(payload[part.place], part.elements, part.dtype)
        return payload


def saturate(total: Elements, *terms: Elements) -> bool:
    """Make ``total``, the sum or difference of ``terms``, finite where the terms are. False where it cannot be.

    Only huge terms overflow; their total becomes the largest number.
    """
    if _all_finite(total):
        return True
    finite = np.logical_and.reduce([np.isfinite(term) for term in terms])
    limit = np.finfo(total.dtype).max
    np.copyto(total, np.clip(total, -limit, limit), where=finite)
    return _all_finite(total)


def _all_finite(values: Elements) -> bool:
    """Whether ``values``, not empty, hold no NaN and no infinity."""
    return bool(np.isfinite(values.min()) and np.isfinite(values.max()))
