"""The command ps-run benchmark: one script under several strategies, one after the other, and what each took."""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import click

from ps_protocol.launch import shim
from ps_server.cli.launcher.replicas import check_strategy

DEFAULT = "one_device,mirrored,central_storage,parameter_server"

_REASON_CHARACTERS = 100


@dataclass(frozen=True, slots=True)
class Run:
    """One run of the script: its duration from the start of ps-run to its end, and why it failed, if it did."""

    seconds: float
    failure: str = ""


def command_of(strategy: str, workers: int, script: str, arguments: Sequence[str]) -> list[str]:
    """How ps-run is called for one run."""
    flags = [] if strategy == "one_device" else ["--workers", str(workers)]
    ps_run = [sys.executable, "-P", "-m", "ps_server.cli.launcher.main"]
    return [*ps_run, "--no-progress", "--strategy", strategy, *flags, script, *arguments]


def run_once(command: Sequence[str]) -> Run:
    """Run ``command`` to its end."""
    begin = time.monotonic()
    done = subprocess.run(shim.command(command), capture_output=True, text=True, check=False)
    seconds = time.monotonic() - begin
    if not done.returncode:
        return Run(seconds)
    lines = [line.partition(" | ")[2] or line for line in (done.stderr + done.stdout).splitlines() if line.strip()]
    return Run(seconds, f"exit code {done.returncode}: {lines[-1] if lines else ''}"[:_REASON_CHARACTERS])


def measure(
    commands: Mapping[str, Sequence[str]], repeats: int, run: Callable[[Sequence[str]], Run] = run_once
) -> dict[str, list[Run]]:
    """The runs of each strategy. They take turns, so that what else the machine does is shared by all."""
    runs: dict[str, list[Run]] = {name: [] for name in commands}
    for _ in range(repeats):
        for name, command in commands.items():
            if not any(each.failure for each in runs[name]):
                runs[name].append(run(command))
    return runs


def table(runs: Mapping[str, Sequence[Run]]) -> list[str]:
    """Lines: the strategies that ran, the fastest first, with median, least and most; then those that failed."""
    ran = {name: [each.seconds for each in its] for name, its in runs.items() if not any(one.failure for one in its)}
    lines = [f"{'strategy':<22} {'median s':>9} {'least':>9} {'most':>9} {'runs':>5}"]
    for name, seconds in sorted(ran.items(), key=lambda item: statistics.median(item[1])):
        numbers = f"{statistics.median(seconds):>9.2f} {min(seconds):>9.2f} {max(seconds):>9.2f}"
        lines.append(f"{name:<22} {numbers} {len(seconds):>5}")
    for name, its in runs.items():
        lines += [f"{name:<22} {each.failure}" for each in its if each.failure]
    return lines


@click.command(context_settings={"allow_interspersed_args": False, "max_content_width": 110})
@click.option("--strategies", default=DEFAULT, show_default=True, help="Names, separated by commas.")
@click.option("--workers", type=click.IntRange(1), default=2, show_default=True, help="Number of processes that train.")
@click.option("--repeats", type=click.IntRange(1), default=3, show_default=True, help="Runs of each strategy.")
@click.argument("script", type=click.Path(exists=True, dir_okay=False))
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def benchmark(strategies: str, workers: int, repeats: int, script: str, arguments: tuple[str, ...]) -> None:
    """Run SCRIPT under several strategies and print how long each took, with the start of its processes.

    SCRIPT calls ps_worker.strategy() without a name and trains as many samples under each. The exit code is 1 when
    every strategy failed.
    """
    names = [name.strip() for name in strategies.split(",") if name.strip()]
    if not names:
        raise click.UsageError("--strategies names none")
    for name in names:
        check_strategy(name, {})
    runs = measure({name: command_of(name, workers, script, arguments) for name in names}, repeats)
    for line in table(runs):
        click.echo(line)
    if all(any(each.failure for each in its) for its in runs.values()):
        sys.exit(1)
