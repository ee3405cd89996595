"""Receives the pieces of one version from their shards at once, each into its place of the version that is staged."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from functools import partial
from typing import Any

import grpc
import numpy as np
import numpy.typing as npt
import xxhash
from google.protobuf.message import DecodeError

from ps_protocol.cluster.weights import WeightsPiece, WeightsVersion
from ps_protocol.errors import DamagedData, InternalError, InvalidRequest, PsError, Unavailable
from ps_protocol.feed.cursor import Cursors
from ps_protocol.model.spec import DType, Variable
from ps_protocol.rpc.client_errors import translate
from ps_protocol.security.security import Security
from ps_protocol.v1 import shard_pb2 as pb
from ps_protocol.weights.version import WholeVersion
from ps_protocol.wire.bulk import attached_bulk
from ps_protocol.wire.chunks import PIECE_REPLIES, ChunkReceiver
from ps_protocol.wire.convert.model import VARIABLE, dtype_to_pb
from ps_protocol.wire.convert.step import side_channel_from_pb

Bytes = npt.NDArray[np.uint8]

_GET_PIECE = "/ps_protocol.v1.Shard/GetPiece"

_LARGEST_GROWTH = 4
"""A conversion makes at most so many bytes of one: float16 as float64."""

_LONGEST_CHAIN = 2
"""Deltas of several versions, beside all of a piece: a shard sends that where they are not less."""

MOST_THREADS = 8

SIDE_CHANNEL_SECONDS = 3.0
"""A side channel to a shard has to be open after this time."""


@dataclass(slots=True)
class PieceSource:
    """A shard that pieces are received from."""

    channel: grpc.Channel
    address: str
    security: Security
    #: Whether payloads are to come over a side channel; not any more once that did not work.
    bulk: bool = True


@dataclass(slots=True)
class Received:
    """What a version took."""

    delta_bytes: int = 0
    full_bytes: int = 0


class _Stage:
    """The memory of a version on its way. Threads of all its shards put their slices in."""

    def __init__(self, most_bytes: int) -> None:
        self._lock = threading.Lock()
        self._left_bytes = most_bytes
        self.variables: dict[str, Variable] = {}
        self.values: dict[str, Bytes] = {}
        #: Rows [begin, end) of each variable that are in pieces.
        self.rows: dict[str, list[tuple[int, int]]] = {}

    def place(self, tensor: pb.PieceTensor, variable: Variable) -> memoryview:
        """The memory of the rows of ``tensor``. Raises DamagedData for rows that do not fit."""
        begin, end = tensor.row_begin, tensor.row_end
        if not 0 <= begin <= end <= variable.rows:
            raise _damaged(f"rows {begin} to {end} of '{variable.name}' {variable.shape}")
        with self._lock:
            if self.variables.setdefault(variable.name, variable) != variable:
                raise _damaged(f"two pieces have different shapes or dtypes of '{variable.name}'")
            if variable.name not in self.values:
                self._left_bytes -= variable.nbytes
                if self._left_bytes < 0:
                    raise _damaged(f"with '{variable.name}' {variable.shape} it is larger than what was committed")
                self.values[variable.name] = np.empty(variable.nbytes, np.uint8)
                self.rows[variable.name] = []
            self.rows[variable.name].append((begin, end))
            width = variable.row_bytes
            return self.values[variable.name][begin * width : end * width].data

    def check_whole(self, variables: int) -> None:
        """Raises DamagedData unless all rows of so many variables are there once."""
        if len(self.variables) != variables:
            raise _damaged(f"{len(self.variables)} variables of {variables} are in its pieces")
        for name, variable in self.variables.items():
            at = 0
            for begin, end in sorted(self.rows[name]):
                if begin != at:
                    raise _damaged(f"rows {min(begin, at)} to {max(begin, at)} of '{name}' are missing or twice there")
                at = end
            if at != variable.rows:
                raise _damaged(f"rows {at} to {variable.rows} of '{name}' are missing")


def receive(
    name: str,
    version: WeightsVersion,
    source: Callable[[int], PieceSource],
    dtype: DType | None,
    base: WholeVersion | None,
    seconds: float,
) -> tuple[WholeVersion, Received]:
    """Receive ``version`` whole, as what changed since ``base`` where that is smaller. ``base`` stays as it is.

    ``source``: the shard of a number. ``seconds``: for each piece. Raises VersionGone, Unavailable, DamagedData
    for what is not as its checksums say.
    """
    stage, received = _Stage(_LARGEST_GROWTH * version.size_bytes), Received()
    calls: list[Any] = []
    manifests: dict[int, pb.PieceManifest] = {}
    checksums: dict[int, bytes] = {}

    def fetch(piece: WeightsPiece) -> None:
        manifest, encoded, size, is_delta = _fetch(
            name, version, piece, source(piece.shard), dtype, base, stage, calls, seconds
        )
        manifests[piece.shard], checksums[piece.shard] = manifest, xxhash.xxh3_128_digest(encoded)
        if is_delta:
            received.delta_bytes += size
        else:
            received.full_bytes += size

    # A signal handler that raises inside gRPC may leave a lock held: threads without signals make the calls.
    with ThreadPoolExecutor(min(MOST_THREADS, max(1, len(version.pieces))), "ps-weights") as pool:
        fetching: list[Future[None]] = [pool.submit(fetch, piece) for piece in version.pieces]
        try:
            done, _ = wait(fetching, return_when=FIRST_EXCEPTION)
            for each in done:
                each.result()
        except BaseException:
            for each in fetching:
                each.cancel()
            for call in calls:
                call.cancel()
            raise
    ordered = [manifests[shard] for shard in sorted(manifests)]
    if len({manifest.variables for manifest in ordered}) > 1:
        raise _damaged("its pieces are of different models")
    stage.check_whole(ordered[0].variables if ordered else 0)
    cursors: dict[str, Cursors] = {}
    for shard, manifest in sorted(manifests.items()):
        for table in manifest.tables:
            cursors.setdefault(table.table, Cursors(version.model, table.table, {})).set(shard, table.cursor)
    return (
        WholeVersion(
            name,
            version.number,
            version.model,
            version.step,
            json.loads(version.metadata or "{}"),
            version.at_seconds,
            tuple(stage.variables[each] for each in sorted(stage.variables)),
            {each: values.data for each, values in stage.values.items()},
            checksums,
            dtype.value if dtype else "",
            {table: each.to_json() for table, each in cursors.items()},
        ),
        received,
    )


def _fetch(
    name: str,
    version: WeightsVersion,
    piece: WeightsPiece,
    source: PieceSource,
    dtype: DType | None,
    base: WholeVersion | None,
    stage: _Stage,
    calls: list[Any],
    seconds: float,
) -> tuple[pb.PieceManifest, bytes, int, bool]:
    """One piece. Returns its manifest, as a message and as bytes, the bytes received, and whether as a delta."""
    request = pb.GetPieceRequest(name=name, number=version.number, checksum=piece.checksum)
    if dtype is not None:
        request.dtype = dtype_to_pb(dtype)
    if base is not None and piece.shard in base.manifests:
        request.have, request.have_checksum = base.number, base.manifests[piece.shard]
    request.bulk = source.bulk
    peer = f"shard {piece.shard} at {source.address}"
    call: grpc.UnaryStreamMultiCallable[bytes, bytes] = source.channel.unary_stream(_GET_PIECE)
    replies = call(request.SerializeToString(), timeout=seconds)
    calls.append(replies)
    try:
        header = _header(next(replies, None), peer)
        manifest = _manifest(header, version, piece, dtype)
        tensors = [(tensor, VARIABLE.from_pb(tensor.variable)) for tensor in manifest.tensors]
        places = [stage.place(tensor, variable) for tensor, variable in tensors]
        total = sum(map(len, places))
        if (dtype is None and total != piece.size_bytes) or total > _LARGEST_GROWTH * piece.size_bytes:
            raise _damaged(f"its tensors have {total} bytes, of {piece.size_bytes}")
        steps = _Steps(header, places, version.number, request.have)
        if not header.HasField("side_channel") or not _from_side(header, steps.pieces, source, peer):
            ChunkReceiver(PIECE_REPLIES, steps.pieces, peer, InternalError).receive(lambda: next(replies, None))
    except grpc.RpcError as error:
        raise translate(error, peer) from error
    finally:
        replies.cancel()
    for index, (tensor, variable) in enumerate(tensors):
        steps.apply(index, partial(_base_part, base, tensor, variable), tensor.checksum)
    return manifest, header.manifest, header.payload_bytes, steps.is_delta


def _from_side(header: pb.PieceHeader, pieces: Sequence[memoryview], source: PieceSource, peer: str) -> bool:
    """Receive the payload from the side channel that is offered; False: it does not work, and chunks come instead.

    Raises Unavailable where it breaks off.
    """
    try:
        offered = side_channel_from_pb(header.side_channel)
        carrier = attached_bulk(offered, source.address, peer, source.security, SIDE_CHANNEL_SECONDS)
    except (OSError, ValueError, PsError):
        source.bulk = False
        return False
    try:
        carrier.receive_into(pieces)
    except OSError as error:
        raise Unavailable(f"the side channel to {peer} broke: {error}", remedy="try again") from error
    finally:
        carrier.shut_down()
        carrier.close()
    return True


def _header(data: bytes | None, peer: str) -> pb.PieceHeader:
    try:
        reply = pb.GetPieceReply.FromString(data or b"")
    except DecodeError:
        reply = pb.GetPieceReply()
    if reply.WhichOneof("body") != "header":
        raise Unavailable(f"{peer} ended the call before a piece came", remedy="try again")
    return reply.header


def _manifest(
    header: pb.PieceHeader, version: WeightsVersion, piece: WeightsPiece, dtype: DType | None
) -> pb.PieceManifest:
    """Raises DamagedData for one of something else."""
    if dtype is None and xxhash.xxh3_128_digest(header.manifest) != piece.checksum:
        raise _damaged(f"the manifest of shard {piece.shard} is not the one that was committed")
    try:
        manifest = pb.PieceManifest.FromString(header.manifest)
    except DecodeError:
        raise _damaged(f"the manifest of shard {piece.shard} cannot be read") from None
    found = manifest.number, manifest.model, manifest.shard
    if found != (version.number, version.model, piece.shard):
        raise _damaged(f"shard {piece.shard} sent the manifest of {found}")
    return manifest


class _Steps:
    """How the tensors of one piece are made of what is received, link by link."""

    def __init__(self, header: pb.PieceHeader, places: Sequence[memoryview], number: int, have: int) -> None:
        """Raises DamagedData for links that do not lead from ``have`` to ``number``, or sizes that cannot be."""
        links = header.links
        first = links[0] if links else pb.PieceLink()
        self.is_delta = any(each != pb.PIECE_ENCODING_WHOLE for each in first.encodings)
        expected = list(range(have + 1, number + 1)) if self.is_delta or len(links) > 1 else [number]
        if [link.number for link in links] != expected or (self.is_delta and not have):
            raise _damaged("its links do not lead from the version that the reader has")
        size = sum(sum(link.sizes) for link in links)
        if header.payload_bytes != size or size > _LONGEST_CHAIN * sum(map(len, places)):
            raise _damaged(f"its payload has {header.payload_bytes} bytes, its parts have {size}")
        self._places = places
        #: For each tensor, what changes it, in order: whether it is all of it, and the bytes.
        self._changes: list[list[tuple[bool, memoryview]]] = [[] for _ in places]
        self.pieces: list[memoryview] = []
        for link in links:
            if not len(link.encodings) == len(link.sizes) == len(places):
                raise _damaged("a link is not of the tensors of its manifest")
            for index, (encoding, size) in enumerate(zip(link.encodings, link.sizes, strict=True)):
                self._add(index, encoding, size, is_last=link.number == number)

    def _add(self, index: int, encoding: int, size: int, *, is_last: bool) -> None:
        place = self._places[index]
        if encoding == pb.PIECE_ENCODING_WHOLE and size == len(place):
            room = place if is_last else np.empty(size, np.uint8).data
        elif encoding == pb.PIECE_ENCODING_DELTA and 0 < size < len(place):
            room = np.empty(size, np.uint8).data
        elif encoding == pb.PIECE_ENCODING_SAME and not size:
            return
        else:
            raise _damaged(f"a tensor of {len(place)} bytes comes as {size} bytes in encoding {encoding}")
        self._changes[index].append((encoding == pb.PIECE_ENCODING_WHOLE, room))
        self.pieces.append(room)

    def apply(self, index: int, base: Callable[[], memoryview], checksum: bytes) -> None:
        """Make one tensor in its place. Raises DamagedData."""
        place, changes = self._places[index], self._changes[index]
        now = base() if not changes or not changes[0][0] else None
        for number, (is_whole, data) in enumerate(changes):
            if is_whole:
                now = data
                continue
            from ps_protocol.wire.deltas import apply_delta  # compiled code

            made = place if number + 1 == len(changes) else np.empty(len(place), np.uint8).data
            try:
                apply_delta(now or b"", data, made)
            except InvalidRequest as error:
                raise _damaged(error.message) from error
            now = made
        if now is not None and now is not place:
            place[:] = now
        if xxhash.xxh3_128_digest(place) != checksum:
            raise _damaged("bytes do not have the checksum that was committed with them")


def _base_part(base: WholeVersion | None, tensor: pb.PieceTensor, variable: Variable) -> memoryview:
    """What the reader has of the rows of ``tensor``. Raises DamagedData where it has something else."""
    values = base.values.get(variable.name) if base else None
    if values is None or len(values) != variable.nbytes:
        raise _damaged(f"it builds on values of '{variable.name}' that are not here")
    return values[tensor.row_begin * variable.row_bytes : tensor.row_end * variable.row_bytes]


def _damaged(reason: str) -> DamagedData:
    return DamagedData(f"a version of published weights is damaged: {reason}", remedy="ask for the full version")
