"""Runs ps-run in a process of its own, with fake servers, and looks at what it leaves behind.

ps-run is forked from a process that has imported it, unless a test asks for an interpreter; what it starts is not.
"""

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import psutil

from tests.support.interpreters import Interpreter, run

SCRIPTS = Path(__file__).with_name("scripts")
ROOT = Path(__file__).parents[3]
PATIENCE_SECONDS = 60.0
RUN_SECONDS = 150.0

#: Arguments are a folder, "one" or "both", a script and its own: the script in the folder, in a session of its own.
_BEGIN = """
import os, runpy, sys
_, folder, outputs, *sys.argv = sys.argv
os.chdir(folder)
os.setsid()
if outputs == "one":
    os.dup2(1, 2)
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def wait_until(condition: Callable[[], object], what: str) -> None:
    """Return once ``condition`` holds; fail naming ``what`` if it never does."""
    pause = threading.Event()
    for _ in range(int(PATIENCE_SECONDS / 0.02)):
        if condition():
            return
        pause.wait(0.02)
    raise AssertionError(f"not within {PATIENCE_SECONDS:.0f} s: {what}")


def alive(pid: int) -> bool:
    """Whether the process runs; a zombie does not."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


class PsRun(Interpreter):
    """A forked ps-run whose output is one stream."""

    def ends(self) -> tuple[int, str]:
        """Read to the end; the exit code, and what was not read before."""
        output = self.stdout.read()
        return self.wait(), output


class Job:
    """One ps-run over a script written for the occasion. Every process leaves its pid in ``pids``."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.pids = folder / "pids"
        self.pids.mkdir()
        self._started: list[PsRun] = []
        #: Where temporary files are; empty: where they are for everybody.
        self.temporary = ""

    def command(self, *flags: str, script: str, arguments: tuple[str, ...] = ()) -> list[str]:
        path = self.folder / "script.py"
        note = "import os, pathlib; R = os.environ['PS_ROLE'] + os.environ['PS_RANK']; P = pathlib.Path('pids')\n"
        # Whole or not at all: it may be killed at any time.
        note += "N = pathlib.Path(R + '.pid'); N.write_text(str(os.getpid())); N.rename(P / R)\n"
        path.write_text(note + script)
        run = str(SCRIPTS / "ps_run_with_fake_servers.py")
        # The fake coordinator has no metrics to ask for.
        return [sys.executable, run, "--no-progress", "--metrics-port", "off", *flags, str(path), *arguments]

    def environment(self) -> dict[str, str]:
        return {**os.environ, **self._added()}

    def _added(self) -> dict[str, str]:
        paths = os.pathsep.join((str(ROOT), str(ROOT / "protos")))
        # Unbuffered, as in containers: what ps-run writes must arrive whole all the same.
        added = {"PIDS": str(self.pids), "PYTHONPATH": paths, "PYTHONUNBUFFERED": "1"}
        return {**added, "TMPDIR": self.temporary} if self.temporary else added

    def run(
        self, *flags: str, script: str, arguments: tuple[str, ...] = (), **environment: str
    ) -> subprocess.CompletedProcess[str]:
        """Run to the end, forked, and see that nothing is left."""
        return self.call(self.command(*flags, script=script, arguments=arguments), **environment)

    def call(self, command: list[str], **environment: str) -> subprocess.CompletedProcess[str]:
        """``run`` of a command that was made before."""
        begun = ("-c", _BEGIN, str(self.folder), "both", *command[1:])
        done = run(*begun, seconds=RUN_SECONDS, **{**self._added(), **environment})
        self.leaves_nothing()
        return done

    def interpreted(
        self, *flags: str, script: str, arguments: tuple[str, ...] = (), **environment: str
    ) -> subprocess.CompletedProcess[str]:
        """``run`` with an interpreter of its own."""
        command = self.command(*flags, script=script, arguments=arguments)
        env = {**self.environment(), **environment}
        done = subprocess.run(
            command, cwd=self.folder, env=env, capture_output=True, text=True, timeout=RUN_SECONDS, check=False
        )
        self.leaves_nothing()
        return done

    def start(self, *flags: str, script: str, **environment: str) -> PsRun:
        """Start in a session of its own, as from a terminal; forked."""
        command = self.command(*flags, script=script)
        self._started.append(PsRun("-c", _BEGIN, str(self.folder), "one", *command[1:], **self._added(), **environment))
        return self._started[-1]

    def close(self) -> None:
        """End what was started, if it lives."""
        for process in self._started:
            process.close()

    def has_started(self, *names: str) -> None:
        wait_until(
            lambda: all((self.pids / name).exists() and (self.pids / name).read_text() for name in names),
            f"{names} have started",
        )

    def pid(self, name: str) -> int:
        return int((self.pids / name).read_text())

    def leaves_nothing(self) -> None:
        """No process that left its pid lives on."""
        # A process that was killed while it left its pid has left an empty file.
        pids = [int(pid) for pid in (path.read_text() for path in self.pids.iterdir()) if pid]
        wait_until(lambda: not any(alive(pid) for pid in pids), f"{pids} have ended")


def order(job: Job, **fields: object) -> None:
    """What the coordinator tells from now on."""
    (job.folder / "part").write_text(json.dumps(fields))
    (job.folder / "part").rename(job.folder / "order")
