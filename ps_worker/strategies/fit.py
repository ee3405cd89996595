"""``Strategy.fit`` and ``Strategy.evaluate``, by the words of Keras: a loop over epochs, its callbacks and its file."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from itertools import count, islice
from pathlib import Path
from typing import Any, Protocol, TypeVar

import numpy as np
import torch
from rich.console import Console
from rich.progress import track
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from ps_protocol.errors import ConfigError, DamagedData
from ps_protocol.files import PUBLIC_MODE, replacing
from ps_worker.data.files.batches import FileBatches, ShareStretches
from ps_worker.data.samples import Share, batch_samples, shard

T = TypeVar("T")

Loss = Callable[[Any, Any], Tensor]
"""A function of output and target: the mean over a batch."""

Logs = Mapping[str, float]
"""The numbers of an epoch."""

History = list[dict[str, float]]
"""The numbers of each epoch: "loss", the metrics, and both of the validation with the prefix "val_"."""

PRECISIONS = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}

_KEYS = {"model", "optimizer", "scheduler", "scaler", "history"}


class Callback:
    """What a script adds to a fit: override the methods of interest. All replicas call them alike.

    The numbers that they get are those of all replicas together.
    """

    def on_fit_begin(self, history: Sequence[Logs]) -> bool | None:
        """Called before the first epoch.

        Args:
            history: The epochs of the checkpoint that the fit continues from.

        Returns:
            True to end the fit.
        """
        return None

    def on_epoch_begin(self, epoch: int) -> None:
        """Called before epoch ``epoch``, from 0."""

    def on_step_end(self, step: int) -> None:
        """Called after optimizer step ``step`` of this replica, from 1, over all epochs of this fit."""

    def on_epoch_end(self, epoch: int, logs: Logs) -> bool | None:
        """Called after an epoch and its validation.

        Args:
            epoch: Number of the epoch, from 0.
            logs: The numbers of the epoch, as in the history.

        Returns:
            True to end the fit.
        """
        return None


class EarlyStopping(Callback):
    """Ends a fit when a number has not fallen by more than ``min_delta`` for ``patience`` epochs."""

    def __init__(self, monitor: str = "val_loss", patience: int = 3, min_delta: float = 0.0) -> None:
        """Watch one number.

        Args:
            monitor: Its name in the history.
            patience: Number of epochs.
            min_delta: Least fall that counts.
        """
        self._monitor, self._patience, self._min_delta = monitor, patience, min_delta
        self._best = float("inf")
        self._waited = 0

    def on_fit_begin(self, history: Sequence[Logs]) -> bool:
        """Return whether the patience is used up in the epochs of the checkpoint."""
        self._best, self._waited = float("inf"), 0
        ends = [self.on_epoch_end(epoch, logs) for epoch, logs in enumerate(history)]
        return any(ends)

    def on_epoch_end(self, epoch: int, logs: Logs) -> bool:
        """Return whether the patience is used up.

        Raises:
            KeyError: ``monitor`` is not in ``logs``.
        """
        if logs[self._monitor] < self._best - self._min_delta:
            self._best, self._waited = logs[self._monitor], 0
        else:
            self._waited += 1
        return self._waited >= self._patience


@dataclass(frozen=True)
class FitSettings:
    """The arguments of ``fit``. Raises ConfigError for numbers out of range and for an unknown precision."""

    loss: Loss
    epochs: int = 1
    steps_per_epoch: int | None = None
    accumulate: int = 1
    precision: str = "fp32"
    scheduler: Any = None
    metrics: Mapping[str, Loss] = field(default_factory=dict)
    callbacks: Sequence[Callback] = ()
    checkpoint: Path | None = None
    progress: bool | None = None

    def __post_init__(self) -> None:
        for name in ("epochs", "accumulate", "steps_per_epoch"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
                raise ConfigError(f"fit() has no such {name}", expected="a whole number from 1", actual=repr(value))
        if self.precision not in PRECISIONS:
            raise ConfigError(
                "fit() has no such precision", expected=", ".join(PRECISIONS), actual=repr(self.precision)
            )
        if not callable(self.loss):
            raise ConfigError(
                "fit() has no loss",
                expected="a function of the model's output and the target",
                actual=repr(self.loss)[:80],
                remedy="call fit(model, loader, loss=torch.nn.functional.cross_entropy)",
            )


class _Replica(Protocol):
    """What the loop needs of the strategy that it runs under: see ``ps_worker.Strategy``."""

    @property
    def device(self) -> torch.device: ...
    @property
    def rank(self) -> int: ...
    @property
    def replicas(self) -> int: ...
    @property
    def is_chief(self) -> bool: ...
    @property
    def share(self) -> Share: ...
    def place(self, value: T) -> T: ...
    def accumulate(self, model: nn.Module) -> AbstractContextManager[Any]: ...
    def reduce(self, how: str, value: T) -> T: ...
    def epoch(self, number: int) -> AbstractContextManager[Any]: ...
    def continue_data(self, loader: Any, optimizer: torch.optim.Optimizer, epoch: int) -> None: ...
    def refresh(self, model: nn.Module) -> None: ...
    def unwrap(self, model: nn.Module) -> nn.Module: ...
    def barrier(self) -> None: ...
    def restore(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        values: dict[str, Any],
        state: dict[str, Any],
        epoch: int,
    ) -> None: ...


class Fit:
    """One fit of a prepared model. Called by ``Strategy.fit`` on every replica alike."""

    def __init__(
        self,
        s: _Replica,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        settings: FitSettings,
        first_epoch: int = 0,
    ) -> None:
        """``first_epoch``: the number of epochs of the fits before this one, on every replica."""
        self._s, self._model, self._optimizer, self._settings = s, model, optimizer, settings
        self._first_epoch = first_epoch
        self._scaler = torch.amp.GradScaler(s.device.type, enabled=settings.precision == "fp16")
        self._steps = count(1)
        self._history: History = []

    def run(self, loader: Iterable[Any], validation: Any) -> History:
        """Train the epochs that a checkpoint does not have yet."""
        self._restore(loader)
        if self._any_ends(lambda callback: callback.on_fit_begin(self._history)):
            return self._history
        for epoch in range(len(self._history), self._settings.epochs):
            with self._s.epoch(self._first_epoch + epoch):
                if self._epoch(loader, epoch, validation):
                    break
        return self._history

    def _epoch(self, loader: Iterable[Any], epoch: int, validation: Any) -> bool:
        """Whether a callback ends the fit after this epoch."""
        for callback in self._settings.callbacks:
            callback.on_epoch_begin(epoch)
        logs = self._train(loader, epoch)
        if validation is not None:
            found = evaluate(self._s, self._model, validation, self._settings.loss, self._settings.metrics)
            logs |= {f"val_{name}": value for name, value in found.items()}
        self._history.append(logs)
        self._save()
        return self._any_ends(lambda callback: callback.on_epoch_end(epoch, logs))

    def _any_ends(self, call: Callable[[Callback], bool | None]) -> bool:
        # Every callback is called, also after one that ends the fit.
        ends = [call(callback) for callback in self._settings.callbacks]
        return any(ends)

    def _train(self, loader: Iterable[Any], epoch: int) -> dict[str, float]:
        totals = _Totals(self._settings.loss, self._settings.metrics)
        self._model.train()
        groups = grouped(loader, self._settings.accumulate, self._settings.steps_per_epoch)
        steps = getattr(loader, "__len__", lambda: None)()
        wanted = self._settings.progress if self._settings.progress is not None else sys.stderr.isatty()
        if wanted and self._s.is_chief:
            total = None if steps is None else -(-steps // self._settings.accumulate)
            groups = track(groups, f"epoch {epoch}", total, console=Console(stderr=True))  # type: ignore[assignment]
        for group in groups:
            self._step(group, totals)
            number = next(self._steps)
            for callback in self._settings.callbacks:
                callback.on_step_end(number)
        # First: replicas that have more batches are not to wait for those that are here.
        self._s.barrier()
        return totals.of_all(self._s)

    def _step(self, group: list[Any], totals: _Totals) -> None:
        for number, batch in enumerate(group, start=1):
            inputs, target = _parts(self._s.place(batch))
            with nullcontext() if number == len(group) else self._s.accumulate(self._model):
                with self._autocast():
                    output = self._model(*inputs)
                    loss = self._settings.loss(output, target)
                self._scaler.scale(loss / len(group)).backward()  # type: ignore[no-untyped-call]
            totals.add(loss, output, target)
        scale = self._scaler.get_scale()
        self._scaler.step(self._optimizer)
        self._scaler.update()
        self._optimizer.zero_grad()
        if self._settings.scheduler is not None and self._scaler.get_scale() >= scale:
            self._settings.scheduler.step()

    def _autocast(self) -> Any:
        dtype = PRECISIONS[self._settings.precision]
        return nullcontext() if dtype is None else torch.autocast(self._s.device.type, dtype)

    def _save(self) -> None:
        if self._settings.checkpoint is None:
            return
        if self._s.is_chief:
            scheduler = self._settings.scheduler
            contents = {
                "model": self._s.unwrap(self._model).state_dict(),
                "optimizer": self._optimizer.state_dict(),
                "scheduler": scheduler.state_dict() if scheduler is not None else {},
                "scaler": self._scaler.state_dict(),
                "history": self._history,
            }
            _write(self._settings.checkpoint, contents)
        self._s.barrier()

    def _restore(self, loader: Iterable[Any]) -> None:
        path = self._settings.checkpoint
        if path is None or not path.exists():
            return
        contents = _read(path)
        epoch = len(contents["history"])
        self._s.restore(
            self._model, self._optimizer, contents["model"], contents["optimizer"], self._first_epoch + epoch
        )
        self._s.continue_data(loader, self._optimizer, epoch)
        if self._settings.scheduler is not None:
            self._settings.scheduler.load_state_dict(contents["scheduler"])
        self._scaler.load_state_dict(contents["scaler"])
        self._history = contents["history"]


class _Totals:
    """Sums over the samples of an epoch; on the device, so that no step waits for them."""

    def __init__(self, loss: Loss, metrics: Mapping[str, Loss]) -> None:
        self._loss, self._metrics = loss, metrics
        self._sums: Tensor | None = None

    @torch.no_grad()
    def add(self, loss: Tensor, output: Any, target: Any) -> None:
        """Count one batch, whose numbers are means over it."""
        samples = batch_samples(target)
        values = [loss.detach(), *(metric(output, target) for metric in self._metrics.values())]
        stacked = torch.stack([torch.as_tensor(value, device=loss.device).double() for value in values])
        sums = torch.cat([stacked * samples, stacked.new_tensor([float(samples)])])
        self._sums = sums if self._sums is None else self._sums + sums

    def of_all(self, s: _Replica) -> dict[str, float]:
        """The means over the samples of all replicas."""
        mine = self._sums if self._sums is not None else torch.zeros(len(self._metrics) + 2, dtype=torch.float64)
        *sums, samples = s.reduce("sum", mine.cpu()).tolist()
        return {name: value / max(samples, 1.0) for name, value in zip(["loss", *self._metrics], sums, strict=True)}


@torch.no_grad()
def evaluate(s: _Replica, model: nn.Module, loader: Any, loss: Loss, metrics: Mapping[str, Loss]) -> dict[str, float]:
    """The mean loss and metrics over all samples of ``loader``, each of which one replica measures."""
    s.barrier()
    s.refresh(model)
    if isinstance(loader, FileBatches):
        # Not leased: a worker that begins its script again has all of an epoch that others have finished.
        loader = FileBatches(loader.data, ShareStretches(loader.data.layout, s.share, count()))
    elif isinstance(loader, DataLoader) and s.replicas > 1:
        loader = shard(loader, s.share, count(), lambda samples: None)
    # Without the wrapper, whose forward is an exchange of buffers: replicas may have different numbers of batches.
    module = s.unwrap(model)
    trained = module.training
    module.eval()
    totals = _Totals(loss, metrics)
    try:
        for batch in loader:
            inputs, target = _parts(s.place(batch))
            output = module(*inputs)
            totals.add(loss(output, target), output, target)
    finally:
        module.train(trained)
    return totals.of_all(s)


def grouped(batches: Iterable[T], size: int, steps: int | None = None) -> Iterator[list[T]]:
    """``batches`` in groups of ``size``, the last one perhaps shorter, and at most ``steps`` of them."""
    rest = iter(batches)
    made = 0
    while steps is None or made < steps:
        group = list(islice(rest, size))
        if not group:
            return
        yield group
        made += 1


def as_loader(data: Any, batch_size: int, *, shuffle: bool) -> Any:
    """``data`` itself, or a DataLoader of a tuple of NumPy arrays or tensors. Raises ConfigError for unequal ones."""
    if not (isinstance(data, tuple) and data and all(isinstance(each, np.ndarray | Tensor) for each in data)):
        return data
    lengths = {len(each) for each in data}
    if len(lengths) > 1:
        raise ConfigError(
            "the arrays have different numbers of samples", actual=", ".join(str(len(each)) for each in data)
        )
    tensors = [torch.as_tensor(each) for each in data]
    return DataLoader(TensorDataset(*tensors), batch_size=batch_size, shuffle=shuffle)


def _parts(batch: Any) -> tuple[list[Any], Any]:
    """The model's inputs and the target of ``batch``. Raises ConfigError for a batch without a target."""
    if not isinstance(batch, tuple | list) or len(batch) < 2:
        raise ConfigError(
            "fit() does not know the target of a batch",
            expected="a sequence of inputs and, last, the target",
            actual=type(batch).__name__,
            remedy="have the dataset, its collate_fn, or transform= of files give (input, target), or write the loop "
            "with s.run()",
        )
    return list(batch[:-1]), batch[-1]


def _write(path: Path, contents: dict[str, Any]) -> None:
    """Replace ``path``. After the return it survives a power failure."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path, PUBLIC_MODE) as file:
        torch.save(contents, file)


def _read(path: Path) -> dict[str, Any]:
    """What ``_write`` has written. Raises DamagedData for another file."""
    try:
        contents = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        raise DamagedData(f"{path} cannot be read as a checkpoint of fit(): {error}"[:300]) from error
    if not isinstance(contents, dict) or contents.keys() != _KEYS:
        raise DamagedData(
            f"{path} is no checkpoint of fit()",
            expected=", ".join(sorted(_KEYS)),
            remedy="give checkpoint= the name of another file",
        )
    return contents
