"""Steps of rows of two checkouts side by side: ``python -m benchmarks.tables.paired OTHER [--transport bulk]``.

As ``benchmarks.paired``: a cluster and a worker of each tree, and blocks of steps in turn. A row of the output has the
time of a step and its CPU time in worker and shard together, of both trees and as ratio (this tree / OTHER) with its
quartiles: for the rows of 14,000 different ids pulled, pulled and pushed, and for 100,000 ids inserted. With
``--trees same`` OTHER is measured twice, which shows what the machine adds.
"""

from __future__ import annotations

import argparse
import sys
from contextlib import ExitStack
from pathlib import Path

from benchmarks.paired import ROOT, TRANSPORTS, Block, compared, running_pair

#: Steps in a block, blocks.
OPERATIONS = {"pull": (50, 30), "step": (50, 30), "insert": (1, 40)}
_WORKER = Path(__file__).with_name("paired_worker.py")


def main() -> int:
    """Print a row for each transport and operation."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("other", type=Path, help="the checkout to compare with")
    parser.add_argument("--only", choices=OPERATIONS, action="append", help="an operation; may be repeated")
    parser.add_argument("--transport", choices=TRANSPORTS, action="append", help="a transport; may be repeated")
    parser.add_argument("--trees", choices=("both", "same"), default="both")
    options = parser.parse_args()
    own = ROOT if options.trees == "both" else options.other.resolve()
    for transport in options.transport or TRANSPORTS:
        for line in rows(options.other.resolve(), own, transport, options.only or list(OPERATIONS)):
            print(line, flush=True)
    return 0


def rows(other: Path, own: Path, transport: str, operations: list[str]) -> list[str]:
    """Measure both trees over one transport."""
    with ExitStack() as stack:
        pairs = [stack.enter_context(running_pair(tree, {}, _WORKER, [transport])) for tree in (other, own)]
        lines = []
        for operation in operations:
            steps, count = OPERATIONS[operation]
            found: tuple[list[Block], list[Block]] = ([], [])
            for block in range(count + 1):
                for which in (0, 1) if block % 2 == 0 else (1, 0):
                    found[which].append(pairs[which].ask(f"{operation} {steps}", steps))
            # The first block of each warms up.
            lines.append(line(f"{transport:5} {operation:6}", found[0][1:], found[1][1:]))
        return lines


def line(name: str, other: list[Block], own: list[Block]) -> str:
    """Times and CPU times of both."""
    times = compared(*([block.seconds for block in each] for each in (other, own)))
    parts = [f"{name} step {times}"]
    for what in ("worker_cpu", "shard_cpu"):
        parts.append(f"{what} {compared(*([getattr(block, what) for block in each] for each in (other, own)))}")
    return "\n   ".join(parts)


if __name__ == "__main__":
    sys.exit(main())
