"""The loop over epochs: forward, backward, step; validation, checkpoint and history after each epoch."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from itertools import count
from typing import Any

import torch
from rich.console import Console
from rich.progress import track
from torch import Tensor, nn
from torch.utils.data import DataLoader

from ps_worker.data.samples import Share, batch_samples, shard
from ps_worker.strategies.fit import saved
from ps_worker.strategies.fit.accumulation import grouped
from ps_worker.strategies.fit.callbacks import Callback
from ps_worker.strategies.fit.inputs import parts
from ps_worker.strategies.fit.replica import LoopReplica
from ps_worker.strategies.fit.settings import PRECISIONS, FitSettings, Loss

History = list[dict[str, float]]
"""The numbers of each epoch: "loss", the metrics, and both of the validation with the prefix "val_"."""


class Fit:
    """One fit of a prepared model. Called by ``Strategy.fit`` on every replica alike."""

    def __init__(
        self,
        s: LoopReplica,
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
        # Every callback is told, also after one that ends the fit.
        said = [call(callback) for callback in self._settings.callbacks]
        return any(said)

    def _train(self, loader: Iterable[Any], epoch: int) -> dict[str, float]:
        totals = Totals(self._settings.loss, self._settings.metrics)
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

    def _step(self, group: list[Any], totals: Totals) -> None:
        for number, batch in enumerate(group, start=1):
            inputs, target = parts(self._s.place(batch))
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
            saved.write(self._settings.checkpoint, contents)
        self._s.barrier()

    def _restore(self, loader: Iterable[Any]) -> None:
        path = self._settings.checkpoint
        if path is None or not path.exists():
            return
        contents = saved.read(path)
        epoch = len(contents["history"])
        self._s.restore(
            self._model, self._optimizer, contents["model"], contents["optimizer"], self._first_epoch + epoch
        )
        self._s.continue_data(loader, self._optimizer, epoch)
        if self._settings.scheduler is not None:
            self._settings.scheduler.load_state_dict(contents["scheduler"])
        self._scaler.load_state_dict(contents["scaler"])
        self._history = contents["history"]


class Totals:
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

    def of_all(self, s: LoopReplica) -> dict[str, float]:
        """The means over the samples of all replicas."""
        mine = self._sums if self._sums is not None else torch.zeros(len(self._metrics) + 2, dtype=torch.float64)
        *sums, samples = s.reduce("sum", mine.cpu()).tolist()
        return {name: value / max(samples, 1.0) for name, value in zip(["loss", *self._metrics], sums, strict=True)}


@torch.no_grad()
def evaluate(
    s: LoopReplica, model: nn.Module, loader: Any, loss: Loss, metrics: Mapping[str, Loss]
) -> dict[str, float]:
    """The mean loss and metrics over all samples of ``loader``, each of which one replica measures."""
    s.barrier()
    s.refresh(model)
    if isinstance(loader, DataLoader) and s.replicas > 1:
        loader = shard(loader, Share(s.rank, s.replicas, 0), count(), lambda samples: None)
    # Without the wrapper, whose forward is an exchange of buffers: replicas may have different numbers of batches.
    module = s.unwrap(model)
    trained = module.training
    module.eval()
    totals = Totals(loss, metrics)
    try:
        for batch in loader:
            inputs, target = parts(s.place(batch))
            output = module(*inputs)
            totals.add(loss(output, target), output, target)
    finally:
        module.train(trained)
    return totals.of_all(s)
