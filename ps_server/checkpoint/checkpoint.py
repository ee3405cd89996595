"""A committed checkpoint for readers: its contents, verification, and comparison with a model."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path

from ps_protocol.errors import ConfigError, DamagedData, ModelMismatch
from ps_protocol.model.optimizers import EXECUTION_HINTS
from ps_protocol.model.spec import ModelSpec, Options, ShardMap, Slice
from ps_protocol.model.tables import TableSpec
from ps_server.checkpoint.manifest import Manifest, read_manifest, read_seal
from ps_server.checkpoint.record import Base, ModelRecord, Piece
from ps_server.checkpoint.source import OnRead, opened, uncounted
from ps_server.model_differences import in_structure, raise_differences

#: What decides whether rows can be stepped as one slice: names of the state, and the values of its counters.
History = frozenset[tuple[str, str]]


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """One checkpoint. Immutable; used from any thread. Opening reads the manifest only."""

    folder: Path
    manifest: Manifest
    #: Called with the number of bytes of each read, by the thread that reads.
    on_read: OnRead = field(default=uncounted, compare=False)

    @classmethod
    def open(cls, folder: Path, on_read: OnRead = uncounted) -> Checkpoint:
        """Raises ConfigError when ``folder`` is not a complete checkpoint, DamagedData for a manifest that was edited,
        cut short, or written by a newer torch-ps.
        """
        return cls(folder, read_manifest(folder), on_read)

    def model(self, name: str) -> ModelRecord:
        """One model by name. Raises ModelMismatch when there is no model of this name."""
        if name not in self.manifest.models:
            raise ModelMismatch(
                f"{self.folder} has no model '{name}'",
                expected=name,
                actual=", ".join(sorted(self.manifest.models)) or "no model",
                remedy="restore a checkpoint of this job, or give the model the name it was saved under",
            )
        return self.manifest.models[name]

    def check_matches(self, spec: ModelSpec) -> None:
        """Raises one ModelMismatch that lists every difference, when ``spec`` does not fit this checkpoint."""
        check_same_model(self.model(spec.name).shard_map.spec, spec, str(self.folder))

    @property
    def size_bytes(self) -> int:
        """Bytes of its own files, without the manifest."""
        return self.manifest.size_bytes

    def table(self, model: str, table: str) -> TableSpec:
        """One table of a model, as it was declared. Raises ModelMismatch."""
        known = {spec.name: spec for spec in self.model(model).shard_map.spec.tables}
        if table not in known:
            raise ModelMismatch(
                f"model '{model}' in {self.folder} has no table '{table}'",
                expected=table,
                actual=", ".join(sorted(known)) or "no table",
            )
        return known[table]

    def lineage(self, model: str, table: str) -> list[Checkpoint]:
        """The checkpoints that hold rows of ``table``, newest first: itself, and those beside it that it builds on.

        Raises ModelMismatch, and DamagedData when one of them is not there or another than it was.
        """
        found = [self]
        while base := found[-1].model(model).base(table):
            if base.folder in (each.folder.name for each in found):
                raise DamagedData(
                    f"{self.folder} builds on itself",
                    variable=table,
                    expected="older checkpoints, each once",
                    actual=f"{base.folder} again",
                    remedy="restore another checkpoint",
                )
            found.append(found[-1]._open_base(base))
        return found

    def _open_base(self, base: Base) -> Checkpoint:
        folder = self.folder.parent / base.folder
        try:
            actual = read_seal(folder)
        except (ConfigError, DamagedData) as error:
            actual = str(error)
        if actual != base.seal:
            raise DamagedData(
                f"{self.folder} holds only what was touched since {base.folder}, and that is not beside it as it was",
                expected=f"{folder} with a manifest of checksum {base.seal}",
                actual=actual,
                remedy="put that folder back, or restore another checkpoint",
            )
        return Checkpoint.open(folder, self.on_read)

    def verify(self) -> None:
        """Read every byte, also of the tables in checkpoints that this one builds on.

        Raises DamagedData that names the first file and tensor that are not as written.
        """
        for name, model in self.manifest.models.items():
            with opened(self.folder, model) as source:
                for file in model.files:
                    source.check_file(file.name)
                for piece in model.pieces:
                    source.check(piece)
            for table in model.shard_map.spec.tables:
                for checkpoint in self.lineage(name, table.name):
                    checkpoint._verify_table(name, table.name)

    def _verify_table(self, model: str, table: str) -> None:
        record = self.model(model)
        with opened(self.folder, record) as source:
            for part in record.parts_of(table):
                source.check_file(part.file)
                for piece in part.pieces:
                    source.check(piece)

    def aligned(self, shard_map: ShardMap) -> ShardMap:
        """``shard_map`` with slices split where rows of one variable have different counters or only some have state.

        After ``async`` training, slices of one variable may have different numbers of steps; each continues with its
        own. Where all have seen the same, nothing is cut. The slices keep their shards and their order. Raises
        ModelMismatch.
        """
        self.check_matches(shard_map.spec)
        model = self.model(shard_map.spec.name)
        histories = row_histories(model)
        cut: list[Slice] = []
        for piece in shard_map.slices:
            variable = shard_map.spec.variables[piece.variable]
            inner = [
                row
                for (_, row, before), (_, _, after) in pairwise(histories[variable.name])
                if before != after and piece.row_begin < row < piece.row_end
            ]
            borders = [piece.row_begin, *inner, piece.row_end]
            cut += [replace(piece, row_begin=begin, row_end=end) for begin, end in pairwise(borders)]
        return replace(shard_map, slices=tuple(cut))


def row_histories(model: ModelRecord) -> dict[str, list[tuple[int, int, History]]]:
    """For each variable, its saved slices that have rows, in order: (first row, end row, history)."""
    states: dict[tuple[str, tuple[int, int]], list[Piece]] = {}
    for piece in model.pieces:
        if piece.state:
            states.setdefault((piece.variable, piece.rows), []).append(piece)
    histories: dict[str, list[tuple[int, int, History]]] = {v.name: [] for v in model.shard_map.spec.variables}
    for name, rows in sorted((piece.variable, piece.rows) for piece in model.pieces if not piece.state):
        if rows[0] < rows[1]:
            histories[name].append((*rows, frozenset(_history(states.get((name, rows), [])))))
    return histories


def _history(pieces: list[Piece]) -> Iterator[tuple[str, str]]:
    """Counters are scalar tensors: each has one checksum, which identifies the value."""
    for piece in pieces:
        yield piece.state, "" if piece.shape else piece.checksums[0]


def check_same_model(saved: ModelSpec, declared: ModelSpec, where: str) -> None:
    """Raises one ModelMismatch that lists every difference when ``declared`` does not fit ``saved``.

    ``where`` is the checkpoint. The order of variables, policies, and arguments such as the learning rate may differ.
    """
    raise_differences(
        f"model '{declared.name}' is not the one in {where}",
        [*in_structure(saved, declared), *_in_options(saved, declared)],
        "restore a checkpoint of this model, or run the script that the checkpoint was made with",
    )


def _in_options(saved: ModelSpec, declared: ModelSpec) -> Iterator[str]:
    for group, (ours, theirs) in enumerate(zip(saved.group_options, declared.group_options, strict=False)):
        first, later = _fixed(ours), _fixed(theirs)
        for name in sorted(first.keys() & later.keys()):
            if first[name] != later[name]:
                yield f"parameter group {group}: {name} {theirs[name]!r} instead of {ours[name]!r}"


def _fixed(options: Options) -> dict[str, bool]:
    """The arguments that determine which state the optimizer has."""
    return {
        name: bool(value)
        for name, value in options.items()
        if (isinstance(value, bool) or name == "momentum") and name not in EXECUTION_HINTS
    }
