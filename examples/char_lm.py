"""A small transformer that learns to write like Python's manual, character by character.

ps-run --shards 2 --workers 2 --mode ssp --staleness 4 examples/char_lm.py

The text is pydoc_data.topics, which comes with CPython: 450 thousand characters of English. Ends with the loss on a
held-out part in bits per character (guessing by frequency alone: 4.7).
"""

import argparse
import math
import sys
from pydoc_data.topics import topics

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import ps_worker

CONTEXT = 64
CHARACTERS = 128


class CharTransformer(nn.Module):
    """Two causal transformer layers over the last 64 characters; ASCII only."""

    def __init__(self, width: int = 64, heads: int = 4, layers: int = 2) -> None:
        super().__init__()
        self.embedding = nn.Embedding(CHARACTERS, width)
        self.position = nn.Parameter(torch.randn(CONTEXT, width) * 0.02)
        layer = nn.TransformerEncoderLayer(width, heads, 4 * width, dropout=0.0, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, layers, nn.LayerNorm(width), enable_nested_tensor=False)
        self.output = nn.Linear(width, CHARACTERS)
        mask = nn.Transformer.generate_square_subsequent_mask(CONTEXT)
        self.register_buffer("mask", mask, persistent=False)

    def forward(self, characters: Tensor) -> Tensor:
        """Logits of each next character: (batch, context) → (batch, context, characters)."""
        hidden = self.embedding(characters) + self.position
        return self.output(self.layers(hidden, mask=self.mask, is_causal=True))


class Windows(Dataset[Tensor]):
    """Every run of CONTEXT + 1 characters that starts at a multiple of ``stride``."""

    def __init__(self, text: Tensor, stride: int) -> None:
        self._windows = text.unfold(0, CONTEXT + 1, stride)

    def __len__(self) -> int:
        return len(self._windows)

    def __getitem__(self, index: int) -> Tensor:
        return self._windows[index]


def texts() -> tuple[Tensor, Tensor]:
    """Training and held-out text as character codes."""
    text = "\n".join(topics[name] for name in sorted(topics))
    codes = torch.tensor(list(text.encode("ascii", "replace")))
    held_out = len(codes) // 20
    return codes[:-held_out], codes[-held_out:]


def loss_of(model: nn.Module, windows: Tensor) -> Tensor:
    """Mean loss in nats per character of predicting each next character of ``windows``."""
    return nn.functional.cross_entropy(model(windows[:, :-1]).flatten(0, 1), windows[:, 1:].flatten())


@torch.no_grad()
def bits_per_character(model: nn.Module, text: Tensor, device: torch.device) -> float:
    """The loss on all of ``text``, in bits."""
    windows = text.unfold(0, CONTEXT + 1, CONTEXT)
    losses = [loss_of(model, batch.to(device)) * len(batch) for batch in windows.split(128)]
    return torch.stack(losses).sum().item() / len(windows) / math.log(2)


def train(cluster: ps_worker.Cluster, args: argparse.Namespace) -> int:
    """What every worker runs; rank 0 measures at the end. Returns the exit code."""
    torch.manual_seed(args.seed)
    text, held_out = texts()
    loader = cluster.shard(DataLoader(Windows(text, args.stride), batch_size=args.batch_size, shuffle=True))
    model = CharTransformer().to(cluster.device)
    optimizer = cluster.optimizer(torch.optim.AdamW, model, lr=args.lr, betas=(0.9, 0.98))
    warm_up = torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=0.05, total_iters=30)
    for _ in range(args.epochs):
        for windows in loader:
            loss = loss_of(model, windows.to(cluster.device))
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            warm_up.step()
            cluster.report(bits=loss / math.log(2))
    cluster.barrier()
    if cluster.rank != 0:
        return 0
    optimizer.pull()
    reached = bits_per_character(model, held_out, cluster.device)
    print(f"held-out loss {reached:.3f} bits per character (expected at most {args.expect_loss})")
    return int(reached > args.expect_loss)


def main() -> int:
    """Read the flags and train."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--batch-size", type=int, default=32, help="windows per worker and step")
    parser.add_argument("--stride", type=int, default=CONTEXT // 2, help="characters between the starts of windows")
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--expect-loss", type=float, default=2.8, help="exit with 1 above this many bits per character")
    args = parser.parse_args()
    with ps_worker.connect() as cluster:
        return train(cluster, args)


if __name__ == "__main__":
    sys.exit(main())
