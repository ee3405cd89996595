"""Runs one exchange with the shards while the training thread computes the next gradients."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait

from ps_worker.step.pipeline import StepPipeline
from ps_worker.step.summary import StepSummary


class Overlap:
    """Used by the training thread. Between ``begin`` and ``finish`` a thread of its own uses the pipeline."""

    def __init__(self, pipeline: StepPipeline) -> None:
        self._pipeline = pipeline
        self._thread = ThreadPoolExecutor(1, "overlap")
        self._under_way: Future[StepSummary] | None = None

    @property
    def is_busy(self) -> bool:
        """Whether an exchange is under way. From any thread."""
        return (under_way := self._under_way) is not None and not under_way.done()

    @property
    def is_pending(self) -> bool:
        """Whether an exchange has begun that ``finish`` has not ended."""
        return self._under_way is not None

    def begin(self, exchange: Callable[[], StepSummary]) -> None:
        """Start one exchange; the one before must have been finished."""
        self._under_way = self._thread.submit(exchange)

    def finish(self) -> StepSummary | None:
        """The result of the exchange under way; None: there is none. Raises what the exchange raised.

        Ctrl-C ends the exchange; its push may or may not have been applied.
        """
        under_way, self._under_way = self._under_way, None
        if under_way is None:
            return None
        try:
            return under_way.result()
        except BaseException:
            if not under_way.done():
                self._abandon(under_way)
            raise

    def close(self) -> None:
        """End the exchange under way; its result is dropped."""
        under_way, self._under_way = self._under_way, None
        if under_way is not None:
            self._abandon(under_way)
        self._thread.shutdown()

    def _abandon(self, under_way: Future[StepSummary]) -> None:
        self._pipeline.interrupt()
        wait([under_way])
        under_way.exception()
        self._pipeline.resume()
