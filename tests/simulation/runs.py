"""Runs seeds until a promise is broken, and says which seed it was."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from simulation.plan import Fault, Plan, Size
from simulation.planning import make_plan
from simulation.world import Outcome, World
from tests.support.length import choose

KNOWN_SEEDS = Path(__file__).with_name("known_seeds.json")
"""By test: a seed that shows its mutation soon; ``python -m tests.simulation.search`` writes it."""

SEARCH = "SIMULATION_SEARCH"
"""In the environment: how many seeds that show a mutation are compared."""


def run(seed: int, size: Size | None = None, change: Callable[[Plan], Plan] = lambda plan: plan) -> Outcome:
    return World(change(make_plan(seed, size or Size()))).run()


def shown(texts: str | tuple[str, ...], seeds: Iterable[int], size: Size | None = None, **fixed: Any) -> bool:
    """Whether the judge says one of ``texts`` to one of ``seeds``, which are tried until it does.

    The known seed of the test that calls it comes before ``seeds``, but not under ``make test-long``. One model, no
    standbys, raw payloads, workers that push by themselves and no readers, where ``fixed`` does not say otherwise.
    """
    fixed = {
        "models": 1,
        "standby": False,
        "acknowledged_after": True,
        "wire": "raw",
        "table": False,
        "stale": None,
        "per_host": 1,
        "readers": 0,
        "relayed": 0,
    } | fixed
    size = size or Size()
    kinds = tuple(kind for kind in size.faults if kind not in ("full_restart", "host", "reader", "relay"))
    ordinary = replace(size, swarms=0.0, faults=kinds)
    wanted = (texts,) if isinstance(texts, str) else texts

    def showing(tried: Iterable[int]) -> Iterator[Outcome]:
        for seed in tried:
            outcome = run(seed, ordinary, lambda plan: replace(plan, **fixed))
            if any(text in outcome.violation for text in wanted):
                yield outcome
            elif outcome.violation:
                sys.stdout.write(f"seed {seed}: {outcome.violation}\n")

    test = os.environ["PYTEST_CURRENT_TEST"].rpartition("::")[2].partition(" ")[0]
    known = json.loads(KNOWN_SEEDS.read_text())
    if compared := int(os.environ.get(SEARCH, "0")):
        found = _soonest(showing(seeds), compared)
        if found is not None:
            KNOWN_SEEDS.write_text(json.dumps(known | {test: found.seed}, indent=2, sort_keys=True) + "\n")
    else:
        first = [known[test]] if test in known else []
        found = next(showing(choose(seeds, [*first, *seeds])), None)
    return found is not None


def _soonest(showing: Iterator[Outcome], wanted: int) -> Outcome | None:
    """Of the first ``wanted``, the one with the fewest events."""
    found = [outcome for _, outcome in zip(range(wanted), showing, strict=False)]
    return min(found, key=lambda outcome: outcome.events, default=None)


def every_second(kind: str, until: float = 10.0) -> tuple[Fault, ...]:
    return tuple(Fault(float(second), kind) for second in range(2, int(until)))
