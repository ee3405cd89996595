"""How long ``ps-run`` takes before the first step and after the last: ``python -m benchmarks.startup [OTHER]``.

A job of 2 shards and 2 workers makes three small steps. A row has medians, smallest and largest of seconds from the
call of ``ps-run`` to the end of the slowest worker's first step, from the last step of all to the end of ``ps-run``,
and of CPU seconds of all processes together. With OTHER, another checkout that has its own ``.venv``, jobs of both are
run in turn. Other programs lengthen the waits; the CPU time shows what they waited for.
"""

from __future__ import annotations

import argparse
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]

_SCRIPT = """
import time

import torch

import ps_worker

with ps_worker.connect() as cluster:
    model = torch.nn.Linear(100, 10)
    optimizer = cluster.optimizer(torch.optim.SGD, model, lr=0.1)
    times = []
    for _ in range(3):
        model(torch.ones(1, 100)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        times.append(time.monotonic())
print("steps", times[0], times[-1])
"""


class Job(NamedTuple):
    """Seconds of one job."""

    first_step: float
    end: float
    cpu: float


def run(tree: Path, script: Path) -> Job:
    """One job of ``tree``. Raises CalledProcessError when it fails, ValueError when it told no steps."""
    command = [tree / ".venv/bin/ps-run", "--no-progress", "--shards", "2", "--workers", "2", script]
    cpu, begun = _children_seconds(), time.monotonic()
    done = subprocess.run(command, cwd=tree, env=_environment(), capture_output=True, text=True, check=True)
    ended = time.monotonic()
    steps = [line.partition("steps ")[2].split() for line in done.stdout.splitlines() if "| steps " in line]
    first, last = (max(float(times[i]) for times in steps) for i in range(2))
    return Job(first - begun, ended - last, _children_seconds() - cpu)


def row(name: str, jobs: Sequence[Job]) -> str:
    """The figures of the jobs of one tree."""
    figures = [f"{statistics.median(v):6.2f} ({min(v):.2f} - {max(v):.2f})" for v in zip(*jobs, strict=True)]
    return f"{name:8}" + "  ".join(figures)


def main() -> int:
    """Print a row for each tree."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("other", type=Path, nargs="?", help="another checkout, to compare with")
    parser.add_argument("--jobs", type=int, default=7, help="jobs of each")
    options = parser.parse_args()
    trees = {"this": ROOT, **({"other": options.other.resolve()} if options.other else {})}
    jobs: dict[str, list[Job]] = {name: [] for name in trees}
    with tempfile.TemporaryDirectory(prefix="ps-startup-") as folder:
        script = Path(folder, "steps.py")
        script.write_text(_SCRIPT)
        for turn in range(1, options.jobs + 1):
            for name, tree in trees.items():
                jobs[name].append(run(tree, script))
            print(f"{turn} of {options.jobs}", file=sys.stderr, flush=True)
    print("seconds to the first step, from the last step to the end, of CPU: median (smallest - largest)")
    for name in trees:
        print(row(name, jobs[name]))
    return 0


def _environment() -> dict[str, str]:
    """Without what would have byte code made again by each process."""
    left_out = ("PS_", "PYTHONDONTWRITEBYTECODE")
    return {name: value for name, value in os.environ.items() if not name.startswith(left_out)}


def _children_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


if __name__ == "__main__":
    sys.exit(main())
