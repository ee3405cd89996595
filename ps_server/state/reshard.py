"""Makes the model of the next shard map from the one before it and the slices and buckets that came."""

from __future__ import annotations

from collections.abc import Mapping

from ps_protocol.errors import InvalidRequest
from ps_protocol.model.layout import Layout, SliceSpan
from ps_protocol.model.spec import Consistency
from ps_server.consistency import Tracker
from ps_server.log.entries import StagedReshard
from ps_server.state.model_state import ModelState
from ps_server.state.region import Region
from ps_server.state.replica import Replica
from ps_server.state.shifts import shifted

#: Names a slice independent of its shard: slices are never cut again.
Rows = tuple[int, int, int]


def rows_of(span: SliceSpan) -> Rows:
    """Variable, first row, row behind the last."""
    return span.slice.variable, span.slice.row_begin, span.slice.row_end


def resharded(model: ModelState, shard: int) -> ModelState:
    """``model`` as staged for it; the bytes of every slice, its state and every row are those it had.

    Slices that stay keep their memory, unless somebody reads it. The same on the shard that reshards and when its log
    is replayed. ``model`` is not to be used any more: its
    optimizer state is gone, its tables are the new one's. Pushes held for an open step are forgotten, as by a restart:
    their workers repeat them. Raises InvalidRequest when nothing is pending, or slices or buckets are missing; nothing
    was changed then. Raises TableFull when rows that come do not fit into memory.
    """
    pending = model.pending
    if pending is None:
        raise InvalidRequest(f"model '{model.shard_map.spec.name}' is resharded, and nothing was staged for it")
    before, layout = model.replica.layout, Layout.of(pending.shard_map, shard)
    places = {rows_of(span): index for index, span in enumerate(before.slices)}
    coming = dict(zip(pending.incoming, _cut(layout, pending), strict=True))
    staying: dict[int, int] = {}
    for index, span in enumerate(layout.slices):
        if index not in coming:
            if rows_of(span) not in places:
                raise _missing(span, shard)
            staying[places[rows_of(span)]] = index
    _check_buckets(before, layout, pending)
    replica = Replica(layout, _region(model, layout, staying))
    for index, data in coming.items():
        span = layout.slices[index]
        replica.region.bytes[span.begin : span.end] = data
    replica.follow(model.replica, staying, pending.entries)
    # Not copied: rows that stay are of any size.
    replica.tables = model.replica.tables
    for table, was, stays in zip(replica.tables, before.buckets, layout.buckets, strict=True):
        for bucket in sorted(set(was).difference(stays)):
            table.forget(bucket)
    for number, contents in pending.buckets:
        replica.tables[number].put(contents)
    model.moved = True
    return ModelState(pending.shard_map, replica, _tracker(model, layout, pending), model.initialised)


def _region(model: ModelState, layout: Layout, staying: Mapping[int, int]) -> Region:
    """Memory in the next layout, with what stays."""
    before = model.replica.region
    if model.unread() and (region := shifted(before, layout, staying)) is not None:
        return region
    region = Region(layout)
    for old, new in staying.items():
        region.slice(new).copy_(before.slice(old))
    return region


def _check_buckets(before: Layout, layout: Layout, pending: StagedReshard) -> None:
    coming = {(number, contents.bucket) for number, contents in pending.buckets}
    for number, (was, wanted) in enumerate(zip(before.buckets, layout.buckets, strict=True)):
        for bucket in sorted(set(wanted).difference(was)):
            if (number, bucket) not in coming:
                raise InvalidRequest(
                    f"shard {layout.shard} was not given a bucket of the next shard map, and had none of it",
                    variable=layout.shard_map.spec.tables[number].name,
                    shard=str(layout.shard),
                    expected=f"bucket {bucket}",
                )


def _cut(layout: Layout, pending: StagedReshard) -> list[memoryview]:
    pieces, position = [], 0
    for index in pending.incoming:
        size = layout.slices[index].end - layout.slices[index].begin
        pieces.append(pending.values[position : position + size])
        position += size
    return pieces


def _tracker(model: ModelState, layout: Layout, pending: StagedReshard) -> Tracker:
    """A shard that holds nothing gets no pushes: what it knew of them would only grow old."""
    tracker = Tracker(Consistency())
    state = model.tracker.persisted_state() if model.replica.layout.holds_any else pending.tracker
    if layout.holds_any and state:
        tracker.restore(state)
    return tracker


def _missing(span: SliceSpan, shard: int) -> InvalidRequest:
    return InvalidRequest(
        f"shard {shard} was not given a slice of the next shard map, and had none of it",
        variable=span.variable.name,
        shard=str(shard),
        expected=f"rows [{span.slice.row_begin}, {span.slice.row_end})",
    )
