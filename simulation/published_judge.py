"""Judges published weights: which versions there are, that each is one cut of all shards, and what readers hold."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import NoReturn

from ps_protocol.cluster.weights import ShardHome, WeightsPiece, WeightsVersion
from simulation.loads import Piece
from simulation.places import Places
from simulation.truth import Name, Update

PRECISION = {"float64": 1e-9, "float32": 1e-6}
"""By dtype in which values are read: how far they may be from what was computed in float64."""


Values = tuple[bytes, list[list[float]]]
"""Of a variable: its bytes, and the elements of each row."""


@dataclass(frozen=True, slots=True)
class TakenPiece:
    """What a shard has taken of a version, at one point of its log."""

    #: The judge's number of the shard; None: another process had its place by then.
    place: int | None
    #: Shards that hold slices of the model.
    holders: frozenset[int]
    version: int
    #: That made ``version``; None: that is 0.
    last: Update | None
    #: Pushes in it.
    pushes: frozenset[Name]
    #: The value of each row of a variable; NaN: not known.
    values: Mapping[Piece, float]


@dataclass(slots=True)
class _Version:
    """A version that the coordinator has committed."""

    told: WeightsVersion
    keep: int
    #: By shard.
    pieces: Mapping[int, TakenPiece]
    #: By dtype: the bytes of each variable as the first reader had them.
    seen: dict[str, Mapping[str, bytes]] = field(default_factory=dict)


class PublishedJudge:
    """Part of the judge, of one job and one name. Every method raises Violation."""

    def __init__(self, fail: Callable[[str], NoReturn], places: Places, *, exact: bool, job: int) -> None:
        """``exact``: all elements of a slice have the same value; else the judge knows their mean. ``job``: which one
        of the run it is.
        """
        self.job = job
        self._fail = fail
        self._places = places
        self._exact = exact
        #: By shard and number of a version: what was taken last, and by checksum too what was written.
        self._taken: dict[tuple[int, int], TakenPiece] = {}
        self._written: dict[tuple[int, int, bytes], TakenPiece] = {}
        self._versions: dict[int, _Version] = {}
        #: The last that was committed, and the last that anybody was told of.
        self._newest = self._told = 0
        #: By shard: the data directory that serves it; and those, by shard, in whose place another one has come.
        self._homes: dict[int, str] = {}
        self._left: set[tuple[int, str]] = set()
        #: Of the job; empty: it has committed none.
        self.job_id = ""
        #: Another job has taken its place: all that it published may be gone.
        self.is_over = False
        #: The newest version when it first told a reader that it is finished; None: it has not. A worker that comes
        #: later begins it again, and who has been told does not follow that.
        self.finished_with: int | None = None

    # Shards

    def taken(self, shard: int, number: int, piece: TakenPiece) -> None:
        """A shard that is paused has taken its piece of a version, and writes it from now on."""
        self._taken[shard, number] = piece

    def written(self, shard: int, number: int, checksum: bytes) -> None:
        """A shard says that it has written its piece."""
        if (piece := self._taken.get((shard, number))) is None:
            self._fail(f"shard {shard} says that it has a piece of version {number}, which it has not taken")
        self._written[shard, number, checksum] = piece

    def denied(self, shard: int, number: int, checksum: bytes) -> None:
        """A shard tells a reader that it does not have this piece."""
        version = self._versions.get(number)
        if version is None or self._may_be_gone(number):
            return
        if any(piece.shard == shard and piece.checksum == checksum for piece in version.told.pieces):
            self._fail(f"shard {shard} does not have its piece of version {number}, which is kept")

    # The coordinator

    def restarted(self, newest: int, versions: Iterable[WeightsVersion]) -> None:
        """A coordinator begins with these: nothing that was told is forgotten."""
        if newest < self._told:
            self._fail(f"the coordinator restarted at version {newest} of the weights, it had told {self._told}")
        self._newest = newest
        self._versions = {number: each for number, each in self._versions.items() if number <= newest}
        found = {each.number: each for each in versions}
        for number, version in self._versions.items():
            if number in found and found[number] != version.told:
                self._fail(f"the coordinator restarted with {found[number]} in place of {version.told}")
            if number not in found and not self._may_be_gone(number):
                self._fail(f"the coordinator restarted without version {number} of the weights, which is kept")

    def homes(self, homes: Mapping[int, ShardHome]) -> None:
        """Where shards are now."""
        for shard, home in homes.items():
            if (before := self._homes.get(shard, home.directory)) != home.directory:
                self._left.add((shard, before))
            self._homes[shard] = home.directory

    def committed(self, version: WeightsVersion, keep: int) -> None:
        """All shards have their piece of it, all of one point of the job, and its number follows the one before."""
        if version.number != self._newest + 1:
            self._fail(f"version {version.number} of the weights is committed after {self._newest}")
        if version.job_id != (self.job_id or version.job_id):
            self._fail(f"version {version.number} of the weights is of job {version.job_id}, not of {self.job_id}")
        self.job_id = version.job_id
        pieces = {each.shard: self._piece(version.number, each) for each in version.pieces}
        for piece in pieces.values():
            if piece.holders != pieces.keys():
                self._fail(
                    f"version {version.number} of the weights has pieces of shards {sorted(pieces)}; its model is on "
                    f"{sorted(piece.holders)}"
                )
        self._newest = version.number
        self._versions[version.number] = _Version(version, keep, pieces)
        self._check_one_point(version.number, pieces)

    def _piece(self, number: int, piece: WeightsPiece) -> TakenPiece:
        found = self._written.get((piece.shard, number, piece.checksum))
        if found is None:
            self._fail(f"version {number} of the weights has a piece that shard {piece.shard} has not written")
        return found

    def told(self, have: int, version: WeightsVersion | None, newest: int) -> None:
        """A reader that has version ``have``, or asks for any, is told of ``version``."""
        self._told = max(self._told, newest)
        if newest > self._newest:
            self._fail(f"a reader is told of version {newest} of the weights; {self._newest} is the newest")
        if version is not None:
            known = self._versions.get(version.number)
            if known is None or known.told != version:
                self._fail(f"a reader is told of {version}, which was not committed")
            if version.number <= have:
                self._fail(f"a reader that has version {have} is told of version {version.number}")

    # Workers and readers

    def published(self, number: int, step: int, *, committed: bool) -> None:
        """The publisher is told that what it gave ``step`` is this version."""
        if not committed:
            return
        self._told = max(self._told, number)
        version = self._versions.get(number)
        if version is None or version.told.step != step:
            self._fail(f"the publisher of step {step} is told that it is version {number}, which is {version}")

    def read(self, reader: str, number: int, step: int, dtype: str, values: Mapping[str, Values]) -> None:
        """A reader holds this version. ``values``: of each variable."""
        version = self._versions.get(number)
        if version is None or number > self._told:
            self._fail(f"{reader} has version {number} of the weights, which nobody was told of")
        if step != version.told.step:
            self._fail(f"{reader} has version {number} of the weights with step {step}; it is of {version.told.step}")
        data = {name: each for name, (each, _) in values.items()}
        if version.seen.setdefault(dtype, data) != data:
            self._fail(f"{reader} has other bytes of version {number} than another reader")
        rows = {(name, row): each for name, (_, elements) in values.items() for row, each in enumerate(elements)}
        expected = {row for piece in version.pieces.values() for row in piece.values}
        if rows.keys() != expected:
            self._fail(f"{reader} has version {number} with rows {sorted(rows)} in place of {sorted(expected)}")
        for shard, piece in version.pieces.items():
            self._check_values(f"{reader} has version {number} of the weights", shard, piece, rows, PRECISION[dtype])
        self._check_one_point(number, version.pieces)

    def gone(self, reader: str, number: int) -> None:
        """A reader is told that this version is gone."""
        if not self._may_be_gone(number):
            self._fail(f"{reader} is told that version {number} of the weights is gone, which is kept")

    def ended(self, reader: str, number: int) -> None:
        """A reader has followed a job to its end, and has this version."""
        last = self._newest if self.finished_with is None else self.finished_with
        if self._is_behind(number, last):
            self._fail(f"{reader} has version {number} of the weights at the end of the job, and not {last}")

    def says_finished(self) -> None:
        """The job tells a reader that it is finished."""
        if self.finished_with is None:
            self.finished_with = self._newest

    def is_behind(self, number: int) -> bool:
        """Whether there is a newer version."""
        return self._is_behind(number, self._newest)

    def _is_behind(self, number: int, last: int) -> bool:
        return not all(map(self._may_be_gone, range(number + 1, last + 1)))

    def _may_be_gone(self, number: int) -> bool:
        """Whether no promise keeps a version: newer ones are, or what held it is not there any more."""
        version = self._versions.get(number)
        if self.is_over or version is None or number <= self._newest - self._versions[self._newest].keep:
            return True
        return any(
            (each.shard, each.directory) in self._left
            or (place := version.pieces[each.shard].place) is None
            or self._places.is_released(place)
            for each in version.told.pieces
        )

    def _check_values(
        self, what: str, shard: int, piece: TakenPiece, rows: Mapping[Piece, list[float]], precision: float
    ) -> None:
        known = {row: value for row, value in piece.values.items() if not math.isnan(value)}
        if self._exact:
            for row, value in known.items():
                if any(not _close(each, value, precision) for each in rows[row]):
                    self._fail(
                        f"{what} with {rows[row]} in {row} of shard {shard} in place of {value}, its version "
                        f"{piece.version}"
                    )
        elif known:
            found = [each for row in known for each in rows[row]]
            expected = [value for row, value in known.items() for _ in rows[row]]
            mean, wanted = math.fsum(found) / len(found), math.fsum(expected) / len(expected)
            if not _close(mean, wanted, precision):
                self._fail(f"{what} with {mean} of shard {shard} in place of {wanted}, its version {piece.version}")

    def _check_one_point(self, number: int, pieces: Mapping[int, TakenPiece]) -> None:
        """A push is in all pieces or in none; one that is in none of a shard is not applied there later."""
        pushes = frozenset[Name]().union(*(piece.pushes for piece in pieces.values()))
        for shard, piece in pieces.items():
            if piece.place is None:
                continue
            truth = self._places.truth[piece.place]
            if piece.version and truth.history[piece.version - 1 : piece.version] != [piece.last]:
                continue  # what the shard had then is lost since
            if later := [name for name in sorted(pushes - piece.pushes) if name in truth.applied]:
                self._fail(
                    f"version {number} of the weights has push {later[0]} of some shards, and shard {shard} applied it "
                    f"later"
                )


def _close(value: float, expected: float, precision: float) -> bool:
    return math.isclose(value, expected, rel_tol=precision, abs_tol=0.01)
