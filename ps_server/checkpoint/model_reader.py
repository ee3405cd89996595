"""Reads a checkpoint for one shard, under any shard map of the same model; reads only the rows it needs."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from ps_protocol.errors import InvalidRequest
from ps_protocol.model.layout import Layout, SliceSpan
from ps_server.checkpoint.checkpoint import Checkpoint, row_histories
from ps_server.checkpoint.record import ModelRecord, Piece
from ps_server.checkpoint.source import ModelFiles, opened
from ps_server.optimizers.state import StateEntry, StateKey
from ps_server.state.region import torch_dtype


def read_values(checkpoint: Checkpoint, layout: Layout, into: memoryview) -> None:
    """Fill ``into``, the region of ``layout`` in bytes, with the saved parameters and buffers.

    Called by the shard's owner; ``into`` is a region that is not shared yet; after an error it may be partly written.
    Raises ModelMismatch, DamagedData, ConfigError.
    """
    model = _matching(checkpoint, layout)
    saved = _by_variable(model)
    with opened(checkpoint.folder, model, checkpoint.on_read) as source:
        for span in layout.slices:
            for piece in _overlapping(span, saved.get((span.variable.name, ""), [])):
                _copy(source, span, piece, into[span.begin : span.end])


def read_state(checkpoint: Checkpoint, layout: Layout) -> list[StateEntry]:
    """The saved optimizer state of the slices of ``layout``, in slice order, for ``ShardOptimizer.load_state``.

    State of the slice's shape is joined and cut by rows; counters, which have no axes, go with every slice; any other
    state, as Adafactor's, goes with its variable, which is whole. Raises ModelMismatch, DamagedData, ConfigError, and
    InvalidRequest when a slice would join rows with different counters: ``Checkpoint.aligned`` cuts it there.
    """
    model = _matching(checkpoint, layout)
    saved, histories = _by_variable(model), row_histories(model)
    entries: list[StateEntry] = []
    with opened(checkpoint.folder, model, checkpoint.on_read) as source:
        for index, span in enumerate(layout.slices[: layout.parameter_slices]):
            begin, end = span.slice.row_begin, span.slice.row_end
            found = {history for first, last, history in histories[span.variable.name] if first < end and begin < last}
            if len(found) > 1:
                raise _parted(span)
            for name in sorted(name for history in found for name, _ in history):
                pieces = _overlapping(span, saved[span.variable.name, name])
                entries.append((StateKey(index, name), _joined(source, span, list(pieces))))
    return entries


def _joined(source: ModelFiles, span: SliceSpan, pieces: list[Piece]) -> torch.Tensor:
    first = pieces[0]
    rows = span.slice.row_begin, span.slice.row_end
    same = first.rows == rows
    row_wise = bool(first.shape) and all(p.shape == (p.row_end - p.row_begin, *span.variable.shape[1:]) for p in pieces)
    if first.shape and not same and not row_wise:
        raise InvalidRequest(
            f"optimizer state '{first.state}' belongs to a variable as a whole and cannot be cut",
            variable=span.variable.name,
            expected=f"rows {first.rows} in one slice",
            actual=f"rows {rows}",
            remedy="place the variables of this model whole",
        )
    shape = first.shape if same or not first.shape else span.shape
    # Before memory is allocated: the files have the sizes in the manifest.
    for piece in pieces:
        source.check_file(piece.file)
    tensor = torch.empty(shape, dtype=torch_dtype(first.dtype))
    data = memoryview(tensor.view(-1).view(torch.uint8).numpy().data)
    if same or not first.shape:
        source.read(first, 0, first.nbytes, data)
    else:
        for piece in pieces:
            _copy(source, span, piece, data)
    return tensor


def _copy(source: ModelFiles, span: SliceSpan, piece: Piece, into: memoryview) -> None:
    """Copy the rows of ``span`` that ``piece`` has to their place in ``into``, which holds the rows of ``span``."""
    row_bytes = piece.nbytes // (piece.row_end - piece.row_begin)
    begin, end = max(span.slice.row_begin, piece.row_begin), min(span.slice.row_end, piece.row_end)
    target = into[(begin - span.slice.row_begin) * row_bytes : (end - span.slice.row_begin) * row_bytes]
    source.read(piece, (begin - piece.row_begin) * row_bytes, (end - piece.row_begin) * row_bytes, target)


def _overlapping(span: SliceSpan, pieces: list[Piece]) -> Iterator[Piece]:
    return (p for p in pieces if p.row_begin < span.slice.row_end and span.slice.row_begin < p.row_end)


def _by_variable(model: ModelRecord) -> dict[tuple[str, str], list[Piece]]:
    """The pieces of each (variable, state name), in row order."""
    found: dict[tuple[str, str], list[Piece]] = {}
    for piece in sorted(model.pieces, key=lambda p: p.row_begin):
        found.setdefault((piece.variable, piece.state), []).append(piece)
    return found


def _matching(checkpoint: Checkpoint, layout: Layout) -> ModelRecord:
    checkpoint.check_matches(layout.shard_map.spec)
    return checkpoint.model(layout.shard_map.spec.name)


def _parted(span: SliceSpan) -> InvalidRequest:
    return InvalidRequest(
        "the rows of a slice were saved with different step counts",
        variable=span.variable.name,
        expected="slices cut where the counts differ",
        actual=f"rows [{span.slice.row_begin}, {span.slice.row_end}) in one slice",
        remedy="lay the model out with Checkpoint.aligned",
    )
