"""Runs seeds until a promise is broken, and says which seed it was."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from simulation.plan import Fault, Plan, Size, make_plan
from simulation.world import Outcome, World
from tests.support.length import choose

KNOWN_SEEDS = Path(__file__).with_name("known_seeds.json")
"""By test: a seed that shows its mutation soon; ``python -m tests.simulation.search`` writes it."""

SEARCH = "SIMULATION_SEARCH"
"""In the environment: how many seeds that show a mutation are compared."""


def run(seed: int, size: Size | None = None, change: Callable[[Plan], Plan] = lambda plan: plan) -> Outcome:
    return World(change(make_plan(seed, size or Size()))).run()


def first_violation(seeds: Iterable[int], size: Size | None = None, **fixed: Any) -> str:
    """What the judge says to the first seed that breaks a promise; empty when none does.

    The known seed of the test that calls it comes before ``seeds``, but not under ``make test-long``. One model, no
    standbys and raw payloads, where ``fixed`` does not say otherwise.
    """
    fixed = {"models": 1, "standby": False, "acknowledged_after": True, "wire": "raw"} | fixed

    def violations(tried: Iterable[int]) -> Iterator[Outcome]:
        outcomes = (run(seed, size, lambda plan: replace(plan, **fixed)) for seed in tried)
        return (outcome for outcome in outcomes if outcome.violation)

    test = os.environ["PYTEST_CURRENT_TEST"].rpartition("::")[2].partition(" ")[0]
    if wanted := int(os.environ.get(SEARCH, "0")):
        found = _soonest(violations(seeds), wanted)
        known = json.loads(KNOWN_SEEDS.read_text()) if KNOWN_SEEDS.exists() else {}
        known[test] = found.seed if found else None
        KNOWN_SEEDS.write_text(json.dumps(known, indent=2, sort_keys=True) + "\n")
    else:
        first = json.loads(KNOWN_SEEDS.read_text()).get(test)
        tried = [first, *seeds] if first is not None else seeds
        found = next(violations(choose(seeds, tried)), None)
    return f"seed {found.seed}: {found.violation}" if found else ""


def _soonest(violations: Iterator[Outcome], wanted: int) -> Outcome | None:
    """Of the first ``wanted``, the one with the fewest events."""
    found = [outcome for _, outcome in zip(range(wanted), violations, strict=False)]
    return min(found, key=lambda outcome: outcome.events, default=None)


def every_second(kind: str, until: float = 10.0) -> tuple[Fault, ...]:
    return tuple(Fault(float(second), kind) for second in range(2, int(until)))
