"""Decides which file is damaged and how, and does it."""

from __future__ import annotations

import random
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

KINDS = {"flip": 6, "cut": 2, "delete": 1, "delete folder": 1}


@dataclass(frozen=True)
class Damage:
    """One damage of one file, or of a folder; ``path`` is inside the directory."""

    kind: str
    path: Path
    #: Of the byte that is changed, or behind the last that stays.
    at: int = 0
    bit: int = 0

    def apply(self, root: Path) -> None:
        path = root / self.path
        if self.kind == "delete folder":
            shutil.rmtree(path)
        elif self.kind == "delete":
            path.unlink()
        elif self.kind == "cut":
            with path.open("r+b") as file:
                file.truncate(self.at)
        else:
            with path.open("r+b") as file:
                file.seek(self.at)
                before = file.read(1)[0]
                file.seek(self.at)
                file.write(bytes([before ^ 1 << self.bit]))

    def __str__(self) -> str:
        where = {"flip": f" bit {self.bit} of byte {self.at}", "cut": f" at byte {self.at}"}.get(self.kind, "")
        return f"{self.kind} {self.path}{where}"


def draw(root: Path, chance: random.Random) -> Damage:
    """A damage for something below ``root``: each kind of file as often as the others."""
    files = [path.relative_to(root) for path in sorted(root.rglob("*")) if path.is_file()]
    # Not a directory as a whole: that is another one, which its cluster knows better than it does.
    folders = [path.relative_to(root) for path in sorted(root.rglob("*/*")) if path.is_dir()]
    kind = chance.choices(list(KINDS), list(KINDS.values()))[0]
    if kind == "delete folder" and folders:
        return Damage(kind, chance.choice(folders))
    if kind == "delete":
        return Damage(kind, _of_a_kind(files, chance))
    filled = [path for path in files if (root / path).stat().st_size]
    path = _of_a_kind(filled, chance)
    data = (root / path).read_bytes()
    if kind == "cut":
        return Damage("cut", path, chance.randrange(len(data)))
    # A segment is mostly zeros that nobody reads: what is written is hit more often.
    at = chance.randrange(len(data))
    if chance.random() < 0.7:
        at = next((each for each in range(at, len(data)) if data[each]), at)
    return Damage("flip", path, at, chance.randrange(8))


def _of_a_kind(files: Sequence[Path], chance: random.Random) -> Path:
    kinds = {path.suffix + path.name[-4:]: path for path in files}
    suffix = chance.choice(sorted(kinds))
    return chance.choice([path for path in files if path.suffix + path.name[-4:] == suffix])
