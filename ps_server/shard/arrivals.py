"""Fetches the slices that come to this shard from the shards that hold them, and decides which those are."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any

import grpc
import torch

from ps_protocol import convert
from ps_protocol.channel import CLIENT_OPTIONS
from ps_protocol.client.errors import translate
from ps_protocol.errors import InternalError, InvalidRequest
from ps_protocol.frames import STATE_CHUNK_FIELD, Scatter, parse_chunk
from ps_protocol.layout import Layout
from ps_protocol.model import ShardMap
from ps_protocol.v1 import shard_pb2 as pb
from ps_server.consistency import TrackerMemento
from ps_server.log import Prepared, rows_of
from ps_server.model_differences import in_structure, raise_differences
from ps_server.optimizers import StateEntry, StateKey, tensor_bytes, torch_dtype

FETCH_SECONDS = 60.0
"""How long another shard may take to send what comes from it."""

_METHOD = "/ps_protocol.v1.Shard/Save"


@dataclass(frozen=True, slots=True)
class Arrivals:
    """What comes to one shard from one other, as (index there, next index here), in the order here."""

    source: int
    slices: tuple[tuple[int, int], ...]


def arrivals(held: ShardMap, wanted: ShardMap, shard: int) -> list[Arrivals]:
    """What ``shard`` lacks of ``wanted``, by the shard that has it, in order of number.

    Raises ModelMismatch for another model, InvalidRequest for a map that does not follow or cuts slices anew.
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
    own = {rows_of(span) for span in Layout.of(held, shard).slices}
    sources = {piece.shard for piece in held.slices} - {shard}
    places = {
        rows_of(span): (source, index)
        for source in sources
        for index, span in enumerate(Layout.of(held, source).slices)
    }
    found: dict[int, list[tuple[int, int]]] = {}
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
        source, there = places[rows_of(span)]
        found.setdefault(source, []).append((there, index))
    return [Arrivals(source, tuple(slices)) for source, slices in sorted(found.items())]


async def fetch(held: ShardMap, wanted: ShardMap, shard: int, addresses: Mapping[int, str]) -> Prepared:
    """Everything that comes to ``shard``; the sources must stand still. Raises as ``arrivals``, and Unavailable."""
    layout = Layout.of(wanted, shard)
    parcels = arrivals(held, wanted, shard)
    incoming = tuple(index for parcel in parcels for _, index in parcel.slices)
    values = memoryview(bytearray(sum(_size(layout, index) for index in incoming)))
    entries: list[StateEntry] = []
    tracker: TrackerMemento | None = None
    begin = 0
    for parcel in parcels:
        if parcel.source not in addresses:
            raise InvalidRequest(
                f"slices come from shard {parcel.source}, and nobody says where it is", shard=str(shard)
            )
        end = begin + sum(_size(layout, index) for _, index in parcel.slices)
        state, known = await _fetch_from(held, parcel, addresses[parcel.source], values[begin:end])
        entries += state
        # Any source will do: they stand at one point. The lowest number, so that it is the same each time.
        tracker = tracker or known
        begin = end
    return Prepared(wanted, incoming, values, entries, tracker)


def _size(layout: Layout, index: int) -> int:
    return layout.slices[index].end - layout.slices[index].begin


async def _fetch_from(
    held: ShardMap, parcel: Arrivals, address: str, into: memoryview
) -> tuple[list[StateEntry], TrackerMemento]:
    """Values into ``into``; returns state under next indexes, and what the source knows of pushes."""
    request = pb.SaveRequest(model=held.spec.name, epoch=held.epoch, slices=[there for there, _ in parcel.slices])
    async with AsyncExitStack() as stack:
        channel = await stack.enter_async_context(grpc.aio.insecure_channel(address, options=CLIENT_OPTIONS))
        save: grpc.aio.UnaryStreamMultiCallable[bytes, bytes] = channel.unary_stream(_METHOD)
        call = save(request.SerializeToString(), timeout=FETCH_SECONDS)
        stack.callback(call.cancel)
        try:
            header = pb.SaveReply.FromString(await _next(call)).header
            entries = _allocate(header.state, dict(parcel.slices), parcel.source)
            scatter = Scatter([into, *(tensor_bytes(tensor) for _, tensor in entries)])
            if header.payload_bytes != scatter.expected_bytes:
                raise _unexpected(parcel.source, f"{scatter.expected_bytes} bytes", f"{header.payload_bytes} bytes")
            while not scatter.complete:
                chunk = parse_chunk(STATE_CHUNK_FIELD, await _next(call))
                if chunk is None:
                    raise _unexpected(parcel.source, "a chunk", "another message")
                scatter.write(*chunk)
        except grpc.RpcError as failed:
            raise translate(failed, f"shard {parcel.source} at {address}") from failed
    return entries, TrackerMemento.from_json(json.loads(header.tracker))


def _allocate(state: Sequence[pb.StateTensor], indexes: Mapping[int, int], source: int) -> list[StateEntry]:
    entries: list[StateEntry] = []
    for item in state:
        if item.slice not in indexes or min(item.shape, default=0) < 0 or math.prod(item.shape) >= 1 << 40:
            raise _unexpected(source, "state of the slices asked for", f"'{item.name}' of slice {item.slice}")
        dtype = torch_dtype(convert.dtype_from_pb(item.dtype))
        entries.append((StateKey(indexes[item.slice], item.name), torch.empty(tuple(item.shape), dtype=dtype)))
    return entries


async def _next(call: grpc.aio.UnaryStreamCall[bytes, bytes]) -> bytes:
    data: Any = await call.read()
    if data is grpc.aio.EOF:
        raise InternalError("a shard ended its answer before it was whole")
    return bytes(data)


def _unexpected(source: int, expected: str, actual: str) -> InternalError:
    return InternalError(
        f"shard {source} sent something else than the slices asked for", expected=expected, actual=actual
    )
