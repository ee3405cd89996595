"""Receives the pieces of one version from their shards at once, each into its place of the version that is staged."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import pairwise
from typing import Any, Protocol

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
from ps_protocol.v1 import common_pb2 as pb_common
from ps_protocol.v1 import shard_pb2 as pb
from ps_protocol.weights.memory import VersionMemory
from ps_protocol.weights.version import WholeVersion
from ps_protocol.wire.bulk import attached_bulk, mapped_memory
from ps_protocol.wire.chunks import PIECE_REPLIES, ChunkReceiver
from ps_protocol.wire.convert.model import VARIABLE, dtype_to_pb
from ps_protocol.wire.convert.step import side_channel_from_pb
from ps_protocol.wire.shared_memory import host_id

Bytes = npt.NDArray[np.uint8]

_GET_PIECE = "/ps_protocol.v1.Shard/GetPiece"

_LARGEST_GROWTH = 4
"""A conversion makes at most so many bytes of one: float16 as float64."""

_LONGEST_CHAIN = 2
"""Deltas of several versions, beside all of a piece: a shard sends that where they are not less."""

_ALIGNMENT = 64
"""Of a variable in memory that several have, in bytes."""

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
    #: Whether pieces of this host are to be mapped; not any more once that did not work.
    maps: bool = True
    #: Called with the reason why they are not.
    say: Callable[[str], None] = lambda text: None


@dataclass(slots=True)
class Received:
    """What a version took."""

    delta_bytes: int = 0
    full_bytes: int = 0
    #: How many more bytes all of it would have been.
    saved_bytes: int = 0


class _Stage:
    """The memory of a version on its way. Threads of all its shards put their slices in."""

    def __init__(self, size_bytes: int, memory: VersionMemory) -> None:
        """``size_bytes``: of the version before a conversion."""
        self._lock = threading.Lock()
        self._left_bytes = _LARGEST_GROWTH * size_bytes
        self._take = partial(memory.take, size_bytes)
        #: Of the memory that was taken, what no variable has; None: nothing was received.
        self._room: Bytes | None = None
        self.variables: dict[str, Variable] = {}
        self.values: dict[str, memoryview] = {}
        #: Rows [begin, end) of each variable that are in pieces.
        self.rows: dict[str, list[tuple[int, int]]] = {}

    def place(self, tensor: pb.PieceTensor, variable: Variable) -> memoryview:
        """See Places."""
        return self._place(tensor, variable, None)

    def adopt(self, tensor: pb.PieceTensor, variable: Variable, data: memoryview) -> memoryview:
        """See Places. Values stay there where all of a variable stands in one piece, at a multiple of their size."""
        address = np.frombuffer(data, np.uint8).ctypes.data if len(data) else 0
        if tensor.row_begin == 0 and tensor.row_end == variable.rows and address % variable.dtype.itemsize == 0:
            return self._place(tensor, variable, data)
        place = self._place(tensor, variable, None)
        place[:] = data
        return place

    def _place(self, tensor: pb.PieceTensor, variable: Variable, data: memoryview | None) -> memoryview:
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
                self.values[variable.name] = self._own(variable.nbytes) if data is None else data
                self.rows[variable.name] = []
            self.rows[variable.name].append((begin, end))
            width = variable.row_bytes
            return self.values[variable.name][begin * width : end * width]

    def _own(self, size: int) -> memoryview:
        """Memory for a variable. What does not fit, as values that a conversion made larger, gets some of its own."""
        if self._room is None:
            try:
                self._room = self._take().data
            except (OSError, OverflowError):  # each variable has its own, as far as there is memory
                self._room = np.empty(0, np.uint8)
        padded = -(-size // _ALIGNMENT) * _ALIGNMENT
        if size > len(self._room):
            return np.empty(size, np.uint8).data
        own, self._room = self._room[:size], self._room[padded:]
        return own.data

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


class PieceBase(Protocol):
    """What a reader has of an earlier version of a piece."""

    @property
    def number(self) -> int:
        """Of that version."""
        ...

    @property
    def checksum(self) -> bytes:
        """Of the manifest that it came with."""
        ...

    def part(self, tensor: pb.PieceTensor, variable: Variable) -> memoryview:
        """The values of the rows of ``tensor``. Raises DamagedData where it has something else."""
        ...


class Places(Protocol):
    """Where the tensors of a piece are put. Raises DamagedData for what does not fit."""

    def place(self, tensor: pb.PieceTensor, variable: Variable) -> memoryview:
        """The memory for the rows of ``tensor``, which are written there."""
        ...

    def adopt(self, tensor: pb.PieceTensor, variable: Variable, data: memoryview) -> memoryview:
        """Where the rows of ``tensor`` are, which ``data`` of another process has: there, or a copy."""
        ...


@dataclass(frozen=True)
class ReceivedPiece:
    """A piece as it was committed, or in the dtype that was asked for. Its bytes have their checksums."""

    manifest: pb.PieceManifest
    encoded: bytes
    #: Of ``encoded``.
    checksum: bytes
    #: Of each tensor of the manifest.
    parts: tuple[memoryview, ...]

    @property
    def number(self) -> int:
        """Of its version."""
        return self.manifest.number

    def part(self, tensor: pb.PieceTensor, variable: Variable) -> memoryview:
        """See PieceBase."""
        values = self._by_rows.get((tensor.variable.name, tensor.row_begin, tensor.row_end))
        if values is None or len(values) != (tensor.row_end - tensor.row_begin) * variable.row_bytes:
            raise _other_values(variable)
        return values

    @cached_property
    def _by_rows(self) -> dict[tuple[str, int, int], memoryview]:
        named = ((each.variable.name, each.row_begin, each.row_end) for each in self.manifest.tensors)
        return dict(zip(named, self.parts, strict=True))


def receive(
    name: str,
    version: WeightsVersion,
    source: Callable[[int], PieceSource],
    dtype: DType | None,
    base: WholeVersion | None,
    seconds: float,
    memory: VersionMemory,
) -> tuple[WholeVersion, Received]:
    """Receive ``version`` whole, as what changed since ``base`` where that is smaller. ``base`` stays as it is.

    ``source``: the shard of a number. ``seconds``: for each piece. ``memory``: where values are put. Raises
    VersionGone, Unavailable, DamagedData for what is not as its checksums say.
    """
    stage = _Stage(version.size_bytes, memory)

    def own(piece: WeightsPiece) -> PieceBase | None:
        return _BaseVersion(base, piece.shard) if base is not None and piece.shard in base.manifests else None

    pieces, received = receive_pieces(name, version, source, dtype, own, lambda piece, size: stage, seconds)
    if len({piece.manifest.variables for piece in pieces.values()}) > 1:
        raise _damaged("its pieces are of different models")
    stage.check_whole(next((piece.manifest.variables for piece in pieces.values()), 0))
    cursors: dict[str, Cursors] = {}
    for shard, piece in sorted(pieces.items()):
        for table in piece.manifest.tables:
            made = Cursors(version.model, table.table, {}, version.job_id, piece.manifest.epoch)
            cursors.setdefault(table.table, made).set(shard, table.cursor)
    return (
        WholeVersion(
            name,
            version.number,
            version.model,
            version.step,
            json.loads(version.metadata or "{}"),
            version.at_seconds,
            tuple(stage.variables[each] for each in sorted(stage.variables)),
            stage.values,
            {shard: piece.checksum for shard, piece in pieces.items()},
            dtype.value if dtype else "",
            {table: each.to_json() for table, each in cursors.items()},
            version.job_id,
        ),
        received,
    )


def receive_pieces(
    name: str,
    version: WeightsVersion,
    source: Callable[[int], PieceSource],
    dtype: DType | None,
    base: Callable[[WeightsPiece], PieceBase | None],
    places: Callable[[WeightsPiece, int], Places],
    seconds: float,
) -> tuple[dict[int, ReceivedPiece], Received]:
    """All pieces of ``version``, by shard. ``places``: where one of so many bytes is put. Raises as ``receive``."""
    received = Received()
    calls: list[Any] = []
    pieces: dict[int, ReceivedPiece] = {}

    def fetch(piece: WeightsPiece) -> None:
        made, size, is_delta = _fetch(
            name, version, piece, source(piece.shard), dtype, base(piece), partial(places, piece), calls, seconds
        )
        pieces[piece.shard] = made
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
    whole = sum(len(part) for piece in pieces.values() for part in piece.parts)
    received.saved_bytes = whole - received.delta_bytes - received.full_bytes
    return pieces, received


def _fetch(
    name: str,
    version: WeightsVersion,
    piece: WeightsPiece,
    source: PieceSource,
    dtype: DType | None,
    base: PieceBase | None,
    places_of: Callable[[int], Places],
    calls: list[Any],
    seconds: float,
) -> tuple[ReceivedPiece, int, bool]:
    """One piece, the bytes received, and whether as a delta."""
    request = pb.GetPieceRequest(name=name, number=version.number, checksum=piece.checksum)
    if dtype is not None:
        request.dtype = dtype_to_pb(dtype)
    if base is not None:
        request.have, request.have_checksum = base.number, base.checksum
    request.bulk, request.host = source.bulk, host_id() if source.maps else ""
    peer = f"shard {piece.shard} at {source.address}"
    call: grpc.UnaryStreamMultiCallable[bytes, bytes] = source.channel.unary_stream(_GET_PIECE)
    replies = call(request.SerializeToString(), timeout=seconds)
    calls.append(replies)
    try:
        header = _header(next(replies, None), peer)
        manifest = _manifest(header, version, piece, dtype)
        tensors = [(tensor, VARIABLE.from_pb(tensor.variable)) for tensor in manifest.tensors]
        total = sum((tensor.row_end - tensor.row_begin) * variable.row_bytes for tensor, variable in tensors)
        least, most = (piece.size_bytes,) * 2 if dtype is None else (0, _LARGEST_GROWTH * piece.size_bytes)
        if not least <= total <= most:
            raise _damaged(f"its tensors have {total} bytes, of {piece.size_bytes}")
        if header.side_channel.transport == pb_common.TRANSPORT_SHM:
            if (memory := _mapped(header, source, peer)) is None:
                replies.cancel()
                return _fetch(name, version, piece, source, dtype, base, places_of, calls, seconds)
            steps, parts = None, _adopted(memory, tensors, places_of(total))
        else:
            places = places_of(total)
            parts = [places.place(tensor, variable) for tensor, variable in tensors]
            steps = _Steps(header, parts, version.number, request.have)
        if steps and (not header.HasField("side_channel") or not _from_side(header, steps.pieces, source, peer)):
            ChunkReceiver(PIECE_REPLIES, steps.pieces, peer, InternalError).receive(lambda: next(replies, None))
    except grpc.RpcError as error:
        raise translate(error, peer) from error
    finally:
        replies.cancel()
    for index, (tensor, variable) in enumerate(tensors):
        if steps:
            steps.apply(index, partial(_base_part, base, tensor, variable), tensor.checksum)
        else:
            _check(parts[index], tensor.checksum)
    checksum = xxhash.xxh3_128_digest(header.manifest)
    made = ReceivedPiece(manifest, header.manifest, checksum, tuple(parts))
    return made, header.payload_bytes if steps else 0, bool(steps and steps.is_delta)


def _mapped(header: pb.PieceHeader, source: PieceSource, peer: str) -> memoryview | None:
    """The memory of a piece that a process of this host hands over; None: that does not work, and bytes are to come."""
    try:
        offered = side_channel_from_pb(header.side_channel)
        return mapped_memory(offered, peer, source.security, SIDE_CHANNEL_SECONDS)
    except (OSError, ValueError, PsError) as error:
        source.maps = False
        if not isinstance(error, FileNotFoundError):  # another container of this host
            source.say(f"memory of {peer} cannot be shared, bytes are received: {error}")
        return None


def _adopted(
    memory: memoryview, tensors: Sequence[tuple[pb.PieceTensor, Variable]], places: Places
) -> list[memoryview]:
    """Where the tensors are whose values stand in ``memory``, one behind the other. Raises DamagedData."""
    parts, at = [], 0
    for tensor, variable in tensors:
        size = (tensor.row_end - tensor.row_begin) * variable.row_bytes
        if not 0 <= size <= len(memory) - at:
            raise _damaged(f"its memory has {len(memory)} bytes")
        parts.append(places.adopt(tensor, variable, memory[at : at + size]))
        at += size
    return parts


def _check(values: memoryview, checksum: bytes) -> None:
    if xxhash.xxh3_128_digest(values) != checksum:
        raise _damaged("bytes do not have the checksum that was committed with them")


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
        numbers = [have if self.is_delta or len(links) > 1 else 0, *(link.number for link in links)]
        rising = all(before < after for before, after in pairwise(numbers))
        if not rising or numbers[-1] != number or (self.is_delta and not have):
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
        _check(place, checksum)


@dataclass(frozen=True, slots=True)
class _BaseVersion:
    """The part of a whole version that came as one piece."""

    version: WholeVersion
    shard: int

    @property
    def number(self) -> int:
        return self.version.number

    @property
    def checksum(self) -> bytes:
        return self.version.manifests[self.shard]

    def part(self, tensor: pb.PieceTensor, variable: Variable) -> memoryview:
        values = self.version.values.get(variable.name)
        if values is None or len(values) != variable.nbytes:
            raise _other_values(variable)
        return values[tensor.row_begin * variable.row_bytes : tensor.row_end * variable.row_bytes]


def _base_part(base: PieceBase | None, tensor: pb.PieceTensor, variable: Variable) -> memoryview:
    """What the reader has of the rows of ``tensor``. Raises DamagedData where it has something else."""
    if base is None:
        raise _other_values(variable)
    return base.part(tensor, variable)


def _other_values(variable: Variable) -> DamagedData:
    return _damaged(f"it builds on values of '{variable.name}' that are not here")


def _damaged(reason: str) -> DamagedData:
    return DamagedData(f"a version of published weights is damaged: {reason}", remedy="ask for the full version")
