"""The options of what the coordinator decides by itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click


def elasticity_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the flags; the command gets them as ``engine``, ``engine_workers`` and ``engine_most``."""
    options = (
        click.option(
            "--engine",
            metavar="ENGINE",
            show_default="none",
            help="Who is asked for workers that are missing for 30 s, and for what psctl scale wants: launcher is the "
            "program that starts processes, launcher:workers one that starts workers only, launcher:lost one that "
            "starts lost workers again, kubernetes:JOB scales a Job by the account of this pod, file:PATH writes the "
            "request to a file, MODULE:CLASS is one of your own (docs/elasticity.md).",
        ),
        click.option(
            "--engine-workers",
            type=click.IntRange(1),
            show_default="that of --workers",
            help="How many workers the engine is asked for. Needed with --workers 0.",
        ),
        click.option(
            "--engine-most",
            type=click.IntRange(1),
            show_default="twice as many",
            help="kubernetes: the highest parallelism that the Job is given.",
        ),
    )
    for option in reversed(options):
        command = option(command)
    return command
