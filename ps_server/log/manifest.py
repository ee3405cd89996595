"""What a snapshot is made of, and how its manifest says so."""

from __future__ import annotations

import base64
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import xxhash

from ps_protocol.errors import InvalidRequest
from ps_protocol.model.payload_headers import StateHeader
from ps_protocol.model.spec import ShardMap
from ps_protocol.v1 import shard_pb2
from ps_protocol.wire.convert import model as convert_model
from ps_protocol.wire.convert.shard import STATE_HEADER
from ps_server.consistency import TrackerState
from ps_server.state.blocks import Block

FORMAT = 4

#: One group in an index: number, offset, message_bytes, size_bytes, checksum.
_GROUP = struct.Struct("<qqqqQ")


@dataclass(frozen=True, slots=True)
class FilePiece:
    """A piece of the file that holds the parts."""

    offset: int
    size_bytes: int
    checksum: int


@dataclass(frozen=True, slots=True)
class BlockPlace:
    """The place of a copy of one block, and the record it was made at."""

    block: Block
    #: The last record of the log that is in it.
    number: int
    part: FilePiece
    state: tuple[StateHeader, ...]


@dataclass(frozen=True, slots=True)
class GroupPlace:
    """The place of copies of some row buckets, all made at one moment: a BucketsRecord, then their payloads."""

    #: The last record of the log that is in them.
    number: int
    part: FilePiece
    #: Of the BucketsRecord.
    message_bytes: int


@dataclass(slots=True)
class ModelPart:
    """One model in a snapshot."""

    shard_map: ShardMap
    initialised: bool
    tracker: TrackerState
    #: The last record of the log that is in ``tracker``.
    tracker_number: int
    blocks: list[BlockPlace] = field(default_factory=list)
    groups: list[GroupPlace] = field(default_factory=list)
    #: Where ``groups`` are written down.
    index: FilePiece | None = None

    @property
    def number(self) -> int:
        """Records after this one are needed to bring every part to the same age."""
        numbers = [block.number for block in self.blocks] + [group.number for group in self.groups]
        return min([self.tracker_number, *numbers])


def encode_index(groups: Sequence[GroupPlace]) -> bytes:
    """The places of ``groups``: there are thousands, so they are not in the manifest."""
    return b"".join(
        _GROUP.pack(each.number, each.part.offset, each.message_bytes, each.part.size_bytes, each.part.checksum)
        for each in groups
    )


def decode_index(data: memoryview) -> list[GroupPlace]:
    """What ``encode_index`` wrote. Raises InvalidRequest."""
    if len(data) % _GROUP.size:
        raise InvalidRequest(
            "an index of buckets was cut short",
            expected=f"a multiple of {_GROUP.size} bytes",
            actual=f"{len(data)} bytes",
        )
    return [
        GroupPlace(number, FilePiece(offset, size_bytes, checksum), message_bytes)
        for number, offset, message_bytes, size_bytes, checksum in _GROUP.iter_unpack(data)
    ]


def part_of(offset: int, pieces: Sequence[bytes | memoryview]) -> FilePiece:
    """``pieces`` written at ``offset``, one behind the other."""
    digest = xxhash.xxh3_64()
    for piece in pieces:
        digest.update(piece)
    return FilePiece(offset, sum(map(len, pieces)), digest.intdigest())


def models_to_json(models: Sequence[ModelPart]) -> list[Mapping[str, Any]]:
    """What the manifest says of ``models``."""
    return [
        {
            "shard_map": _text(convert_model.shard_map_to_bytes(part.shard_map)),
            "initialised": part.initialised,
            "tracker": part.tracker.to_json(),
            "tracker_number": part.tracker_number,
            "blocks": [
                {
                    "first": place.block.first,
                    "last": place.block.last,
                    "begin": place.block.begin,
                    "end": place.block.end,
                    "number": place.number,
                    **_part_to_json(place.part),
                    "state": [_text(tensor.SerializeToString()) for tensor in STATE_HEADER.all_to_pb(place.state)],
                }
                for place in part.blocks
            ],
            "buckets": _part_to_json(part.index) if part.index else None,
        }
        for part in models
    ]


def models_from_json(items: Sequence[Mapping[str, Any]]) -> tuple[ModelPart, ...]:
    """Without their groups. Raises KeyError, TypeError, ValueError, DecodeError, InvalidRequest."""
    return tuple(
        ModelPart(
            convert_model.shard_map_from_bytes(base64.b64decode(item["shard_map"])),
            item["initialised"],
            TrackerState.from_json(item["tracker"]),
            item["tracker_number"],
            list(_places(item["blocks"])),
            index=_part_from_json(item["buckets"]) if item["buckets"] else None,
        )
        for item in items
    )


def _places(items: Sequence[Mapping[str, Any]]) -> Iterator[BlockPlace]:
    for item in items:
        state = (shard_pb2.StateTensor.FromString(base64.b64decode(text)) for text in item["state"])
        block = Block(item["first"], item["last"], item["begin"], item["end"])
        yield BlockPlace(block, item["number"], _part_from_json(item), tuple(STATE_HEADER.all_from_pb(state)))


def _part_to_json(part: FilePiece) -> Mapping[str, int]:
    return {"offset": part.offset, "size_bytes": part.size_bytes, "checksum": part.checksum}


def _part_from_json(item: Mapping[str, Any]) -> FilePiece:
    return FilePiece(item["offset"], item["size_bytes"], item["checksum"])


def _text(data: bytes) -> str:
    return base64.b64encode(data).decode()
