"""Owns the pieces of published weights that this shard holds: takes, keeps and serves them, whole or as deltas."""

from __future__ import annotations

import asyncio
import mmap
import os
import struct
import weakref
from collections.abc import Awaitable, Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

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
from ps_protocol.wire.chunks import PIECE_REPLIES
from ps_protocol.wire.convert.model import VARIABLE, dtype_from_pb, dtype_to_pb
from ps_protocol.wire.convert.step import side_channel_to_pb
from ps_server.shard.execution.tasks import finished, seen
from ps_server.shard.registry import Registry
from ps_server.shard.step.model import ShardModel
from ps_server.shard.transport.grpc_stream import Context, reader_gone, write
from ps_server.shard.transport.side_channels import SideChannels
from ps_server.state.region import Region, torch_dtype

logger = EventLogger(__name__)

FLOATS = (DType.FLOAT32, DType.FLOAT64, DType.FLOAT16, DType.BFLOAT16)
"""What is converted, and what it may be converted to."""

_MAGIC = b"psw1"
_FOOTER = struct.Struct("<4sI16s")
"""At the end of a piece's file: the length of its manifest, which stands before it, and its checksum."""

_PART_BYTES = 1 << 20

BULK_BYTES = 1 << 20
"""Payloads from this size on may go over a side channel: to open one takes about a millisecond."""

LINGERING = 2
"""Pieces that were removed and are still being read; beyond that the readers of the oldest are ended."""

Positions = Callable[[ShardModel], Awaitable[Sequence[tuple[str, pb.FeedCursor]]]]


@dataclass(frozen=True, slots=True)
class PieceForm:
    """A piece in one dtype. Its bytes never change."""

    manifest: bytes
    checksum: bytes
    tensors: tuple[pb.PieceTensor, ...]
    #: Bytes [begin, end) of each tensor.
    ranges: tuple[tuple[int, int], ...]
    data: memoryview

    @classmethod
    def of(cls, manifest: pb.PieceManifest, data: memoryview) -> PieceForm:
        """Raises ValueError where ``data`` is not as long as the tensors of ``manifest``."""
        encoded = manifest.SerializeToString(deterministic=True)
        tensors, ranges, at = tuple(manifest.tensors), [], 0
        for tensor in tensors:
            size = (tensor.row_end - tensor.row_begin) * VARIABLE.from_pb(tensor.variable).row_bytes
            ranges.append((at, at + size))
            at += size
        if at != len(data):
            raise ValueError(f"{len(data)} bytes in place of {at}")
        return cls(encoded, xxhash.xxh3_128_digest(encoded), tensors, tuple(ranges), data)

    def part(self, number: int) -> memoryview:
        """The bytes of one tensor."""
        begin, end = self.ranges[number]
        return self.data[begin:end]

    def check(self) -> None:
        """Read everything. Raises DamagedData."""
        for number, tensor in enumerate(self.tensors):
            if xxhash.xxh3_128_digest(self.part(number)) != tensor.checksum:
                raise DamagedData("its bytes do not have their checksum", variable=tensor.variable.name)

    def converted(self, dtype: DType) -> PieceForm:
        """The same with floating-point values of ``dtype``."""
        manifest = pb.PieceManifest.FromString(self.manifest)
        parts = []
        for number, tensor in enumerate(manifest.tensors):
            known, part = dtype_from_pb(tensor.variable.dtype), self.part(number)
            if known in FLOATS and known is not dtype and len(part):
                # A copy: the file can only be read, and torch wants values at multiples of their size.
                values = torch.from_numpy(np.frombuffer(part, np.uint8).copy()).view(torch_dtype(known))
                values = values.to(torch_dtype(dtype))
                part = memoryview(values.view(torch.uint8).numpy().data)
            if known in FLOATS:
                tensor.variable.dtype = dtype_to_pb(dtype)
                tensor.checksum = xxhash.xxh3_128_digest(part)
            parts.append(part)
        data = np.empty(sum(map(len, parts)), np.uint8)
        _fill(data, parts)
        return PieceForm.of(manifest, data.data)


@dataclass(frozen=True, slots=True)
class VersionLink:
    """What leads from one version of a piece to the next."""

    message: pb.PieceLink
    parts: tuple[memoryview, ...]

    @property
    def size(self) -> int:
        """Of the bytes that are sent."""
        return sum(map(len, self.parts))


class HeldPiece:
    """One version of what this shard holds. What is made of it is made once, when it is first asked for."""

    def __init__(self, native: PieceForm, path: Path | None, *, checked: bool) -> None:
        """``path``: of its file; None: it is in memory. ``checked``: its bytes are as they were written."""
        self.native = native
        manifest = pb.PieceManifest.FromString(native.manifest)
        self.name, self.number = manifest.name, manifest.number
        self.model, self.epoch = manifest.model, manifest.epoch
        self.path = path
        self.checking: asyncio.Future[None] | None = None
        self.checked = checked
        self.forms: dict[DType, asyncio.Task[PieceForm]] = {}
        #: Of the manifest of each form that was made; None stands for as it is.
        self.checksums: dict[DType | None, bytes] = {None: native.checksum}
        #: From the version before, by dtype; None stands for as it is.
        self.links: dict[DType | None, asyncio.Task[VersionLink | None]] = {}
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


class PieceMemory:
    """Memory of pieces. That of the last one that nobody refers to is kept for the next: new pages take longer than the
    copy. From any thread.
    """

    def __init__(self) -> None:
        self._spare: list[mmap.mmap] = []

    def take(self, size: int) -> npt.NDArray[np.uint8]:
        """Memory of ``size`` bytes, with any content. It comes back when nothing refers to it any more."""
        try:
            mapping = self._spare.pop()
        except IndexError:
            mapping = None
        if mapping is None or len(mapping) != size:
            mapping = mmap.mmap(-1, max(size, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        data = np.frombuffer(mapping, np.uint8, size)
        weakref.finalize(data, self._give, mapping).atexit = False
        return data

    def _give(self, mapping: mmap.mmap) -> None:
        self._spare[:] = [mapping]


class HeldWeights:
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
        self._shard = registry.context.shard
        self._positions = positions
        self._folder = folder
        self._side_channels = side_channels
        self._sync = sync
        #: By name and version.
        self._pieces: dict[tuple[str, int], HeldPiece] = {}
        self._writing: dict[tuple[str, int], asyncio.Future[HeldPiece]] = {}
        #: Removed, and still being read; oldest first.
        self._lingering: list[HeldPiece] = []
        self._memory = PieceMemory()
        #: One delta is made at a time, and a form: training needs the cores.
        self._turn = asyncio.Lock()
        #: Sent to readers, as deltas and as whole pieces.
        self.delta_bytes = self.full_bytes = 0
        registry.watch(self._on_view)

    @property
    def held(self) -> list[tuple[str, int, int]]:
        """Name, number and bytes of each piece."""
        return [(name, number, len(piece.native.data)) for (name, number), piece in sorted(self._pieces.items())]

    def recover(self) -> None:
        """Read what is in the folder: at the start, before anything is served. A damaged file is left out and said."""
        if self._folder is None or not self._folder.is_dir():
            return
        for path in sorted(self._folder.glob("*/*")):
            if path.suffix != ".piece":
                path.unlink(missing_ok=True)  # of a process that was killed while it wrote
                continue
            try:
                form = read_file(path)
                manifest = pb.PieceManifest.FromString(form.manifest)
            except (DamagedData, OSError) as error:
                logger.warning("weights.failed", "a published version is lost: %s", error)
                continue
            self._pieces[manifest.name, manifest.number] = HeldPiece(form, path, checked=False)

    async def close(self) -> None:
        """Write nothing more."""
        tasks = [*self._writing.values()]
        for piece in self._pieces.values():
            tasks += [*piece.forms.values(), *piece.links.values()]  # type: ignore[list-item]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

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
            if key in self._pieces:
                self._pieces[key].end_readers()
            self._pieces[key] = piece
        elif self._pieces.get(key) is not piece:
            raise self._not_taken(name, number)  # it was taken again meanwhile
        return piece

    def _not_taken(self, name: str, number: int) -> PsError:
        return Unavailable(
            f"shard {self._shard} has not taken version {number} of '{name}'",
            shard=str(self._shard),
            remedy="publish again",
        )

    def keep(self, name: str, numbers: Collection[int]) -> None:
        """Remove all versions of ``name`` but these."""
        self._remove([key for key in self._pieces if key[0] == name and key[1] not in numbers])

    def _remove(self, keys: Collection[tuple[str, int]]) -> None:
        for key in keys:
            piece = self._pieces.pop(key)
            if piece.path is not None:
                with suppress(OSError):  # the next start finds it, and the next version removes it
                    piece.path.unlink(missing_ok=True)
            if piece.is_read:
                self._lingering.append(piece)
        self._lingering = [piece for piece in self._lingering if piece.is_read]
        while len(self._lingering) > LINGERING:
            self._lingering.pop(0).end_readers()

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
            data = self._memory.take(sum(map(len, pieces)))
            _fill(data, pieces)
            copied()
            at = 0
            for tensor, piece in zip(manifest.tensors, pieces, strict=True):
                tensor.checksum = xxhash.xxh3_128_digest(data[at : at + len(piece)].data)
                at += len(piece)
            return PieceForm.of(manifest, data.data)
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

    # -- serving

    async def serve(self, request: pb.GetPieceRequest, context: Context) -> None:
        """Send one piece. Raises VersionGone, InvalidRequest; Unavailable where the reader does not read."""
        piece = self._pieces.get((request.name, request.number))
        if piece is None or piece.native.checksum != request.checksum:
            raise self._gone(request, "it does not hold it")
        dtype = dtype_from_pb(request.dtype) if request.dtype else None
        if dtype is not None and dtype not in FLOATS:
            raise InvalidRequest(
                "weights are not converted to this dtype",
                expected=", ".join(each.value for each in FLOATS),
                actual=dtype.value,
            )
        with piece.reading():
            await self._check(piece, request)
            form = await self._form(piece, dtype)
            links = await self._links(form, dtype, request)
            is_delta = links is not None
            links = links or [_whole(form, request.number)]
            size = sum(link.size for link in links)
            header = pb.PieceHeader(manifest=form.manifest, links=[link.message for link in links], payload_bytes=size)
            await self._send(context, header, [part for link in links for part in link.parts], bulk=request.bulk)
            if is_delta:
                self.delta_bytes += size
            else:
                self.full_bytes += size

    async def _send(self, context: Context, header: pb.PieceHeader, parts: Sequence[memoryview], *, bulk: bool) -> None:
        """Send the payload behind its header: on a side channel that the reader takes up, else as chunks."""
        wanted = [Transport.BULK] if bulk and self._side_channels and header.payload_bytes >= BULK_BYTES else []
        with self._side_channels.offer(wanted) if self._side_channels else nullcontext() as offer:
            for channel in offer.channels if offer else ():
                header.side_channel.CopyFrom(side_channel_to_pb(channel))
            await write(context, pb.GetPieceReply(header=header).SerializeToString())
            if offer and offer.channels and self._side_channels:
                transport = await offer.taken(self._side_channels.token_seconds)
                if transport is not None:
                    with reader_gone():
                        await transport.send_bytes(parts)
                    return
            for chunk in PIECE_REPLIES.chunks(parts):
                await write(context, chunk)

    async def _check(self, piece: HeldPiece, request: pb.GetPieceRequest) -> None:
        """Read a piece that came from the disk once, before it is first sent."""
        if piece.checked:
            return
        if piece.checking is None:
            piece.checking = asyncio.ensure_future(asyncio.to_thread(piece.native.check))
        try:
            await asyncio.shield(piece.checking)
        except DamagedData as error:
            logger.warning("weights.failed", "%s is damaged, and is not served: %s", piece.path, error)
            if self._pieces.get((request.name, request.number)) is piece:
                del self._pieces[request.name, request.number]
            raise self._gone(request, "its file is damaged") from error
        piece.checked = True

    async def _sound(self, name: str, number: int) -> HeldPiece | None:
        """A piece that deltas may build on; None: it is not here, or damaged."""
        if (piece := self._pieces.get((name, number))) is not None:
            try:
                await self._check(piece, pb.GetPieceRequest(name=name, number=number))
            except VersionGone:
                return None
        return piece

    async def _form(self, piece: HeldPiece, dtype: DType | None) -> PieceForm:
        if dtype is None:
            return piece.native
        if dtype not in piece.forms or _failed(piece.forms[dtype]):
            for other in self._pieces.values():
                # They are in memory: those of two versions that follow each other are enough to make deltas.
                far = other.name == piece.name and abs(other.number - piece.number) > 1
                if far and dtype in other.forms and other.forms[dtype].done():
                    del other.forms[dtype]
            piece.forms[dtype] = asyncio.create_task(self._converted(piece, dtype), name="form")
        return await asyncio.shield(piece.forms[dtype])

    async def _converted(self, piece: HeldPiece, dtype: DType) -> PieceForm:
        async with self._turn:
            form = await asyncio.to_thread(piece.native.converted, dtype)
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
        if base.checksums.get(dtype) != request.have_checksum:
            return None
        links: list[VersionLink] = []
        for number in range(request.have + 1, request.number + 1):
            piece = await self._sound(request.name, number)
            if piece is None:
                return None
            link = await self._link(base, piece, dtype, number)
            if link is None:
                return None
            links.append(link)
            if sum(each.size for each in links) >= len(form.data):
                return None
            base = piece
        return links

    async def _link(self, base: HeldPiece, piece: HeldPiece, dtype: DType | None, number: int) -> VersionLink | None:
        if dtype not in piece.links or _failed(piece.links[dtype]):
            old, new = await self._form(base, dtype), await self._form(piece, dtype)
            if dtype not in piece.links or _failed(piece.links[dtype]):
                making = self._encoded(old, new, number, is_form=dtype is not None)
                piece.links[dtype] = asyncio.create_task(making, name="delta")
        return await asyncio.shield(piece.links[dtype])

    async def _encoded(self, old: PieceForm, new: PieceForm, number: int, *, is_form: bool) -> VersionLink | None:
        async with self._turn:
            link = await asyncio.to_thread(encode, old, new, number)
        if link is None or link.size >= len(new.data):
            return None
        # What is kept of a form is a copy: the form itself is not kept.
        whole = new.data.obj
        parts = (memoryview(bytes(part)) if is_form and part.obj is whole else part for part in link.parts)
        return VersionLink(link.message, tuple(parts))

    def _gone(self, request: pb.GetPieceRequest, why: str) -> PsError:
        return VersionGone(
            f"version {request.number} of '{request.name[:100]}' is gone from shard {self._shard}: {why}",
            shard=str(self._shard),
            remedy="read the newest version",
        )


def encode(old: PieceForm, new: PieceForm, number: int) -> VersionLink | None:
    """What leads from ``old`` to ``new``; None where they do not have the same tensors."""
    from ps_protocol.wire.deltas import encode_delta  # compiled code

    if len(old.tensors) != len(new.tensors):
        return None
    message, parts = pb.PieceLink(number=number), []
    for index, (was, now) in enumerate(zip(old.tensors, new.tensors, strict=True)):
        if (was.variable, was.row_begin, was.row_end) != (now.variable, now.row_begin, now.row_end):
            return None
        encoding, part = pb.PIECE_ENCODING_SAME, memoryview(b"")
        if was.checksum != now.checksum:
            delta = encode_delta(old.part(index), new.part(index))
            whole = delta is None
            encoding = pb.PIECE_ENCODING_WHOLE if whole else pb.PIECE_ENCODING_DELTA
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
            data = memoryview(mmap.mmap(file.fileno(), size, prot=mmap.PROT_READ))
            magic, length, checksum = _FOOTER.unpack(data[-_FOOTER.size :])
            end = size - _FOOTER.size
            encoded = bytes(data[max(0, end - length) : end])
            if magic != _MAGIC or xxhash.xxh3_128_digest(encoded) != checksum:
                raise ValueError("its manifest does not have its checksum")
            return PieceForm.of(pb.PieceManifest.FromString(encoded), data[: end - length])
        except (ValueError, DecodeError, InvalidRequest) as error:
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


def _failed(task: asyncio.Task[PieceForm] | asyncio.Task[VersionLink | None]) -> bool:
    return task.done() and (task.cancelled() or task.exception() is not None)
