"""The safetensors files of a checkpoint: their heads, and the position in them of each slice of a model.

It follows from the shard map alone, so every shard can write its own rows of files that several shards share.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TypeVar
from urllib.parse import quote

from ps_protocol.errors import InvalidRequest
from ps_protocol.model.layout import Layout
from ps_protocol.model.spec import DType, ShardMap, Slice, Variable
from ps_server.checkpoint.files import MANIFEST_NAME

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
DTYPES = MappingProxyType({code: dtype for dtype, code in _CODES.items()})
"""By the name in a safetensors file."""

LENGTH_BYTES = 8
"""A safetensors file begins with the length of its header."""

_ALIGNMENT_BYTES = 64
#: Required by Hugging Face loaders.
_METADATA = MappingProxyType({"format": "pt"})

MAX_FILE_BYTES = 5_000_000_000
"""The limit that Hugging Face's save_pretrained uses."""


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


T = TypeVar("T", TensorForm, Variable)


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
    def of(cls, name: str, tensors: Sequence[TensorForm], metadata: Mapping[str, str] = _METADATA) -> FileForm:
        """Lay out ``tensors`` one after the other; ``metadata`` is what the format calls so.

        Raises InvalidRequest for a name that the format cannot hold, or holds already.
        """
        _check_names(name, tensors)
        header: dict[str, object] = {"__metadata__": dict(metadata)}
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
        text = text.ljust(-(-(len(text) + LENGTH_BYTES) // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES - LENGTH_BYTES)
        head = len(text).to_bytes(LENGTH_BYTES, "little") + text
        return cls(name, head, {key: len(head) + begin for key, begin in begins.items()}, len(head) + position)


def grouped(tensors: Iterable[T], max_file_bytes: int) -> list[list[T]]:
    """Tensors in their order, in groups up to the size limit; no group for no tensors."""
    groups: list[list[T]] = []
    room = 0
    for tensor in tensors:
        if tensor.nbytes > room or not groups:
            groups.append([])
            room = max_file_bytes
        groups[-1].append(tensor)
        room -= tensor.nbytes
    return groups


def in_file_order(tensors: Iterable[TensorForm]) -> list[TensorForm]:
    """Wide dtypes first, so that every tensor is aligned for its dtype; otherwise in the given order."""
    return sorted(tensors, key=lambda t: -t.dtype.itemsize)


def index_json(files: Mapping[str, str], metadata: Mapping[str, str | int]) -> bytes:
    """A Hugging Face index: ``files`` names the file of each tensor; a checkpoint's metadata has its "total_size"."""
    index = {"metadata": dict(metadata), "weight_map": dict(sorted(files.items()))}
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


INDEX_NAME = "model.safetensors.index.json"

_LONGEST_FOLDER = 200


def model_folder(model: str) -> str:
    """The folder of a model inside a checkpoint: its name, with special characters of paths escaped."""
    escaped = quote(model, safe="") or "%"
    if escaped.startswith((".", MANIFEST_NAME)):
        escaped = f"%{ord(escaped[0]):02X}{escaped[1:]}"
    if len(escaped) > _LONGEST_FOLDER:
        escaped = f"{escaped[:_LONGEST_FOLDER]}~{hashlib.sha256(model.encode()).hexdigest()[:16]}"
    return escaped


def numbered(stem: str, number: int, of: int) -> str:
    """The name of file ``number`` (from 1) of ``of``, as Hugging Face has it."""
    return f"{stem}-{number:05d}-of-{of:05d}.safetensors"


@dataclass(frozen=True, slots=True)
class ValueFiles:
    """The files that hold a model's parameters and buffers, each variable complete in one of them."""

    #: Shard → the file with the variables whose first rows it holds; shards without any have none.
    files: dict[int, FileForm]
    #: Variable number → the shard in ``files``.
    owner: dict[int, int]

    @classmethod
    def of(cls, shard_map: ShardMap) -> ValueFiles:
        """Plan the files of ``shard_map``; tensors are in arena order, so that neighbours stay neighbours."""
        owner = {s.variable: s.shard for s in sorted(shard_map.slices, key=lambda s: -s.row_begin)}
        owners = sorted(set(owner.values()))
        files = {}
        for number, shard in enumerate(owners, 1):
            spans = Layout.of(shard_map, shard).slices
            mine = dict.fromkeys(s.slice.variable for s in spans if owner[s.slice.variable] == shard)
            variables = [shard_map.spec.variables[variable] for variable in mine]
            tensors = [TensorForm(v.name, v.dtype, v.shape) for v in variables]
            files[shard] = FileForm.of(numbered("model", number, len(owners)), tensors)
        return cls(files, owner)

    def place(self, shard_map: ShardMap, piece: Slice) -> tuple[FileForm, int]:
        """The file of ``piece`` and its first byte there."""
        variable = shard_map.spec.variables[piece.variable]
        form = self.files[self.owner[piece.variable]]
        return form, form.at[variable.name] + piece.row_begin * variable.row_bytes


def state_file(shard_map: ShardMap, shard: int, tensors: Sequence[TensorForm]) -> FileForm:
    """The file with a shard's optimizer state; only this shard writes it."""
    return FileForm.of(numbered("optimizer", shard + 1, shard_map.shards), tensors)


def state_name(shard_map: ShardMap, piece: Slice, state: str) -> str:
    """The name of optimizer state in its file: "layer.weight/exp_avg", "layer.weight[0:64]/exp_avg"."""
    variable = shard_map.spec.variables[piece.variable]
    rows = "" if piece.row_end - piece.row_begin == variable.rows else f"[{piece.row_begin}:{piece.row_end}]"
    return f"{variable.name}{rows}/{state}"
