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


class Task(ABC):
    """A model, the batches of each worker, and a measure on held-out data."""

    #: Samples of one worker's batch.
    batch_size = 16
    #: Whether more of the measure is better.
    larger_is_better = False
    #: Name of the measure.
    measure_name = "loss"

    @abstractmethod
    def model(self, seed: int) -> nn.Module:
        """A new model with the initial values of ``seed``."""

    @abstractmethod
    def loss(self, model: nn.Module, rank: int, workers: int, generator: torch.Generator) -> Tensor:
        """The loss on the next batch of worker ``rank``, drawn by ``generator``, which is that worker's."""

    @abstractmethod
    def measure(self, model: nn.Module) -> float:
        """On held-out data."""


class NoisyQuadratic(Task):
    """(1/2) sum of h w² over 64 dimensions, curvatures h from 0.01 to 1, with noise of one per batch in the gradient.

    The model of Ringmaster ASGD's and Zhang et al.'s experiments in shape. Measured: the value without noise.
    """

    batch_size = 1
    measure_name = "value"

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


@cache
def _texts() -> tuple[Tensor, Tensor]:
    return texts()


class Characters(Task):
    """A two-layer transformer over the characters of Python's manual: 110,000 parameters. Measured: held-out bits."""

    batch_size = 8
    measure_name = "bits per character"

    def model(self, seed: int) -> nn.Module:
        """That of ``examples/char_lm.py``."""
        torch.manual_seed(seed)
        return CharTransformer()

    def loss(self, model: nn.Module, rank: int, workers: int, generator: torch.Generator) -> Tensor:
        """Mean loss of a batch of windows, in nats."""
        text, _ = _texts()
        begins = torch.randint(len(text) - CONTEXT - 1, (self.batch_size,), generator=generator)
        return loss_of(model, torch.stack([text[begin : begin + CONTEXT + 1] for begin in begins.tolist()]))

    @torch.no_grad()
    def measure(self, model: nn.Module) -> float:
        """The loss on 128 windows of the held-out text, in bits."""
        _, held_out = _texts()
        windows = held_out.unfold(0, CONTEXT + 1, CONTEXT)
        return loss_of(model, windows[:: max(1, len(windows) // 128)]).item() / math.log(2)


TASKS: Mapping[str, Callable[[], Task]] = MappingProxyType(
    {
        "quadratic": NoisyQuadratic,
        "digits": Digits,
        "digits-by-label": lambda: Digits(by_label=True),
        "characters": Characters,
    }
)
"""By the name that commands take."""
