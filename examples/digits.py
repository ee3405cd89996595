"""Handwritten digits (8×8, scikit-learn) with a small CNN; ends with a test accuracy of 0.97 or better in every mode.

ps-run --shards 2 --workers 2 --mode ssp --staleness 4 examples/digits.py --epochs 10
"""

import argparse
import sys
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import ps_worker


def network() -> nn.Sequential:
    """Two convolutions with BatchNorm, two linear layers: 40 thousand parameters."""
    return nn.Sequential(
        *(nn.Conv2d(1, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU()),
        *(nn.Conv2d(16, 32, 3, padding=1, bias=False), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(32 * 4 * 4, 64), nn.ReLU(), nn.Linear(64, 10)),
    )


def datasets() -> tuple[TensorDataset, TensorDataset]:
    """Training set of 1437 and test set of 360 images, the same split for everyone."""
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    labels = torch.tensor(digits.target)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    test, train = order[:360], order[360:]
    return TensorDataset(images[train], labels[train]), TensorDataset(images[test], labels[test])


@torch.no_grad()
def accuracy(model: nn.Module, data: TensorDataset, device: torch.device) -> float:
    """The part of ``data`` that ``model`` names rightly."""
    images, labels = (tensor.to(device) for tensor in data.tensors)
    model.eval()
    right = (model(images).argmax(dim=1) == labels).float().mean().item()
    model.train()
    return right


def train(cluster: ps_worker.Cluster, args: argparse.Namespace) -> int:
    """What every worker runs; rank 0 measures at the end. Returns the exit code."""
    torch.manual_seed(args.seed)
    data, test = datasets()
    loader = cluster.shard(DataLoader(data, batch_size=args.batch_size, shuffle=True))
    model = network().to(cluster.device)
    optimizer = cluster.optimizer(torch.optim.AdamW, model, lr=args.lr)
    for _ in range(args.epochs):
        for images, labels in loader:
            loss = nn.functional.cross_entropy(model(images.to(cluster.device)), labels.to(cluster.device))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            cluster.report(loss=loss)
    cluster.barrier()
    if cluster.rank != 0:
        return 0
    optimizer.pull()
    reached = accuracy(model, test, cluster.device)
    print(f"test accuracy {reached:.4f} (expected at least {args.expect_accuracy})")
    if args.save:
        torch.save(model.state_dict(), args.save)
    return int(reached < args.expect_accuracy)


def evaluate(cluster: ps_worker.Cluster) -> int:
    """What an evaluator runs: the accuracy of the newest parameters for as long as training goes on."""
    _, test = datasets()
    model = network().to(cluster.device)
    for step in cluster.follow(model):
        print(f"step {step}: test accuracy {accuracy(model, test, cluster.device):.4f}")
    return 0


def main() -> int:
    """Read the flags, join the cluster, do what this process's role asks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch-size", type=int, default=32, help="images per worker and step")
    parser.add_argument("--lr", type=float, default=0.003)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--expect-accuracy", type=float, default=0.97, help="exit with 1 below this test accuracy")
    parser.add_argument("--save", type=Path, help="write the trained state_dict to this file")
    args = parser.parse_args()
    with ps_worker.connect() as cluster:
        return evaluate(cluster) if cluster.role == "evaluator" else train(cluster, args)


if __name__ == "__main__":
    sys.exit(main())
