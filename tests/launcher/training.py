"""A real training through ps-run that stops half-way until the test lets it go on, and ends with known bits."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

from tests.launcher.jobs import ROOT, wait_until
from tests.recovery.reference import alone

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
    """One ps-run; made by ``training``."""

    def __init__(self, folder: Path, *flags: str) -> None:
        (folder / "train.py").write_text(SCRIPT)
        self._go = folder / "go"
        paths = os.pathsep.join((str(ROOT), str(ROOT / "protos")))
        command = [sys.executable, "-m", "ps_server.launcher.main", "--no-progress", *flags, "train.py"]
        self.process = subprocess.Popen(
            command,
            cwd=folder,
            env={**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self.output = ""

    def says(self, wanted: str) -> None:
        """Read up to a line that has ``wanted`` in it."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.output += line
            if wanted in line:
                return
        raise AssertionError(f"ended before it said '{wanted}':\n{self.output}")

    def kill(self, part: str) -> None:
        """kill -9 of the one process of this kind, as soon as it lives."""

        def killed() -> bool:
            for child in psutil.Process(self.process.pid).children():
                with suppress(psutil.ZombieProcess, psutil.NoSuchProcess):
                    if MODULES[part] in child.cmdline():
                        child.send_signal(signal.SIGKILL)
                        return True
            return False

        wait_until(killed, f"a {part} lives and is killed")

    def go_on(self) -> None:
        """Let the script train the second half."""
        self._go.touch()

    def ends(self) -> int:
        """Read to the end; the exit code."""
        self.output += self.process.communicate(timeout=60)[0]
        return self.process.returncode


@contextmanager
def training(folder: Path, *flags: str) -> Iterator[Training]:
    """Start one; nothing of it outlives the context."""
    running = Training(folder, *flags)
    try:
        yield running
    finally:
        running.process.kill()
        running.process.communicate()
