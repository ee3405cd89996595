"""Writes reported values to TensorBoard event files: each process its own, in a separate thread."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

import torch

from ps_protocol.errors import ConfigError
from ps_protocol.logs import EventLogger

logger = EventLogger("ps_worker")

VARIABLE = "PS_TENSORBOARD"
"""A folder; not set: no event files."""

WAITING = 10_000
"""Reports that may wait to be written; more are left out."""


Values = Mapping[str, float | torch.Tensor]


class ScalarWriter(Protocol):
    """The part of torch's ``SummaryWriter`` that is used here."""

    def add_scalar(self, tag: str, scalar_value: float, global_step: int, walltime: float) -> None:
        """Write one value."""
        ...

    def close(self) -> None:
        """Write what is kept, and end the file."""
        ...


def open_writer(folder: Path) -> ScalarWriter:
    """Torch's writer of event files in ``folder``. Raises ConfigError without the package tensorboard."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise ConfigError(
            f"{VARIABLE} needs the package tensorboard, which is not installed",
            remedy="pip install 'torch-ps[tensorboard]'",
        ) from error
    try:
        folder.mkdir(parents=True, exist_ok=True)
        writer: ScalarWriter = SummaryWriter(str(folder))
    except OSError as error:
        raise ConfigError(
            f"the folder {folder} cannot be written: {error.strerror}",
            remedy=f"give with --tensorboard or {VARIABLE} a folder that this user may write to",
        ) from error
    return writer


class ReportedScalars:
    """Called from the user's thread. The writing thread reads tensors, so training does not wait for a GPU."""

    def __init__(self, writer: ScalarWriter) -> None:
        """Owns ``writer`` from now on."""
        self._writer = writer
        self._waiting: queue.Queue[tuple[Values, int, float] | None] = queue.Queue(WAITING)
        self._left_out = 0
        self._thread = threading.Thread(target=self._write, name="tensorboard", daemon=True)
        self._thread.start()

    def add(self, values: Values, step: int) -> None:
        """Queue ``values`` of ``step``. Never waits: values that do not fit in the queue are dropped, and counted."""
        kept = {name: each.clone() if isinstance(each, torch.Tensor) else each for name, each in values.items()}
        try:
            self._waiting.put_nowait((kept, step, time.time()))
        except queue.Full:
            self._left_out += 1

    def close(self, seconds: float = 10.0) -> None:
        """Write what is queued, for at most ``seconds``. Safe to repeat."""
        if self._thread.is_alive():
            try:
                self._waiting.put(None, timeout=seconds)
            except queue.Full:
                pass  # the warning below counts it
            self._thread.join(seconds)
        left = self._left_out + self._waiting.qsize()
        if left:
            logger.warning("report", "TensorBoard lacks %d calls of cluster.report(), which came too fast", left)
            self._left_out = 0

    def _write(self) -> None:
        try:
            while (report := self._waiting.get()) is not None:
                values, step, at = report
                for name, value in values.items():
                    self._writer.add_scalar(name, float(value), step, at)
            self._writer.close()
        except (OSError, RuntimeError) as error:
            logger.warning("report", "TensorBoard's event files end here: %s", error)
