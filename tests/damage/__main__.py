"""``python -m tests.damage``: thousands of random damages; ends with 1 when one was neither right nor refused."""

from __future__ import annotations

import random
import sys
import tempfile
from pathlib import Path

import click

from tests.damage.campaign import run
from tests.damage.subjects import SUBJECTS


@click.command()
@click.option("--damages", default=2000, show_default=True, type=click.IntRange(1))
@click.option("--seed", type=int, help="Repeats a run; random by default.")
@click.option("--only", default="", help="Directories whose name contains this.")
def main(damages: int, seed: int | None, only: str) -> None:
    """Flip bits in files of data directories, cut them, delete them, and see what their readers make of it."""
    seed = random.SystemRandom().randrange(1 << 20) if seed is None else seed
    click.echo(f"seed {seed}")
    subjects = [subject for subject in SUBJECTS if only in subject.name]
    with tempfile.TemporaryDirectory(prefix="torch-ps-damage-") as folder:
        report = run(subjects, Path(folder), seed=seed, damages=damages, say=click.echo)
    click.echo(report.table())
    click.echo(f"{damages} damages in {report.seconds:.0f} s, {len(report.failures)} failures")
    sys.exit(bool(report.failures))


if __name__ == "__main__":
    main()
