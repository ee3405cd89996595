"""The largest stable learning rate of trainings in the laboratory. That of theory: ``ps_worker.model.momentum``."""

from __future__ import annotations

from collections.abc import Callable

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


def measured(delay: int, momentum: float = 0.0, *, nesterov: bool = False, pushes: int = 4000) -> float:
    """The largest stable learning rate times curvature of the SGD that shards run, on one dimension.

    ``delay`` + 1 equal workers in async make gradients that are ``delay`` updates old.
    """
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
