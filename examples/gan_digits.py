"""A small GAN on handwritten digits: two models with their own optimizers in one job.

ps-run --shards 2 --workers 2 --mode async examples/gan_digits.py --epochs 20

Ends with the distance between generated and real images: the mean over pixels of |difference of means| plus
|difference of standard deviations|. Untrained it is about 0.45; a collapsed generator keeps the second part high.
"""

import argparse
import sys

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import ps_worker

NOISE = 16


def generator_network() -> nn.Sequential:
    """Noise to the 64 pixels of an image, each in [0, 1]."""
    return nn.Sequential(
        *(nn.Linear(NOISE, 128), nn.LayerNorm(128), nn.LeakyReLU(0.2)),
        *(nn.Linear(128, 128), nn.LayerNorm(128), nn.LeakyReLU(0.2)),
        *(nn.Linear(128, 64), nn.Sigmoid()),
    )


def discriminator_network() -> nn.Sequential:
    """64 pixels to one logit: positive for real."""
    return nn.Sequential(
        *(nn.Linear(64, 128), nn.LeakyReLU(0.2), nn.Dropout(0.3)),
        *(nn.Linear(128, 64), nn.LeakyReLU(0.2), nn.Dropout(0.3), nn.Linear(64, 1)),
    )


def real_images() -> Tensor:
    """All 1797 digits as rows of 64 pixels in [0, 1]."""
    return torch.tensor(load_digits().data, dtype=torch.float32) / 16


@torch.no_grad()
def distance(generator: nn.Module, real: Tensor, device: torch.device) -> float:
    """How far the pixels' means and standard deviations of 2000 generated images are from the real ones."""
    noise = torch.randn(2000, NOISE, generator=torch.Generator().manual_seed(1))
    fake = generator(noise.to(device)).cpu()
    return ((fake.mean(0) - real.mean(0)).abs() + (fake.std(0) - real.std(0)).abs()).mean().item()


def train(cluster: ps_worker.Cluster, args: argparse.Namespace) -> int:
    """What every worker runs; rank 0 measures at the end. Returns the exit code."""
    torch.manual_seed(args.seed)
    real = real_images()
    loader = cluster.shard(DataLoader(TensorDataset(real), batch_size=args.batch_size, shuffle=True))
    generator, discriminator = generator_network().to(cluster.device), discriminator_network().to(cluster.device)
    adam = {"lr": args.lr, "betas": (0.5, 0.999)}
    generator_optimizer = cluster.optimizer(torch.optim.Adam, generator, name="generator", **adam)
    discriminator_optimizer = cluster.optimizer(torch.optim.Adam, discriminator, name="discriminator", **adam)
    torch.manual_seed(args.seed + cluster.rank)  # the workers' noise differs
    softplus = nn.functional.softplus
    for _ in range(args.epochs):
        for (images,) in loader:
            fake = generator(torch.randn(len(images), NOISE, device=cluster.device))
            judged_real, judged_fake = discriminator(images.to(cluster.device)), discriminator(fake.detach())
            discriminator_loss = (softplus(-judged_real) + softplus(judged_fake)).mean()
            discriminator_optimizer.zero_grad()
            discriminator_loss.backward()
            discriminator_optimizer.step()

            generator_loss = softplus(-discriminator(fake)).mean()
            generator_optimizer.zero_grad()
            generator_loss.backward()
            generator_optimizer.step()
            cluster.report(discriminator=discriminator_loss, generator=generator_loss)
    cluster.barrier()
    if cluster.rank != 0:
        return 0
    generator_optimizer.pull()
    reached = distance(generator, real, cluster.device)
    print(f"distance {reached:.4f} (expected at most {args.expect_distance})")
    return int(reached > args.expect_distance)


def main() -> int:
    """Read the flags and train."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--batch-size", type=int, default=32, help="images per worker and step")
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--expect-distance", type=float, default=0.2, help="exit with 1 above this distance")
    args = parser.parse_args()
    with ps_worker.connect() as cluster:
        return train(cluster, args)


if __name__ == "__main__":
    sys.exit(main())
