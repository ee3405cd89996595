"""Handwritten digits with a loop on Fabric: ps-run --workers 2 --mode sync examples/fabric_digits.py"""

import argparse
import sys

import torch
from lightning.fabric import Fabric
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import ps_worker.lightning  # noqa: F401 -- makes the strategy known


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
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--lr", type=float, default=0.01)
    parser.add_argument("--expect-accuracy", type=float, default=0.93)
    args = parser.parse_args()
    fabric = Fabric(strategy="torch_ps")
    fabric.launch()
    fabric.seed_everything(0, verbose=False)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 4, 0.5)
    model, optimizer = fabric.setup(model, optimizer)
    train, test = fabric.setup_dataloaders(*loaders(args.batch_size))
    for _ in range(args.epochs):
        for images, labels in train:
            optimizer.zero_grad()
            fabric.backward(nn.functional.cross_entropy(model(images), labels))
            optimizer.step()
        scheduler.step()
        fabric.save("digits.ckpt", {"model": model, "optimizer": optimizer})
    fabric.barrier()
    with torch.no_grad():
        counts = [(model(images).argmax(dim=1) == labels).float() for images, labels in test]
    right, images = torch.cat(counts).sum(), torch.tensor(float(sum(map(len, counts))))
    reached = (fabric.all_reduce(right, reduce_op="sum") / fabric.all_reduce(images, reduce_op="sum")).item()
    if fabric.is_global_zero:
        print(f"accuracy {reached:.4f} (expected at least {args.expect_accuracy})", flush=True)
    return int(reached < args.expect_accuracy)


if __name__ == "__main__":
    sys.exit(main())
