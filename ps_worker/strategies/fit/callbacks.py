"""What a user adds to a fit. All replicas call them alike, with the same numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

Logs = Mapping[str, float]


class Callback:
    """Does nothing; override what is of interest. The numbers are those of all replicas together."""

    def on_fit_begin(self, history: Sequence[Logs]) -> bool | None:
        """Before the first epoch; ``history`` has the epochs of the checkpoint that is continued. True ends the fit."""
        return None

    def on_epoch_begin(self, epoch: int) -> None:
        """Before epoch ``epoch``, from 0."""

    def on_step_end(self, step: int) -> None:
        """After optimizer step ``step`` of this replica, from 1, over all epochs of this fit."""

    def on_epoch_end(self, epoch: int, logs: Logs) -> bool | None:
        """After an epoch and its validation; True ends the fit."""
        return None


class EarlyStopping(Callback):
    """Ends a fit when ``monitor`` has not fallen by more than ``min_delta`` for ``patience`` epochs."""

    def __init__(self, monitor: str = "val_loss", patience: int = 3, min_delta: float = 0.0) -> None:
        self._monitor, self._patience, self._min_delta = monitor, patience, min_delta
        self._best = float("inf")
        self._waited = 0

    def on_fit_begin(self, history: Sequence[Logs]) -> bool:
        """Whether the patience was used up in the epochs of the checkpoint. Raises as ``on_epoch_end``."""
        self._best, self._waited = float("inf"), 0
        ends = [self.on_epoch_end(epoch, logs) for epoch, logs in enumerate(history)]
        return any(ends)

    def on_epoch_end(self, epoch: int, logs: Logs) -> bool:
        """Whether the patience is used up. Raises KeyError for a ``monitor`` that is not in ``logs``."""
        if logs[self._monitor] < self._best - self._min_delta:
            self._best, self._waited = logs[self._monitor], 0
        else:
            self._waited += 1
        return self._waited >= self._patience
