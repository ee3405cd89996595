"""The output of ps-run: the lines of each process, the status of the job below them, and the summary at its end."""

from __future__ import annotations

import json
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from rich.console import Console
from rich.live import Live
from rich.text import Text

from ps_protocol.cluster.job_state import current_members, outline, time_text
from ps_protocol.cluster.view import ClusterStatus, Role
from ps_protocol.logs import FACTS, LogEvent, LogFormat, json_line
from ps_protocol.logs import time_text as record_time
from ps_server.cli.launcher.events import SERVERS, ProcessName, ProcessRole
from ps_server.glance.terminal import elapsed_text, status_line, status_tables

WORKER_STYLES = ("cyan", "green", "yellow", "magenta", "blue", "bright_cyan", "bright_green", "bright_magenta")

SELF = "ps-run"
PREFIX_WIDTH = len(ProcessRole.COORDINATOR.value)


class Screen:
    """Used by the runner's one thread. Lines are written whole; a closed output sets ``broken``, and raises nothing.

    On a terminal all goes to one rich console, with a table that stays below the lines. Otherwise the processes'
    lines go to ``out`` as they are, and ps-run's own to ``err`` with the time of day.
    """

    def __init__(
        self,
        out: TextIO | None = None,
        err: TextIO | None = None,
        clock: Callable[[], float] = time.time,
        form: LogFormat = LogFormat.TEXT,
    ) -> None:
        """``out`` and ``err`` default to the process's own. ``clock``: seconds since the epoch.

        ``form`` JSON: every line is one JSON object, also on a terminal, and nothing is drawn.
        """
        self._json = form is LogFormat.JSON
        out, err = out or _buffered(sys.stdout), err or _buffered(sys.stderr)
        self._console = Console(file=out, highlight=False, markup=False, emoji=False)
        self._out, self._err = out, err
        self._clock = clock
        self._live: Live | None = None
        #: Of the status that was written last: what changes seldom, when in the job, and the line.
        self._outline: Hashable = None
        self._said_at = 0.0
        self._last_line = ""
        #: The other end of the pipe, or the terminal, was closed.
        self.broken = False

    @property
    def interactive(self) -> bool:
        """Whether the output is a terminal that can redraw."""
        return not self._json and self._console.is_terminal and not self._console.is_dumb_terminal

    def show(self, process: ProcessName, lines: Iterable[str]) -> None:
        """Lines that ``process`` wrote."""
        if self._json:
            self._write_plain("".join(f"{record_of(process, line, self._clock())}\n" for line in lines), self._out)
            return
        style = "dim" if process.part in SERVERS else WORKER_STYLES[process.index % len(WORKER_STYLES)]
        self._write(str(process), style, list(lines), self._out)

    def say(self, text: str, style: str = "bold", event: LogEvent = "job") -> None:
        """A message of ps-run itself; with the time of day if the output is not a terminal."""
        if self._json:
            self._write_plain(f"{own_record(event, text, self._clock())}\n", self._err)
            return
        shown = text if self._console.is_terminal else f"{time_text(self._clock())} {text}"
        self._write(SELF, style, [shown], self._err)

    def progress(self, status: ClusterStatus, elapsed_seconds: float) -> None:
        """The status of the job: a table on a terminal; else a line when what changes seldom has, and once a minute."""
        if self.interactive:
            tables = status_tables(status, self._console.width, elapsed_seconds)
            if self._live is None:
                self._live = Live(console=self._console, auto_refresh=False)
                self._live.start()
            try:
                self._live.update(tables, refresh=True)
            except OSError:
                self._lose_reader()
        elif (seen := outline(status)) != self._outline or elapsed_seconds - self._said_at >= 60.0:
            self._outline, self._said_at = seen, elapsed_seconds
            if (line := status_line(status)) != self._last_line:
                self._last_line = line
                self.say(line, style="none", event="status")

    def close(self) -> None:
        """Keep the last table on the screen and show the cursor again."""
        if self._live is not None:
            live, self._live = self._live, None
            try:
                live.stop()
            except OSError:
                self._lose_reader()

    def _write(self, name: str, style: str, lines: Sequence[str], plain: TextIO) -> None:
        if not lines:
            return
        try:
            if self._console.is_terminal:
                prefix = Text(f"{name:<{PREFIX_WIDTH}} | ", style)
                texts = [prefix + Text.from_ansi(line) for line in lines]
                self._console.print(Text("\n").join(texts), soft_wrap=True)
            else:
                self._write_plain("".join(f"{name:<{PREFIX_WIDTH}} | {line}\n" for line in lines), plain)
        except OSError:
            self._lose_reader()

    def _write_plain(self, text: str, stream: TextIO) -> None:
        try:
            stream.write(text)
            stream.flush()
        except OSError:
            self._lose_reader()

    def _lose_reader(self) -> None:
        """Discard all further output, also that of the interpreter at exit."""
        self.broken = True
        nowhere = os.open(os.devnull, os.O_WRONLY)
        for stream in (self._out, self._err):
            os.dup2(nowhere, stream.fileno())
        os.close(nowhere)


def _buffered(stream: TextIO) -> TextIO:
    """``stream`` with a buffer, which continues after a write that a signal interrupted.

    Under PYTHONUNBUFFERED the standard streams have none, and lose the rest: a child's end (SIGCHLD) is such a signal.
    """
    try:
        return open(stream.fileno(), "w", encoding=stream.encoding, errors=stream.errors, closefd=False)
    except (OSError, ValueError):  # not a file, as when captured
        return stream


OUTPUT_EVENT = "output"
"""Event of a line that is no record of a log."""


def record_of(process: ProcessName, line: str, now: float) -> str:
    """``line`` of ``process`` as one JSON object: a record of a log as it came, else a record with the line in it."""
    try:
        found = json.loads(line) if line.startswith("{") else None
    except ValueError:
        found = None
    if isinstance(found, dict) and {"time", "level", "message"} <= found.keys():
        return json_line(found)
    return json_line(_fields(process.part.value, OUTPUT_EVENT, line, now) | _number(process))


def own_record(event: LogEvent, message: str, now: float) -> str:
    """A message of ps-run itself."""
    return json_line(_fields("ps-run", event, message, now))


def _fields(role: str, event: str, message: str, now: float) -> dict[str, Any]:
    facts: dict[str, Any] = dict.fromkeys(FACTS)
    facts["role"] = role
    return {"time": record_time(now), "level": "info", **facts, "event": event, "message": message, "logger": "ps_run"}


def _number(process: ProcessName) -> dict[str, int]:
    if process.part is ProcessRole.SHARD:
        return {"shard": process.index}
    return {"worker": process.index} if process.part is not ProcessRole.COORDINATOR else {}


REMEMBERED = 32
"""With this many former members, the coordinator may have forgotten workers."""


@dataclass(frozen=True, slots=True)
class Folders:
    """What a job leaves on disk, and where; None: nothing."""

    #: The newest checkpoint.
    checkpoint: Path | None = None
    #: There should be a newer one.
    unsaved: bool = False
    state: Path | None = None
    logs: Path | None = None


def summary(
    code: int,
    elapsed_seconds: float,
    status: ClusterStatus | None,
    failures: Sequence[str],
    folders: Folders,
) -> list[str]:
    """The lines of the summary. ``status``: the last known one; None without any."""
    how = "finished in" if code == 0 else f"ended with exit code {code} after"
    lines = [f"{how} {elapsed_text(elapsed_seconds)}{_work(status)}"]
    if failures:
        counted = Counter(failures)
        lines.append(
            "failures: " + "; ".join(f"{what}{f' ({n} times)' if n > 1 else ''}" for what, n in counted.items())
        )
    if folders.unsaved:
        newest = f"the newest one is older: {folders.checkpoint}" if folders.checkpoint else "there is none"
        lines.append(f"the last checkpoint was not written; {newest}")
    elif folders.checkpoint:
        lines.append(f"checkpoint: {folders.checkpoint}")
    if folders.state:
        lines.append(f"state: {folders.state}; the same command continues from it")
    if folders.logs:
        lines.append(f"logs: {folders.logs}")
    return lines


def _work(status: ClusterStatus | None) -> str:
    workers = current_members(status, Role.WORKER) if status else []
    if not workers:
        return ""
    steps, samples = (sum(getattr(each.stats, what) for each in workers) for what in ("steps", "samples"))
    who = f"{len(workers)} worker{'s' if len(workers) > 1 else ''}"
    return f": {steps} steps by {who}" + (f", {samples} samples" if samples else "")


def silent_workers(status: ClusterStatus | None, workers: int) -> list[str]:
    """A line that names the workers which ended well and never connected to the coordinator.

    There is none without a status, nor for a job with more workers than the coordinator remembers.
    """
    if status is None:
        return []
    seen = {entry.member.index for entry in status.members if entry.member.role is Role.WORKER}
    unseen = sorted(set(range(workers)) - seen)
    if not unseen or len(seen) >= REMEMBERED:
        return []
    names = ", ".join(f"worker {rank}" for rank in unseen)
    return [f"{names} ended without having connected: does the script call ps_worker.connect()?"]
