"""What a cost is of a step: CPU time of both, taken in turn on the same machine.

CPU time can be taken on a machine that others use: other programs add little to it, unlike to the time of a step. What
they add (colder caches) meets both, for a block of one follows a block of the other.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from benchmarks.paired import _WORKER, ROOT, TRANSPORTS, Pair, running_pair

STEPS = {"10 KB": (10_000, 200), "1 MB": (1_000_000, 60)}
"""Bytes of parameters, steps in a block."""

ROUNDS = 25


@dataclass(frozen=True, slots=True)
class Cost:
    """CPU seconds of one step, of a worker and of its shard."""

    worker: float
    shard: float


def shares(measure: Callable[[], Cost], rounds: int = ROUNDS) -> Iterator[str]:
    """A row for each size and transport; ``measure`` is called once a round."""
    for size, (nbytes, steps) in STEPS.items():
        for transport in TRANSPORTS:
            with running_pair(ROOT, {}, _WORKER, [transport, str(nbytes)]) as pair:
                yield f"{size:6} {transport:5} {_row(pair, steps, measure, rounds)}"


def _row(pair: Pair, steps: int, measure: Callable[[], Cost], rounds: int) -> str:
    costs, blocks = [], []
    for _ in range(rounds):
        blocks.append(pair.steps(steps))
        costs.append(measure())
    texts = []
    for role in ("worker", "shard"):
        cost = [getattr(each, role) for each in costs]
        step = [getattr(each, f"{role}_cpu") for each in blocks]
        low, middle, high = statistics.quantiles([c / s for c, s in zip(cost, step, strict=True)], n=4)
        texts.append(
            f"{role} {statistics.median(cost) * 1e6:6.2f} of {statistics.median(step) * 1e6:7.0f} us: "
            f"{middle:.2%} [{low:.2%} {high:.2%}]"
        )
    return "  ".join(texts)
