"""Judges a run with faults by runs without: pure."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from chaos.plan import Fault, Kind
from chaos.run import Outcome

#: Student's t for two-sided 99 %, by degrees of freedom from 1.
_T = (63.66, 9.92, 5.84, 4.60, 4.03, 3.71, 3.50, 3.36, 3.25)


@dataclass(frozen=True, slots=True)
class Runs:
    """What is compared."""

    disturbed: Outcome
    #: A run of the same pace without faults, for progress.
    undisturbed: Outcome | None
    #: Runs without faults that made as many steps, for the loss.
    references: Sequence[Outcome]

    @property
    def goodput(self) -> float | None:
        """Progress under faults as a part of undisturbed progress; None where that was not measured."""
        if self.undisturbed is None:
            return None
        return self.disturbed.steps_per_second / self.undisturbed.steps_per_second

    @property
    def spread(self) -> tuple[float, float] | None:
        """Where one more loss of the same kind lies with 99 % probability; None without two references.

        The prediction interval of a normal distribution, from Student's t.
        """
        losses = [run.loss for run in self.references]
        if len(losses) < 2:
            return None
        count = len(losses)
        within = _T[min(count - 1, len(_T)) - 1] * statistics.stdev(losses) * (1 + 1 / count) ** 0.5
        return statistics.mean(losses) - within, statistics.mean(losses) + within


def broken(runs: Runs, least_goodput: float) -> Iterator[str]:
    """The promises that were not kept, in sentences."""
    for run in filter(None, (runs.disturbed, runs.undisturbed, *runs.references)):
        if not run.served_is_replayed:
            yield "the shards serve other bits than their logs make"
        if not run.counted_right:
            yield (
                f"{run.acknowledged} pushes were acknowledged to {run.worker_lives} lives of workers, "
                f"and {list(run.versions)} applied"
            )
    for run in filter(None, (runs.disturbed, runs.undisturbed, *runs.references)):
        yield from run.contradictions
    if runs.spread and not runs.spread[0] <= runs.disturbed.loss <= runs.spread[1]:
        yield "the final loss is not within {:.4f} to {:.4f}".format(*runs.spread)
    if runs.goodput is not None and runs.goodput < least_goodput:
        yield f"goodput is {runs.goodput:.1%}, less than {least_goodput:.0%}"


def lines(runs: Runs, faults: Sequence[Fault]) -> Iterator[str]:
    """The report."""
    disturbed = runs.disturbed
    kinds = Counter(fault.kind.value for fault in faults)
    killed = Counter(fault.target for fault in faults if fault.kind is Kind.KILL)
    yield "faults      " + (", ".join(f"{count} × {kind}" for kind, count in kinds.most_common()) or "none")
    yield "killed      " + (", ".join(f"{name} {count} times" for name, count in sorted(killed.items())) or "nobody")
    yield f"ended       by themselves, and were started again: {', '.join(disturbed.ended) or 'none'}"
    yield f"weights     {disturbed.weights_seen} versions seen by readers"
    yield f"hung        and were killed for that: {disturbed.hung} servers"
    yield f"progress    {disturbed.steps_per_second:.1f} steps/s over {disturbed.seconds:.0f} s"
    if runs.undisturbed:
        yield f"undisturbed {runs.undisturbed.steps_per_second:.1f} steps/s over {runs.undisturbed.seconds:.0f} s"
        yield f"goodput     {runs.goodput:.1%}"
    yield f"final loss  {disturbed.loss:.4f} after {disturbed.acknowledged} steps"
    if runs.spread:
        losses = ", ".join(f"{run.loss:.4f}" for run in runs.references)
        yield "undisturbed {}: 99 % of such runs lie from {:.4f} to {:.4f}".format(losses, *runs.spread)
    yield (
        f"pushes      {disturbed.acknowledged} acknowledged to {disturbed.worker_lives} lives of workers, "
        f"{', '.join(map(str, disturbed.versions))} applied by the shards"
    )
    same = "the same bits" if disturbed.served_is_replayed else "OTHER BITS"
    yield f"replay      of each shard's log and the parameters served: {same}"
