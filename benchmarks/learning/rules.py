"""Rules for gradients that are some updates old, each in a few lines: the references that trainings compare.

What a shard applies is plain unless a rule says otherwise. A rule sees each push of ``async`` and ``ssp`` before it is
applied; a synchronous round has no old gradients. Vectors are flat: all parameters of the model, float32.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

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

    def __init__(self, workers: int, options: Mapping[str, Any]) -> None:
        """``options``: the optimizer's arguments."""
        self._workers, self._options = workers, options
        #: The learning rate now, where a schedule changes it.
        self.lr: float = options.get("lr", 0.0)

    def take(self, push: Pushed) -> float:
        """What the learning rate is multiplied by for this push; 0 drops it."""
        return 1.0

    def applied(self, change: Tensor) -> None:
        """The update that followed changed the parameters by ``change``."""

    def look_ahead(self, pulled: Tensor) -> None:
        """Change in place what a worker pulls."""

    def arguments(self, options: Mapping[str, Any]) -> Mapping[str, Any]:
        """Of the shard's optimizer: ``options`` without what the rule does itself."""
        return options


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
    """Each element divided by 1 + how many usual updates it has moved since the pull (Gap-Aware, Barkai et al. 2020).

    A usual update is the root of the mean square of updates before their division: with the mean of divided updates
    each penalty would make the next one larger.
    """

    _decay = 0.99

    def __init__(self, workers: int, options: Mapping[str, Any]) -> None:
        super().__init__(workers, options)
        self._square: Tensor | None = None
        self._weight = 0.0
        self._penalty: Tensor | None = None

    def take(self, push: Pushed) -> float:
        """1: the gradient itself is divided."""
        self._penalty = None
        if self._square is not None and push.staleness:
            usual = (self._square / self._weight).sqrt_()
            self._penalty = (push.values - push.pulled).abs_().div_(usual.add_(1e-12)).add_(1)
            push.gradient.div_(self._penalty)
        return 1.0

    def applied(self, change: Tensor) -> None:
        """Average the squares of updates by element."""
        square = (change if self._penalty is None else change * self._penalty).square_()
        self._weight = self._decay * self._weight + 1 - self._decay
        if self._square is None:
            self._square = square.mul_(1 - self._decay)
        else:
            self._square.lerp_(square, 1 - self._decay)


class Compensation(Rule):
    """g + l g² (w - w_pulled), with l divided by the root of the mean of g² (DC-ASGD-a, Zheng et al. 2017)."""

    _strength, _decay = 2.0, 0.95

    def __init__(self, workers: int, options: Mapping[str, Any]) -> None:
        super().__init__(workers, options)
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
    """The optimizer's momentum for each worker; who pulls gets where all momenta lead (DANA-Zero, Hakimi et al. 2019).

    With one worker this is Nesterov's momentum.
    """

    def __init__(self, workers: int, options: Mapping[str, Any]) -> None:
        super().__init__(workers, options)
        self._momentum: float = options.get("momentum", 0.0)
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
            pulled.sub_(self._sum, alpha=self.lr * self._momentum)

    def arguments(self, options: Mapping[str, Any]) -> Mapping[str, Any]:
        """Without momentum, which the rule has made."""
        return {**options, "momentum": 0.0}


class Share(Rule):
    """Each worker counts alike, however fast it is (Rescaled ASGD, 2605.13434): steps by the time they took."""

    _decay = 0.9

    def __init__(self, workers: int, options: Mapping[str, Any]) -> None:
        super().__init__(workers, options)
        self._seconds = [math.nan] * workers

    def take(self, push: Pushed) -> float:
        """The worker's mean time of a step over the harmonic mean of those of all, so that the factors' mean is 1."""
        known, now = self._seconds[push.rank], max(push.seconds, 1e-9)
        self._seconds[push.rank] = own = now if math.isnan(known) else known + (1 - self._decay) * (now - known)
        # Of all pushes a worker makes the share of its rate: the mean of factors over pushes is 1.
        ratios = [own / each for each in self._seconds if not math.isnan(each)]
        return sum(ratios) / len(ratios)


RULES: Mapping[str, Callable[[int, Mapping[str, Any]], Rule]] = MappingProxyType(
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
"""By the name that commands take; called with the number of workers and the optimizer's arguments."""


def check(name: str, optimizer: str, options: Mapping[str, object]) -> None:
    """Raise click.BadParameter where the rule ``name`` does not fit the optimizer."""
    if name == "dana" and (optimizer != "SGD" or not options.get("momentum") or options.get("nesterov")):
        raise click.BadParameter(
            f"the rule dana makes the momentum of SGD itself: it takes SGD with momentum above 0 and without nesterov, "
            f"not {optimizer} with {dict(options)}"
        )
