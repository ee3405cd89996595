"""Judges checkpoints: what they hold, and what a shard has after one was restored."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import NoReturn

from ps_server.consistency import Position, TrackerState
from ps_server.consistency.events import START
from simulation.loads import Load, Piece, RowLoad
from simulation.places import Places
from simulation.rows_judge import RowsJudge, close
from simulation.truth import RowValues, State, name_of, same


@dataclass(frozen=True, slots=True)
class SavedPart:
    """What a checkpoint has of one place."""

    version: int
    #: Less what its slices have brought along.
    value: float
    #: By the last checkpoint that was put in before: what each piece of the part has brought along.
    brought: Callable[[Load | None], Mapping[Piece, float]]
    #: As they are, and less what they have brought along.
    rows: RowValues
    own_rows: RowValues


@dataclass(slots=True)
class _Saved:
    """What a checkpoint has of one model."""

    #: By shard.
    states: dict[int, State] = field(default_factory=dict)
    #: The highest that any shard had, and the position of the furthest push in any.
    version: int = 0
    highest: Position = START
    pieces: dict[Piece, float] = field(default_factory=dict)
    rows: dict[int, float] = field(default_factory=dict)


class CheckpointJudge:
    """Part of the judge. Checkpoints are named by their folders."""

    def __init__(self, fail: Callable[[str], NoReturn], places: Places, rows: RowsJudge) -> None:
        self._fail = fail
        self._places = places
        self._truth = places.truth
        self._rows = rows
        #: By checkpoint and name of a model.
        self._saved: dict[str, dict[str, _Saved]] = {}

    def knows(self, folder: str) -> bool:
        """Whether it was told what this checkpoint holds."""
        return folder in self._saved

    def saved(self, folder: str, model: str, parts: Mapping[int, SavedPart]) -> None:
        """It holds these parts of ``model``, by number: every push is on all shards or on none."""
        saved = self._saved.setdefault(folder, {}).setdefault(model, _Saved())
        for number, part in parts.items():
            truth = self._truth[number]
            if part.version > len(truth.history):
                self._fail(
                    f"a checkpoint has version {part.version} of shard {number}; {len(truth.history)} were logged"
                )
            states = truth.states(part.version)
            found = truth.had(part.version, part.value)
            if found is None:
                self._fail(
                    f"a checkpoint has {part.value} as version {part.version} of shard {number} instead of "
                    f"{states[-1][0]}"
                )
            self._rows.served(number, part.version, part.own_rows, "has in a checkpoint")
            state, brought = states[found], part.brought(truth.loads.bases(part.version)[found])
            saved.states[number % self._places.shards] = state
            saved.pieces |= {piece: state[0] + more for piece, more in brought.items()}
            saved.rows |= part.rows
            saved.version = max(saved.version, part.version)
            pushes = (push for update in truth.history[: part.version] for push in update.pushes)
            saved.highest = max([saved.highest, *(each.position for push in pushes for each in push.contributions)])
        self._check_one_point(parts)

    def _check_one_point(self, parts: Mapping[int, SavedPart]) -> None:
        for number, part in parts.items():
            updates = self._truth[number].history[: part.version]
            names = [name_of(each) for update in updates for push in update.pushes for each in push.contributions]
            for other, other_part in parts.items():
                applied = self._truth[other].applied
                if later := [name for name in names if applied.get(name, 0) > other_part.version]:
                    self._fail(f"a checkpoint has push {later[0]} on shard {number}, not on shard {other}")

    def begun(self, number: int, folder: str, model: str, state: TrackerState) -> None:
        """A shard of a new job goes on from ``state``, where the job of the checkpoint stood."""
        saved = self._of(number, folder, model)
        if state.version != saved.version or max(state.highest, state.applied) < saved.highest:
            self._fail(
                f"shard {number} begins at version {state.version} and {state.highest}; the checkpoint has version "
                f"{saved.version} and a push at {saved.highest}"
            )
        self._truth[number].begin_at(state.version, state.applied, state.highest)

    def load(self, number: int, folder: str, model: str, epoch: int, pieces: Iterable[Piece]) -> Load:
        """What a shard takes that puts the checkpoint into ``pieces``, by the shard map of ``epoch``."""
        saved = self._of(number, folder, model)
        value, velocity = saved.states.get(number % self._places.shards, (0.0, 0.0))
        brought = {piece: more for piece in pieces if (more := saved.pieces[piece] - value)}
        return Load(value, velocity, epoch, brought)

    def loaded(self, number: int, folder: str, load: Load, value: float) -> tuple[int, int]:
        """A shard has this value in its log, less what ``load`` brought. Returns which it is, for ``acknowledged``."""
        truth = self._truth[number]
        if not same(value, load.value):
            self._fail(f"shard {number} took {value} from a checkpoint that has {load.value}")
        truth.checkpoints.add(folder)
        return truth.loads.add(len(truth.history), load)

    def rows_loaded(
        self, number: int, folder: str, model: str, epoch: int, rows: RowValues, held: Callable[[list[int]], list[int]]
    ) -> tuple[int, int]:
        """A shard has these rows of the checkpoint in its log. ``held``: those of ids that lie there."""
        saved, truth = self._of(number, folder, model), self._truth[number]
        self._rows.put(number, saved.rows)
        version, brought = len(truth.history), dict[int, float]()
        for row in held(self._rows.known(number)):
            # The checkpoint may have none: then the shard has none any more.
            value = saved.rows.get(row, 0.0)
            if not close(rows.get(row, 0.0), value):
                self._fail(f"shard {number} took {rows.get(row)} as row {row} from a checkpoint that has {value}")
            brought[row] = value - truth.row(row, version)
        return truth.row_loads.add(version, RowLoad(epoch, brought))

    def acknowledged(
        self, number: int, load: tuple[int, int] | None, rows: tuple[int, int] | None, *, has_rows: bool
    ) -> None:
        """The shard says that it has them: from now on it must not come back without them."""
        truth = self._truth[number]
        if load is not None:
            truth.loads.acknowledge(load)
            if has_rows and rows is None:
                self._fail(f"shard {number} says that it has a checkpoint, and has not taken its rows")
        if rows is not None:
            truth.row_loads.acknowledge(rows)

    def restored(self, folder: str, numbers: Iterable[int]) -> None:
        """An operator was told that it is restored: every shard has its part. ``numbers``: of the models in it."""
        for number in numbers:
            if folder not in self._truth[number].checkpoints:
                self._fail(f"a checkpoint was called restored, and shard {number} has not taken it")

    def _of(self, number: int, folder: str, model: str) -> _Saved:
        saved = self._saved.get(folder, {}).get(model)
        if saved is None:
            self._fail(f"shard {number} takes model '{model}' from a checkpoint that does not have it")
        return saved
