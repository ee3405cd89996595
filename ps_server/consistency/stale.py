"""What async and ssp do with a stale push, one class for each policy: by what its learning rate is multiplied.

A fresh push is applied as it is, whatever the policy. The log has the factor of each update, so that a replay and a
standby decide nothing.

Rules with a memory are not here: divided by the gap, compensated, a momentum or a rate for each worker. They are
references in ``benchmarks/learning/rules.py``, whose trainings decide which of them is worth its memory.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Protocol

from ps_protocol.model.spec import StalePolicy, StaleRule


class Factor(Protocol):
    """One policy. Pure."""

    def __call__(self, staleness: int, workers: int) -> float:
        """What the learning rate of a push is multiplied by, whose ``staleness`` is 1 or more; 0 drops it.

        ``workers``: how many are live.
        """


@dataclass(frozen=True, slots=True)
class _Policy:
    rule: StaleRule

    def threshold(self, workers: int) -> int:
        """The policy acts on a staleness above this."""
        return workers if self.rule.by_workers else self.rule.threshold

    def __str__(self) -> str:
        return str(self.rule)


class Accept(_Policy):
    """Each push is applied as it comes."""

    def __call__(self, staleness: int, workers: int) -> float:
        """1."""
        return 1.0


class Scale(_Policy):
    """The whole step up to the threshold, smaller beyond: min(1, threshold / staleness), the threshold at least 1.

    1 is Zhang, Gupta, Lian, Liu, "Staleness-aware Async-SGD", IJCAI 2016; the number of workers is Koloskova, Stich,
    Jaggi, "Sharper Convergence Guarantees for Asynchronous SGD", NeurIPS 2022, section 4.
    """

    def __call__(self, staleness: int, workers: int) -> float:
        """Above 0."""
        return min(1.0, max(1, self.threshold(workers)) / staleness)


class Reject(_Policy):
    """A push above the threshold is dropped: Maranjyan, Tyurin, Richtarik, "Ringmaster ASGD", ICML 2025."""

    def __call__(self, staleness: int, workers: int) -> float:
        """1 or 0."""
        return float(staleness <= self.threshold(workers))


_POLICIES: Mapping[StalePolicy, type[Accept | Scale | Reject]] = MappingProxyType(
    {StalePolicy.ACCEPT: Accept, StalePolicy.SCALE: Scale, StalePolicy.REJECT: Reject}
)


def factor_of(rule: StaleRule) -> Factor:
    """What ``rule`` says."""
    return _POLICIES[rule.policy](rule)
