"""Decides which rows of files are leased together, and their order in each epoch. Pure."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch

WINDOW_ROWS = 1 << 16
"""Rows that are mixed with each other, and decoded at a time, unless the caller says."""

LEAST_PARTS = 64
"""There are about so many parts at least, so that all workers have some and end together."""

LEAST_ROWS = 64
"""Of a part, unless a run has fewer: each takes a message to the coordinator."""

MOST_ROWS = 1 << 20
"""Of a part: another worker trains all of it again when its holder is killed."""


@dataclass(frozen=True, slots=True)
class Group:
    """What a file can be read from: a row group of Parquet, a range of bytes of text."""

    #: Index of the file.
    file: int
    #: Its number in the file.
    number: int
    #: None: not known before it is read.
    rows: int | None
    #: The most rows that it may have.
    bound: int


Run = tuple[Group, ...]
"""Groups whose rows follow each other. They are mixed within windows; a small run is one window."""


class FileLayout:
    """The rows of all files in runs, and these in parts of ``unit`` rows, the last of each run perhaps of fewer.

    Position ``i * unit + k`` of an epoch is row k of part i in the order of that epoch; a part with fewer rows takes
    ``unit`` positions, too. So leases of ``unit`` items are whole parts in every order, and rows need not be counted
    before they are read: a run of text is one part.
    """

    def __init__(self, groups: Sequence[Group], seed: int | None, window: int = WINDOW_ROWS) -> None:
        """``seed`` of the order; None: the order of the files. ``window``: rows that are mixed."""
        self._seed = seed
        self.window = window
        self.runs = _runs([group for group in groups if group.bound], seed, window)
        bounds = [sum(group.bound for group in run) for run in self.runs]
        rows = [group.rows for group in groups if group.bound]
        known = [each for each in rows if each is not None]
        #: Rows of all files; None if not known.
        self.rows = sum(known) if len(known) == len(rows) else None
        #: Positions of a part.
        largest = max([1, *bounds])
        self.unit = largest if self.rows is None else _unit(self.rows, largest, window)
        self._parts = [-(-bound // self.unit) for bound in bounds]

    @property
    def shuffled(self) -> bool:
        """Whether rows are mixed."""
        return self._seed is not None

    @property
    def length(self) -> int:
        """Positions of an epoch."""
        return sum(self._parts) * self.unit

    def order(self, epoch: int) -> list[tuple[int, int]]:
        """The parts in the order of ``epoch``, the same on every worker: each as a run and its first row there.

        The parts of a run follow each other, so that a reader goes on where it is.
        """
        count = len(self.runs)
        runs = range(count) if self._seed is None else permutation(count, self._seed, epoch).tolist()
        return [(run, part * self.unit) for run in runs for part in range(self._parts[run])]

    def mixed(self, epoch: int, run: int, window: int, rows: int) -> torch.Tensor | None:
        """The order of the ``rows`` rows of a window of a run; None: as they are."""
        return None if self._seed is None else permutation(rows, self._seed, epoch, run, window)


def permutation(count: int, *key: int) -> torch.Tensor:
    """A random order of ``count`` things, int64 [count], the same for the same ``key``."""
    digest = hashlib.blake2b(repr(key).encode(), digest_size=8).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)
    return torch.randperm(count, generator=generator)


def _runs(groups: Sequence[Group], seed: int | None, window: int) -> list[Run]:
    """Small groups together, up to a window, drawn from all files where rows are mixed; others alone."""
    drawn = list(groups) if seed is None else [groups[i] for i in permutation(len(groups), seed, -1).tolist()]
    runs: list[Run] = []
    packed: list[Group] = []
    rows = 0
    for group in drawn:
        if group.rows is None:
            runs.append((group,))
            continue
        if packed and rows + group.rows > window:
            runs.append(tuple(packed))
            packed, rows = [], 0
        packed.append(group)
        rows += group.rows
    if packed:
        runs.append(tuple(packed))
    return runs


def _unit(rows: int, largest_run: int, window: int) -> int:
    """Rows of a part: whole windows where it has several, so that each is decoded by one worker."""
    unit = min(largest_run, MOST_ROWS, max(LEAST_ROWS, -(-rows // LEAST_PARTS)))
    return unit if unit < window or unit == largest_run else unit // window * window
