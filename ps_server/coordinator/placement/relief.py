"""Decides which slices and buckets leave a shard that is busier than others: pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ps_protocol.model.spec import ShardMap, Slice
from ps_server.coordinator.placement.tables import BucketPlace


@dataclass(frozen=True, slots=True)
class RelievedPiece:
    """One slice or bucket that leaves its shard."""

    model: str
    piece: Slice | BucketPlace


def pieces_to_move(maps: Mapping[str, ShardMap], shard: int, part: float) -> tuple[RelievedPiece, ...]:
    """About ``part`` of what ``shard`` holds: of each table so many of its buckets, and slices of so many bytes.

    Slices are whole, the largest that fit first: nothing of a model whose slices are all larger.
    """
    found: list[RelievedPiece] = []
    for name in sorted(maps):
        found += [RelievedPiece(name, piece) for piece in _buckets(maps[name], shard, part)]
        found += [RelievedPiece(name, piece) for piece in _slices(maps[name], shard, part)]
    return tuple(found)


def _buckets(shard_map: ShardMap, shard: int, part: float) -> list[BucketPlace]:
    chosen: list[BucketPlace] = []
    for table, owners in enumerate(shard_map.tables):
        held = [BucketPlace(table, number, owner) for number, owner in enumerate(owners) if owner == shard]
        count = round(part * len(held))
        chosen += held[len(held) - count :]
    return chosen


def _slices(shard_map: ShardMap, shard: int, part: float) -> list[Slice]:
    sizes = [
        ((piece.row_end - piece.row_begin) * shard_map.spec.variables[piece.variable].row_bytes, at, piece)
        for at, piece in enumerate(shard_map.slices)
        if piece.shard == shard
    ]
    left = part * sum(size for size, _, _ in sizes)
    chosen: list[Slice] = []
    for size, _, piece in sorted(sizes, key=lambda each: (-each[0], -each[1])):
        if 0 < size <= left:
            chosen.append(piece)
            left -= size
    return chosen
