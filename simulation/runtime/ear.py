"""Takes what the shipped code logs into the story of the run."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from simulation.runtime.kernel import Kernel


class _Ear(logging.Handler):
    """Takes what the shipped code logs into the story; an error with a traceback is a defect."""

    def __init__(self, kernel: Kernel) -> None:
        super().__init__()
        self._kernel = kernel

    def handle(self, record: logging.LogRecord) -> bool:
        kernel = self._kernel
        if kernel.process is None or kernel.process.alive:
            kernel.say(kernel.process, _Said(record))
        return True


class _Said:
    def __init__(self, record: logging.LogRecord) -> None:
        self._record = record

    def __str__(self) -> str:
        return f"{self._record.levelname.lower()}: {self._record.getMessage()}"


@contextmanager
def heard(kernel: Kernel, packages: Sequence[str]) -> Iterator[None]:
    """Within the block what ``packages`` log is said."""
    loggers = [logging.getLogger(name) for name in packages]
    before = [(logger.level, logger.propagate, logger.handlers) for logger in loggers]
    ear = _Ear(kernel)
    for logger in loggers:
        logger.handlers, logger.propagate = [ear], False
        logger.setLevel(logging.INFO if kernel.loud else logging.WARNING)
    try:
        yield
    finally:
        for logger, (level, propagate, handlers) in zip(loggers, before, strict=True):
            logger.handlers, logger.propagate = handlers, propagate
            logger.setLevel(level)
