"""Handwritten digits under any strategy: this script does not name one.

python examples/strategies.py
ps-run --strategy mirrored --workers 2 examples/strategies.py
ps-run --strategy parameter_server --workers 2 examples/strategies.py
"""

import argparse
import sys

import torch
from digits import datasets
from torch import nn
from torch.utils.data import DataLoader

import ps_worker


def main() -> int:
    """Train and measure; the exit code is 1 below the expected accuracy."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch-size", type=int, default=64, help="images per step of all replicas in sync")
    parser.add_argument("--lr", type=float, default=0.01)
    parser.add_argument("--expect-accuracy", type=float, default=0.9, help="exit with 1 below this test accuracy")
    args = parser.parse_args()
    with ps_worker.strategy() as s:
        return train(s, args)


def train(s: ps_worker.Strategy, args: argparse.Namespace) -> int:
    """What every replica runs."""
    torch.manual_seed(0)
    data, test = datasets()
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
    model, optimizer = s.prepare(model, torch.optim.Adam, lr=args.lr)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 50, gamma=0.5)
    s.seed_replica(0)

    def step(images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        scheduler.step()
        return loss.detach()

    loader = s.distribute(DataLoader(data, batch_size=args.batch_size // s.num_replicas_in_sync, shuffle=True))
    for epoch in range(args.epochs):
        losses = [s.run(step, *batch) for batch in loader]
        mean = s.reduce("mean", torch.stack(losses).mean())
        if s.is_chief:
            print(f"epoch {epoch}: loss {mean.item():.4f}", flush=True)
    s.barrier()
    if not s.is_chief:
        return 0
    s.refresh(model)
    images, labels = test.tensors
    with torch.no_grad():
        right = s.unwrap(model)(images.to(s.device)).argmax(1).cpu() == labels
    accuracy = right.float().mean().item()
    print(f"{s.name}: test accuracy {accuracy:.4f} (expected at least {args.expect_accuracy})")
    return int(accuracy < args.expect_accuracy)


if __name__ == "__main__":
    sys.exit(main())
