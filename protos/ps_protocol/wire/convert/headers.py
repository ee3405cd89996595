"""Between the messages that announce payloads of state and buckets, and their dataclasses."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import fields
from operator import attrgetter

from ps_protocol.model.payload_headers import BucketHeader, StateHeader
from ps_protocol.v1 import shard_pb2 as pb
from ps_protocol.wire.convert.model import dtype_from_pb, dtype_to_pb

#: Fields of BucketHeader, which those of the message are named as.
_BUCKET_FIELDS = [field.name for field in fields(BucketHeader)]
_bucket_values = attrgetter(*_BUCKET_FIELDS)


def state_headers_to_pb(headers: Iterable[StateHeader]) -> list[pb.StateTensor]:
    """The wire form of ``headers``."""
    return [
        pb.StateTensor(slice=each.slice_index, name=each.name, dtype=dtype_to_pb(each.dtype), shape=each.shape)
        for each in headers
    ]


def state_headers_from_pb(messages: Iterable[pb.StateTensor]) -> list[StateHeader]:
    """What ``messages`` announce. Raises InvalidRequest for a dtype that this version does not know."""
    return [StateHeader(each.slice, each.name, dtype_from_pb(each.dtype), tuple(each.shape)) for each in messages]


def bucket_headers_to_pb(headers: Iterable[BucketHeader]) -> list[pb.Bucket]:
    """The wire form of ``headers``."""
    return [pb.Bucket(**{name: getattr(each, name) for name in _BUCKET_FIELDS}) for each in headers]


def bucket_headers_from_pb(messages: Iterable[pb.Bucket]) -> list[BucketHeader]:
    """What ``messages`` announce."""
    return [BucketHeader(*_bucket_values(each)) for each in messages]
