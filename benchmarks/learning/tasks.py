"""What virtual workers learn: small tasks whose data every machine has."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from functools import cache
from types import MappingProxyType

import torch
from torch import Tensor, nn

from examples.char_lm import CONTEXT, CharTransformer, loss_of, texts
from examples.clicks.auc import auc
from examples.clicks.batch import FEATURES, Batch, in_columns
from examples.clicks.generated import HELD_OUT, ClickStream
from examples.clicks.models import FactorizationMachine


class Task(ABC):
    """A model, the batches of each worker, and a measure on held-out data."""

    #: Samples of one worker's batch, for the task's own use.
    batch_size = 16
    #: Name of the measure, of which less is better.
    measure_name = "loss"
    #: Name of the score.
    score_name = "loss"
    #: Whether more of the score is better.
    larger_is_better = False

    @abstractmethod
    def model(self, seed: int) -> nn.Module:
        """A new model with the initial values of ``seed``."""

    @abstractmethod
    def loss(self, model: nn.Module, rank: int, workers: int, generator: torch.Generator) -> Tensor:
        """The loss on the next batch of worker ``rank``, drawn by ``generator``, which is that worker's."""

    @abstractmethod
    def measure(self, model: nn.Module) -> float:
        """On held-out data: what trainings are compared by on their way."""

    def score(self, model: nn.Module) -> float:
        """On held-out data: what people ask for. The measure unless the task has one of its own."""
        return self.measure(model)


class NoisyQuadratic(Task):
    """(1/2) sum of h w² over 64 dimensions, curvatures h from 0.01 to 1, with noise of one per batch in the gradient.

    The model of Ringmaster ASGD's and Zhang et al.'s experiments in shape. Measured: the value without noise.
    """

    batch_size = 1
    measure_name = score_name = "value"

    def __init__(self, noise: float = 0.1, dimensions: int = 64) -> None:
        self._noise = noise
        self._curvatures = torch.logspace(-2, 0, dimensions) if dimensions > 1 else torch.ones(1)

    def model(self, seed: int) -> nn.Module:
        """One parameter, which begins at 1."""
        return nn.ParameterDict({"w": nn.Parameter(torch.ones(len(self._curvatures)))})

    def loss(self, model: nn.Module, rank: int, workers: int, generator: torch.Generator) -> Tensor:
        """The value, and a term whose gradient is the noise."""
        (w,) = model.parameters()
        noise = self._noise * torch.randn(w.shape, generator=generator)
        return self._value(w) + w @ noise

    @torch.no_grad()
    def measure(self, model: nn.Module) -> float:
        """The value without noise."""
        (w,) = model.parameters()
        return self._value(w).item()

    def _value(self, w: Tensor) -> Tensor:
        return (self._curvatures * w.square()).sum() / 2


@cache
def _digits() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    from sklearn.datasets import load_digits  # takes a second, and every test process imports this file

    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    labels = torch.tensor(digits.target)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    test, train = order[:360], order[360:]
    return images[train], labels[train], images[test], labels[test]


class Digits(Task):
    """Handwritten digits (8×8, scikit-learn) with two convolutions: 19,000 parameters. Measured: held-out loss."""

    score_name = "accuracy, %"
    larger_is_better = True

    def __init__(self, *, by_label: bool = False) -> None:
        """``by_label``: each worker has the images of some labels alone."""
        self._by_label = by_label

    def model(self, seed: int) -> nn.Module:
        """Without statistics of batches, which would differ by worker."""
        torch.manual_seed(seed)
        return nn.Sequential(
            *(nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
            *(nn.Flatten(), nn.Linear(256, 64), nn.ReLU(), nn.Linear(64, 10)),
        )

    def loss(self, model: nn.Module, rank: int, workers: int, generator: torch.Generator) -> Tensor:
        """Mean cross-entropy of a batch."""
        images, labels, _, _ = _digits()
        own = torch.arange(len(labels))
        if self._by_label:
            own = own[(labels * workers).div(10, rounding_mode="floor") == rank] if workers <= 10 else own
        chosen = own[torch.randint(len(own), (self.batch_size,), generator=generator)]
        return nn.functional.cross_entropy(model(images[chosen]), labels[chosen])

    @torch.no_grad()
    def measure(self, model: nn.Module) -> float:
        """Mean cross-entropy of the held-out images."""
        _, _, images, labels = _digits()
        return nn.functional.cross_entropy(model(images), labels).item()

    @torch.no_grad()
    def score(self, model: nn.Module) -> float:
        """How many of the held-out images are recognized."""
        _, _, images, labels = _digits()
        return 100 * (model(images).argmax(dim=1) == labels).float().mean().item()


@cache
def _texts() -> tuple[Tensor, Tensor]:
    return texts()


class Characters(Task):
    """A two-layer transformer over the characters of Python's manual: 36,000 parameters. Measured: held-out bits."""

    batch_size = 4
    measure_name = score_name = "bits per character"

    def model(self, seed: int) -> nn.Module:
        """That of ``examples/char_lm.py``, half as wide, so that a training takes seconds."""
        torch.manual_seed(seed)
        return CharTransformer(width=32, heads=2)

    def loss(self, model: nn.Module, rank: int, workers: int, generator: torch.Generator) -> Tensor:
        """Mean loss of a batch of windows, in nats."""
        text, _ = _texts()
        begins = torch.randint(len(text) - CONTEXT - 1, (self.batch_size,), generator=generator)
        return loss_of(model, torch.stack([text[begin : begin + CONTEXT + 1] for begin in begins.tolist()]))

    @torch.no_grad()
    def measure(self, model: nn.Module) -> float:
        """The loss on 64 windows of the held-out text, in bits."""
        _, held_out = _texts()
        windows = held_out.unfold(0, CONTEXT + 1, CONTEXT)
        return loss_of(model, windows[:: len(windows) // 64]).item() / math.log(2)


_ROWS, _DIM, _SAMPLES, _HELD_OUT = 4096, 8, 65_536, 8192


@cache
def _clicks() -> tuple[Batch, Batch]:
    """Samples to draw from, and those held out; ids are hashed to rows of a dense table, as one column."""
    parts = []
    for first, samples in ((0, _SAMPLES), (HELD_OUT, _HELD_OUT)):
        batch = ClickStream(samples, seed=0, first=first, vocabulary=10_000).__getitems__(range(samples))
        parts.append(batch._replace(ids={"all": in_columns(batch.ids) % _ROWS}))
    train, held_out = parts
    return train, held_out


class _DenseTable(nn.Module):
    """A dense table for the ids of all features: what rows are on shards."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(_ROWS, 1 + _DIM) * 0.01)

    def forward(self, ids: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """For ids [n, features] their rows by feature, [n, dim] each."""
        rows = nn.functional.embedding(ids["all"], self.weight).unbind(dim=1)
        return dict(zip(FEATURES, rows, strict=True))


class Clicks(Task):
    """Generated clicks and a factorization machine with a dense table: 37,000 parameters. Measured: held-out loss."""

    batch_size = 64
    score_name = "AUC"
    larger_is_better = True

    def model(self, seed: int) -> nn.Module:
        """That of ``examples/factorization_machine.py``."""
        torch.manual_seed(seed)
        return FactorizationMachine(_DenseTable(), _DIM)

    def loss(self, model: nn.Module, rank: int, workers: int, generator: torch.Generator) -> Tensor:
        """Mean cross-entropy of a batch."""
        samples, _ = _clicks()
        chosen = torch.randint(_SAMPLES, (self.batch_size,), generator=generator)
        logits = model(samples.numbers[chosen], {"all": samples.ids["all"][chosen]})
        return nn.functional.binary_cross_entropy_with_logits(logits, samples.labels[chosen])

    @torch.no_grad()
    def measure(self, model: nn.Module) -> float:
        """Mean cross-entropy of the held-out samples."""
        _, held_out = _clicks()
        logits = model(held_out.numbers, held_out.ids)
        return nn.functional.binary_cross_entropy_with_logits(logits, held_out.labels).item()

    @torch.no_grad()
    def score(self, model: nn.Module) -> float:
        """The area under the ROC curve of the same samples."""
        _, held_out = _clicks()
        return auc(held_out.labels.numpy(), model(held_out.numbers, held_out.ids).numpy())


class Matrices(Task):
    """A task of which matrices alone are trained, as Muon has it; other parameters stay as they begin."""

    def __init__(self, task: Task) -> None:
        self._task = task
        self.measure_name, self.score_name = task.measure_name, task.score_name
        self.larger_is_better = task.larger_is_better

    def model(self, seed: int) -> nn.Module:
        """That of the task."""
        model = self._task.model(seed)
        for parameter in model.parameters():
            parameter.requires_grad_(parameter.ndim == 2)
        return model

    def loss(self, model: nn.Module, rank: int, workers: int, generator: torch.Generator) -> Tensor:
        """That of the task."""
        return self._task.loss(model, rank, workers, generator)

    def measure(self, model: nn.Module) -> float:
        """That of the task."""
        return self._task.measure(model)

    def score(self, model: nn.Module) -> float:
        """That of the task."""
        return self._task.score(model)


TASKS: Mapping[str, Callable[[], Task]] = MappingProxyType(
    {
        "quadratic": NoisyQuadratic,
        "digits": Digits,
        "digits-by-label": lambda: Digits(by_label=True),
        "characters": Characters,
        "clicks": Clicks,
        "digits-matrices": lambda: Matrices(Digits()),
        "characters-matrices": lambda: Matrices(Characters()),
    }
)
"""By the name that commands take."""
