"""Runs seeds one after another, on several processes, and counts what came of them."""

from __future__ import annotations

import sys
import time
from collections import Counter, deque
from collections.abc import Iterator
from concurrent.futures import Future, ProcessPoolExecutor

from simulation.plan import Size
from simulation.planning import make_plan
from simulation.world import Outcome, World

_SAY_SECONDS = 60.0


def run_seed(seed: int, size: Size) -> Outcome:
    """One run, from nothing but its seed and size."""
    return World(make_plan(seed, size)).run()


def run_seeds(seeds: range, size: Size, jobs: int) -> bool:
    """Run ``seeds`` in ``jobs`` processes and tell how it goes; whether no promise was broken.

    Ctrl-C ends it early. The last lines name the seed with which another run goes on.
    """
    tally = _Tally(seeds, size)
    try:
        for outcome in _outcomes(seeds, size, jobs):
            tally.add(outcome)
    except KeyboardInterrupt:
        say("interrupted")
    tally.finish()
    return not tally.failed


class _Tally:
    """What has been run so far: always a beginning of the range."""

    def __init__(self, seeds: range, size: Size) -> None:
        self._seeds, self._size = seeds, size
        self._began = self._said = time.monotonic()
        self._done = self._events = self._pushes = 0
        self._processor = 0.0
        self._faults: Counter[str] = Counter()
        self.failed: list[int] = []

    def add(self, outcome: Outcome) -> None:
        """The next seed has been run."""
        self._done += 1
        self._events += outcome.events
        self._pushes += outcome.pushes
        self._processor += outcome.processor_seconds
        self._faults.update(outcome.faults)
        if outcome.violation:
            self.failed.append(outcome.seed)
            report(outcome, self._size, told=False)
        if outcome.violation or time.monotonic() - self._said > _SAY_SECONDS:
            self._said = time.monotonic()
            say(self._text())

    def finish(self) -> None:
        """Say what came of them all."""
        say(self._text())
        say("faults: " + ", ".join(f"{kind} {count}" for kind, count in sorted(self._faults.items())))
        if self.failed:
            say(f"seeds with violations: {' '.join(map(str, self.failed))}")
        say(f"to go on: --from {self._seeds.start + self._done}")

    def _text(self) -> str:
        size, first, done = self._size, self._seeds.start, self._done
        return (
            f"{done} seeds from {first} ({size.shards} shards, {size.workers} workers): {len(self.failed)} violations; "
            f"{self._events} events, {self._pushes} pushes applied, {time.monotonic() - self._began:.0f} s, "
            f"{self._processor / max(1, done):.3f} s of processor time per seed"
        )


def _outcomes(seeds: range, size: Size, jobs: int) -> Iterator[Outcome]:
    """In the order of ``seeds``."""
    if jobs <= 1:
        yield from (run_seed(seed, size) for seed in seeds)
        return
    pool, under_way = ProcessPoolExecutor(jobs), deque[Future[Outcome]]()
    try:
        for seed in seeds:
            under_way.append(pool.submit(run_seed, seed, size))
            if len(under_way) > 4 * jobs:
                yield under_way.popleft().result()
        while under_way:
            yield under_way.popleft().result()
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def report(outcome: Outcome, size: Size, *, told: bool) -> None:
    """Say what came of one seed. ``told``: its story has been said as it happened."""
    say(f"seed {outcome.seed}: {outcome.plan}")
    if outcome.violation:
        if not told:
            say(outcome.story)
        say(f"VIOLATION in seed {outcome.seed}: {outcome.violation}")
        say(
            f"again: python -m simulation --seed {outcome.seed} --shards {size.shards} --workers {size.workers} "
            f"--steps {size.steps} --swarms {size.swarms:g} --trace"
        )
    else:
        say(
            f"no violation: {outcome.events} events, {outcome.pushes} pushes applied, {outcome.replies} replies, "
            f"{outcome.virtual_seconds:.1f} s of virtual time; faults {outcome.faults}"
        )


def say(line: str) -> None:
    """One line, at once."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()
