"""The largest stable learning rate: of theory on a quadratic, and of trainings in the laboratory."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from benchmarks.learning.laboratory import Setting, train
from benchmarks.learning.tasks import NoisyQuadratic
from ps_protocol.launch.rehearsal import speeds_of
from ps_protocol.model.spec import Consistency, Mode

ACCURACY = 0.01
"""Relative, of rates that are found by bisection."""


def largest_stable(stable: Callable[[float], bool], high: float = 8.0) -> float:
    """The largest rate for which ``stable`` holds, if it holds below one rate and not above. 0: for none tried."""
    low = 0.0
    while high - low > ACCURACY * high and high > 1e-6:
        middle = (low + high) / 2
        low, high = (middle, high) if stable(middle) else (low, middle)
    return low


def theory(delay: int, momentum: float = 0.0, *, nesterov: bool = False) -> float:
    """The largest stable learning rate times curvature of SGD whose gradients are ``delay`` updates old.

    The roots of w' = (1 + b) w - b w₋₁ - r w₋d on h w²/2, with momentum b and r = learning rate times h, lie within the
    unit circle below it (Mitliagkas et al. 2016 and Barkai et al. 2020 study this recurrence). With Nesterov's
    momentum, as torch.optim has it, the last term is r ((1 + b) w₋d - b w₋d₋₁).
    """

    def stable(rate: float) -> bool:
        size = delay + 3
        terms = np.zeros(size)  # of w', w, w₋₁, …
        terms[0], terms[1], terms[2] = 1.0, -(1 + momentum), momentum
        if nesterov:
            terms[delay + 1] += rate * (1 + momentum)
            terms[delay + 2] -= rate * momentum
        else:
            terms[delay + 1] += rate
        return bool(max(abs(np.roots(terms)), default=0.0) < 1.0)

    return largest_stable(stable)


def measured(delay: int, momentum: float = 0.0, *, nesterov: bool = False, pushes: int = 4000) -> float:
    """The same of the optimizer that shards run, with ``delay`` + 1 equal workers in async on one dimension."""
    task = NoisyQuadratic(noise=0.0, dimensions=1)
    equal = speeds_of("equal", delay + 1, 0)

    def stable(rate: float) -> bool:
        options = {"lr": rate, "momentum": momentum, "nesterov": nesterov}
        setting = Setting("SGD", options, Consistency(Mode.ASYNC), delay + 1, pushes, measures=pushes // 20)
        outcome = train(task, setting, equal, 0)
        values = [value for _, _, value in outcome.curve]
        half = len(values) // 2
        return not outcome.diverged and max(values[half:], default=0.0) <= max(values[:half], default=0.0)

    return largest_stable(stable)
