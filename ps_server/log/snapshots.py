"""Owns the snapshots of one shard on disk: their parts first, the manifest last, and never two that count."""

from __future__ import annotations

import base64
import mmap
import os
import shutil
import struct
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
import xxhash

from ps_protocol.errors import DamagedData, InvalidRequest
from ps_protocol.files import FILE_MODE, make_private_folder, replace_file, sync
from ps_protocol.logs import EventLogger
from ps_protocol.model.payload_headers import BucketHeader, StateHeader
from ps_protocol.model.spec import ShardMap
from ps_protocol.sealed import load, seal
from ps_protocol.v1 import log_pb2, shard_pb2
from ps_protocol.wire.convert import model as convert_model
from ps_protocol.wire.convert.shard import BUCKET_HEADER, STATE_HEADER
from ps_server.consistency import TrackerState
from ps_server.log.head import REMEDY
from ps_server.log.messages import decode_saved, encode_saved
from ps_server.log.record import write_at
from ps_server.optimizers.state import StateEntry, describe, tensor_bytes
from ps_server.state.blocks import Block
from ps_server.tables.bucket_contents import BucketChanges, BucketContents

logger = EventLogger(__name__)

FORMAT = 5

FIRST_FORMAT = 4
"""Of release 0.1.0: a snapshot has all of its rows."""

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


@dataclass(frozen=True, slots=True)
class RowsPart:
    """Groups of buckets of one model, as one snapshot wrote them."""

    #: Name of the snapshot's folder, and of the file in it.
    folder: str
    file: str
    #: Where the groups are written down.
    index: FilePiece
    #: Bytes of the groups.
    size_bytes: int


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
    #: Where its buckets are, oldest first: each part has what has changed since the one before. The last one has
    #: ``groups``.
    rows: tuple[RowsPart, ...] = ()

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
    """The part of the manifest about ``models``."""
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
            "rows": [
                {
                    "folder": rows.folder,
                    "file": rows.file,
                    "index": _part_to_json(rows.index),
                    "size_bytes": rows.size_bytes,
                }
                for rows in part.rows
            ],
        }
        for part in models
    ]


def models_from_json(items: Sequence[Mapping[str, Any]], folder: str) -> tuple[ModelPart, ...]:
    """Those of the snapshot in ``folder``, without their groups.

    Raises KeyError, TypeError, ValueError, DecodeError, InvalidRequest.
    """
    return tuple(
        ModelPart(
            convert_model.shard_map_from_bytes(base64.b64decode(item["shard_map"])),
            item["initialised"],
            TrackerState.from_json(item["tracker"]),
            item["tracker_number"],
            list(_places(item["blocks"])),
            rows=tuple(_rows_from_json(item, folder)),
        )
        for item in items
    )


def _rows_from_json(item: Mapping[str, Any], folder: str) -> Iterator[RowsPart]:
    if "rows" not in item:  # Release 0.1.0: all of them beside the blocks.
        if item["buckets"]:
            index = _part_from_json(item["buckets"])
            yield RowsPart(folder, _PARTS, index, index.offset)
        return
    for each in item["rows"]:
        if Path(each["folder"]).name != each["folder"] or each["file"] not in (_PARTS, _ROWS):
            raise ValueError(f"rows in {each['folder']}/{each['file']}")
        yield RowsPart(each["folder"], each["file"], _part_from_json(each["index"]), each["size_bytes"])


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


_MANIFEST = "manifest.json"
_PARTS = "blocks.bin"
_ROWS = "rows.bin"
_SPARE = "spare.bin"
_SPARE_ROWS = "spare-rows.bin"
_ALIGNMENT_BYTES = 4096


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A whole one. Its parts are of different ages; with the records up to ``through`` they are one state."""

    folder: Path
    #: Records after this one are needed to bring every part to the same age.
    number: int
    #: The log reached this far when the snapshot was whole; recovery must reach it too.
    through: int
    #: The log behind ``through`` counts; False where it is written during snapshots only.
    log_goes_on: bool
    models: tuple[ModelPart, ...]

    def block_bytes(self, place: BlockPlace) -> memoryview:
        """The bytes of one block and its state. Raises DamagedData when they are not what was written."""
        return _bytes_of(self.folder, place.part)

    def buckets(self, model: ModelPart) -> Iterator[tuple[int, Sequence[tuple[int, BucketContents | BucketChanges]]]]:
        """Group by group, the last record in some buckets of ``model``, and what they hold, by number of their table;
        of what has changed in a bucket since a group before, that alone.

        Raises DamagedData when that is not what was written.
        """
        for part in model.rows:
            path = self.folder.parent / part.folder / part.file
            file = _mapped(path)
            for place in decode_index(_checked(path, file, part.index)):
                data = _checked(path, file, place.part)
                record = log_pb2.BucketsRecord.FromString(bytes(data[: place.message_bytes]))
                yield place.number, decode_saved(record, data[place.message_bytes :], model.shard_map.spec)


class SnapshotWriter:
    """Writes one snapshot, from one thread at a time; closed without ``commit`` it leaves nothing that counts."""

    def __init__(self, root: Path, number: int) -> None:
        """``number``: the last record before anything was copied; those after it will be replayed. Raises OSError."""
        self._root = root
        self._folder = root / f"{number:020}.part"
        for unfinished in root.glob("*.part"):  # of processes that were killed
            shutil.rmtree(unfinished, ignore_errors=True)
        make_private_folder(self._folder)
        spare = root / _SPARE
        path = self._folder / _PARTS
        # Overwriting is much faster than writing a new file; what is left of the last one is not referred to.
        if spare.exists():
            spare.rename(path)
        self._blocks = _PartsFile(path)
        self._rows: _PartsFile | None = None
        self._begun = number
        self._models: list[ModelPart] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close its files, and remove them if they were not committed: large ones take a while."""
        self._blocks.close()
        if self._rows is not None:
            self._rows.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    @property
    def written_bytes(self) -> int:
        """Bytes of the parts so far."""
        return self._blocks.end + (self._rows.end if self._rows is not None else 0)

    def has(self, part: RowsPart) -> bool:
        """Whether the file of ``part`` is still there, and long enough."""
        try:
            return (self._root / part.folder / part.file).stat().st_size >= part.index.offset + part.index.size_bytes
        except OSError:
            return False

    def begin_model(self, part: ModelPart) -> None:
        """The blocks and buckets that follow are of this model; the latter go on from ``part.rows``."""
        self._models.append(part)

    def write_block(self, block: Block, number: int, values: memoryview, entries: Sequence[StateEntry]) -> None:
        """Write one block and its state as they are after record ``number``. Raises OSError."""
        pieces = [values, *(tensor_bytes(tensor) for _, tensor in entries)]
        self.write_copy(block, number, pieces, describe(entries))

    def write_copy(self, block: Block, number: int, pieces: Sequence[memoryview], state: Sequence[StateHeader]) -> None:
        """Write a copy of one block that was received: values, then the tensors of ``state``. Raises OSError."""
        self._models[-1].blocks.append(BlockPlace(block, number, self._blocks.write(pieces), tuple(state)))

    def write_buckets(self, number: int, buckets: Sequence[BucketHeader], pieces: Sequence[memoryview]) -> None:
        """Write some buckets as they are after record ``number``; ``pieces`` are their payloads. Raises OSError."""
        message = log_pb2.BucketsRecord(buckets=BUCKET_HEADER.all_to_pb(buckets)).SerializeToString()
        self._write_group(number, message, pieces)

    def write_saved(self, number: int, group: Sequence[tuple[int, BucketContents | BucketChanges]]) -> None:
        """As ``write_buckets``; of some buckets, what has changed since the parts before. Raises OSError."""
        self._write_group(number, *encode_saved(group))

    def _write_group(self, number: int, message: bytes, pieces: Sequence[memoryview]) -> None:
        if self._rows is None:
            path, spare = self._folder / _ROWS, self._root / _SPARE_ROWS
            if spare.exists():
                spare.rename(path)
            self._rows = _PartsFile(path)
        part = self._rows.write([memoryview(message), *pieces])
        self._models[-1].groups.append(GroupPlace(number, part, len(message)))

    def commit(self, through: int, *, log_goes_on: bool) -> Snapshot:
        """Make it the snapshot that counts, and forget the one before. Raises OSError.

        The log must be on disk up to ``through`` before.
        """
        indexes = [self._write_index(part) for part in self._models]
        for file in (self._blocks, self._rows):
            if file is not None:
                file.finish()
        # A model may have been placed after the copying began: the records that say so are needed.
        number = min([self._begun, *(part.number for part in self._models)])
        folder = self._free_name(through)
        for part, index in zip(self._models, indexes, strict=True):
            if index is not None:
                size_bytes = sum(group.part.size_bytes for group in part.groups)
                part.rows += (RowsPart(folder.name, _ROWS, index, size_bytes),)
        snapshot = Snapshot(folder, number, through, log_goes_on, tuple(self._models))
        replace_file(self._folder / _MANIFEST, seal(FORMAT, _to_json(snapshot)))
        self._folder.rename(folder)
        sync(self._root)
        try:
            self._recycle(folder, {rows.folder for part in self._models for rows in part.rows})
        except OSError as error:
            # The next one tries it again.
            logger.error("snapshot.failed", "what snapshots before %s take is not freed: %s", folder, error)
        return snapshot

    def _write_index(self, part: ModelPart) -> FilePiece | None:
        return self._rows.write([memoryview(encode_index(part.groups))]) if part.groups and self._rows else None

    def _free_name(self, through: int) -> Path:
        """Behind the names of others that were whole at the same record: they count until this one does."""
        same = [path for path in _folders(self._root) if _through(path) == through]
        ordinal = 1 + int(same[-1].name.partition("-")[2] or 0) if same else 0
        return self._root / (f"{through:020}" + (f"-{ordinal:03}" if ordinal else ""))

    def _recycle(self, newest: Path, kept: Collection[str]) -> None:
        """Remove the snapshots before ``newest``, but for the rows in ``kept`` folders."""
        for path in _folders(self._root):
            if path == newest:
                continue
            (path / _MANIFEST).unlink(missing_ok=True)
            parts, rows = path / _PARTS, path / _ROWS
            if path.name in kept:
                if rows.exists() and parts.exists():
                    parts.replace(self._root / _SPARE)
                continue
            if parts.exists():
                parts.replace(self._root / _SPARE)
            if rows.exists():
                rows.replace(self._root / _SPARE_ROWS)
            shutil.rmtree(path, ignore_errors=True)


class _PartsFile:
    """A file of parts that is being written; what is behind them, of an earlier use, does not count."""

    def __init__(self, path: Path) -> None:
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT, FILE_MODE)
        self.end = 0

    def write(self, pieces: Sequence[memoryview]) -> FilePiece:
        part = part_of(self.end, pieces)
        end = write_at(self._descriptor, pieces, self.end)
        self.end = -(-end // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
        return part

    def finish(self) -> None:
        os.ftruncate(self._descriptor, self.end)
        os.fdatasync(self._descriptor)

    def close(self) -> None:
        os.close(self._descriptor)


def _folders(root: Path) -> list[Path]:
    """The folders of snapshots that were finished, oldest first; those without a manifest are being removed."""
    return sorted(path for path in root.glob("[0-9]*") if not path.suffix)


def _through(folder: Path) -> int:
    """The record at which the snapshot in ``folder`` was whole."""
    return int(folder.name.partition("-")[0])


def newest_snapshot(root: Path, at_least: int = 0) -> Snapshot | None:
    """The snapshot that counts, None when there is none; ``at_least``: the one of this record, or a newer one, is here.

    Raises DamagedData.
    """
    folders = [path for path in _folders(root) if (path / _MANIFEST).exists()]
    if not folders or _through(folders[-1]) < at_least:
        if at_least:
            raise _damaged(root / f"{at_least:020}" / _MANIFEST, "the file is missing")
        return None
    path = folders[-1] / _MANIFEST
    return load(path, FORMAT, partial(_from_json, folders[-1]), REMEDY, earlier=FIRST_FORMAT)


def let_log_go_on(snapshot: Snapshot) -> None:
    """From now on the log behind ``snapshot`` counts, too. Raises OSError."""
    path = snapshot.folder / _MANIFEST
    replace_file(path, seal(FORMAT, {**_to_json(snapshot), "log_goes_on": True}))


def _to_json(snapshot: Snapshot) -> Mapping[str, Any]:
    return {
        "number": snapshot.number,
        "through": snapshot.through,
        "log_goes_on": snapshot.log_goes_on,
        "torch": torch.__version__,
        "models": models_to_json(snapshot.models),
    }


def _from_json(folder: Path, data: Mapping[str, Any]) -> Snapshot:
    models = models_from_json(data["models"], folder.name)
    for model in models:
        if model.rows:
            path = folder.parent / model.rows[-1].folder / model.rows[-1].file
            model.groups = decode_index(_checked(path, _mapped(path), model.rows[-1].index))
    return Snapshot(folder, data["number"], data["through"], data["log_goes_on"], models)


def _bytes_of(folder: Path, part: FilePiece) -> memoryview:
    """Raises DamagedData when they are not what was written."""
    path = folder / _PARTS
    return _checked(path, _mapped(path), part)


def _mapped(path: Path) -> memoryview:
    try:
        with path.open("rb") as file:
            return memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
    except (OSError, ValueError) as error:
        raise _damaged(path, str(error)) from error


def _checked(path: Path, data: memoryview, part: FilePiece) -> memoryview:
    found = data[part.offset : part.offset + part.size_bytes]
    if len(found) < part.size_bytes or xxhash.xxh3_64_intdigest(found) != part.checksum:
        raise _damaged(path, f"what begins at byte {part.offset} is not what was written")
    return found


def _damaged(path: Path, what: str) -> DamagedData:
    return DamagedData(
        f"the snapshot at {path} is damaged: {what}",
        remedy=REMEDY,
    )
