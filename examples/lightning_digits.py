"""Handwritten digits with a LightningModule: ps-run --workers 2 --mode sync examples/lightning_digits.py"""

import argparse
import sys

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import ps_worker.lightning  # noqa: F401 -- makes the strategy known


class Digits(pl.LightningModule):
    """A small network for images of 8×8 pixels."""

    def __init__(self, lr: float) -> None:
        super().__init__()
        self.lr = lr
        self.network = nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        """The loss of a batch."""
        images, labels = batch
        return nn.functional.cross_entropy(self.network(images), labels)

    def validation_step(self, batch: list[torch.Tensor], batch_idx: int) -> None:
        """The part of a batch that is named rightly."""
        images, labels = batch
        right = (self.network(images).argmax(dim=1) == labels).float().mean()
        self.log("accuracy", right, sync_dist=True)

    def configure_optimizers(self) -> dict[str, object]:
        """AdamW, and a learning rate that falls with each epoch."""
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.lr)
        return {"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 4, 0.5)}


def loaders(batch_size: int) -> tuple[DataLoader, DataLoader]:
    """1437 images to train on, 360 to measure with."""
    digits = load_digits()
    images, labels = torch.tensor(digits.images, dtype=torch.float32) / 16, torch.tensor(digits.target)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    test, train = (TensorDataset(images[part], labels[part]) for part in (order[:360], order[360:]))
    return DataLoader(train, batch_size=batch_size, shuffle=True), DataLoader(test, batch_size=120)


def main() -> int:
    """Train, and exit with 1 below the expected accuracy."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--lr", type=float, default=0.01)
    parser.add_argument("--expect-accuracy", type=float, default=0.93)
    args = parser.parse_args()
    pl.seed_everything(0, verbose=False)
    callbacks = [EarlyStopping("accuracy", mode="max", patience=4), ModelCheckpoint(monitor="accuracy", mode="max")]
    trainer = pl.Trainer(
        strategy="torch_ps",
        max_epochs=args.epochs,
        accumulate_grad_batches=2,
        callbacks=callbacks,
        enable_progress_bar=False,
    )
    trainer.fit(Digits(args.lr), *loaders(args.batch_size))
    reached = trainer.callback_metrics["accuracy"].item()
    if trainer.is_global_zero:
        print(f"accuracy {reached:.4f} (expected at least {args.expect_accuracy})", flush=True)
    return int(reached < args.expect_accuracy)


if __name__ == "__main__":
    sys.exit(main())
