"""The folders that a shard may write checkpoints to and read them from."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from ps_protocol.errors import InvalidRequest
from ps_server.checkpoint.format.validation import plain_name


@dataclass(frozen=True, slots=True)
class CheckpointRoots:
    """The directories of ``--checkpoint-dir``, resolved. Used from any thread; touches the disk."""

    folders: tuple[Path, ...] = ()

    @classmethod
    def of(cls, folders: Iterable[Path]) -> Self:
        """``folders`` need not exist yet."""
        return cls(tuple(folder.absolute().resolve() for folder in folders))

    def confine(self, text: str) -> Path:
        """The folder of a checkpoint, given by another process.

        Raises InvalidRequest unless it is below one of these folders and is not a link.
        """
        path = Path(text).absolute() if "\0" not in text else Path()
        folder = path.parent.resolve() / path.name
        inside = any(folder.parent == root or root in folder.parent.parents for root in self.folders)
        if not (plain_name(path.name) and inside) or folder.is_symlink():
            raise InvalidRequest(
                "a checkpoint is to be in a folder that this shard does not use",
                expected="a folder below " + " or ".join(map(str, self.folders))
                if self.folders
                else "no folder: this shard was started without --checkpoint-dir",
                actual=text[:500],
                remedy="start ps-server with --checkpoint-dir, the same as ps-coordinator's",
            )
        return folder
