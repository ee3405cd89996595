"""What a codec is: a way to write the elements of one run in fewer bytes, of a size that both sides know beforehand."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any, ClassVar, TypeAlias

import numpy as np
import numpy.typing as npt
from torch import Tensor

from ps_protocol.errors import InvalidRequest

Bytes: TypeAlias = npt.NDArray[np.uint8]
#: A flat array of float32 or float64; uint8 for bytes that are sent as they are.
Elements: TypeAlias = npt.NDArray[Any]
DTypeOf: TypeAlias = np.dtype[Any]
#: Bytes to read or to write; a tensor is flat, of dtype uint8, on the CPU.
Buffer: TypeAlias = Tensor | memoryview | bytearray | bytes

PIECE_ELEMENTS = 1 << 18
"""Elements handled at once: their temporaries stay in the processor's cache."""


class Codec(ABC):
    """Writes flat arrays of float32 or float64 as bytes and reads them back.

    Called by PayloadCodec, ErrorFeedback and Reference, from one thread at a time: an instance keeps its temporaries
    from call to call. What ``decode`` and ``accumulate`` compute is bitwise the same on every machine: each element
    takes one multiplication and one addition at most, rounded to nearest even, denormals kept (unless the process has
    called ``torch.set_flush_denormal(True)``).

    A run is cut into pieces of ``piece_elements``. Its encoded form is that of its pieces, one after another.
    Bytes are little-endian, at any alignment. The work is done by numpy on the calling thread, which lets go of the
    interpreter lock: torch would share each of many small steps among threads, and wait long where cores are taken.
    """

    #: Whether what an encoding leaves out is kept and sent later.
    keeps_error: ClassVar[bool] = False
    piece_elements: ClassVar[int] = PIECE_ELEMENTS

    def __init__(self) -> None:
        self._scratch: dict[tuple[str, DTypeOf], Elements] = {}

    @abstractmethod
    def piece_bytes(self, elements: int, dtype: DTypeOf) -> int:
        """Bytes that one piece takes."""

    @abstractmethod
    def encode_piece(self, source: Elements, out: Bytes) -> None:
        """Write ``source`` to ``out``, uint8, of ``piece_bytes``. What is finite in ``source`` stays finite."""

    @abstractmethod
    def decode_piece(self, data: Bytes, out: Elements) -> None:
        """Set ``out`` to what ``data`` stands for; ``data`` has been checked."""

    @abstractmethod
    def accumulate_piece(self, data: Bytes, out: Elements, sign: int) -> None:
        """Add to ``out`` what ``data`` stands for, times ``sign``, 1 or -1; ``data`` has been checked."""

    def check_piece(self, data: Bytes, elements: int, dtype: DTypeOf) -> None:
        """Raise InvalidRequest when ``data`` is not the encoding of a piece of ``elements``."""
        check_length(len(data), self.piece_bytes(elements, dtype))

    def encoded_bytes(self, elements: int, dtype: DTypeOf) -> int:
        """Bytes that a run of ``elements`` takes, for any values."""
        full, rest = divmod(elements, self.piece_elements)
        size = full * self.piece_bytes(self.piece_elements, dtype) if full else 0
        return size + (self.piece_bytes(rest, dtype) if rest else 0)

    def pieces(self, elements: int, dtype: DTypeOf) -> Iterator[tuple[slice, slice]]:
        """Per piece of a run of ``elements``: its elements, and its bytes in the encoded form."""
        at = 0
        for begin in range(0, elements, self.piece_elements):
            end = min(begin + self.piece_elements, elements)
            size = self.piece_bytes(end - begin, dtype)
            yield slice(begin, end), slice(at, at + size)
            at += size

    def encode(self, source: Elements, out: Bytes) -> None:
        """Write ``source``, a run, to ``out``, uint8, of ``encoded_bytes``."""
        for part, place in self.pieces(len(source), source.dtype):
            self.encode_piece(source[part], out[place])

    def check(self, data: Bytes, elements: int, dtype: DTypeOf) -> None:
        """Raise InvalidRequest when ``data`` is not the encoding of a run of ``elements``."""
        check_length(len(data), self.encoded_bytes(elements, dtype))
        for part, place in self.pieces(elements, dtype):
            self.check_piece(data[place], part.stop - part.start, dtype)

    def decode(self, data: Bytes, out: Elements) -> None:
        """Set ``out``, a run, to what ``data`` stands for; ``data`` has passed ``check``."""
        for part, place in self.pieces(len(out), out.dtype):
            self.decode_piece(data[place], out[part])

    def accumulate(self, data: Bytes, out: Elements, sign: int = 1) -> None:
        """Add to ``out``, a run, what ``data`` stands for, times ``sign``; ``data`` has passed ``check``."""
        for part, place in self.pieces(len(out), out.dtype):
            self.accumulate_piece(data[place], out[part], sign)

    def scratch(self, elements: int, dtype: DTypeOf, use: str) -> Elements:
        """Memory for a temporary, flat, of any content; the same at the next call for the same ``use``."""
        kept = self._scratch.get((use, dtype))
        if kept is None or len(kept) < elements:
            kept = self._scratch[use, dtype] = np.empty(elements, dtype)
        return kept[:elements]


def check_length(actual: int, expected: int) -> None:
    """Raise InvalidRequest unless an encoded form has the length both sides compute."""
    if actual != expected:
        raise InvalidRequest(
            "encoded bytes have the wrong length",
            expected=f"{expected} bytes",
            actual=f"{actual} bytes",
            remedy="use the same wire format on both sides",
        )


def as_bytes(buffer: Buffer) -> Bytes:
    """``buffer`` as a flat array of bytes that shares its memory; read-only where the buffer is."""
    return buffer.numpy() if isinstance(buffer, Tensor) else np.frombuffer(buffer, dtype=np.uint8)


def silent() -> np.errstate:
    """Huge and non-finite values are data here, not warnings."""
    return np.errstate(over="ignore", invalid="ignore")
