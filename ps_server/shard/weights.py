"""Owns the pieces of published weights that this shard holds: takes, keeps and serves them, whole or as deltas."""

from __future__ import annotations

import asyncio
import os
import re
import struct
from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import TypeGuard, cast

import numpy as np
import numpy.typing as npt
import torch
import xxhash
from google.protobuf.message import DecodeError

from ps_protocol.cluster.transport import Transport
from ps_protocol.cluster.view import ClusterView
from ps_protocol.cluster.weights import NAME
from ps_protocol.errors import DamagedData, InvalidRequest, PsError, Unavailable, VersionGone
from ps_protocol.files import full_disk, make_private_folder, replacing
from ps_protocol.logs import EventLogger
from ps_protocol.model.spec import DType
from ps_protocol.v1 import shard_pb2 as pb
from ps_protocol.weights.memory import Room, VersionMemory
from ps_protocol.wire.chunks import PIECE_REPLIES
from ps_protocol.wire.convert.model import VARIABLE, dtype_from_pb, dtype_to_pb
from ps_protocol.wire.convert.step import side_channel_to_pb
from ps_protocol.wire.shared_memory import host_id
from ps_server.shard.registry import Registry
from ps_server.shard.step.model import ShardModel
from ps_server.shard.transport.grpc_stream import Context, reader_gone, write
from ps_server.shard.transport.side_channels import SideChannels
from ps_server.state.region import Region, torch_dtype
from ps_server.tasks import finished, seen

logger = EventLogger(__name__)

FLOATS = (DType.FLOAT32, DType.FLOAT64, DType.FLOAT16, DType.BFLOAT16)
"""What is converted, and what it may be converted to."""

_MAGIC = b"psw1"
_FOOTER = struct.Struct("<4sI16s")
"""At the end of a piece's file: the length of its manifest, which stands before it, and its checksum."""

_PART_BYTES = 1 << 20

_PARTIAL = re.compile(r"\d+\.piece\.\d+\.part")
"""A file that is being written."""

_READ_BYTES = 256 << 10
"""Read from a file at once, to be sent: it stays in the cache of the processor."""

BULK_BYTES = 1 << 20
"""Payloads from this size on may go over a side channel: to open one takes about a millisecond."""

LINGERING = 2
"""Pieces that were removed and are still being read; beyond that the readers of the oldest are ended."""

MOST_LINK_BYTES = 256 << 20
"""What has changed between versions is kept in memory up to here; beyond that what was made first is made again when it
is asked for. The last one made is kept whatever its size.
"""

LinkKey = tuple[int, DType | None]

Positions = Callable[[ShardModel], Awaitable[Sequence[tuple[str, pb.FeedCursor]]]]


class FilePart:
    """Bytes of a piece's file, which are read when they are sent. They are not mapped: where a file was cut, or a
    sector cannot be read, that would end the process.
    """

    __slots__ = ("begin", "end", "path")

    def __init__(self, path: Path, begin: int, end: int) -> None:
        self.path, self.begin, self.end = path, begin, end

    def __len__(self) -> int:
        return self.end - self.begin

    def __getitem__(self, wanted: slice) -> FilePart:
        begin, end, _ = wanted.indices(len(self))
        return FilePart(self.path, self.begin + begin, self.begin + max(begin, end))


Part = memoryview | FilePart


class DamagedPiece(Exception):
    """The bytes of a piece are not as they were written, or cannot be read."""

    def __init__(self, part: Part, reason: str) -> None:
        super().__init__(reason)
        #: The file; None: memory.
        self.path = part.path if isinstance(part, FilePart) else None


class PartReader:
    """Reads parts of pieces. Used by one thread at a time, in ``opened``."""

    def __init__(self, descriptors: Mapping[Path, int]) -> None:
        self._descriptors = descriptors

    def blocks(self, part: Part) -> Iterator[memoryview]:
        """The bytes of ``part``, piece by piece. Raises DamagedPiece."""
        if isinstance(part, memoryview):
            yield part
            return
        for begin in range(part.begin, part.end, _READ_BYTES):
            yield self._read(part, begin, min(part.end, begin + _READ_BYTES))

    def load(self, part: Part) -> memoryview:
        """All bytes of ``part``. Raises DamagedPiece."""
        return part if isinstance(part, memoryview) else self._read(part, part.begin, part.end)

    def _read(self, part: FilePart, begin: int, end: int) -> memoryview:
        data, at = memoryview(np.empty(end - begin, np.uint8).data), 0
        while at < len(data):
            try:
                got = os.preadv(self._descriptors[part.path], [data[at:]], begin + at)
            except OSError as error:
                raise DamagedPiece(part, f"it cannot be read: {error}") from error
            if not got:
                raise DamagedPiece(part, f"it ends at byte {begin + at}")
            at += got
        return data


@contextmanager
def opened(parts: Iterable[Part]) -> Iterator[PartReader]:
    """What reads ``parts``, also where their files are removed meanwhile. Raises DamagedPiece where one is not there;
    Unavailable where it cannot be opened.
    """
    with ExitStack() as stack:
        descriptors: dict[Path, int] = {}
        for part in parts:
            if isinstance(part, memoryview) or part.path in descriptors:
                continue
            try:
                descriptor = os.open(part.path, os.O_RDONLY | os.O_CLOEXEC)
            except FileNotFoundError as error:
                raise DamagedPiece(part, "it is not there any more") from error
            except OSError as error:
                raise Unavailable(f"{part.path} cannot be opened: {error}", remedy="try again") from error
            stack.callback(os.close, descriptor)
            descriptors[part.path] = descriptor
        yield PartReader(descriptors)


@dataclass(frozen=True, slots=True)
class PieceForm:
    """A piece in one dtype. Its bytes never change."""

    manifest: bytes
    checksum: bytes
    tensors: tuple[pb.PieceTensor, ...]
    #: Bytes [begin, end) of each tensor.
    ranges: tuple[tuple[int, int], ...]
    data: Part
    #: Has ``data``; None: that is in a file.
    room: Room | None = None

    @classmethod
    def of(cls, manifest: pb.PieceManifest, data: Room | FilePart, encoded: bytes = b"") -> PieceForm:
        """``encoded``: ``manifest`` as it came; empty: it was made here.

        Raises ValueError where ``data`` is not as long as its tensors.
        """
        encoded = encoded or manifest.SerializeToString(deterministic=True)
        tensors, ranges, at = tuple(manifest.tensors), [], 0
        for tensor in tensors:
            size = (tensor.row_end - tensor.row_begin) * VARIABLE.from_pb(tensor.variable).row_bytes
            ranges.append((at, at + size))
            at += size
        room, part = (data, data.data.data) if isinstance(data, Room) else (None, data)
        if at != len(part):
            raise ValueError(f"{len(part)} bytes in place of {at}")
        return cls(encoded, xxhash.xxh3_128_digest(encoded), tensors, tuple(ranges), part, room)

    def part(self, number: int) -> Part:
        """The bytes of one tensor."""
        begin, end = self.ranges[number]
        return self.data[begin:end]

    def check(self) -> None:
        """Read everything. Raises DamagedPiece, Unavailable."""
        with opened([self.data]) as source:
            for number, tensor in enumerate(self.tensors):
                digest = xxhash.xxh3_128()
                for block in source.blocks(self.part(number)):
                    digest.update(block)
                if digest.digest() != tensor.checksum:
                    name = tensor.variable.name
                    raise DamagedPiece(self.data, f"the bytes of '{name}' do not have their checksum")

    def converted(self, dtype: DType, memory: VersionMemory) -> PieceForm:
        """The same with floating-point values of ``dtype``, in ``memory``.

        Raises DamagedPiece, Unavailable.
        """
        manifest = pb.PieceManifest.FromString(self.manifest)
        parts = []
        with opened([self.data]) as source:
            for number, tensor in enumerate(manifest.tensors):
                known, part = dtype_from_pb(tensor.variable.dtype), source.load(self.part(number))
                if known in FLOATS and known is not dtype and len(part):
                    # A copy: torch wants values at multiples of their size.
                    values = torch.from_numpy(np.frombuffer(part, np.uint8).copy()).view(torch_dtype(known))
                    values = values.to(torch_dtype(dtype))
                    part = memoryview(values.view(torch.uint8).numpy().data)
                if known in FLOATS:
                    tensor.variable.dtype = dtype_to_pb(dtype)
                    tensor.checksum = xxhash.xxh3_128_digest(part)
                parts.append(part)
        room = memory.take(sum(map(len, parts)))
        _fill(room.data, parts)
        return PieceForm.of(manifest, room)


@dataclass(frozen=True, slots=True)
class VersionLink:
    """What leads from one version of a piece to the next."""

    message: pb.PieceLink
    parts: tuple[Part, ...]

    @property
    def size(self) -> int:
        """Of the bytes that are sent."""
        return sum(map(len, self.parts))


class HeldPiece:
    """One version of what this shard holds. What is made of it is made once, when it is first asked for."""

    def __init__(self, native: PieceForm, path: Path | None, *, checked: bool, committed: bytes = b"") -> None:
        """``path``: of its file; None: it is in memory. ``checked``: its bytes are as they were written. ``committed``:
        the checksum by which readers ask for it; empty: that of ``native``, which else was made of it elsewhere.
        """
        self.native = native
        self.committed = committed or native.checksum
        manifest = pb.PieceManifest.FromString(native.manifest)
        self.name, self.number = manifest.name, manifest.number
        self.model, self.epoch = manifest.model, manifest.epoch
        self.path = path
        self.checking: asyncio.Future[None] | None = None
        self.checked = checked
        self.forms: dict[DType, asyncio.Task[PieceForm]] = {}
        #: Of the manifest of each form that was made; None stands for as it is.
        self.checksums: dict[DType | None, bytes] = {None: native.checksum}
        #: By the number of the version that they lead from, and by dtype; None stands for as it is.
        self.links: dict[LinkKey, asyncio.Task[VersionLink | None]] = {}
        self._readers: set[asyncio.Task[None]] = set()
        self._ended = False

    @property
    def is_read(self) -> bool:
        """Whether a reader is receiving it."""
        return bool(self._readers)

    @contextmanager
    def reading(self) -> Iterator[None]:
        """While the running task sends it. Raises Unavailable where ``end_readers`` ends that."""
        task = asyncio.current_task()
        assert task is not None
        self._readers.add(task)
        try:
            yield
        except asyncio.CancelledError:
            if not self._ended:
                raise
            # A call that is cancelled here is not answered at all: its client would wait for its whole time.
            task.uncancel()
            raise Unavailable(
                "a published version was removed while it was sent", remedy="read the newest version"
            ) from None
        finally:
            self._readers.discard(task)

    def end_readers(self) -> None:
        """It is removed: those who still read it ask for another one."""
        self._ended = True
        for task in self._readers:
            task.cancel()


class HeldPieces:
    """Serves pieces of published weights, whole or as what has changed. Used on one event loop.

    Bytes are read, converted and compared in helper threads.
    """

    def __init__(
        self, shard: int, holder: str, side_channels: SideChannels | None = None, turn: asyncio.Lock | None = None
    ) -> None:
        """``shard``: whose pieces these are. ``holder`` names who serves them, in errors. ``turn`` is held while a form
        or a delta is made.
        """
        self._shard = shard
        self._holder = holder
        self._side_channels = side_channels
        #: By name and version.
        self._pieces: dict[tuple[str, int], HeldPiece] = {}
        #: Removed, and still being read; oldest first.
        self._lingering: list[HeldPiece] = []
        #: Those that are kept, in the order in which they were made, with the bytes of memory each takes.
        self._made: list[tuple[HeldPiece, LinkKey, int]] = []
        #: One delta is made at a time, and a form: training needs the cores.
        self._turn = turn or asyncio.Lock()
        shared = side_channels is not None and side_channels.shares_memory
        #: Of pieces and of their forms, by dtype; None stands for as they are.
        self._memory = {dtype: VersionMemory(shared=shared) for dtype in (None, *FLOATS)}
        #: Sent to readers, as deltas and as whole pieces.
        self.delta_bytes = self.full_bytes = 0

    @property
    def held(self) -> list[tuple[str, int, int]]:
        """Name, number and bytes of each piece."""
        return [(name, number, len(piece.native.data)) for (name, number), piece in sorted(self._pieces.items())]

    def _of(self, name: str) -> list[HeldPiece]:
        """The versions of ``name``, by rising number."""
        return [piece for _, piece in sorted(self._pieces.items(), key=itemgetter(0)) if piece.name == name]

    def holds(self, name: str, number: int, checksum: bytes) -> bool:
        """Whether the piece with a manifest of this checksum is here."""
        piece = self._pieces.get((name, number))
        return piece is not None and piece.committed == checksum

    async def close(self) -> None:
        """Make nothing more."""
        tasks = [task for piece in self._pieces.values() for task in (*piece.forms.values(), *piece.links.values())]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def put(self, piece: HeldPiece) -> None:
        """Serve ``piece`` in place of another one of its name and number."""
        key = piece.name, piece.number
        if key in self._pieces:
            self._pieces[key].end_readers()
            self._pieces[key].links.clear()
        self._pieces[key] = piece
        self._drop_made()

    def keep(self, name: str, numbers: Collection[int], newest: int | None = None) -> None:
        """Remove all versions of ``name`` but these, and those above ``newest``."""
        removed = [key for key in self._pieces if key[0] == name and key[1] not in numbers]
        self._remove([key for key in removed if newest is None or key[1] <= newest])

    def _remove(self, keys: Collection[tuple[str, int]]) -> None:
        for key in keys:
            piece = self._pieces.pop(key)
            piece.links.clear()
            for other in self._of(piece.name):
                for link in [link for link in other.links if link[0] == piece.number]:
                    del other.links[link]
            if piece.path is not None:
                with suppress(OSError):  # the next start finds it, and the next version removes it
                    piece.path.unlink(missing_ok=True)
            if piece.is_read:
                self._lingering.append(piece)
        self._drop_made()
        self._lingering = [piece for piece in self._lingering if piece.is_read]
        while len(self._lingering) > LINGERING:
            self._lingering.pop(0).end_readers()

    # -- serving

    async def serve(self, request: pb.GetPieceRequest, context: Context) -> None:
        """Send one piece. Raises VersionGone, InvalidRequest; Unavailable where the reader does not read."""
        piece = self._pieces.get((request.name, request.number))
        if piece is None or piece.committed != request.checksum:
            raise self._gone(request, "it does not hold it")
        dtype = dtype_from_pb(request.dtype) if request.dtype else None
        if dtype is not None and dtype not in FLOATS:
            raise InvalidRequest(
                "weights are not converted to this dtype",
                expected=", ".join(each.value for each in FLOATS),
                actual=dtype.value,
            )
        channels = self._side_channels
        maps = bool(channels and channels.shares_memory and request.host and request.host == host_id())
        with piece.reading():
            try:
                await self._check(piece)
                form = await self._form(piece, dtype)
                if maps and form.room is not None and form.room.segment is not None:
                    await self._lend(context, form, form.room, request.number)
                    return
                links = await self._links(form, dtype, request)
                sent = links or [_whole(form, request.number)]
                await self._send(context, form, sent, is_delta=links is not None, bulk=request.bulk)
            except DamagedPiece as error:
                self._lose(error)
                raise self._gone(request, "its file is damaged") from error

    async def _send(
        self, context: Context, form: PieceForm, links: Sequence[VersionLink], *, is_delta: bool, bulk: bool
    ) -> None:
        """Send a header, and the payload behind it: on a side channel that the reader takes up, else as chunks.

        Raises DamagedPiece.
        """
        size, parts = sum(link.size for link in links), [part for link in links for part in link.parts]
        header = pb.PieceHeader(manifest=form.manifest, links=[link.message for link in links], payload_bytes=size)
        wanted = [Transport.BULK] if bulk and self._side_channels and size >= BULK_BYTES else []
        with (
            opened(parts) as source,
            self._side_channels.offer(wanted) if self._side_channels else nullcontext() as offer,
        ):
            for channel in offer.channels if offer else ():
                header.side_channel.CopyFrom(side_channel_to_pb(channel))
            await write(context, pb.GetPieceReply(header=header).SerializeToString())
            given = 0

            def blocks() -> Iterator[memoryview]:
                nonlocal given
                for block in (block for part in parts for block in source.blocks(part)):
                    given += len(block)
                    yield block

            try:
                if offer and offer.channels and self._side_channels:
                    transport = await offer.taken(self._side_channels.token_seconds)
                    if transport is not None:
                        with reader_gone():
                            if _in_memory(parts):
                                given = size
                                await transport.send_bytes(parts)
                            else:
                                await transport.send_bytes(blocks())
                        return
                chunks = PIECE_REPLIES.chunks(blocks())
                while (chunk := await finished(asyncio.to_thread(next, chunks, None))) is not None:
                    await write(context, chunk)
            finally:
                # Also where the reader, which has everything, has ended the call by now.
                if is_delta:
                    self.delta_bytes += given
                else:
                    self.full_bytes += given

    async def _lend(self, context: Context, form: PieceForm, room: Room, number: int) -> None:
        """Hand the memory of a piece over; the reader asks again for its bytes where it cannot take it."""
        assert self._side_channels is not None
        header = pb.PieceHeader(
            manifest=form.manifest, links=[_whole(form, number).message], payload_bytes=len(form.data)
        )
        with self._side_channels.offer([Transport.SHM], memory=room) as offer:
            header.side_channel.CopyFrom(side_channel_to_pb(offer.channels[0]))
            await write(context, pb.GetPieceReply(header=header).SerializeToString())
            if await offer.taken(self._side_channels.token_seconds) is None:
                raise Unavailable(
                    "the memory of a published version was not taken",
                    expected=f"a connection within {self._side_channels.token_seconds:g} s",
                    remedy="read again",
                )

    async def _check(self, piece: HeldPiece) -> None:
        """Read a piece that came from the disk once, before it is first sent. Raises DamagedPiece."""
        if piece.checked:
            return
        if piece.checking is None:
            piece.checking = asyncio.ensure_future(asyncio.to_thread(piece.native.check))
        await asyncio.shield(piece.checking)
        piece.checked = True

    def _lose(self, error: DamagedPiece) -> None:
        """A damaged piece is not served any more."""
        for key, piece in list(self._pieces.items()):
            if piece.path is not None and piece.path == error.path:
                logger.warning("weights.failed", "%s is damaged, and is not served: %s", piece.path, error)
                self._remove([key])

    async def _sound(self, name: str, number: int) -> HeldPiece | None:
        """A piece that deltas may build on; None: it is not here, or damaged."""
        if (piece := self._pieces.get((name, number))) is not None:
            try:
                await self._check(piece)
            except DamagedPiece as error:
                self._lose(error)
                return None
        return piece

    async def _form(self, piece: HeldPiece, dtype: DType | None) -> PieceForm:
        if dtype is None:
            return piece.native
        if dtype not in piece.forms or _failed(piece.forms[dtype]):
            held = self._of(piece.name)
            at = held.index(piece) if piece in held else len(held)
            for place, other in enumerate(held):
                # They are in memory: those of two versions that follow each other are enough to make deltas.
                if abs(place - at) > 1 and dtype in other.forms and other.forms[dtype].done():
                    del other.forms[dtype]
            piece.forms[dtype] = asyncio.create_task(self._converted(piece, dtype), name="form")
        return await asyncio.shield(piece.forms[dtype])

    async def _converted(self, piece: HeldPiece, dtype: DType) -> PieceForm:
        async with self._turn:
            form = await asyncio.to_thread(piece.native.converted, dtype, self._memory[dtype])
        piece.checksums[dtype] = form.checksum
        return form

    async def _links(
        self, form: PieceForm, dtype: DType | None, request: pb.GetPieceRequest
    ) -> list[VersionLink] | None:
        """From what the reader has to ``form``, where that is smaller than all of it; else None."""
        if not 0 < request.have < request.number:
            return None
        base = await self._sound(request.name, request.have)
        if base is None:
            return None
        try:
            if dtype not in base.checksums:
                await self._form(base, dtype)  # of a version from before this process
        except DamagedPiece as error:
            self._lose(error)
            return None
        if base.checksums.get(dtype) != request.have_checksum:
            return None
        links: list[VersionLink] = []
        for number in [each.number for each in self._of(request.name)]:
            if not request.have < number <= request.number:
                continue
            piece = await self._sound(request.name, number)
            if piece is None:
                continue
            try:
                link = await self._link(base, piece, dtype)
            except DamagedPiece as error:
                self._lose(error)
                return None
            if link is None:
                return None
            links.append(link)
            if sum(each.size for each in links) >= len(form.data):
                return None
            base = piece
        return links

    async def _link(self, base: HeldPiece, piece: HeldPiece, dtype: DType | None) -> VersionLink | None:
        key = base.number, dtype
        if key not in piece.links or _failed(piece.links[key]):
            old, new = await self._form(base, dtype), await self._form(piece, dtype)
            if key not in piece.links or _failed(piece.links[key]):
                making = self._encoded(old, new, piece, key)
                piece.links[key] = asyncio.create_task(making, name="delta")
        return await asyncio.shield(piece.links[key])

    async def _encoded(self, old: PieceForm, new: PieceForm, piece: HeldPiece, key: LinkKey) -> VersionLink | None:
        async with self._turn:
            link = await asyncio.to_thread(encode, old, new, piece.number)
        if link is None or link.size >= len(new.data):
            return None
        # What is kept of a form is a copy: the form itself is not kept. The piece is.
        new_data = new.data.obj if isinstance(new.data, memoryview) else None
        is_form, parts, size = key[1] is not None, list[Part](), 0
        for part in link.parts:
            is_own = isinstance(part, memoryview) and part.obj is not new_data
            if isinstance(part, memoryview) and not is_own and is_form:
                part, is_own = memoryview(bytes(part)), True
            parts.append(part)
            size += len(part) if is_own else 0
        self._made += [(piece, key, size)]
        self._drop_made()
        left = sum(size for _, _, size in self._made)
        while left > MOST_LINK_BYTES and len(self._made) > 1:
            first, its_key, size = self._made.pop(0)
            del first.links[its_key]
            left -= size
        return VersionLink(link.message, tuple(parts))

    def _drop_made(self) -> None:
        """Forget what is no link of a piece any more."""
        self._made = [(piece, key, size) for piece, key, size in self._made if key in piece.links]

    def _gone(self, request: pb.GetPieceRequest, why: str) -> PsError:
        return VersionGone(
            f"version {request.number} of '{request.name[:100]}' is gone from {self._holder}: {why}",
            shard=str(self._shard),
            remedy="read the newest version",
        )


class HeldWeights(HeldPieces):
    """Called by the service, on the shard's event loop. Bytes are copied, summed and compared in helper threads.

    A piece is in a file of the data directory, or in memory where this shard keeps nothing. A file takes its name when
    it is whole; those of versions that were not committed are removed when the next one is taken.
    """

    def __init__(
        self,
        registry: Registry,
        positions: Positions,
        folder: Path | None = None,
        side_channels: SideChannels | None = None,
        *,
        sync: bool = False,
    ) -> None:
        """``positions``: of the feeds of a model's tables. ``folder``: where pieces are kept; None: in memory.
        ``sync``: they survive a loss of power.
        """
        shard = registry.context.shard
        super().__init__(shard, f"shard {shard}", side_channels)
        self._positions = positions
        self._folder = folder
        self._sync = sync
        self._writing: dict[tuple[str, int], asyncio.Future[HeldPiece]] = {}
        registry.watch(self._on_view)

    def recover(self) -> None:
        """Read what is in the folder: at the start, before anything is served.

        A damaged file is removed, and so is one that was not written to its end; this is said of the first. What a
        shard did not write there is left alone.
        """
        if self._folder is None or not self._folder.is_dir():
            return
        for path in sorted(self._folder.glob("*/*")):
            try:
                if _PARTIAL.fullmatch(path.name):
                    path.unlink()  # of a process that was killed while it wrote
                elif path.suffix == ".piece":
                    self._recover(path)
            except OSError as error:
                logger.warning("weights.failed", "%s is no published version, and stays there: %s", path, error)

    def _recover(self, path: Path) -> None:
        """Raises OSError."""
        try:
            form = read_file(path)
            manifest = pb.PieceManifest.FromString(form.manifest)
            if self._path(manifest.name, manifest.number) != path:
                raise DamagedData(f"{path} has version {manifest.number} of '{manifest.name}'")
        except DamagedData as error:
            logger.warning("weights.failed", "a published version is lost, and its file removed: %s", error)
            path.unlink()
            return
        self._pieces[manifest.name, manifest.number] = HeldPiece(form, path, checked=False)

    async def close(self) -> None:
        """Write nothing more."""
        writing = [*self._writing.values()]
        for each in writing:
            each.cancel()
        await asyncio.gather(*writing, return_exceptions=True)
        await super().close()

    # -- taking

    async def take(self, model: ShardModel, name: str, number: int, kept: Collection[int]) -> None:
        """Hold what ``model``, which is paused, has now, and begin to write it. Versions that are not ``kept`` go."""
        if not NAME.fullmatch(name) or not 0 < number < 1 << 63:
            raise InvalidRequest("this is no name and number of a version", actual=f"{name[:100]!r}, {number}")
        # Before the new file is there: one of the same number that was not committed goes, too.
        self.keep(name, kept)
        tables = await self._positions(model)
        path = self._path(name, number)
        # To memory it is copied in about the time that the update would take to copy it: that waits a little instead.
        quick = path is None
        published = await model.take_published(quick=quick)
        manifest = pb.PieceManifest(
            name=name,
            number=number,
            model=model.name,
            shard=self._shard,
            variables=len(model.layout.shard_map.spec.variables),
            tables=[pb.PieceTable(table=table, cursor=cursor) for table, cursor in tables],
            epoch=model.layout.shard_map.epoch,
        )
        for span in model.layout.slices:
            variable = VARIABLE.to_pb(span.variable)
            manifest.tensors.add(variable=variable, row_begin=span.slice.row_begin, row_end=span.slice.row_end)

        key = name, number
        before = self._writing.get(key)

        async def written() -> HeldPiece:
            loop, copied = asyncio.get_running_loop(), asyncio.Event()
            try:
                if before is not None:
                    # Nobody wants it any more, but its thread writes the same file.
                    await asyncio.gather(before, return_exceptions=True)
                write = partial(self._write, path, manifest, published.region)
                writing = loop.run_in_executor(None, write, lambda: loop.call_soon_threadsafe(copied.set))
                writing.add_done_callback(lambda _: copied.set())
                await finished(copied.wait())
            finally:
                published.give_back(quick=quick)
            return HeldPiece(await writing, path, checked=True)

        self._writing[key] = seen(asyncio.create_task(written(), name="piece"))

    async def finish(self, name: str, number: int) -> HeldPiece:
        """The piece that was taken last, once it is written. Raises StorageFull; Unavailable where none was taken."""
        key = name, number
        if (writing := self._writing.get(key)) is None:
            if (piece := self._pieces.get(key)) is not None:
                return piece
            raise self._not_taken(name, number)
        try:
            piece = await asyncio.shield(writing)
        finally:
            is_last = self._writing.get(key) is writing
            if writing.done() and is_last:
                del self._writing[key]
        if is_last:
            self.put(piece)
        elif self._pieces.get(key) is not piece:
            raise self._not_taken(name, number)  # it was taken again meanwhile
        return piece

    def _not_taken(self, name: str, number: int) -> PsError:
        return Unavailable(
            f"shard {self._shard} has not taken version {number} of '{name}'",
            shard=str(self._shard),
            remedy="publish again",
        )

    def _on_view(self, view: ClusterView) -> None:
        """What was published from a model that was released goes with it."""
        if not view.released_models or not self._pieces:
            return
        self._remove([key for key, piece in self._pieces.items() if view.was_released(piece.model, piece.epoch)])

    def _path(self, name: str, number: int) -> Path | None:
        return None if self._folder is None else self._folder / name / f"{number:06d}.piece"

    def _write(
        self, path: Path | None, manifest: pb.PieceManifest, region: Region, copied: Callable[[], object]
    ) -> PieceForm:
        """In a helper thread. ``copied`` is called once ``region`` is not read any more."""
        spans = region.layout.slices
        pieces = region.pieces([(span.begin, span.end) for span in spans])
        if path is None:
            room = self._memory[None].take(sum(map(len, pieces)))
            _fill(room.data, pieces)
            copied()
            at = 0
            for tensor, piece in zip(manifest.tensors, pieces, strict=True):
                tensor.checksum = xxhash.xxh3_128_digest(room.data[at : at + len(piece)].data)
                at += len(piece)
            return PieceForm.of(manifest, room)
        with self._room(path):
            make_private_folder(path.parent)
            with replacing(path, durable=self._sync) as file:
                for tensor, piece in zip(manifest.tensors, pieces, strict=True):
                    digest = xxhash.xxh3_128()
                    for begin in range(0, len(piece), _PART_BYTES):
                        part = piece[begin : begin + _PART_BYTES]
                        digest.update(part)
                        file.write(part)
                    tensor.checksum = digest.digest()
                copied()
                encoded = manifest.SerializeToString(deterministic=True)
                file.write(encoded)
                file.write(_FOOTER.pack(_MAGIC, len(encoded), xxhash.xxh3_128_digest(encoded)))
            return read_file(path)

    def _room(self, path: Path) -> AbstractContextManager[None]:
        return full_disk(
            f"shard {self._shard} has no room for a version of published weights",
            shard=str(self._shard),
            expected="free space in the shard's data directory",
            actual=str(path.parent),
            remedy="free some space, or keep fewer versions",
        )


def encode(old: PieceForm, new: PieceForm, number: int) -> VersionLink | None:
    """What leads from ``old`` to ``new``; None where they do not have the same tensors. Raises DamagedPiece."""
    from ps_protocol.wire.deltas import encode_delta  # compiled code

    if len(old.tensors) != len(new.tensors):
        return None
    message, parts = pb.PieceLink(number=number), list[Part]()
    with opened([old.data, new.data]) as source:
        for index, (was, now) in enumerate(zip(old.tensors, new.tensors, strict=True)):
            if (was.variable, was.row_begin, was.row_end) != (now.variable, now.row_begin, now.row_end):
                return None
            encoding, part = pb.PIECE_ENCODING_SAME, cast("Part", memoryview(b""))
            if was.checksum != now.checksum:
                delta = encode_delta(source.load(old.part(index)), source.load(new.part(index)))
                encoding = pb.PIECE_ENCODING_WHOLE if delta is None else pb.PIECE_ENCODING_DELTA
                part = new.part(index) if delta is None else memoryview(delta)
            message.encodings.append(encoding)
            message.sizes.append(len(part))
            parts.append(part)
    return VersionLink(message, tuple(parts))


def _whole(form: PieceForm, number: int) -> VersionLink:
    sizes = [end - begin for begin, end in form.ranges]
    encodings = [pb.PIECE_ENCODING_WHOLE] * len(sizes)
    return VersionLink(pb.PieceLink(number=number, encodings=encodings, sizes=sizes), (form.data,))


def read_file(path: Path) -> PieceForm:
    """A piece in a file: its manifest is checked, its bytes are not read. Raises DamagedData, OSError."""
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        try:
            if size < _FOOTER.size:
                raise ValueError(f"{size} bytes")
            file.seek(size - _FOOTER.size)
            magic, length, checksum = _FOOTER.unpack(file.read(_FOOTER.size))
            begin = size - _FOOTER.size - length
            if magic != _MAGIC or begin < 0:
                raise ValueError("it has no manifest")
            file.seek(begin)
            encoded = file.read(length)
            if xxhash.xxh3_128_digest(encoded) != checksum:
                raise ValueError("its manifest does not have its checksum")
            return PieceForm.of(pb.PieceManifest.FromString(encoded), FilePart(path, 0, begin))
        except (ValueError, struct.error, DecodeError, InvalidRequest) as error:
            raise DamagedData(
                f"{path} is no piece of a published version: {error}",
                remedy="remove it: readers get the next version whole",
            ) from error


def _fill(data: npt.NDArray[np.uint8], parts: Sequence[memoryview]) -> None:
    """Put ``parts`` into ``data``, end to end."""
    at = 0
    for part in parts:
        data[at : at + len(part)] = np.frombuffer(part, np.uint8)
        at += len(part)


def _in_memory(parts: Iterable[Part]) -> TypeGuard[Sequence[memoryview]]:
    return all(isinstance(part, memoryview) for part in parts)


def _failed(task: asyncio.Task[PieceForm] | asyncio.Task[VersionLink | None]) -> bool:
    return task.done() and (task.cancelled() or task.exception() is not None)
