"""A whole version of published weights in memory, and in a file."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from google.protobuf import json_format

from ps_protocol.errors import DamagedData, PsError
from ps_protocol.feed.cursor import Cursor
from ps_protocol.files import PUBLIC_MODE, replacing
from ps_protocol.model.spec import Variable
from ps_protocol.v1 import common_pb2
from ps_protocol.wire.convert.model import VARIABLE

_MAGIC = b"psv1"
_HEAD = struct.Struct("<4sI16s")
"""At the beginning of a file: the length of the JSON text behind it, and its checksum."""


@dataclass(frozen=True)
class WholeVersion:
    """All variables of one version. Nothing of it changes; its memory is not to be written to."""

    name: str
    number: int
    model: str
    step: int
    metadata: Mapping[str, Any]
    #: Unix time at which it was committed.
    at_seconds: float
    variables: tuple[Variable, ...]
    #: The bytes of each variable, by name.
    values: Mapping[str, memoryview]
    #: By shard, the checksum of the manifest that its piece came with: what a delta goes on from.
    manifests: Mapping[int, bytes] = field(default_factory=dict)
    #: The dtype that was asked for; empty: as on the shards.
    dtype: str = ""
    #: By table, where its feed stood on all shards: a copy of its rows that has come to it fits this version.
    tables: Mapping[str, Cursor] = field(default_factory=dict)
    #: Of the job that made it; empty: it has none.
    job_id: str = ""

    @property
    def size_bytes(self) -> int:
        """Of all values."""
        return sum(map(len, self.values.values()))

    def save(self, path: Path) -> None:
        """Write it to a file, which has this version or the one before, whatever happens. Raises OSError."""
        body = {
            "name": self.name,
            "number": self.number,
            "model": self.model,
            "step": self.step,
            "metadata": self.metadata,
            "at_seconds": self.at_seconds,
            "dtype": self.dtype,
            "variables": [
                json_format.MessageToDict(VARIABLE.to_pb(variable))
                | {"checksum": xxhash.xxh3_128_hexdigest(self.values[variable.name])}
                for variable in self.variables
            ],
            "manifests": {str(shard): checksum.hex() for shard, checksum in self.manifests.items()},
            "tables": self.tables,
            "job_id": self.job_id,
        }
        text = json.dumps(body).encode()
        with replacing(path, PUBLIC_MODE) as file:
            file.write(_HEAD.pack(_MAGIC, len(text), xxhash.xxh3_128_digest(text)))
            file.write(text)
            for variable in self.variables:
                file.write(self.values[variable.name])

    @classmethod
    def load(cls, path: Path) -> WholeVersion | None:
        """The version in a file; None: there is none. Raises DamagedData."""
        try:
            with path.open("rb") as file:
                magic, length, checksum = _HEAD.unpack(file.read(_HEAD.size))
                if magic != _MAGIC or length > path.stat().st_size:
                    raise ValueError("it has another format")
                text = file.read(length)
                if xxhash.xxh3_128_digest(text) != checksum:
                    raise ValueError("its head does not have its checksum")
                body, values, variables = json.loads(text), {}, []
                for each in body.pop("variables"):
                    expected = each.pop("checksum")
                    variable = VARIABLE.from_pb(json_format.ParseDict(each, common_pb2.Variable()))
                    data = np.empty(variable.nbytes, np.uint8)
                    if file.readinto(data.data) != len(data) or xxhash.xxh3_128_hexdigest(data.data) != expected:
                        raise ValueError(f"the values of '{variable.name}' do not have their checksum")
                    values[variable.name] = data.data
                    variables.append(variable)
                manifests = {int(shard): bytes.fromhex(checksum) for shard, checksum in body.pop("manifests").items()}
                return cls(**body, variables=tuple(variables), values=values, manifests=manifests)
        except FileNotFoundError:
            return None
        except (
            *(OSError, ValueError, LookupError, TypeError, AttributeError),
            *(struct.error, json_format.ParseError, PsError),
        ) as error:
            raise DamagedData(
                f"{path} is no version of published weights: {error}",
                remedy="remove it: the newest version comes whole",
            ) from error
