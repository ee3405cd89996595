"""The header of a safetensors file, and the position of each tensor in it.

The format: 8 bytes of little-endian length, a JSON header, then the tensors without gaps
(https://github.com/huggingface/safetensors, "Format").
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from ps_protocol.errors import InvalidRequest
from ps_protocol.model.spec import DType

_CODES = MappingProxyType(
    {
        DType.FLOAT64: "F64",
        DType.FLOAT32: "F32",
        DType.FLOAT16: "F16",
        DType.BFLOAT16: "BF16",
        DType.INT64: "I64",
        DType.INT32: "I32",
        DType.INT16: "I16",
        DType.INT8: "I8",
        DType.UINT8: "U8",
        DType.BOOL: "BOOL",
    }
)
_LENGTH_BYTES = 8
_ALIGNMENT_BYTES = 64
#: Required by Hugging Face loaders.
_METADATA = MappingProxyType({"format": "pt"})


@dataclass(frozen=True, slots=True)
class TensorForm:
    """A tensor to be written: its name in the file, its dtype and shape."""

    name: str
    dtype: DType
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class FileForm:
    """A safetensors file before it is written."""

    name: str
    #: Everything before the tensors.
    head: bytes
    #: Tensor name → its first byte in the file.
    at: Mapping[str, int]
    size_bytes: int

    @classmethod
    def of(cls, name: str, tensors: Sequence[TensorForm]) -> FileForm:
        """Lay out ``tensors`` one after the other.

        Raises InvalidRequest for a name that the format cannot hold, or holds already.
        """
        _check_names(name, tensors)
        header: dict[str, object] = {"__metadata__": dict(_METADATA)}
        begins: dict[str, int] = {}
        position = 0
        for tensor in in_file_order(tensors):
            begins[tensor.name], end = position, position + tensor.nbytes
            header[tensor.name] = {
                "dtype": _CODES[tensor.dtype],
                "shape": tensor.shape,
                "data_offsets": (position, end),
            }
            position = end
        text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
        # The format allows spaces after the header.
        text = text.ljust(-(-(len(text) + _LENGTH_BYTES) // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES - _LENGTH_BYTES)
        head = len(text).to_bytes(_LENGTH_BYTES, "little") + text
        return cls(name, head, {key: len(head) + begin for key, begin in begins.items()}, len(head) + position)


def in_file_order(tensors: Iterable[TensorForm]) -> list[TensorForm]:
    """Wide dtypes first, so that every tensor is aligned for its dtype; otherwise in the given order."""
    return sorted(tensors, key=lambda t: -t.dtype.itemsize)


def index_json(files: Mapping[str, str], total_bytes: int) -> bytes:
    """A Hugging Face index: ``files`` names the file of each tensor, ``total_bytes`` is the size of all tensors."""
    index = {"metadata": {"total_size": total_bytes}, "weight_map": dict(sorted(files.items()))}
    return json.dumps(index, ensure_ascii=False, indent=2).encode()


def _check_names(name: str, tensors: Sequence[TensorForm]) -> None:
    for tensor, count in Counter(t.name for t in tensors).items():
        if count > 1 or tensor == "__metadata__":
            raise InvalidRequest(
                f"safetensors file {name} cannot hold this tensor",
                variable=tensor,
                expected="distinct names other than '__metadata__'",
                actual=f"'{tensor}' {count} times",
                remedy="rename the variable",
            )
