"""The exchange that goes on while the training thread computes: how Ctrl-C ends the waiting for it."""

from __future__ import annotations

import _thread
import sys
import threading
from types import FrameType
from typing import Any, cast

import pytest

from ps_worker.step.overlap import Overlap
from ps_worker.step.pipeline import StepPipeline
from tests.support.shards import wait_until


class _Pipeline:
    def __init__(self) -> None:
        self.interrupted = threading.Event()

    def interrupt(self) -> None:
        self.interrupted.set()

    def resume(self) -> None:
        pass


def test_ctrl_c_that_does_not_wake_who_waits_for_an_exchange_ends_it() -> None:
    main = threading.main_thread().ident or 0
    pipeline = _Pipeline()

    def waits() -> bool:
        frame: FrameType | None = sys._current_frames()[main]
        names = []
        while frame is not None:
            names.append(frame.f_code.co_name)
            frame = frame.f_back
        return names[0] in ("next_item", "wait") and "finish" in names

    def interrupt() -> None:
        wait_until(waits)
        _thread.interrupt_main()  # only marks the signal, as one that comes before the thread waits

    overlap = Overlap(cast(StepPipeline, pipeline))
    overlap.begin(lambda: cast(Any, pipeline.interrupted.wait(60)))
    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        overlap.finish()
    thread.join()
    assert pipeline.interrupted.is_set()
    assert not overlap.is_pending
    overlap.close()
