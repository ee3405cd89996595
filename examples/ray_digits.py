"""Handwritten digits (8×8, scikit-learn) in a Ray cluster: python examples/ray_digits.py --workers 2

Without ``--ray`` it starts a Ray cluster on this machine; ``--ray auto`` joins the one that this machine belongs to.
"""

import argparse
import sys
from pathlib import Path

import ray
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import ps_worker
from ps_worker.ray import RayCluster


def train(config: dict[str, float]) -> float:
    """What every worker runs; returns its accuracy on 360 images that it was not trained on."""
    digits = load_digits()
    images, labels = torch.tensor(digits.images, dtype=torch.float32) / 16, torch.tensor(digits.target)
    with ps_worker.connect() as cluster:
        torch.manual_seed(0)
        loader = cluster.shard(DataLoader(TensorDataset(images[360:], labels[360:]), batch_size=32, shuffle=True))
        model = nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)).to(cluster.device)
        optimizer = cluster.optimizer(torch.optim.Adam, model, lr=config["lr"])
        for _ in range(int(config["epochs"])):
            for some_images, some_labels in loader:
                loss = nn.functional.cross_entropy(
                    model(some_images.to(cluster.device)), some_labels.to(cluster.device)
                )
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                cluster.report(loss=loss)
        cluster.barrier()
        optimizer.pull()
        with torch.no_grad():
            right = model(images[:360].to(cluster.device)).argmax(dim=1).cpu() == labels[:360]
        return right.float().mean().item()


def main() -> int:
    """Read the flags, start the servers, run ``train`` on every worker."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ray", help="address of a Ray cluster, or auto")
    parser.add_argument("--shards", type=int, default=2)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--mode", default="async", help="async, ssp or sync")
    parser.add_argument("--data-dir", type=Path, help="folder on every node from which servers continue")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--lr", type=float, default=0.005)
    parser.add_argument("--expect-accuracy", type=float, default=0.85, help="exit with 1 below this test accuracy")
    args = parser.parse_args()
    # On one machine Ray may count more CPUs than there are: this is a small model.
    ray.init(address=args.ray, num_cpus=None if args.ray else args.shards + args.workers + 1)
    with RayCluster(args.shards, args.workers, mode=args.mode, data_dir=args.data_dir) as cluster:
        reached = cluster.run(train, {"epochs": args.epochs, "lr": args.lr})
    print("test accuracy of each worker:", ", ".join(f"{accuracy:.4f}" for accuracy in reached))
    return int(min(reached) < args.expect_accuracy)


if __name__ == "__main__":
    sys.exit(main())
