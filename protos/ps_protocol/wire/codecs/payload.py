"""Between the bytes of a region and one payload, run by run: some are encoded, the others sent as they are."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np

from ps_protocol.model.layout import ArenaSpan, Layout
from ps_protocol.model.spec import DType, Kind
from ps_protocol.wire.codecs.built_in import RawCodec, codec_of
from ps_protocol.wire.codecs.codec import Buffer, Bytes, Codec, DTypeOf, Elements, as_bytes, check_length
from ps_protocol.wire.formats import Wire

#: 16-bit elements are small already, integers and buffers are to arrive exactly.
_CODED = frozenset({DType.FLOAT32, DType.FLOAT64})

_DTYPES: Mapping[DType | None, DTypeOf] = MappingProxyType(
    {DType.FLOAT32: np.dtype(np.float32), DType.FLOAT64: np.dtype(np.float64), None: np.dtype(np.uint8)}
)


@dataclass(frozen=True, slots=True)
class PayloadRun:
    """Bytes [begin, end) of a region; never empty."""

    begin: int
    end: int
    #: Type of the elements; None for bytes that are sent as they are.
    dtype: DType | None


@dataclass(frozen=True, slots=True)
class EncodedRun:
    """One run, what writes it, and its bytes in the payload."""

    run: PayloadRun
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

    def parts(self, runs: Sequence[PayloadRun]) -> Iterator[EncodedRun]:
        """The runs with their places in the payload."""
        at = 0
        for run in runs:
            codec, dtype = (self._raw if run.dtype is None else self.codec), _DTYPES[run.dtype]
            end = at + codec.encoded_bytes((run.end - run.begin) // dtype.itemsize, dtype)
            yield EncodedRun(run, codec, dtype, slice(at, end))
            at = end

    def encoded_bytes(self, runs: Sequence[PayloadRun]) -> int:
        """Length of the payload, for any values."""
        end = 0
        for part in self.parts(runs):
            end = part.place.stop
        return end

    def encode(self, region: Buffer, runs: Sequence[PayloadRun], out: Buffer) -> None:
        """Write the runs of ``region`` to ``out``, of ``encoded_bytes``. Raises InvalidRequest for another length."""
        source, payload = as_bytes(region), self.sized(out, runs)
        for part in self.parts(runs):
            part.codec.encode(part.of(source), payload[part.place])

    def decode(self, data: Buffer, runs: Sequence[PayloadRun], region: Buffer) -> None:
        """Set the runs of ``region`` to what ``data`` stands for.

        Raises InvalidRequest when ``data`` is not a payload of these runs; nothing has been written then.
        """
        payload, target = self._checked(data, runs), as_bytes(region)
        for part in self.parts(runs):
            part.codec.decode(payload[part.place], part.of(target))

    def accumulate(self, data: Buffer, runs: Sequence[PayloadRun], region: Buffer) -> None:
        """Add what ``data`` stands for to the coded runs of ``region``, and set its other runs.

        The receiver's half of Reference, for formats that keep errors; for the others use ``decode``. Raises the same
        errors as ``decode``.
        """
        payload, target = self._checked(data, runs), as_bytes(region)
        for part in self.parts(runs):
            if part.run.dtype is None:
                part.codec.decode(payload[part.place], part.of(target))
            else:
                part.codec.accumulate(payload[part.place], part.of(target))

    def sized(self, out: Buffer, runs: Sequence[PayloadRun]) -> Bytes:
        """``out`` as bytes. Raises InvalidRequest unless it is as long as the payload."""
        payload = as_bytes(out)
        check_length(len(payload), self.encoded_bytes(runs))
        return payload

    def _checked(self, data: Buffer, runs: Sequence[PayloadRun]) -> Bytes:
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
    """Whether ``values``, not empty, are all finite."""
    return bool(np.isfinite(values.min()) and np.isfinite(values.max()))


def payload_runs(layout: Layout, absent: Iterable[int] = (), *, buffers: bool = True) -> tuple[PayloadRun, ...]:
    """The runs of a payload without the slices ``absent``: in region order, none across two arenas, none empty.

    They cover the bytes of ``layout.ranges(absent, buffers=buffers)``. The result depends on nothing else: keep it.
    """
    missing = frozenset(absent)
    if not missing:
        carried = (a for a in layout.arenas if buffers or a.key.kind is Kind.PARAMETER)
        whole = [PayloadRun(a.begin, a.end, _coded(a)) for a in carried]
        return tuple(run for run in whole if run.begin < run.end)
    runs: list[PayloadRun] = []
    last_arena = -1
    for index, span in enumerate(layout.slices):
        if index in missing or span.begin == span.end or not (buffers or span.variable.kind is Kind.PARAMETER):
            continue
        if span.arena == last_arena and runs[-1].end == span.begin:
            runs[-1] = PayloadRun(runs[-1].begin, span.padded_end, runs[-1].dtype)
        else:
            runs.append(PayloadRun(span.begin, span.padded_end, _coded(layout.arenas[span.arena])))
        last_arena = span.arena
    return tuple(runs)


def _coded(arena: ArenaSpan) -> DType | None:
    """The element type of a run in ``arena``."""
    return arena.key.dtype if arena.key.kind is Kind.PARAMETER and arena.key.dtype in _CODED else None
