"""A loop of Accelerate in one process: a small network learns to add.

python examples/huggingface/accelerate_one_process.py --epochs 4
"""

import argparse

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def dataset(count: int, seed: int) -> TensorDataset:
    """Eight numbers, and their sum."""
    numbers = torch.rand(count, 8, generator=torch.Generator().manual_seed(seed))
    return TensorDataset(numbers, numbers.sum(dim=1, keepdim=True))


def main() -> None:
    """Read the flags, train with two batches to a step, and print the error on other data."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--batch-size", type=int, default=8, help="samples per process and batch")
    parser.add_argument("--save", help="write the state to this folder")
    parser.add_argument("--load", help="continue from the state in this folder")
    args = parser.parse_args()
    torch.manual_seed(0)
    accelerator = Accelerator(gradient_accumulation_steps=2)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 10, gamma=0.8)
    loader = DataLoader(dataset(256, seed=0), batch_size=args.batch_size)
    test = DataLoader(dataset(64, seed=1), batch_size=args.batch_size)
    model, optimizer, loader, test, scheduler = accelerator.prepare(model, optimizer, loader, test, scheduler)
    if args.load:
        accelerator.load_state(args.load)
    for _ in range(args.epochs):
        for numbers, sums in loader:
            with accelerator.accumulate(model):
                loss = nn.functional.mse_loss(model(numbers), sums)
                accelerator.backward(loss)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
    errors = []
    with torch.no_grad():
        for numbers, sums in test:
            errors.append(accelerator.gather_for_metrics((model(numbers) - sums).abs()))
    accelerator.print(f"{len(torch.cat(errors))} sums, mean error {torch.cat(errors).mean():.4f}")
    if args.save:
        accelerator.save_state(args.save)


if __name__ == "__main__":
    main()
