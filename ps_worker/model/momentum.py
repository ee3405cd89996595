"""Warns once where momentum makes steps on old gradients unstable, with the learning rate that is stable."""

from __future__ import annotations

import cmath
import math
from collections.abc import Sequence

from ps_protocol.logs import EventLogger
from ps_protocol.model.spec import Consistency, ModelSpec, Options
from ps_worker.session.session import Session

logger = EventLogger("ps_worker")

_WITH_MOMENTUM = ("torch.optim.SGD", "torch.optim.RMSprop")
"""Optimizers that add classical or Nesterov's momentum to steps of any length. Those of Adam have a length, and Muon
makes its steps equally long after the momentum.
"""


def largest_stable_rate(delay: float, momentum: float, *, nesterov: bool = False) -> float:
    """The largest learning rate, times curvature, with which SGD on gradients ``delay`` updates old is stable.

    On h w²/2, w' = (1 + b) w - b w₋₁ - r w₋d, with momentum b in [0, 1) and r = rate times h, is stable while all its
    roots z lie within the unit circle (Mitliagkas et al. 2016, Barkai et al. 2020). The first root leaves it where
    zᵈ⁻¹ (z - 1) (z - b) = -r has a solution z = exp(ia) with the smallest angle a: there both sides have the argument
    π. With Nesterov's momentum, as torch.optim has it, zᵈ (z - 1) (z - b) = -r ((1 + b) z - b).
    """
    low, high = 0.0, math.pi
    lead = momentum / (1 + momentum) if nesterov else 0.0

    def argument(angle: float) -> float:
        """Of the left side divided by what is beside r, without the quarter turn of z - 1."""
        plain = (delay - 0.5) * angle + cmath.phase(cmath.rect(1, angle) - momentum)
        return plain + angle - cmath.phase(cmath.rect(1, angle) - lead) if nesterov else plain

    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if argument(middle) < math.pi / 2 else (low, middle)
    root = cmath.rect(1, low)
    rate = abs((root - 1) * (root - momentum))
    return rate / abs((1 + momentum) * root - momentum) if nesterov else rate


def usual_delay(workers: int, consistency: Consistency, *, overlap: bool = False) -> float:
    """How many updates old the gradients of ``workers`` equally fast workers are when they are applied.

    In ssp(0) workers begin a step together, so it is 0 to workers - 1; no other bound matters to workers of equal
    speed. With ``overlap`` each gradient also lacks one more push of every worker. No rule for stale gradients counts:
    by default they leave those of equal workers as they are.
    """
    if consistency.mode.collects:
        return 0.0
    delay = float(workers * (1 + overlap * consistency.lookahead) - 1)
    return delay if consistency.lookahead else delay / 2


def slowdown(delay: float, momentum: float, *, nesterov: bool = False) -> float:
    """How many times smaller the largest stable rate is than that of one process."""
    alone, late = (largest_stable_rate(each, momentum, nesterov=nesterov) for each in (0.0, delay))
    return alone / late


class MomentumWarning:
    """Used by one model, in its training thread."""

    def __init__(self, session: Session, spec: ModelSpec, *, overlap: bool) -> None:
        self._session, self._spec, self._overlap = session, spec, overlap
        #: There is nothing to warn of any more.
        self._done = spec.optimizer not in _WITH_MOMENTUM
        self._seen: tuple[object, Sequence[Options]] | None = None

    def look(self, changed: Sequence[Options] = ()) -> bool:
        """Warn if the job and the options of the groups are such; ``changed``: those that are not as declared.

        The worker of the lowest rank logs it, once. Returns whether to look again, at the next step.
        """
        view = self._session.view
        if self._done or (self._seen is not None and self._seen[0] is view and self._seen[1] is changed):
            return not self._done
        self._seen = view, changed
        consistency, workers = self._session.consistency, len(self._session.workers)
        delay = usual_delay(workers, consistency, overlap=self._overlap)
        found = [
            (slowdown(delay, momentum, nesterov=nesterov), momentum, nesterov)
            for momentum, nesterov in self._momenta(changed)
            if 0 < momentum < 1 and delay
        ]
        if found:
            self._done = True
            if self._session.initialiser():
                self._warn(consistency, workers, delay, *max(found))
        return not self._done

    def _momenta(self, changed: Sequence[Options]) -> set[tuple[float, bool]]:
        """Momentum of the groups, and whether it is Nesterov's."""
        declared = self._spec.group_options
        groups = [{**options, **now} for options, now in zip(declared, changed or ({},) * len(declared), strict=True)]
        momenta = [(group.get("momentum"), bool(group.get("nesterov"))) for group in groups]
        return {(momentum, nesterov) for momentum, nesterov in momenta if isinstance(momentum, float | int)}

    def _warn(
        self, consistency: Consistency, workers: int, delay: float, times: float, momentum: float, nesterov: bool
    ) -> None:
        logger.warning(
            "model.momentum",
            "model '%s': in %s with %d worker%s%s the staleness of gradients is about %g, and the largest stable "
            "learning rate of %s with %smomentum %g is about 1/%.0f of that of one process; set momentum=0, or use "
            "Adam or sync (docs/learning.md)",
            self._spec.name,
            consistency,
            workers,
            "s" if workers > 1 else "",
            " and overlap" if self._overlap and consistency.lookahead else "",
            delay,
            self._spec.optimizer.removeprefix("torch.optim."),
            "Nesterov's " if nesterov else "",
            momentum,
            times,
        )
