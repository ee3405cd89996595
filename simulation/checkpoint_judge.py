"""Judges checkpoints: what they hold, and what a shard has after one was restored into the running job."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NoReturn

from simulation.places import Places
from simulation.truth import State, same


class CheckpointJudge:
    """Part of the judge. Checkpoints are named by their folders."""

    def __init__(self, fail: Callable[[str], NoReturn], places: Places) -> None:
        self._fail = fail
        self._truth = places.truth
        #: By checkpoint and place.
        self._saved: dict[str, dict[int, State]] = {}

    def knows(self, folder: str) -> bool:
        """Whether it was told what this checkpoint holds."""
        return folder in self._saved

    def saved(self, folder: str, parts: Mapping[int, tuple[int, float]]) -> None:
        """It holds, by number, this version with this value: every push is on all shards or on none."""
        saved = self._saved.setdefault(folder, {})
        for number, (version, value) in parts.items():
            truth = self._truth[number]
            if version > len(truth.history):
                self._fail(f"a checkpoint has version {version} of shard {number}; {len(truth.history)} were logged")
            states = truth.states(version)
            found = truth.had(version, value)
            if found is None:
                self._fail(
                    f"a checkpoint has {value} as version {version} of shard {number} instead of {states[-1][0]}"
                )
            saved[number] = states[found]
        for number, (version, _) in parts.items():
            updates = self._truth[number].history[:version]
            names = [(p.worker.rank, p.worker.incarnation, p.sequence) for update in updates for p in update.pushes]
            for other, (other_version, _) in parts.items():
                applied = self._truth[other].applied
                if later := [name for name in names if applied.get(name, 0) > other_version]:
                    self._fail(f"a checkpoint has push {later[0]} on shard {number}, not on shard {other}")

    def loaded(self, number: int, folder: str, value: float) -> tuple[int, int]:
        """A shard has this value of the checkpoint in its log. Returns which load it is, for ``acknowledged``."""
        truth = self._truth[number]
        saved = self._saved.get(folder, {}).get(number)
        if saved is None or not same(value, saved[0]):
            self._fail(f"shard {number} took {value} from a checkpoint that has {saved}")
        version = len(truth.history)
        loads = truth.loads.setdefault(version, [])
        loads.append(saved)
        truth.checkpoints.add(folder)
        return version, len(loads)

    def acknowledged(self, number: int, load: tuple[int, int]) -> None:
        """The shard says that it has it: from now on it must not come back without it."""
        self._truth[number].acknowledged_load = max(self._truth[number].acknowledged_load, load)

    def restored(self, folder: str) -> None:
        """An operator was told that it is restored: every shard has its part."""
        for number in self._saved.get(folder, {}):
            if folder not in self._truth[number].checkpoints:
                self._fail(f"a checkpoint was called restored, and shard {number} has not taken it")
