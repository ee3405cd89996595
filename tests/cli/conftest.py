"""Trainings through ps-run that are gone when their test is."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest

from tests.cli.launcher.training import Training
from tests.recovery.zygote import shared


@pytest.fixture
def training(tmp_path) -> Iterator[Callable[..., Training]]:
    """``training(*flags)``: a job in the test's folder, forked; ``own_interpreters``: its processes are not."""
    with ExitStack() as exits:

        def training(*flags: str, own_interpreters: bool = False) -> Training:
            started = Training(tmp_path, flags, None if own_interpreters else shared())
            exits.callback(started.close)
            return started

        yield training
