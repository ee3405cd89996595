"""Published versions of weights as directories that SGLang, slime and miles follow: ``weight_v000007`` and a pointer.

A version is a Hugging Face checkpoint directory: safetensors files and ``model.safetensors.index.json``. It is *full*,
an ordinary checkpoint, or a *delta* against the version before it, where the metadata of its index has (all as text):

    version, base_version    six digits, or more
    delta_encoding           "overwrite" or "xor", of all tensors
    compression_format       "zstd"
    checksum_format          "xxh3-128"

A delta has the tensors that changed, each as one zstd frame of dtype U8 under its name, and in the metadata of the
safetensors file the checksum of its new bytes. ``overwrite``: a uint32 count, as many uint32 positions of bytes, and
the new bytes, little-endian; ``xor``: the difference of all bytes. ``latest`` is a text file with the name of the
newest version; ``origin.json`` says whose versions they are. What begins with a dot is of no version. The index of a
full one has a ``checksum`` of all its bytes, which the writer that reads it back compares.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Final, Self, TypeAlias

import numpy as np
import numpy.typing as npt
import xxhash
import zstandard

from ps_protocol.errors import ConfigError, DamagedData, InvalidRequest
from ps_protocol.files import PUBLIC_MODE, full_disk, replace_file, sync
from ps_protocol.model.spec import DType
from ps_server.checkpoint.file_plan import (
    DTYPES,
    INDEX_NAME,
    LENGTH_BYTES,
    MAX_FILE_BYTES,
    FileForm,
    TensorForm,
    grouped,
    index_json,
    numbered,
)
from ps_server.checkpoint.files import output, remove_tree, write_file

Bytes: TypeAlias = npt.NDArray[np.uint8]

LATEST_NAME: Final = "latest"
ORIGIN_NAME: Final = "origin.json"

_NAME = re.compile(r"weight_v(\d{6,})")
_PARTIAL = re.compile(r"\.weight_v\d{6,}\.part")

_LEVEL = 1
"""Of zstd."""

_OVERWRITE_BELOW = 64
"""Where less than one byte of so many changed, ``overwrite`` is written, although it takes 1.6 times the bytes of
``xor``: a reader that died in the middle may apply it again, which gives other values with ``xor``."""

_POSITIONS = 1 << 32

_BLOCK_BYTES = 1 << 20

_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".index.json")

_MOST_BESIDE_BYTES = 1 << 28


@dataclass(frozen=True)
class WrittenVersion:
    """A version that is there now."""

    number: int
    #: The version that it is a delta against; None: it is full.
    base: int | None
    #: Of its tensors, as files and in memory.
    file_bytes: int
    full_bytes: int
    #: Bytes that differ from the base; all of a full version.
    changed_bytes: int


@dataclass(frozen=True)
class Origin:
    """Whose versions a directory has: numbers of another name or job mean other ones."""

    name: str
    job_id: str


@dataclass(frozen=True)
class _Base:
    number: int
    tensors: tuple[TensorForm, ...]
    values: Mapping[str, memoryview]


class WeightDirectory:
    """Writes versions, used by one thread. One process at a time has a directory; a context that ends that.

    Wherever the process is killed, the directory has each version whole or not at all, and every delta has what it
    builds on. One that does not follow the one before, one of other shapes, and one behind files that are damaged is
    full.
    """

    def __init__(
        self,
        path: Path,
        *,
        anchor_every: int = 20,
        keep: int = 50,
        beside: Mapping[str, bytes] = MappingProxyType({}),
        max_file_bytes: int = MAX_FILE_BYTES,
    ) -> None:
        """Open ``path``, which is made if it is missing, and remove what a killed process left.

        ``anchor_every``: of so many versions one is full at least. ``keep``: so many versions stay, and those that they
        build on. ``beside``: files that go into each full version, by name. Raises ConfigError where the directory
        cannot be used or another process has it, DamagedData for an index there that cannot be read, StorageFull.
        """
        if anchor_every < 1 or keep < 1:
            raise ConfigError("of versions one is full and one is kept at least", actual=f"{anchor_every} and {keep}")
        self.path = path
        self._anchor_every = anchor_every
        self._keep = keep
        self._beside = beside
        self._max_file_bytes = max_file_bytes
        self._base: _Base | None = None
        with self._storage():
            path.mkdir(parents=True, exist_ok=True)
            self._lock = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                self._take_lock()
                for left in path.iterdir():
                    if _PARTIAL.fullmatch(left.name):
                        remove_tree(left)
                #: By number, whether it is full.
                self._versions = {number: _is_full(path / _name(number)) for number in _numbers(path)}
                if self._versions:
                    self._point(self.newest)
                #: None: there is no version, or one of torch-ps did not write them.
                self.origin = _origin(path) if self._versions else None
            except BaseException:
                os.close(self._lock)
                raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Give up the directory."""
        os.close(self._lock)

    @property
    def newest(self) -> int:
        """The number of the newest version; 0: there is none."""
        return max(self._versions, default=0)

    @property
    def versions(self) -> Mapping[int, bool]:
        """By number, whether it is full; oldest first."""
        return dict(sorted(self._versions.items()))

    def begin(self, origin: Origin) -> None:
        """Note whose versions are written from now on. Raises ConfigError, StorageFull."""
        with self._storage():
            replace_file(self.path / ORIGIN_NAME, json.dumps(asdict(origin)).encode(), PUBLIC_MODE)
        self.origin = origin

    def write(self, number: int, tensors: Sequence[TensorForm], values: Mapping[str, memoryview]) -> WrittenVersion:
        """Write version ``number``, which is newer than all others, and remove what need not stay.

        ``values``: the bytes of each tensor, not changed until the next call has returned. Raises InvalidRequest for
        another number or size, ConfigError, StorageFull; the versions before it stay.
        """
        if number <= self.newest:
            raise InvalidRequest(
                f"{self.path} takes no version of this number",
                expected=f"{self.newest + 1} or more",
                actual=str(number),
                remedy="give a new directory to a new job",
            )
        for tensor in tensors:
            if (size := values[tensor.name].nbytes) != tensor.nbytes:
                raise InvalidRequest(
                    "the bytes of a tensor are not those of its shape",
                    variable=tensor.name,
                    expected=f"{tensor.nbytes} bytes",
                    actual=f"{size} bytes",
                )
        if self._base is None and self._versions and number == self.newest + 1:
            # Of an earlier process.
            self._base = _read_back(self.path, self.newest)
        target, partial = self.path / _name(number), self.path / f".{_name(number)}.part"
        now = _Base(number, tuple(tensors), values)
        delta = _Delta.between(self._base, now) if self._base and self._may_be_delta(now) else None
        with self._storage():
            self._remove_old()  # first: fewer may be kept now, where the disk was full
            partial.mkdir()
            try:
                size = delta.write(partial) if delta else self._write_full(partial, now)
                sync(partial)
                partial.rename(target)
            except BaseException:
                with suppress(OSError):
                    remove_tree(partial)
                raise
            self._versions[number] = delta is None
            self._base = now
            sync(self.path)
            self._point(number)
            self._remove_old()
        full = sum(tensor.nbytes for tensor in tensors)
        return WrittenVersion(number, delta.base if delta else None, size, full, delta.changed if delta else full)

    def _may_be_delta(self, now: _Base) -> bool:
        base = self._base
        if base is None or base.number + 1 != now.number or _by_name(base.tensors) != _by_name(now.tensors):
            return False
        anchor = max(number for number, full in self._versions.items() if full)
        return now.number - anchor < self._anchor_every

    def _write_full(self, folder: Path, version: _Base) -> int:
        groups = grouped(version.tensors, self._max_file_bytes)
        files = {}
        total = sum(tensor.nbytes for tensor in version.tensors)
        size = 0
        for place, group in enumerate(groups, 1):
            form = FileForm.of(numbered("model", place, len(groups)), group)
            size += _write_tensors(folder, form, version.values)
            files.update(dict.fromkeys(form.at, form.name))
        metadata: dict[str, str | int] = {
            "total_size": total,
            "version": _digits(version.number),
            "checksum": _checksum(version.values),
        }
        write_file(folder / INDEX_NAME, index_json(files, metadata))
        for name, data in self._beside.items():
            write_file(folder / name, data)
        return size

    def _point(self, number: int) -> None:
        replace_file(self.path / LATEST_NAME, _name(number).encode(), PUBLIC_MODE)

    def _remove_old(self) -> None:
        """Keep the newest ones and what they build on. The newer of the others goes first: each left has its base."""
        numbers = sorted(self._versions)
        anchors = [number for number in numbers[: -self._keep + 1 or None] if self._versions[number]]
        for number in reversed([each for each in numbers if anchors and each < anchors[-1]]):
            gone = self.path / f".{_name(number)}.part"
            (self.path / _name(number)).rename(gone)
            del self._versions[number]
            sync(self.path)
            remove_tree(gone)

    def _take_lock(self) -> None:
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(
                f"another process writes the versions in {self.path}", remedy="give each its own directory"
            ) from None

    @contextmanager
    def _storage(self) -> Iterator[None]:
        remedy = "free some space, or keep fewer versions; those that are there stay whole"
        try:
            with full_disk(f"no room to write a version of weights to {self.path}", remedy=remedy):
                yield
        except OSError as error:
            raise ConfigError(
                f"{error.filename or self.path} cannot be used: {error.strerror}",
                remedy="give a directory that can be written",
            ) from error


def files_beside(model: Path) -> dict[str, bytes]:
    """What is beside the weights in a Hugging Face checkpoint: configuration and tokenizer. Raises ConfigError.

    A server that takes over a full version takes its files, too, and removes others.
    """
    found = {}
    try:
        for path in sorted(model.iterdir()):
            if path.is_file() and not path.name.startswith(".") and not path.name.endswith(_WEIGHTS):
                found[path.name] = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"{error.filename or model} cannot be read: {error.strerror}") from error
    if (size := sum(map(len, found.values()))) > _MOST_BESIDE_BYTES or "config.json" not in found:
        raise ConfigError(
            f"{model} is no Hugging Face checkpoint",
            expected=f"config.json, and at most {_MOST_BESIDE_BYTES >> 20} MB beside the weights",
            actual=f"{', '.join(found) or 'nothing'}, {size} bytes",
            remedy="name the folder that the servers start from",
        )
    return found


# -- deltas


@dataclass(frozen=True)
class _Delta:
    number: int
    base: int
    encoding: str
    changed: int
    #: By tensor: its frame, and the checksum of its new bytes.
    frames: Mapping[str, bytes]
    checksums: Mapping[str, str]

    @classmethod
    def between(cls, base: _Base, now: _Base) -> _Delta | None:
        """What changed; None where that is not smaller than all of it."""
        pairs = {
            tensor.name: (_array(base.values[tensor.name]), _array(now.values[tensor.name])) for tensor in now.tensors
        }
        changed = {name: count for name, (old, new) in pairs.items() if (count := _changed(old, new))}
        full = sum(tensor.nbytes for tensor in now.tensors)
        sparse = sum(changed.values()) * _OVERWRITE_BELOW < full
        small = all(len(pairs[name][0]) <= _POSITIONS for name in changed)
        encoding = "overwrite" if sparse and small else "xor"
        encode = _overwritten if encoding == "overwrite" else np.bitwise_xor
        packer = zstandard.ZstdCompressor(level=_LEVEL)
        frames, size = {}, 0
        for name in changed:
            frames[name] = packer.compress(encode(*pairs[name]).data)
            size += len(frames[name])
            if size >= full:
                return None
        sums = {name: xxhash.xxh3_128_hexdigest(pairs[name][1].data) for name in changed}
        return cls(now.number, base.number, encoding, sum(changed.values()), frames, sums)

    def write(self, folder: Path) -> int:
        """Write its files. Returns the bytes of the one with its tensors."""
        forms = [TensorForm(name, DType.UINT8, (len(frame),)) for name, frame in self.frames.items()]
        form = FileForm.of(numbered("model", 1, 1), forms, self.checksums)
        size = _write_tensors(folder, form, {name: memoryview(frame) for name, frame in self.frames.items()})
        metadata = {
            "version": _digits(self.number),
            "base_version": _digits(self.base),
            "delta_encoding": self.encoding,
            "compression_format": "zstd",
            "checksum_format": "xxh3-128",
        }
        write_file(folder / INDEX_NAME, index_json(dict.fromkeys(form.at, form.name), metadata))
        return size


def _blocks(old: Bytes, new: Bytes) -> Iterator[tuple[int, npt.NDArray[np.bool_]]]:
    for at in range(0, len(old), _BLOCK_BYTES):
        yield at, old[at : at + _BLOCK_BYTES] != new[at : at + _BLOCK_BYTES]


def _changed(old: Bytes, new: Bytes) -> int:
    return sum(int(np.count_nonzero(differ)) for _, differ in _blocks(old, new))


def _overwritten(old: Bytes, new: Bytes) -> Bytes:
    positions = np.concatenate([(np.flatnonzero(differ) + at).astype("<u4") for at, differ in _blocks(old, new)])
    count = np.array([len(positions)], "<u4")
    return np.concatenate([count.view(np.uint8), positions.view(np.uint8), new[positions]])


def _applied(encoding: str, old: Bytes, frame: Bytes) -> Bytes:
    """The new bytes of a tensor. Raises ValueError, IndexError, ZstdError for what is no delta of it."""
    size = zstandard.frame_content_size(frame.data)
    if not 0 <= size <= 4 + 5 * len(old):
        raise ValueError(f"a tensor of {len(old)} bytes has a delta of {size} bytes")
    data = np.frombuffer(zstandard.ZstdDecompressor().decompress(frame.data), np.uint8)
    if encoding == "xor":
        return np.bitwise_xor(old, data)
    count = int.from_bytes(data[:4].tobytes(), "little")
    new = old.copy()
    new[data[4 : 4 + 4 * count].view("<u4")] = data[4 + 4 * count :]
    return new


# -- files


def _read_back(path: Path, number: int) -> _Base | None:
    """Version ``number``, from the full one that it builds on; None where its files are damaged or missing."""
    folders, at = [], number
    try:
        while encoding := (metadata := _metadata(path / _name(at))).get("delta_encoding"):
            folders.append((path / _name(at), encoding))
            at, newer = int(metadata["base_version"]), at
            if at >= newer:
                return None
        forms: dict[str, TensorForm] = {}
        values: dict[str, Bytes] = {}
        for form, data, _ in _tensors(path / _name(at)):
            forms[form.name], values[form.name] = form, data
        if _checksum({name: data.data for name, data in values.items()}) != metadata["checksum"]:
            return None
        for folder, encoding in reversed(folders):
            for form, frame, checksum in _tensors(folder):
                new = _applied(encoding, values[form.name], frame)
                if xxhash.xxh3_128_hexdigest(new.data) != checksum:
                    return None
                values[form.name] = new
    except (OSError, LookupError, TypeError, ValueError, AttributeError, zstandard.ZstdError, DamagedData):
        return None
    return _Base(number, tuple(forms.values()), {name: data.data for name, data in values.items()})


def _tensors(folder: Path) -> Iterator[tuple[TensorForm, Bytes, str]]:
    """Each tensor of the safetensors files of a version, its bytes, and the checksum in the metadata of its file.

    Raises ValueError and the like for other files.
    """
    for name in sorted(set(json.loads((folder / INDEX_NAME).read_bytes())["weight_map"].values())):
        data = np.fromfile(folder / Path(name).name, np.uint8)
        begins = LENGTH_BYTES + int.from_bytes(data[:LENGTH_BYTES].tobytes(), "little")
        header = json.loads(data[LENGTH_BYTES:begins].tobytes())
        checksums = header.pop("__metadata__", {})
        for tensor, info in header.items():
            form = TensorForm(tensor, DTYPES[info["dtype"]], tuple(info["shape"]))
            begin, end = info["data_offsets"]
            part = data[begins + begin : begins + end]
            if len(part) != form.nbytes:
                raise ValueError(f"'{tensor}' has {len(part)} bytes of {form.nbytes}")
            yield form, part, checksums.get(tensor, "")


def _write_tensors(folder: Path, form: FileForm, values: Mapping[str, memoryview]) -> int:
    with output(folder / form.name, form.size_bytes) as file:
        file.write(memoryview(form.head), 0)
        for name, at in form.at.items():
            file.write(_array(values[name]).data, at)
    return form.size_bytes


def _array(buffer: memoryview) -> Bytes:
    return np.frombuffer(buffer, np.uint8)


def _checksum(values: Mapping[str, memoryview]) -> str:
    """xxh3-128 of the bytes of all tensors, in the order of their names."""
    digest = xxhash.xxh3_128()
    for name in sorted(values):
        digest.update(_array(values[name]).data)
    return digest.hexdigest()


def _by_name(tensors: Sequence[TensorForm]) -> list[TensorForm]:
    return sorted(tensors, key=lambda tensor: tensor.name)


def _digits(number: int) -> str:
    return f"{number:06d}"


def _name(number: int) -> str:
    return f"weight_v{_digits(number)}"


def _numbers(path: Path) -> list[int]:
    return [int(found[1]) for each in path.iterdir() if (found := _NAME.fullmatch(each.name)) and each.is_dir()]


def _origin(path: Path) -> Origin | None:
    try:
        plain = json.loads((path / ORIGIN_NAME).read_bytes())
        return Origin(str(plain["name"]), str(plain["job_id"]))
    except FileNotFoundError:
        return None
    except (KeyError, TypeError, ValueError) as error:
        raise DamagedData(
            f"{path / ORIGIN_NAME} does not say whose versions are there: {error}",
            remedy="remove it if they are of this job; else give a new directory",
        ) from error


def _is_full(version: Path) -> bool:
    return "delta_encoding" not in _metadata(version)


def _metadata(version: Path) -> Mapping[str, str]:
    """Of the index of a version; nothing without one. Raises DamagedData."""
    index = version / INDEX_NAME
    try:
        return dict(json.loads(index.read_bytes()).get("metadata", {}))
    except FileNotFoundError:
        return {}
    except (AttributeError, TypeError, ValueError) as error:
        raise DamagedData(
            f"{index} is no index of a checkpoint: {error}", remedy=f"remove {version} and those after it"
        ) from error
