"""Decides which slices and buckets come to a shard when they move, and from which shards."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

from ps_protocol.errors import InvalidRequest
from ps_protocol.model.layout import Layout
from ps_protocol.model.spec import ShardMap
from ps_server.model_differences import in_structure, raise_differences
from ps_server.state.reshard import rows_of


@dataclass(frozen=True, slots=True)
class TransferPlan:
    """What comes to one shard from one other."""

    source: int
    #: Slices as (index there, next index here), in the order here.
    slices: tuple[tuple[int, int], ...] = ()
    #: Buckets by number of their table, rising.
    buckets: tuple[tuple[int, tuple[int, ...]], ...] = ()


def transfer_plan(held: ShardMap, wanted: ShardMap, shard: int) -> list[TransferPlan]:
    """What ``shard`` lacks of ``wanted``, by the shard that has it, in order of number.

    Raises ModelMismatch for another model, InvalidRequest for a map that does not follow or cuts slices differently.
    """
    raise_differences(
        f"shard {shard} was given another model under the name '{held.spec.name}'",
        in_structure(held.spec, wanted.spec),
        "see the log of the coordinator",
    )
    if wanted.epoch != held.epoch + 1:
        raise InvalidRequest(
            f"the next shard map of model '{held.spec.name}' is not the next",
            shard=str(shard),
            expected=f"epoch {held.epoch + 1}",
            actual=f"epoch {wanted.epoch}",
            remedy="try again",
        )
    slices: defaultdict[int, list[tuple[int, int]]] = defaultdict(list)
    for source, there, here in _slices(held, wanted, shard):
        slices[source].append((there, here))
    buckets: defaultdict[int, defaultdict[int, list[int]]] = defaultdict(lambda: defaultdict(list))
    for source, table, bucket in _buckets(held, wanted, shard):
        buckets[source][table].append(bucket)
    return [
        TransferPlan(
            source, tuple(slices[source]), tuple((t, tuple(numbers)) for t, numbers in buckets[source].items())
        )
        for source in sorted(slices.keys() | buckets.keys())
    ]


def _slices(held: ShardMap, wanted: ShardMap, shard: int) -> Iterator[tuple[int, int, int]]:
    """Source, index there, next index here."""
    own = {rows_of(span) for span in Layout.of(held, shard).slices}
    sources = {piece.shard for piece in held.slices} - {shard}
    places = {
        rows_of(span): (source, index)
        for source in sources
        for index, span in enumerate(Layout.of(held, source).slices)
    }
    for index, span in enumerate(Layout.of(wanted, shard).slices):
        if rows_of(span) in own:
            continue
        if rows_of(span) not in places:
            raise InvalidRequest(
                "the next shard map cuts a variable otherwise: slices only move",
                variable=span.variable.name,
                shard=str(shard),
                actual=f"rows [{span.slice.row_begin}, {span.slice.row_end})",
            )
        yield (*places[rows_of(span)], index)


def _buckets(held: ShardMap, wanted: ShardMap, shard: int) -> Iterator[tuple[int, int, int]]:
    """Source, table, bucket."""
    for table, (before, after) in enumerate(zip(held.tables, wanted.tables, strict=True)):
        for bucket, (source, target) in enumerate(zip(before, after, strict=True)):
            if target == shard != source:
                yield source, table, bucket
