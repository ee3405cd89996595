"""A server that follows ``weight_v`` directories, written from the description of their format, with other libraries.

It does what SGLang's /pull_weights says that it does: takes the newest full version at or below its target, unless it
has a later one, and then every delta up to the target.
"""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import xxhash
import zstandard
from safetensors import deserialize

Tensors = dict[str, tuple[str, tuple[int, ...], bytes]]


class Server:
    """``version`` and ``tensors``: what it serves; by name a tensor's dtype in safetensors, its shape and bytes."""

    def __init__(self) -> None:
        self.version = 0
        self.tensors: Tensors = {}
        #: Of its checkpoint, beside the weights.
        self.files: set[str] = set()
        self.applied: list[str] = []

    def pull(self, source: Path, target: int | None = None) -> None:
        if target is None:
            target = int((source / "latest").read_text().removeprefix("weight_v"))
        start = target
        while start > self.version and _metadata(_folder(source, start)).get("delta_encoding"):
            start -= 1
        if start > self.version:
            self._take(_folder(source, start), start)
        for number in range(self.version + 1, target + 1):
            self._apply(_folder(source, number), number)

    def _take(self, folder: Path, number: int) -> None:
        tensors = {}
        for path in folder.glob("*.safetensors"):
            for name, entry in deserialize(path.read_bytes()):
                tensors[name] = entry["dtype"], tuple(entry["shape"]), bytes(entry["data"])
                assert _index(folder)["weight_map"][name] == path.name
        assert set(tensors) == set(_index(folder)["weight_map"])
        assert _metadata(folder)["total_size"] == sum(len(data) for _, _, data in tensors.values())
        self.tensors, self.version = tensors, number
        self.files = {path.name for path in folder.iterdir() if path.suffix != ".safetensors"}
        self.applied.append(f"full {number}")

    def _apply(self, folder: Path, number: int) -> None:
        said = _metadata(folder)
        assert said.pop("delta_encoding") in ("xor", "overwrite")
        assert said == {
            "version": f"{number:06d}",
            "base_version": f"{self.version:06d}",
            "compression_format": "zstd",
            "checksum_format": "xxh3-128",
        }
        tensors = dict(self.tensors)
        names = set()
        for path in sorted(folder.glob("*.safetensors")):
            blob = path.read_bytes()
            (length,) = struct.unpack_from("<Q", blob)
            header = json.loads(blob[8 : 8 + length])
            checksums = header.pop("__metadata__", {})
            for name, info in header.items():
                begin, end = info["data_offsets"]
                assert (info["dtype"], info["shape"]) == ("U8", [end - begin])
                packed = blob[8 + length + begin : 8 + length + end]
                dtype, shape, old = tensors[name]
                new = _changed(
                    _metadata(folder)["delta_encoding"], old, zstandard.ZstdDecompressor().decompress(packed)
                )
                assert xxhash.xxh3_128(new).hexdigest() == checksums[name]
                tensors[name] = dtype, shape, new
                names.add(name)
        assert names == set(_index(folder)["weight_map"])
        self.tensors, self.version = tensors, number
        self.applied.append(f"delta {number}")


def _changed(encoding: str, old: bytes, delta: bytes) -> bytes:
    if encoding == "xor":
        return bytes(a ^ b for a, b in zip(old, delta, strict=True))
    (count,) = struct.unpack_from("<I", delta)
    positions = struct.unpack_from(f"<{count}I", delta, 4)
    made = bytearray(old)
    for position, value in zip(positions, delta[4 + 4 * count :], strict=True):
        made[position] = value
    return bytes(made)


def _folder(source: Path, number: int) -> Path:
    return source / f"weight_v{number:06d}"


def _index(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "model.safetensors.index.json").read_text())
    return found


def _metadata(folder: Path) -> dict[str, Any]:
    return dict(_index(folder)["metadata"])
