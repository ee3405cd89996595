"""Modules and loops as a user of Lightning writes them: nothing in them knows of the cluster."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric import Fabric
from lightning.pytorch.callbacks import (
    Callback,
    EarlyStopping,
    EMAWeightAveraging,
    ModelCheckpoint,
    StochasticWeightAveraging,
)
from lightning.pytorch.loggers import CSVLogger
from torch.utils.data import DataLoader, TensorDataset

from ps_worker.optimizer import PsOptimizer


def data(samples: int, seed: int) -> TensorDataset:
    chance = torch.Generator().manual_seed(seed)
    inputs = torch.randn(samples, 6, generator=chance, dtype=torch.float64)
    return TensorDataset(inputs, (inputs.sum(1, keepdim=True) > 0).double())


def loader(batch: int, samples: int = 96, seed: int = 1) -> DataLoader[Any]:
    return DataLoader(data(samples, seed), batch_size=batch)


def network(seed: int = 3) -> torch.nn.Module:
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.Tanh(), torch.nn.Linear(5, 1)).double()


class Classifier(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = network()

    def loss(self, batch: Sequence[torch.Tensor]) -> torch.Tensor:
        return torch.nn.functional.binary_cross_entropy_with_logits(self(batch).double(), batch[1])

    def forward(self, batch: Sequence[torch.Tensor]) -> torch.Tensor:
        return self.net(batch[0].to(self.net[0].weight.dtype))  # type: ignore[no-any-return]

    def training_step(self, batch: Sequence[torch.Tensor], batch_idx: int) -> torch.Tensor:
        loss = self.loss(batch)
        self.log("train_loss", loss, on_epoch=True, on_step=False, sync_dist=True)
        return loss

    def validation_step(self, batch: Sequence[torch.Tensor], batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch), sync_dist=True)

    def test_step(self, batch: Sequence[torch.Tensor], batch_idx: int) -> None:
        self.log("test_loss", self.loss(batch), sync_dist=True)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.05)
        return [optimizer], [{"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5), "interval": "epoch"}]


class TwoOptimizers(pl.LightningModule):
    """Manual optimization."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.one, self.other = network(4), network(5)

    def training_step(self, batch: Sequence[torch.Tensor], batch_idx: int) -> None:
        inputs, targets = batch
        for net, optimizer in zip((self.one, self.other), self.optimizers(), strict=True):  # type: ignore[arg-type]
            optimizer.zero_grad()
            loss = torch.nn.functional.mse_loss(net(inputs), targets)
            self.manual_backward(loss)
            optimizer.step()
        self.log("last", loss, on_epoch=True, on_step=False, sync_dist=True)
        if self.trainer.is_last_batch:
            for scheduler in self.lr_schedulers():  # type: ignore[union-attr]
                scheduler.step(self.trainer.callback_metrics.get("last", torch.tensor(1.0)))

    def configure_optimizers(self) -> Any:
        one = torch.optim.SGD(self.one.parameters(), lr=0.1, momentum=0.9)
        other = torch.optim.Adam(self.other.parameters(), lr=0.01)
        schedulers = [
            torch.optim.lr_scheduler.ReduceLROnPlateau(each, patience=0, threshold=10.0) for each in (one, other)
        ]
        return [one, other], schedulers


class Losses(Callback):
    """What was logged at the end of each epoch, and how long gradients were."""

    def __init__(self) -> None:
        self.seen: list[dict[str, float]] = []
        #: Of the gradients of this process, before clipping.
        self.norms: list[float] = []

    def on_before_optimizer_step(self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Any) -> None:
        gradients = torch.cat([p.grad.reshape(-1) for p in pl_module.parameters() if p.grad is not None])
        self.norms.append(gradients.norm().item())

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.seen.append({name: value.item() for name, value in trainer.callback_metrics.items()})


def trainer(folder: Path, strategy: Any, epochs: int, callbacks: Sequence[Callback] = (), **more: Any) -> pl.Trainer:
    return pl.Trainer(
        strategy=strategy,
        max_epochs=epochs,
        accelerator="cpu",
        devices=1,
        logger=CSVLogger(folder),
        default_root_dir=folder,
        enable_progress_bar=False,
        enable_model_summary=False,
        log_every_n_steps=1,
        callbacks=list(callbacks),
        **more,
    )


def counted(kind: type, method: str) -> list[None]:
    """One entry for each call of ``method`` from now on, in this process."""
    calls: list[None] = []
    original = getattr(kind, method)

    def call(*arguments: Any, **named: Any) -> Any:
        calls.append(None)
        return original(*arguments, **named)

    setattr(kind, method, call)
    return calls


def fit(folder: Path, strategy: str, workers: int, resume: str | None = None) -> dict[str, Any]:
    """Accumulation, a scheduler, early stopping, checkpoints; with ``resume`` two epochs more."""
    module, losses = Classifier(), Losses()
    states = counted(PsOptimizer, "state_dict")
    stopping = EarlyStopping("val_loss", patience=1, min_delta=0.01)
    checkpoints = ModelCheckpoint(monitor="val_loss", save_last=True, filename="best")
    fitting = trainer(
        folder,
        strategy,
        9 if resume else 6,
        [losses, stopping, checkpoints],
        accumulate_grad_batches=4,
        gradient_clip_val=0.1,
    )
    fitting.fit(module, loader(8 // workers), loader(8 // workers, 24, 2), ckpt_path=resume)
    return {
        "rank": fitting.global_rank,
        "parameters": [p.detach().clone() for p in module.parameters()],
        "losses": losses.seen,
        "norm": max(losses.norms),
        "epochs": fitting.current_epoch,
        "steps": fitting.global_step,
        "lr": fitting.optimizers[0].param_groups[0]["lr"],
        "best": str(checkpoints.best_model_path),
        "last": str(checkpoints.last_model_path),
        "states": len(states),
    }


def again(folder: Path, strategy: str, workers: int) -> dict[str, Any]:
    """One module in two trainers: saved and tested after a fit, fitted again from an old checkpoint, and once more."""
    module, losses, seen = Classifier(), Losses(), list[torch.Tensor]()
    train, test = loader(8 // workers), loader(8 // workers, 24, 2)

    def note() -> None:
        seen.extend(p.detach().clone() for p in module.parameters())

    # The first epoch, which is not the last, is the best one.
    worst = ModelCheckpoint(monitor="val_loss", mode="max", filename="worst")
    first = trainer(folder / "first", strategy, 3, [losses, worst])
    first.fit(module, train, test)
    note()
    first.save_checkpoint(folder / "end.ckpt")
    measured = [first.validate(module, test, verbose=False), first.test(module, test, "best", verbose=False)]
    note()
    first.fit_loop.max_epochs = 4
    first.fit(module, train, test, ckpt_path=worst.best_model_path)
    note()
    other = trainer(folder / "other", strategy, 2, [losses], enable_checkpointing=False)
    measured.append(other.validate(module, test, verbose=False))
    other.fit(module, train, test)
    note()
    return {
        "parameters": seen,
        "losses": losses.seen,
        "lr": [each.optimizers[0].param_groups[0]["lr"] for each in (first, other)],
        "measured": [value for (each,) in measured for value in each.values()],
    }


class SwapAtStart(Callback):
    """Evaluates an average in the middle of a fit, put in before the evaluation and taken out after it."""

    def __init__(self) -> None:
        self.average: list[torch.Tensor] = []
        self.seen: list[torch.Tensor] = []

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *rest: Any) -> None:
        now = [p.detach().clone() for p in pl_module.parameters()]
        self.average = [0.5 * (a + p) for a, p in zip(self.average or now, now, strict=True)]

    @torch.no_grad()
    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.own = [p.detach().clone() for p in pl_module.parameters()]
        for parameter, average in zip(pl_module.parameters(), self.average or self.own, strict=True):
            parameter.copy_(average)

    def on_validation_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.seen = [p.detach().clone() for p in pl_module.parameters()]

    @torch.no_grad()
    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        # After a fit all workers evaluate what the lowest rank has set.
        if trainer.state.fn == "fit" or trainer.global_rank == 0:
            assert not self.average or all(map(torch.equal, self.seen, self.average))
        for parameter, own in zip(pl_module.parameters(), self.own, strict=True):
            parameter.copy_(own)


class WithNorm(Classifier):
    """Has buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Sequential(self.net, torch.nn.BatchNorm1d(1).double())

    def forward(self, batch: Sequence[torch.Tensor]) -> torch.Tensor:
        return self.net(batch[0])  # type: ignore[no-any-return]


def averages(folder: Path, strategy: str, workers: int, kind: str, norm: bool = False) -> dict[str, Any]:
    """Weights that a callback, or the script, sets after a fit are tested, predicted with and fitted on."""
    module: Classifier = WithNorm() if norm else Classifier()
    callbacks = {"ema": [EMAWeightAveraging()], "swa": [StochasticWeightAveraging(0.01, 2)], "swap": [SwapAtStart()]}
    train, test = loader(8 // workers), loader(8 // workers, 24, 2)
    fitting = trainer(folder / kind, strategy, 4, callbacks.get(kind, []), enable_checkpointing=False)
    fitting.fit(module, train, test)
    average = getattr(callbacks.get(kind, [None])[0], "_average_model", None)
    trained = {name: value.clone() for name, value in module.state_dict().items()}
    if kind == "best" or (kind == "lowest" and fitting.global_rank == 0):
        module.load_state_dict({name: value * 0.5 for name, value in trained.items()})
    set_values = [p.detach().clone() for p in module.parameters()]
    measured = fitting.test(module, test, verbose=False)[0]
    fitting.predict(module, test)
    validated = fitting.validate(module, test, verbose=False)[0]
    tested = [p.detach().clone() for p in module.parameters()]
    buffers = [b.clone() for b in module.buffers()]
    if kind == "best":
        # Back to what was trained, as after an evaluation with other weights.
        module.load_state_dict(trained)
    again = trainer(folder / "again", strategy, 1, enable_checkpointing=False)
    again.fit(module, train, test)
    return {
        "set": set_values,
        "average": None if average is None else [p.detach().clone() for p in average.parameters()],
        "tested": tested,
        "tested_buffers": buffers,
        "parameters": [p.detach().clone() for p in module.parameters()],
        "measured": [measured["test_loss"], validated["val_loss"]],
    }


def manual(folder: Path, strategy: str, workers: int) -> dict[str, Any]:
    """Two optimizers in manual optimization, each with a scheduler that looks at the loss."""
    module = TwoOptimizers()
    fitting = trainer(folder, strategy, 3, enable_checkpointing=False)
    fitting.fit(module, loader(8 // workers))
    return {
        "parameters": [p.detach().clone() for p in module.parameters()],
        "lr": [each.param_groups[0]["lr"] for each in fitting.optimizers],
        "last": fitting.callback_metrics["last"].item(),
    }


def loop(folder: Path, strategy: str, workers: int) -> dict[str, Any]:
    """A Fabric loop that saves in the middle and loads again."""
    fabric = Fabric(accelerator="cpu", devices=1, strategy=strategy)
    fabric.launch()
    model = network()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    model, optimizer = fabric.setup(model, optimizer)
    batches = fabric.setup_dataloaders(loader(8 // workers))
    losses = []
    for epoch in range(3):
        for number, (inputs, targets) in enumerate(batches):
            with fabric.no_backward_sync(model, enabled=number % 2 == 0):
                loss = torch.nn.functional.mse_loss(model(inputs), targets)
                fabric.backward(loss / 2)
            if number % 2:
                optimizer.step()
                optimizer.zero_grad()
        scheduler.step()
        losses.append(fabric.all_reduce(loss.detach()).item())
        if epoch == 1:
            fabric.save(folder / "saved.ckpt", {"model": model, "optimizer": optimizer, "epoch": epoch})
    end = [p.detach().clone() for p in model.parameters()]
    fabric.barrier()
    state: dict[str, Any] = {"model": model, "optimizer": optimizer, "epoch": 0}
    fabric.load(folder / "saved.ckpt", state)
    fabric.barrier()
    for inputs, targets in batches:
        fabric.backward(torch.nn.functional.mse_loss(model(inputs), targets))
        optimizer.step()
        optimizer.zero_grad()
    told = fabric.broadcast({"rank": fabric.global_rank} if fabric.is_global_zero else None)
    return {
        "parameters": [*end, *(p.detach().clone() for p in model.parameters())],
        "losses": losses,
        "lr": optimizer.param_groups[0]["lr"],
        "epoch": state["epoch"],
        "told": told,
        "gathered": fabric.all_gather(torch.tensor([1.0])).reshape(-1).tolist(),
    }
