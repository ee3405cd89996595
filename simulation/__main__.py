"""``python -m simulation``: run seeds, say which break a promise, and replay one of them."""

from __future__ import annotations

import argparse
import os
import sys

from simulation.folders import remove_left_behind
from simulation.many import report, run_seeds, say
from simulation.plan import Size
from simulation.planning import make_plan
from simulation.world import World


def main(arguments: list[str] | None = None) -> int:
    """Returns 0 when no promise was broken, 1 otherwise, 2 for wrong arguments."""
    options = _parser().parse_args(arguments)
    faults = tuple(options.faults.split(",")) if options.faults else Size().faults
    if unknown := set(faults) - {*Size().faults, "none"}:
        say(f"unknown faults: {', '.join(sorted(unknown))}; there are {', '.join((*Size().faults, 'none'))}")
        return 2
    size = Size(options.shards, options.workers, options.steps, tuple(f for f in faults if f != "none"), options.swarms)
    remove_left_behind()
    if options.seed is not None:
        outcome = World(make_plan(options.seed, size), loud=options.trace).run()
        report(outcome, size, told=options.trace)
        return int(bool(outcome.violation))
    return int(not run_seeds(range(options.first, options.first + options.seeds), size, options.jobs))


def _parser() -> argparse.ArgumentParser:
    size = Size()
    parser = argparse.ArgumentParser(prog="python -m simulation", description=__doc__)
    parser.add_argument("--seeds", type=int, default=100, help="how many seeds (default 100)")
    parser.add_argument("--from", dest="first", type=int, default=0, help="the first seed (default 0)")
    parser.add_argument("--seed", type=int, help="run this one only")
    parser.add_argument("--trace", action="store_true", help="with --seed: say everything as it happens")
    parser.add_argument("--shards", type=int, default=size.shards, help=f"default {size.shards}")
    parser.add_argument("--workers", type=int, default=size.workers, help=f"default {size.workers}")
    parser.add_argument("--steps", type=int, default=size.steps, help=f"per worker and phase (default {size.steps})")
    parser.add_argument("--faults", default="", help=f"comma-separated, default all: {','.join(size.faults)}")
    parser.add_argument(
        "--swarms", type=float, default=size.swarms, help="share of seeds with many faults of few kinds"
    )
    parser.add_argument("-j", "--jobs", type=int, default=os.cpu_count() or 1, help="processes (default: one per core)")
    return parser


if __name__ == "__main__":
    sys.exit(main())
