"""What checkpoints put in the place of values and rows, as the judge knows it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Generic, TypeVar

Piece = tuple[str, int]
"""A row of a variable: the variable's name and the number of the row."""


@dataclass(frozen=True, slots=True)
class Load:
    """Values that a checkpoint put in the place of those of the log.

    What the shard had itself when the checkpoint was made is value and momentum. By piece, what it holds instead
    because the piece lay on another shard then, or had moved before, less that value.
    """

    value: float
    velocity: float
    #: Of the shard map then.
    epoch: int
    brought: Mapping[Piece, float]


@dataclass(frozen=True, slots=True)
class RowLoad:
    """Rows that a checkpoint put in the place of those of the log: by id, what each has more than the log says."""

    epoch: int
    brought: Mapping[int, float]


L = TypeVar("L", Load, RowLoad)


@dataclass(slots=True)
class Loads(Generic[L]):
    """All of one place that have not been lost since, one after another."""

    #: By the version that they came after.
    _at: dict[int, list[L]] = field(default_factory=dict)
    #: The last of them that the shard has said to have: its version, and how many there were of it.
    _acknowledged: tuple[int, int] = (0, 0)

    def add(self, version: int, load: L) -> tuple[int, int]:
        """It is in the log behind the update that made ``version``. Returns which it is, for ``acknowledge``."""
        loads = self._at.setdefault(version, [])
        loads.append(load)
        return version, len(loads)

    def acknowledge(self, load: tuple[int, int]) -> None:
        """The shard says that it has this one: from now on it must not come back without."""
        self._acknowledged = max(self._acknowledged, load)

    def of(self, version: int) -> list[L]:
        """Those that came after ``version`` and before the next."""
        return self._at.get(version, [])

    def bases(self, version: int) -> list[L | None]:
        """By state of ``version``, in order: the load before it that was the last. None: there was none."""
        if not self._at:
            return [None]
        before = max((each for each in self._at if each < version), default=None)
        found: list[L | None] = [None if before is None else self._at[before][-1]]
        found.extend(self.of(version))
        return found

    def first(self, version: int) -> int:
        """The first state of ``version`` that may come back."""
        return self._acknowledged[1] if self._acknowledged[0] == version else 0

    def last(self) -> L | None:
        """The newest; None: there is none."""
        return self._at[max(self._at)][-1] if self._at else None

    def forget_behind(self, version: int, state: int | None = None) -> None:
        """Those after ``version`` are lost, and those after this state of it."""
        self._at = {each: loads for each, loads in self._at.items() if each <= version}
        if state is not None and version in self._at:
            self._at[version] = self._at[version][:state]
            if not self._at[version]:
                del self._at[version]
        if self._acknowledged > (version, len(self.of(version))):
            self._acknowledged = (0, 0)
