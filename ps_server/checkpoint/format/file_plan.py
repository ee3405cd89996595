"""The file of a checkpoint, and the position in it, of each slice of a model.

It follows from the shard map alone, so every shard can write its own rows of files that several shards share.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from urllib.parse import quote

from ps_protocol.model.layout import Layout
from ps_protocol.model.spec import ShardMap, Slice
from ps_server.checkpoint.folder.files import MANIFEST_NAME
from ps_server.checkpoint.format.tensor_header import FileForm, TensorForm

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
