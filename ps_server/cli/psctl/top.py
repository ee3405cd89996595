"""The commands psctl top and psctl report: the job at a glance, live in a terminal or as one file."""

from __future__ import annotations

import logging
import os
import select
import sys
import termios
import time
import tty
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import click
from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from ps_protocol.client.admin import AdminClient
from ps_protocol.cluster.history import JobHistory
from ps_protocol.cluster.job_state import time_text
from ps_protocol.errors import ConfigError, Unavailable
from ps_protocol.files import PUBLIC_MODE, replace_file
from ps_server.cli.psctl.connection import connected, coordinator_option
from ps_server.cli.psctl.output import echo, note
from ps_server.glance.job import glance_of
from ps_server.glance.terminal import NO_LIMIT, glance_view
from ps_server.page.needs import check_libraries
from ps_server.settings import Finite

POINTS = 60
"""The points of each curve that are requested; a terminal shows a part of them."""


@click.command()
@coordinator_option
@click.option(
    "--interval",
    type=Finite(0.1),
    default=1.0,
    show_default=True,
    metavar="SECONDS",
    help="Interval of updates.",
)
@click.option("--count", type=click.IntRange(1), metavar="N", help="End after N updates.  [default: no limit]")
def top(coordinator: str, interval: float, count: int | None) -> None:
    """Show the job live: speed, curves, alerts, who waits for whom, the bytes of shards, the last events.

    q or Ctrl-C ends it, and so does the end of the job. Where the output is no terminal, one table is printed per
    interval.
    """
    console = Console(highlight=False, markup=False, emoji=False)
    if not console.is_terminal:
        # A file has room for every column.
        console = Console(highlight=False, markup=False, emoji=False, width=NO_LIMIT)
    with connected(coordinator) as job:
        try:
            if console.is_terminal:
                _live(job, console, interval, count)
            else:
                _print(job, console, interval, count)
        except KeyboardInterrupt:
            return


def _live(job: AdminClient, console: Console, interval: float, count: int | None) -> None:
    shown, updates = Group(), 0
    with _keys() as key, Live(console=console, auto_refresh=False, screen=True) as live:
        while True:
            try:
                history = _look(job)
                shown = glance_view(glance_of(history), history.curves, console.width, console.height)
                live.update(shown, refresh=True)
            except Unavailable:
                history = None
                notice = Text("the coordinator does not answer; trying again (q ends)", style="bold red")
                live.update(Group(notice, shown), refresh=True)
            updates += 1
            if (
                updates == count
                or (history is not None and history.status.view.finished)
                or key(interval) in ("q", "Q")
            ):
                break
    console.print(shown)


@contextmanager
def _keys() -> Iterator[Callable[[float], str]]:
    """A function that waits up to the given seconds for a key and returns it; "" for none, or without a terminal."""
    if not sys.stdin.isatty():
        yield _pause
        return
    descriptor = sys.stdin.fileno()
    before = termios.tcgetattr(descriptor)

    def key(seconds: float) -> str:
        ready, _, _ = select.select([descriptor], [], [], seconds)
        return os.read(descriptor, 1).decode(errors="replace") if ready else ""

    try:
        tty.setcbreak(descriptor)
        yield key
    finally:
        termios.tcsetattr(descriptor, termios.TCSADRAIN, before)


def _pause(seconds: float) -> str:
    time.sleep(seconds)
    return ""


def _print(job: AdminClient, console: Console, interval: float, count: int | None) -> None:
    updates = 0
    while True:
        try:
            history = _look(job)
            console.print(time_text(history.at_seconds))
            console.print(glance_view(glance_of(history), history.curves))
            if history.status.view.finished:
                return
        except Unavailable as error:
            note(f"{time_text(time.time())} {error.message}", logging.WARNING)
        updates += 1
        if updates == count:
            return
        time.sleep(interval)


def _look(job: AdminClient) -> JobHistory:
    return job.history(last_points=POINTS)


@click.command()
@click.option(
    "-o",
    "--output",
    "file",
    type=click.Path(dir_okay=False, path_type=Path),
    default=Path("job.html"),
    show_default=True,
    help="File to write; one that exists is replaced.",
)
@click.option("--title", help="Title of the report.  [default: the name of the job]")
@coordinator_option
def report(coordinator: str, file: Path, title: str | None) -> None:
    """Write the job as one HTML file: curves, events, members, placement, configuration.

    The file opens in any browser, without a network and without this job. Needs torch-ps[page].
    """
    with connected(coordinator) as job:
        check_libraries("psctl report")
        # Its libraries are an extra of the package.
        from ps_server.page.report import report_html

        history = job.history()
        text = report_html(history, title or glance_of(history).job or "torch-ps job")
        try:
            replace_file(file, text.encode(), PUBLIC_MODE, durable=False)
        except OSError as error:
            raise ConfigError(f"cannot write {file}: {error.strerror or error}") from error
    echo(f"{file}: {len(text) / 1e6:.2f} MB")
