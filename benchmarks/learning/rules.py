"""Rules for gradients that are some updates old, each in a few lines: the references that trainings compare.

What a shard applies is plain unless a rule says otherwise. A rule sees each push of ``async`` and ``ssp`` before it is
applied; a synchronous round has no old gradients. Vectors are flat: all parameters of the model, float32.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import click
import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Pushed:
    """A push that is about to be applied."""

    rank: int
    #: How many updates were made since the worker pulled.
    staleness: int
    #: Virtual seconds from the pull to the push.
    seconds: float
    #: May be changed in place.
    gradient: Tensor
    #: The parameters that the worker pulled.
    pulled: Tensor
    #: The parameters now.
    values: Tensor


class Rule:
    """The plain rule: each gradient is applied as it comes. Owned by one training."""

    def __init__(self, workers: int, lr: float) -> None:
        self._workers, self._lr = workers, lr

    def take(self, push: Pushed) -> float:
        """What the learning rate is multiplied by for this push; 0 drops it."""
        return 1.0

    def applied(self, change: Tensor) -> None:
        """The update that followed changed the parameters by ``change``."""

    def look_ahead(self, pulled: Tensor) -> None:
        """Change in place what a worker pulls."""


class Threshold(Rule):
    """Drop a gradient that is as old as there are workers, or older (Ringmaster ASGD, Maranjyan et al. 2025)."""

    def take(self, push: Pushed) -> float:
        """1 below the threshold, else 0."""
        return float(push.staleness < self._workers)


class Concurrency(Rule):
    """The whole step up to as many updates as there are workers, smaller beyond (Koloskova et al. 2022, section 4)."""

    def take(self, push: Pushed) -> float:
        """min(1, workers / staleness)."""
        return min(1.0, self._workers / max(1, push.staleness))


class Inverse(Rule):
    """The learning rate divided by the staleness (Zhang et al. 2016, equation 6)."""

    def take(self, push: Pushed) -> float:
        """1 / staleness; 1 for a fresh gradient."""
        return 1.0 / max(1, push.staleness)


class Gap(Rule):
    """Each element divided by how many usual updates it has moved since the pull (Gap-Aware, Barkai et al. 2020)."""

    _decay = 0.99

    def __init__(self, workers: int, lr: float) -> None:
        super().__init__(workers, lr)
        self._usual: Tensor | None = None

    def take(self, push: Pushed) -> float:
        """1: the gradient itself is divided."""
        if self._usual is not None and push.staleness:
            push.gradient.div_(1 + (push.values - push.pulled).abs() / (self._usual + 1e-12))
        return 1.0

    def applied(self, change: Tensor) -> None:
        """Average the sizes of updates by element."""
        size = change.abs()
        self._usual = size if self._usual is None else self._usual.lerp_(size, 1 - self._decay)


class Compensation(Rule):
    """g + l g² (w - w_pulled), with l divided by the root of the mean of g² (DC-ASGD-a, Zheng et al. 2017)."""

    _strength, _decay = 2.0, 0.95

    def __init__(self, workers: int, lr: float) -> None:
        super().__init__(workers, lr)
        self._square: Tensor | None = None

    def take(self, push: Pushed) -> float:
        """1: the gradient itself is corrected."""
        square = push.gradient.square()
        self._square = square.clone() if self._square is None else self._square.lerp_(square, 1 - self._decay)
        push.gradient.addcmul_(
            square.div_((self._square + 1e-7).sqrt_()), push.values - push.pulled, value=self._strength
        )
        return 1.0


class Dana(Rule):
    """A momentum of 0.9 for each worker; who pulls gets where all momenta lead (DANA-Zero, Hakimi et al. 2019)."""

    _momentum = 0.9

    def __init__(self, workers: int, lr: float) -> None:
        super().__init__(workers, lr)
        self._momenta: list[Tensor | None] = [None] * workers
        self._sum: Tensor | None = None

    def take(self, push: Pushed) -> float:
        """1: the gradient becomes the momentum of its worker."""
        if self._sum is None:
            self._sum = torch.zeros_like(push.gradient)
        before = self._momenta[push.rank]
        now = push.gradient.clone() if before is None else before.mul(self._momentum).add_(push.gradient)
        self._sum.add_(now if before is None else now - before)
        self._momenta[push.rank] = now
        push.gradient.copy_(now)
        return 1.0

    def look_ahead(self, pulled: Tensor) -> None:
        """Subtract lr times momentum times the sum of all momenta."""
        if self._sum is not None:
            pulled.sub_(self._sum, alpha=self._lr * self._momentum)


class Share(Rule):
    """Each worker counts alike, however fast it is (Rescaled ASGD, 2605.13434): steps by the time they took."""

    _decay = 0.9

    def __init__(self, workers: int, lr: float) -> None:
        super().__init__(workers, lr)
        self._seconds = [math.nan] * workers

    def take(self, push: Pushed) -> float:
        """The worker's mean time of a step over the harmonic mean of those of all, so that the factors' mean is 1."""
        known = self._seconds[push.rank]
        kept = self._decay if known == known else 0.0
        self._seconds[push.rank] = (kept * known if kept else 0.0) + (1 - kept) * push.seconds
        rates = [1 / max(each, 1e-9) for each in self._seconds if each == each]
        # Of all pushes a worker makes the share of its rate: the mean of factors over pushes is 1.
        return self._seconds[push.rank] * sum(rates) / len(rates)


RULES: Mapping[str, Callable[[int, float], Rule]] = MappingProxyType(
    {
        "plain": Rule,
        "threshold": Threshold,
        "concurrency": Concurrency,
        "inverse": Inverse,
        "gap": Gap,
        "compensation": Compensation,
        "dana": Dana,
        "share": Share,
    }
)
"""By the name that commands take; called with the number of workers and the learning rate."""


def check(name: str, optimizer: str, options: Mapping[str, object]) -> None:
    """Raise click.BadParameter where the rule ``name`` does not fit the optimizer."""
    if name == "dana" and (optimizer != "SGD" or options.get("momentum")):
        raise click.BadParameter(
            f"the rule dana has a momentum of its own: it takes SGD without momentum, not {optimizer} "
            f"with {dict(options)}"
        )
