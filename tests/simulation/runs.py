"""Runs seeds until a promise is broken, and says which seed it was."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

from simulation.plan import Fault, Plan, Size, make_plan
from simulation.world import Outcome, World


def run(seed: int, size: Size | None = None, change: Callable[[Plan], Plan] = lambda plan: plan) -> Outcome:
    return World(change(make_plan(seed, size or Size()))).run()


def first_violation(seeds: Iterable[int], size: Size | None = None, **fixed: Any) -> str:
    """What the judge says to the first seed that breaks a promise; empty when none does.

    One model and no standbys, where ``fixed`` does not say otherwise.
    """
    fixed = {"models": 1, "standby": False} | fixed
    for seed in seeds:
        outcome = run(seed, size, lambda plan: replace(plan, **fixed))
        if outcome.violation:
            return f"seed {seed}: {outcome.violation}"
    return ""


def every_second(kind: str, until: float = 10.0) -> tuple[Fault, ...]:
    return tuple(Fault(float(second), kind) for second in range(2, int(until)))
