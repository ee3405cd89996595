"""``python -m simulation``: run seeds, say which break a promise, and replay one of them."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed

from simulation.plan import ALL_FAULTS, Size, make_plan
from simulation.world import Outcome, World


def main(arguments: list[str] | None = None) -> int:
    """Returns 0 when no promise was broken, 1 otherwise, 2 for wrong arguments."""
    options = _parser().parse_args(arguments)
    faults = tuple(options.faults.split(",")) if options.faults else Size().faults
    if unknown := set(faults) - {*ALL_FAULTS, "calls", "none"}:
        _say(f"unknown faults: {', '.join(sorted(unknown))}; there are {', '.join((*ALL_FAULTS, 'calls', 'none'))}")
        return 2
    size = Size(options.shards, options.workers, options.steps, tuple(f for f in faults if f != "none"))
    if options.seed is not None:
        outcome = World(make_plan(options.seed, size), loud=options.trace).run()
        _report(outcome, size, told=options.trace)
        return int(bool(outcome.violation))
    return _many(range(options.first, options.first + options.seeds), size, options.jobs)


def run_seed(seed: int, size: Size) -> Outcome:
    """One run, from nothing but its seed and size."""
    return World(make_plan(seed, size)).run()


def _many(seeds: range, size: Size, jobs: int) -> int:
    began, failed = time.monotonic(), []
    done, events, pushes = 0, 0, 0
    faults: dict[str, int] = {}
    for outcome in _outcomes(seeds, size, jobs):
        done, events, pushes = done + 1, events + outcome.events, pushes + outcome.pushes
        for kind, count in outcome.faults.items():
            faults[kind] = faults.get(kind, 0) + count
        if outcome.violation:
            failed.append(outcome.seed)
            _report(outcome, size, told=False)
        if done % max(1, len(seeds) // 20) == 0 or outcome.violation:
            seconds = time.monotonic() - began
            _say(
                f"{done}/{len(seeds)} seeds, {len(failed)} violations, {events} events, {seconds:.0f} s",
            )
    _say(
        f"{len(seeds)} seeds of {size.shards} shards and {size.workers} workers: {len(failed)} violations; "
        f"{events} events, {pushes} pushes applied, {time.monotonic() - began:.0f} s"
    )
    _say("faults: " + ", ".join(f"{kind} {count}" for kind, count in sorted(faults.items())))
    if failed:
        _say(f"seeds with violations: {' '.join(map(str, sorted(failed)))}")
    return int(bool(failed))


def _outcomes(seeds: range, size: Size, jobs: int) -> Iterator[Outcome]:
    if jobs <= 1:
        yield from (run_seed(seed, size) for seed in seeds)
        return
    with ProcessPoolExecutor(jobs) as pool:
        for future in as_completed([pool.submit(run_seed, seed, size) for seed in seeds]):
            yield future.result()


def _report(outcome: Outcome, size: Size, *, told: bool) -> None:
    _say(f"seed {outcome.seed}: {outcome.plan}")
    if outcome.violation:
        if not told:
            _say(outcome.story)
        _say(f"VIOLATION in seed {outcome.seed}: {outcome.violation}")
        _say(
            f"again: python -m simulation --seed {outcome.seed} --shards {size.shards} --workers {size.workers} "
            f"--steps {size.steps} --trace"
        )
    else:
        _say(
            f"no violation: {outcome.events} events, {outcome.pushes} pushes applied, {outcome.replies} replies, "
            f"{outcome.virtual_seconds:.1f} s of virtual time; faults {outcome.faults}"
        )


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def _parser() -> argparse.ArgumentParser:
    size = Size()
    parser = argparse.ArgumentParser(prog="python -m simulation", description=__doc__)
    parser.add_argument("--seeds", type=int, default=100, help="how many seeds (default 100)")
    parser.add_argument("--first", type=int, default=0, help="the first seed (default 0)")
    parser.add_argument("--seed", type=int, help="run this one only")
    parser.add_argument("--trace", action="store_true", help="with --seed: say everything as it happens")
    parser.add_argument("--shards", type=int, default=size.shards, help=f"default {size.shards}")
    parser.add_argument("--workers", type=int, default=size.workers, help=f"default {size.workers}")
    parser.add_argument("--steps", type=int, default=size.steps, help=f"per worker and phase (default {size.steps})")
    parser.add_argument("--faults", default="", help=f"comma-separated, default all: {','.join(ALL_FAULTS)},calls")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes (default: one per core)")
    return parser


if __name__ == "__main__":
    sys.exit(main())
