"""Deltas of the bf16 weights of a language model that Adam trains at a learning rate of 1e-6, as when RL tunes one.

A transformer learns the bytes of this repository's pages and programs for a while at a usual learning rate, in float32.
Then a new Adam goes on at 1e-6, and after each step the weights are taken as bf16: how many elements changed, and how
large is the delta, in the formats of the service and of ``weight_v`` directories? "bf16 alone": the weights that are
trained are bf16 themselves, without float32 ones behind them. Then deltas are applied to
100 MB.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import click
import numpy as np
import torch
import zstandard
from torch import Tensor, nn

from ps_protocol.model.spec import DType
from ps_protocol.wire.deltas import HEADER_BYTES, Encoding, apply_delta, encode_delta, read_header
from ps_server.checkpoint.file_plan import TensorForm
from ps_server.checkpoint.weight_directory import WeightDirectory

ROOT = Path(__file__).parents[1]

RATE = 1e-6
APPLIED_BYTES = 100_000_000
ROUNDS = 9

ASKED_SHARE, ASKED_APPLY = 0.05, 1.5


@dataclass(frozen=True)
class Size:
    """Of the model and of what it is trained on."""

    width: int = 256
    layers: int = 4
    heads: int = 4
    context: int = 128
    batch: int = 4
    #: Steps at a usual learning rate, and those that are measured.
    begun: int = 100
    steps: int = 10


QUICK = Size(width=64, layers=2, heads=2, begun=20, steps=5)


@dataclass(frozen=True)
class Step:
    """What one step changed."""

    number: int
    #: Parts of all elements, and of all bytes.
    elements: float
    changed: float
    #: Of the full weights.
    delta: float
    directory: float
    encoding: str


class LanguageModel(nn.Module):
    """A causal transformer over bytes. [batch, context] to logits [batch, context, 256]."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.bytes = nn.Embedding(256, size.width)
        self.places = nn.Embedding(size.context, size.width)
        layer = nn.TransformerEncoderLayer(
            size.width, size.heads, 4 * size.width, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
        )
        self.layers = nn.TransformerEncoder(layer, size.layers, enable_nested_tensor=False)
        self.norm = nn.LayerNorm(size.width)
        self.head = nn.Linear(size.width, 256)
        self.mask: Tensor
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(size.context), persistent=False)

    def forward(self, text: Tensor) -> Tensor:
        """Logits of the bytes that come next."""
        hidden = self.bytes(text) + self.places.weight[: text.shape[1]]
        mask = self.mask.to(hidden.dtype)
        return self.head(self.norm(self.layers(hidden, mask=mask, is_causal=True)))


class Text:
    """Random pieces of the pages and programs of this repository, from a seed."""

    def __init__(self, size: Size) -> None:
        paths = sorted([*ROOT.glob("docs/**/*.md"), *ROOT.glob("ps_*/**/*.py")])
        self._bytes = torch.frombuffer(bytearray(b"".join(path.read_bytes() for path in paths)), dtype=torch.uint8)
        self._generator = torch.Generator().manual_seed(0)
        self._size = size

    def batch(self) -> tuple[Tensor, Tensor]:
        """Bytes, and those that come next; int64 [batch, context]."""
        size = self._size
        begins = torch.randint(len(self._bytes) - size.context - 1, (size.batch, 1), generator=self._generator)
        pieces = self._bytes[begins + torch.arange(size.context + 1)].long()
        return pieces[:, :-1], pieces[:, 1:]


def _train(model: nn.Module, text: Text, optimizer: torch.optim.Optimizer) -> float:
    given, wanted = text.batch()
    loss = nn.functional.cross_entropy(model(given).float().flatten(0, 1), wanted.flatten())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.item()


def _weights(model: nn.Module) -> dict[str, np.ndarray]:
    return {
        name: value.detach().bfloat16().flatten().view(torch.uint8).numpy().copy()
        for name, value in model.named_parameters()
    }


def steps_of(model: nn.Module, text: Text, count: int) -> list[Step]:
    """Train ``model`` for ``count`` steps of Adam at ``RATE``, and look at its bf16 weights after each."""
    optimizer = torch.optim.Adam(model.parameters(), lr=RATE)
    forms = [TensorForm(name, DType.BFLOAT16, tuple(value.shape)) for name, value in model.named_parameters()]
    found, before = [], _weights(model)
    with tempfile.TemporaryDirectory() as folder, WeightDirectory(Path(folder), anchor_every=count + 1) as directory:
        directory.write(1, forms, {name: value.data for name, value in before.items()})
        for number in range(1, count + 1):
            _train(model, text, optimizer)
            after = _weights(model)
            written = directory.write(number + 1, forms, {name: value.data for name, value in after.items()})
            base, new = (np.concatenate(list(state.values())) for state in (before, after))
            delta = encode_delta(base.data, new.data)
            if delta is None:
                raise RuntimeError(f"the delta of step {number} is not smaller than the weights")
            out = np.empty_like(base)
            apply_delta(base.data, delta, out.data)
            if not np.array_equal(out, new):
                raise RuntimeError(f"the delta of step {number} gives other weights")
            elements = float(np.mean(base.view(np.uint16) != new.view(np.uint16)))
            encoding = read_header(delta).encoding.name.lower()
            full = len(new)
            shares = written.changed_bytes / full, len(delta) / full, written.file_bytes / full
            found.append(Step(number, elements, *shares, encoding))
            before = after
    return found


@dataclass(frozen=True)
class Applied:
    """Seconds; of the best round."""

    share: float
    size: int
    encode: float
    copy: float
    decompress: float
    apply: float

    @property
    def ratio(self) -> float:
        """What applying takes beside decompression, in copies."""
        return (self.apply - self.decompress) / self.copy


def applied(share: float, size: int = APPLIED_BYTES, rounds: int = ROUNDS) -> Applied:
    """A delta of bf16 values of which ``share`` changed by one in the last place."""
    random = np.random.default_rng(0)
    base = torch.from_numpy(random.standard_normal(size // 2, np.float32) * 0.02).bfloat16().view(torch.int16).numpy()
    new = base + (random.random(len(base)) < share).astype(np.int16)
    old, now = base.view(np.uint8), new.view(np.uint8)
    delta = encode_delta(old.data, now.data)
    if delta is None:
        raise RuntimeError("the delta is not smaller than the weights")
    header, out = read_header(delta), np.zeros(len(old), np.uint8)
    raw = header.size if header.encoding is Encoding.DENSE_XOR else 2 * header.gaps + header.changed
    room = np.empty(raw, np.uint8)

    def decompress() -> None:
        zstandard.ZstdDecompressor().stream_reader(delta[HEADER_BYTES:]).readinto(room.data)

    timed: Sequence[Callable[[], object]] = (
        lambda: encode_delta(old.data, now.data),
        lambda: np.copyto(out, old),
        decompress,
        lambda: apply_delta(old.data, delta, out.data),
    )
    seconds = [[_seconds(each) for each in timed] for _ in range(rounds)]
    return Applied(share, len(delta), *(min(column) for column in zip(*seconds, strict=True)))


def _seconds(work: Callable[[], object]) -> float:
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


@click.command()
@click.option("--quick", is_flag=True, help="A small model and few steps: a look.")
def main(quick: bool) -> None:
    """Measure deltas of the weights of a language model, and print a table."""
    size = QUICK if quick else Size()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model, text = LanguageModel(size), Text(size)
    count = sum(value.numel() for value in model.parameters())
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-4)
    losses = [_train(model, text, optimizer) for _ in range(size.begun)]
    click.echo(
        f"a language model of {count / 1e6:.1f} M parameters, {2 * count / 1e6:.1f} MB in bf16; "
        f"loss {losses[0]:.2f} to {losses[-1]:.2f} in {size.begun} steps at 3e-4, then Adam at {RATE}"
    )
    _show("float32, published as bf16", steps_of(model, text, size.steps))
    _show("bf16 alone", steps_of(model.bfloat16(), text, size.steps))
    click.echo(f"\n{'changed':>9} {'delta':>9} {'encode':>9} {'copy':>9} {'unpack':>9} {'apply':>9} {'ratio':>7}")
    for share in (0.001, 0.01, 0.02, 0.05):
        each = applied(share, APPLIED_BYTES // 10 if quick else APPLIED_BYTES, 3 if quick else ROUNDS)
        milliseconds = (each.encode, each.copy, each.decompress, each.apply)
        texts = " ".join(f"{1e3 * value:>6.1f} ms" for value in milliseconds)
        click.echo(f"{share:>9.1%} {each.size / 1e6:>6.2f} MB {texts} {each.ratio:>7.2f}")
    click.echo(f"ratio: (apply - unpack) / copy, asked: {ASKED_APPLY} at most")


def _show(title: str, steps: Sequence[Step]) -> None:
    click.echo(f"\n{title}")
    click.echo(f"{'step':>6} {'elements':>9} {'bytes':>9} {'delta':>9} {'weight_v':>9}  encoding")
    for step in steps:
        if step.number in (1, 2, 3, 5, 10, len(steps)):
            shares = " ".join(f"{each:>9.3%}" for each in (step.elements, step.changed, step.delta, step.directory))
            click.echo(f"{step.number:>6} {shares}  {step.encoding}")
    largest = max(step.delta for step in steps)
    click.echo(f"largest delta {largest:.2%} of full, asked: {ASKED_SHARE:.0%} at most")


if __name__ == "__main__":
    main()
