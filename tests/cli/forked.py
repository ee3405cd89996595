"""ps-run over real servers without their imports: its processes are forked from it, which has imported everything.

What they are told, their process groups, pipes, signals and ends are those of ps-run. That its command lines and its
shim work is shown by the jobs that are not forked.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryFile
from types import SimpleNamespace

from ps_protocol.client.worker_requests import Wanted
from ps_protocol.launch import child
from ps_protocol.launch.shim import PR_SET_PDEATHSIG
from ps_server.cli.launcher import main as entry
from ps_server.cli.launcher import runner
from tests.recovery.zygote import PS_RUN, finish, python, shared

RUN_SECONDS = 150.0

_PR_SET_NAME = 15


def run(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """ps-run, called in ``folder``, from its beginning to its end."""
    with TemporaryFile("w+") as out, TemporaryFile("w+") as err, Path(os.devnull).open() as nothing:
        files = (nothing.fileno(), out.fileno(), err.fileno())
        code = shared().start(PS_RUN, [str(folder), *arguments], {}, files).wait(RUN_SECONDS)
        for file in (out, err):
            file.seek(0)
        return subprocess.CompletedProcess(arguments, code, out.read(), err.read())


def ps_run(arguments: Sequence[str]) -> None:
    """In a process of its own; the first argument is the folder it is called in."""
    folder, *flags = arguments
    os.chdir(folder)
    # To tell where they are, ps-run calls the coordinator, and gRPC does not survive the forks that follow.
    os.environ.setdefault("PS_RUN_METRICS_PORT", "off")
    # All of its processes are forked here.
    os.environ["PS_RUN_FORK_SHARDS"] = "0"
    runner.WorkerRequests = Nobody  # type: ignore[assignment, misc]
    runner.Runner._kept_order = lambda self: []  # type: ignore[method-assign]
    child.subprocess = SimpleNamespace(Popen=Popen, DEVNULL=None)  # type: ignore[assignment, misc]
    entry.main(flags)


class Nobody:
    """Stands for ``WorkerRequests``, which calls the coordinator, too."""

    def __init__(self, address: str, security: object) -> None:
        pass

    def take(self) -> Wanted:
        return Wanted()

    def ask_now(self) -> None:
        pass

    def close(self) -> None:
        pass


class Popen:
    """subprocess.Popen as ``child`` uses it."""

    def __init__(
        self,
        command: Sequence[str],
        *,
        stdin: None,
        stdout: int,
        stderr: int,
        env: Mapping[str, str],
        process_group: int,
        pass_fds: Sequence[int],
    ) -> None:
        # python -I -S shim.py PARENT python …
        program = command[6:]
        sys.stdout.flush()
        sys.stderr.flush()
        self.pid = os.fork()
        if not self.pid:
            finish(lambda: _become(program, stdout, env, pass_fds))
        # Both sides ask for it: the first one is answered.
        with suppress(ProcessLookupError):
            os.setpgid(self.pid, process_group)

    def wait(self) -> int:
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


def _become(program: Sequence[str], output: int, environment: Mapping[str, str], kept: Sequence[int]) -> None:
    os.setpgid(0, 0)
    libc = ctypes.CDLL(None)
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD):
        signal.signal(number, signal.SIG_DFL)
    for number in (1, 2):
        os.dup2(output, number)
    for descriptor in {*range(3, 64)} - {*kept}:
        with suppress(OSError):
            os.close(descriptor)
    os.environ.clear()
    os.environ.update(environment)
    told = [word for word in program if word != "-P"]
    # The name by which a test finds it: coordinator, shard or worker.
    libc.prctl(_PR_SET_NAME, told[1].split(".")[1].encode() if told[0] == "-m" else b"worker")
    python(told)
