"""The process of one rehearsal: ``python -m ps_worker.rehearsal.main PLAN DESCRIPTOR``, started by ps-run."""

from __future__ import annotations

import io
import os
import sys
from pathlib import Path
from typing import TextIO

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from ps_protocol.errors import PsError
from ps_protocol.launch.rehearsal import RehearsalNews, RehearsalPlan, speeds_of
from ps_worker import times
from ps_worker.connection import connect_as
from ps_worker.data.leased_loader import LeasedItems
from ps_worker.embedded import EmbeddedCluster
from ps_worker.rehearsal import substitutes
from ps_worker.rehearsal.workers import (
    LONG_SECONDS,
    RehearsalStage,
    RehearsedCluster,
    RehearsedSession,
    TurnFeed,
    TurnOverlap,
    current,
)
from ps_worker.step.remote_model import RemoteModel

_START_SECONDS = 120.0


class WorkerOutput(io.TextIOBase):
    """Stands for standard output and standard error: lines of scripts name their worker."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        #: Of each worker, the line that is not complete.
        self._begun: dict[int, str] = {}

    @property
    def encoding(self) -> str:  # type: ignore[override]
        """Of the stream behind."""
        return self._stream.encoding

    def writable(self) -> bool:
        """As it is."""
        return True

    def fileno(self) -> int:
        """Of the stream behind."""
        return self._stream.fileno()

    def flush(self) -> None:
        """Send complete lines."""
        self._stream.flush()

    def finish(self) -> None:
        """Send all that is there."""
        for rank, line in self._begun.items():
            if line:
                self._stream.write(f"worker {rank} | {line}\n")
        self._stream.flush()

    def write(self, text: str) -> int:
        """Send the lines that are complete."""
        worker = current()
        if worker is None:
            return self._stream.write(text)
        *lines, rest = (self._begun.get(worker.rank, "") + text).split("\n")
        self._begun[worker.rank] = rest
        for line in lines:
            # A progress bar rewrites its line after each carriage return.
            self._stream.write(f"worker {worker.rank} | {line.rpartition(chr(13))[2]}\n")
        if lines:
            self._stream.flush()
        return len(text)


def rehearse(plan: RehearsalPlan, descriptor: int) -> bool:
    """Make the rehearsal, and write what is new to ``descriptor``; whether all workers have ended."""

    def tell(news: RehearsalNews) -> None:
        data = f"{news.to_json()}\n".encode()
        while data:
            data = data[os.write(descriptor, data) :]

    for name in [name for name in os.environ if name.startswith("PS_")]:
        del os.environ[name]
    os.environ.pop("TF_CONFIG", None)
    torch.set_num_threads(plan.threads)
    settings = {**plan.settings, "workers": plan.workers, "seed": plan.seed, "lease_seconds": LONG_SECONDS}
    # That a worker has left is told here.
    settings["log_level"] = "error"
    embedded = stage = None
    try:
        speeds = speeds_of(plan.speeds, plan.workers, plan.seed)
        embedded = EmbeddedCluster.start(_START_SECONDS, settings)
        os.environ["PS_COORDINATOR"] = embedded.address
        # What is parked there is asked for again in other turns; and nobody waits for others in real time.
        times.WAIT_SECONDS = times.LAST_VALUES_SECONDS = 0.0
        sys.path.insert(0, str(Path.cwd() if plan.module else Path(plan.script).absolute().parent))
        stage = RehearsalStage(plan, embedded.address, speeds, tell)
        substitutes.install(current, stage.is_script)
        connect_as(RehearsedSession, RehearsedCluster)
        LeasedItems.feed_class = TurnFeed
        RemoteModel.overlap_class = TurnOverlap
        register_optimizer_step_pre_hook(stage.begins_step)
        register_optimizer_step_post_hook(stage.ended_step)
        result = stage.run()
    except (PsError, SyntaxError) as error:
        result = RehearsalNews(finished=True, failure=f"{type(error).__name__}: {error}")
    tell(result)
    if embedded is not None:
        embedded.close()
    return stage is None or stage.all_ended


def main() -> None:
    """The process. Workers that have not ended do not go on, and nothing is closed in them."""
    plan, descriptor = sys.argv[1:]
    outputs = WorkerOutput(sys.stdout), WorkerOutput(sys.stderr)
    sys.stdout, sys.stderr = outputs
    ended = rehearse(RehearsalPlan.from_json(plan), int(descriptor))
    for output in outputs:
        output.finish()
    if not ended:
        os._exit(0)


if __name__ == "__main__":
    main()
