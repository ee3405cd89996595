"""Writes the part of one model that one shard holds to a checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from operator import itemgetter
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ps_protocol.errors import InvalidRequest
from ps_protocol.files import sync
from ps_protocol.model.layout import Layout, SliceSpan
from ps_protocol.model.spec import DType
from ps_server.checkpoint.file_plan import (
    FileForm,
    TensorForm,
    ValueFiles,
    in_file_order,
    model_folder,
    state_file,
    state_name,
)
from ps_server.checkpoint.files import Output, checksum, make_folder, output, storage_errors
from ps_server.checkpoint.record import Facts, FileRecord, Piece, ShardPart, TablePart
from ps_server.optimizers.state import StateEntry
from ps_server.state.region import torch_dtype

if TYPE_CHECKING:
    from ps_server.checkpoint.table_copy import TableCapture

_DTYPES = MappingProxyType({torch_dtype(dtype): dtype for dtype in DType})

#: Called with (bytes written, bytes to write), by the thread that writes.
Progress = Callable[[int, int], None]


def write_part(
    folder: Path,
    layout: Layout,
    values: memoryview,
    state: Sequence[StateEntry],
    facts: Facts,
    progress: Progress = lambda done, total: None,
    tables: Sequence[TableCapture] = (),
) -> ShardPart:
    """Write a shard's slices, optimizer state and ``tables`` below ``folder``, and sync them; returns what ``commit``
    needs.

    ``values`` is the whole region of ``layout`` in bytes; neither it nor ``state`` may change until this returns.
    ``progress`` is called for both.
    ``facts`` is what the shard wants back with them: version, clocks, sequences. All shards of a model may write at the
    same time, from any thread: each writes files of its own, and its own rows in those of others. Nothing here makes
    the folder a checkpoint; what is left behind by an error is without meaning. Raises StorageFull, ConfigError for a
    folder that cannot be written, InvalidRequest for values or names that do not fit.
    """
    if len(values) != layout.region_bytes:
        raise InvalidRequest(
            "these are not the values of this layout",
            shard=str(layout.shard),
            expected=f"{layout.region_bytes} bytes",
            actual=f"{len(values)} bytes",
        )
    model = layout.shard_map.spec.name
    target = folder / model_folder(model)
    with storage_errors(target, str(layout.shard)):
        make_folder(target)
        writer = _PartWriter(target, layout, progress)
        writer.write(values, state)
        written = _write_tables(folder, layout, tables)
        sync(target)
    files = (*writer.records, *(record for _, record in written))
    parts = tuple(part for part, _ in written)
    return ShardPart(model, layout.shard, layout.shard_map.epoch, facts, files, tuple(writer.pieces), parts)


def _write_tables(folder: Path, layout: Layout, tables: Sequence[TableCapture]) -> list[tuple[TablePart, FileRecord]]:
    if not tables:
        return []
    from ps_server.checkpoint.table_writer import write_table  # compiled code

    return [write_table(folder, layout, table) for table in tables if table.here.any()]


class _PartWriter:
    """One call of ``write_part``."""

    def __init__(self, folder: Path, layout: Layout, progress: Progress) -> None:
        self._folder = folder
        self._layout = layout
        self._progress = progress
        self._done = self._total = 0
        self.records: list[FileRecord] = []
        self.pieces: list[Piece] = []

    def write(self, values: memoryview, state: Sequence[StateEntry]) -> None:
        self._total = sum(s.end - s.begin for s in self._layout.slices) + sum(t.nbytes for _, t in state)
        self._write_values(values)
        if state:
            self._write_state(state)

    def _write_values(self, values: memoryview) -> None:
        shard_map, shard = self._layout.shard_map, self._layout.shard
        plan = ValueFiles.of(shard_map)
        # Its own file in any case: it writes the head.
        own = plan.files.get(shard)
        forms = {own.name: own} if own else {}
        members: dict[str, list[tuple[int, SliceSpan]]] = {}
        for span in self._layout.slices:
            form, at = plan.place(shard_map, span.slice)
            forms[form.name] = form
            members.setdefault(form.name, []).append((at, span))
        for name, form in forms.items():
            with self._file(form, with_head=form is own) as file:
                for at, span in sorted(members[name], key=itemgetter(0)):
                    tensor = TensorForm("", span.variable.dtype, span.shape)
                    self._put(file, (name, at), span, tensor, values[span.begin : span.end])

    def _write_state(self, state: Sequence[StateEntry]) -> None:
        shard_map, slices = self._layout.shard_map, self._layout.slices
        names = [state_name(shard_map, slices[key.slice_index].slice, key.name) for key, _ in state]
        tensors = [TensorForm(name, _dtype(name, t), tuple(t.shape)) for name, (_, t) in zip(names, state, strict=True)]
        form = state_file(shard_map, self._layout.shard, tensors)
        entries = dict(zip(names, state, strict=True))
        with self._file(form, with_head=True) as file:
            for tensor in in_file_order(tensors):
                key, data = entries[tensor.name]
                place = form.name, form.at[tensor.name]
                self._put(file, place, slices[key.slice_index], replace(tensor, name=key.name), _bytes(data))

    @contextmanager
    def _file(self, form: FileForm, *, with_head: bool) -> Iterator[Output]:
        with output(self._folder / form.name, form.size_bytes) as file:
            if with_head:
                file.write(memoryview(form.head), 0)
            yield file
        self.records.append(FileRecord(form.name, form.size_bytes, len(form.head), checksum(form.head)))

    def _put(self, file: Output, place: tuple[str, int], span: SliceSpan, tensor: TensorForm, data: memoryview) -> None:
        """Write the bytes of one tensor at ``place``, which is file and byte; its name is that of the state."""
        checksums = file.write(data, place[1], self._wrote)
        rows = span.slice.row_begin, span.slice.row_end
        self.pieces.append(
            Piece(span.variable.name, *rows, tensor.name, tensor.dtype, tensor.shape, *place, checksums=checksums)
        )

    def _wrote(self, written_bytes: int) -> None:
        self._done += written_bytes
        self._progress(self._done, self._total)


def _dtype(name: str, tensor: Tensor) -> DType:
    if tensor.dtype not in _DTYPES:
        raise InvalidRequest(
            "a checkpoint cannot hold optimizer state of this dtype",
            variable=name,
            expected=", ".join(dtype.value for dtype in DType),
            actual=str(tensor.dtype),
        )
    return _DTYPES[tensor.dtype]


def _bytes(tensor: Tensor) -> memoryview:
    return memoryview(tensor.contiguous().view(-1).view(torch.uint8).numpy().data)
