"""Remembers in which checkpoints this process has written its tables, so that the next need not hold all of them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

from ps_protocol.errors import ConfigError
from ps_server.checkpoint.format.manifest import read_seal
from ps_server.checkpoint.format.table_part import Base, Mark

if TYPE_CHECKING:
    from ps_server.checkpoint.write.table_copy import TableCapture
    from ps_server.tables.table import ShardTable

_REMEMBERED = 4
"""Checkpoints of a table; those that were not committed count, too."""


@dataclass(frozen=True, slots=True)
class _Written:
    folder: Path
    mark: Mark


class CheckpointBases:
    """Owned by Cuts. A table that came from elsewhere, or from a disk, is not known here: all of it is written next."""

    def __init__(self) -> None:
        self._written: WeakKeyDictionary[ShardTable, list[_Written]] = WeakKeyDictionary()

    def wrote(self, table: ShardTable, folder: Path, copy: TableCapture) -> None:
        """``copy`` was written to ``folder``; whether that becomes a checkpoint, others decide."""
        known = [each for each in self._written.get(table, []) if each.folder != folder]
        self._written[table] = [*known, _Written(folder, copy.mark())][-_REMEMBERED:]

    def bases(self, tables: Iterable[ShardTable], folder: Path, full_every: int) -> dict[ShardTable, tuple[Mark, Base]]:
        """What a checkpoint in ``folder`` may be based on, for those tables that it need not hold whole. Reads files.

        The newest one beside it that is complete, unless ``full_every`` - 1 increments are on top of each other there.
        """
        found = {table: self._base(table, folder, full_every) for table in tables}
        return {table: base for table, base in found.items() if base}

    def _base(self, table: ShardTable, folder: Path, full_every: int) -> tuple[Mark, Base] | None:
        for written in reversed(self._written.get(table, [])):
            if written.folder.parent != folder.parent:
                continue
            try:
                seal = read_seal(written.folder)
            except ConfigError:
                continue
            return (written.mark, Base(written.folder.name, seal)) if written.mark.depth + 1 < full_every else None
        return None
