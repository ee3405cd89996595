"""Judges rows of tables: what is looked up and what comes back after a restart."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from typing import NoReturn

from ps_protocol.cluster.view import Member
from ps_server.consistency import PushInfo
from simulation.places import Places
from simulation.truth import Name, RowValues, name_of


class RowsJudge:
    """Part of the judge. What a row has brought along from another shard is taken off before it is told here."""

    def __init__(self, fail: Callable[[str], NoReturn], places: Places) -> None:
        self._fail = fail
        self._places = places
        #: By model, as the number of its first place, and push: the gradients of rows on all shards.
        self._sent: dict[tuple[int, Name], dict[int, float]] = {}
        #: The same of combined pushes, by the name of their sender's part.
        self._together: dict[tuple[int, Name], dict[int, float]] = {}
        #: By number and push: what a worker of a host has for rows there; None: it skips the step.
        self._made: dict[tuple[int, Name], RowValues | None] = {}
        #: By model: ids that checkpoints had.
        self._put: dict[int, set[int]] = {}

    def sent(self, number: int, member: Member, sequence: int, rows: RowValues) -> None:
        """A worker sends gradients of rows with a push, the first time or again."""
        key = self._model(number), (member.index, member.incarnation, sequence)
        self._sent.setdefault(key, {}).update(rows)

    def made(self, number: int, name: Name, rows: RowValues | None) -> None:
        """A worker of a host has gradients for its next push; None: it skips the step."""
        self._made[number, name] = rows

    def sent_together(self, number: int, names: Sequence[Name], rows: RowValues) -> None:
        """A worker sends ``rows`` as the mean of what workers have for the pushes ``names``; the first is its own."""
        made = [found for name in names if (found := self._made[number, name]) is not None]
        expected = {row: math.fsum(each.get(row, 0.0) for each in made) / len(made) for each in made for row in each}
        if rows.keys() != expected.keys() or not all(close(value, expected[row]) for row, value in rows.items()):
            self._fail(f"rows {dict(rows)} are pushed for {names} to shard {number} instead of {expected}")
        self._together.setdefault((self._model(number), names[0]), {}).update(rows)

    def change(
        self, number: int, pushes: Mapping[PushInfo, int], scale: float, held: Container[int]
    ) -> dict[int, float]:
        """What an update of ``pushes``, each of so many workers, adds to the rows that are ``held`` at its place."""
        workers = sum(pushes.values())
        change: Counter[int] = Counter()
        for push, count in pushes.items():
            sent = self._together if push.others else self._sent
            for row, gradient in sent.get((self._model(number), name_of(push)), {}).items():
                if row in held:
                    change[row] -= scale * gradient * count / workers  # type: ignore[assignment]
        return dict(change)

    def served(self, number: int, version: int, rows: RowValues, what: str = "serves") -> None:
        """A shard answers a lookup with ``rows`` as of ``version``."""
        truth = self._places.truth[number]
        if version > len(truth.history):
            self._fail(f"shard {number} {what} rows of version {version}; {len(truth.history)} were logged")
        for row, value in rows.items():
            if not close(value, expected := truth.row(row, version)):
                self._fail(f"shard {number} {what} row {row} as {value} in version {version} instead of {expected}")

    def fits(self, number: int, version: int, rows: RowValues) -> bool:
        """Whether ``served`` has nothing against it."""
        truth = self._places.truth[number]
        return all(close(value, truth.row(row, version)) for row, value in rows.items())

    def put(self, number: int, rows: Iterable[int]) -> None:
        """A checkpoint has these ids."""
        self._put.setdefault(self._model(number), set()).update(rows)

    def known(self, number: int) -> list[int]:
        """The ids of all rows that were ever in a push to the model at this place, or in what was restored into it."""
        model = self._model(number)
        pushes = (*self._sent.items(), *self._together.items())
        sent = {row for (each, _), rows in pushes if each == model for row in rows}
        return sorted(sent | self._put.get(model, set()))

    def _model(self, number: int) -> int:
        return number - number % self._places.shards


def close(value: float, expected: float) -> bool:
    """Whether these are the same number of a row: those are float32."""
    return math.isclose(value, expected, rel_tol=1e-4, abs_tol=1e-2)
