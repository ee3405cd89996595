"""Records of protocol version 4, whose slices lay one behind another without padding, are read as they were written."""

from __future__ import annotations

import struct

import pytest

from ps_protocol.errors import InvalidRequest
from ps_protocol.model.layout import Layout
from ps_protocol.model.spec import PACKED_BYTES
from ps_protocol.v1 import common_pb2, log_pb2
from ps_protocol.wire.convert import model as convert_model
from ps_server.log.messages import LoggedOptions, decode_load, decode_place, decode_update
from ps_server.state.region import Region
from ps_server.state.replica import Replica

#: As version 4 wrote them: variables a (3 elements) and b (2), all on shard 0; values; an update without a.
PLACED = bytes.fromhex(
    "0a4e0a4c0801123c0a016d120f746f7263682e6f7074696d2e5347441a0a0a0161120103180120011a0a0a016212010218012001220a7b226c72"
    "223a312e307d28013001180122021803220408011802"
)
LOADED = bytes.fromhex("12050a016d1001"), struct.pack("<5f", 1, 2, 3, 4, 5)
UPDATED = (
    bytes.fromhex("1a1d0a016d10012201002a0a7b226c72223a312e307d31000000000000f03f"),
    struct.pack("<2f", 0.5, 0.25),
)


def test_a_log_of_slices_without_padding_is_replayed_to_the_same_values() -> None:
    shard_map = decode_place(log_pb2.LogRecord.FromString(PLACED).place).shard_map
    assert shard_map.alignment_bytes == PACKED_BYTES
    layout = Layout.of(shard_map, 0)
    replica = Replica(layout)
    loaded = decode_load(log_pb2.LogRecord.FromString(LOADED[0]).load, memoryview(LOADED[1]), layout)
    replica.load(loaded.region, loaded.entries)
    record = log_pb2.LogRecord.FromString(UPDATED[0]).update
    update = decode_update(record, memoryview(UPDATED[1]), Region(layout), LoggedOptions())
    replica.apply(update.step)
    assert replica.region.slice(0).tolist() == [1, 2, 3]
    assert replica.region.slice(1).tolist() == [3.5, 4.75]
    # This version writes the same of that model, but for the text of its options.
    again, before = convert_model.shard_map_to_pb(shard_map), log_pb2.LogRecord.FromString(PLACED).place.shard_map
    again.spec.ClearField("groups")
    before.spec.ClearField("group_options")
    assert again == before


def test_an_alignment_of_a_later_version_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="aligned in a way"):
        convert_model.shard_map_from_pb(common_pb2.ShardMap(epoch=1, shards=1, alignment_bytes=128))
