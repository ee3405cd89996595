"""A real training through ps-run that stops half-way until the test lets it go on, and ends with known bits."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

import psutil

from tests.cli.launcher.jobs import ROOT, wait_until
from tests.recovery.reference import alone
from tests.recovery.zygote import PS_RUN, Forked, Zygote

OPTIMIZER = "Adam"
STEPS = 40
HALF = STEPS // 2

SCRIPT = f"""
import pathlib, select
import torch, ps_worker
from tests.recovery.scripts import digest_of, gradients_of, make_model

go = pathlib.Path("go")
with ps_worker.connect(device="cpu") as cluster:
    model = make_model()
    optimizer = cluster.optimizer(torch.optim.{OPTIMIZER}, model, lr=0.01, name="model")
    print("started at", optimizer.version, flush=True)
    for step in range(optimizer.version, {STEPS}):
        gradients_of(model, 0, step)
        optimizer.step()
        if step + 1 == {HALF}:
            print("half-way", flush=True)
            while not go.exists():
                select.select([], [], [], 0.01)
    print("digest", digest_of(model), flush=True)
"""

UNDISTURBED = f"worker 0    | digest {alone(STEPS, OPTIMIZER)}\n"
"""The line of a training that nothing has happened to."""

MODULES = {"coordinator": "ps_server.coordinator.main", "shard": "ps_server.shard.main", "worker": "train.py"}


class Training:
    """One ps-run; made by the fixture ``training``."""

    def __init__(self, folder: Path, flags: Sequence[str], zygote: Zygote | None, script: str = SCRIPT) -> None:
        """Its processes are forked from ``zygote``, or interpreters of their own without one."""
        (folder / "train.py").write_text(script)
        self._go = folder / "go"
        ours, theirs = os.pipe()
        self._lines = os.fdopen(ours)
        arguments = ["--no-progress", *flags, "train.py"]
        begin = partial(_forked, zygote) if zygote else _started
        try:
            self._process = begin(folder, arguments, theirs)
        finally:
            os.close(theirs)
        self.output = ""

    def says(self, wanted: str) -> None:
        """Read up to a line that has ``wanted`` in it."""
        for line in self._lines:
            self.output += line
            if wanted in line:
                return
        raise AssertionError(f"ended before it said '{wanted}':\n{self.output}")

    def kill(self, part: str) -> None:
        """kill -9 of the one process of this kind, as soon as it lives."""

        def killed() -> bool:
            for child in psutil.Process(self._process.pid).children():
                with suppress(psutil.ZombieProcess, psutil.NoSuchProcess):
                    if child.name() == part or MODULES[part] in child.cmdline():
                        child.send_signal(signal.SIGKILL)
                        return True
            return False

        wait_until(killed, f"a {part} lives and is killed")

    def send(self, number: signal.Signals) -> None:
        """A signal to ps-run."""
        if self._process.poll() is None:
            os.kill(self._process.pid, number)

    def go_on(self) -> None:
        """Let the script train the second half."""
        self._go.touch()

    def ends(self) -> int:
        """Read to the end; the exit code."""
        self.output += self._lines.read()
        return self._process.wait()

    def close(self) -> None:
        self.send(signal.SIGKILL)
        self._process.wait()
        self._lines.close()


def _started(folder: Path, arguments: Sequence[str], output: int) -> subprocess.Popen[bytes]:
    paths = os.pathsep.join((str(ROOT), str(ROOT / "protos")))
    return subprocess.Popen(
        [sys.executable, "-m", "ps_server.cli.launcher.main", *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"},
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=output,
    )


def _forked(zygote: Zygote, folder: Path, arguments: Sequence[str], output: int) -> Forked:
    with Path(os.devnull).open() as nothing:
        return zygote.start(PS_RUN, [str(folder), *arguments], {}, (nothing.fileno(), output, output))
