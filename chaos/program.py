"""The command: a run under faults and undisturbed ones beside it, then a report; it fails for a broken promise."""

from __future__ import annotations

import argparse
import os
import random
import signal
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from chaos import report
from chaos.cluster import TRANSPORTS, Size
from chaos.plan import plan
from chaos.run import started

_CHOICES = "grpc, the default, bulk or shm"


def say(text: str) -> None:
    """One line, now."""
    print(text, flush=True)


def arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    """``words`` or those of the command line; else SEED, MINUTES, EVERY, TRANSPORT, as variables, else defaults."""
    told = os.environ.get
    parser = argparse.ArgumentParser(prog="chaos", description=__doc__)
    parser.add_argument("--seed", type=int, default=int(told("SEED") or random.SystemRandom().randrange(1 << 20)))
    parser.add_argument("--minutes", type=float, default=float(told("MINUTES") or 30), help="length of the faulty run")
    parser.add_argument("--every", type=float, default=float(told("EVERY") or 60), help="seconds between two kills")
    parser.add_argument("--undisturbed-minutes", type=float, help="length of the run without; default: the same")
    parser.add_argument("--references", type=int, default=4, help="runs that show how the final loss varies")
    parser.add_argument("--shards", type=int, default=2)
    parser.add_argument("--workers", type=int, default=3)
    parser.add_argument("--step-ms", type=float, default=50.0, help="what a step takes at least")
    parser.add_argument("--lease-seconds", type=float, default=3.0)
    parser.add_argument("--least-goodput", type=float, default=0.0, help="fail below this part of undisturbed progress")
    parser.add_argument("--transport", default=told("TRANSPORT") or "grpc", help=f"of the steps: {_CHOICES}")
    parser.add_argument("--plain", action="store_true", help="without TLS, certificates and tokens")
    parser.add_argument("--kills-only", action="store_true", help="no other fault than kill -9")
    parser.add_argument("--folder", type=Path, help="keeps the logs of all processes; default: a temporary one")
    found = parser.parse_args(words)
    if found.transport not in TRANSPORTS:
        parser.error(f"unknown transport {found.transport!r}; it is {_CHOICES}")
    return found


def main(no_mounts: str) -> None:
    """Exit code 0 when every promise was kept. ``no_mounts``: why the disk cannot be full; empty where it can."""
    told = arguments()
    # As Ctrl-C does, and no process stays behind.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    torch.set_num_threads(1)
    say(f"seed {told.seed}: {told.minutes:g} minutes, a kill every {told.every:g} s, steps over {told.transport}")
    if no_mounts:
        say(f"the disk is never full: {no_mounts}")
    with tempfile.TemporaryDirectory(prefix="chaos-") as temporary:
        sys.exit(run(told, (told.folder or Path(temporary)) / f"seed-{told.seed}", own_disk=not no_mounts))


def run(told: argparse.Namespace, folder: Path, *, own_disk: bool) -> int:
    """All runs and the report; the exit code."""
    secure, transport = not told.plain, told.transport
    size = Size(told.shards, told.workers, told.lease_seconds, told.step_ms / 1000, secure=secure, transport=transport)
    seconds = told.minutes * 60
    calm = seconds if told.undisturbed_minutes is None else told.undisturbed_minutes * 60
    undisturbed = None
    if calm:
        say("an undisturbed run")
        with started(folder / "undisturbed", size, own_disk=own_disk, say=say) as quiet:
            undisturbed = quiet.train(calm)
    say("the run under faults")
    with started(folder / "disturbed", size, own_disk=own_disk, say=say) as noisy:
        faults = plan(told.seed, seconds, told.every, told.lease_seconds, noisy.targets, kills_only=told.kills_only)
        disturbed = noisy.train(seconds, faults=faults)
    references = []
    for number in range(told.references):
        say(f"undisturbed run {number + 1} of {told.references} with as many steps, made as fast as they can be")
        at_full_speed = replace(size, step_seconds=0.0)
        with started(folder / f"reference-{number}", at_full_speed, own_disk=own_disk, say=say) as fast:
            references.append(fast.train(float("inf"), disturbed.acknowledged))
    runs = report.Runs(disturbed, undisturbed, references)
    for line in report.lines(runs, faults):
        say(line)
    broken = list(report.broken(runs, told.least_goodput))
    for line in broken:
        say(f"BROKEN      {line}")
    say(f"seed {told.seed}: {'broken' if broken else 'every promise kept'}")
    return int(bool(broken))
